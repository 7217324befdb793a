"""Every setting of a run, in one flat frozen model: name, unit, default, limit.

The command line, the TOML file, the presets and the saved `config.toml` of a run all use these names.
Precedence: defaults < preset < config file < command line.
"""

from __future__ import annotations

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rollout_service.errors import ConfigError
from rollout_service.runspec import Core, OnBadData, PolicySpec, StateStrategy, Vectorize


class Device(StrEnum):
    """Where the learner computes. AUTO: cuda where torch sees one, else cpu."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Schedule(StrEnum):
    """The learning rate over the run."""

    CONSTANT = "constant"
    LINEAR = "linear"


class GaeRule(StrEnum):
    """Which rule the advantages follow. Only the first is unbiased at episode ends; see docs/semantics.md."""

    BOUNDARY_CORRECT = "boundary_correct"
    ORIGINAL_STATED = "original_stated"
    ORIGINAL_ACTUAL = "original_actual"


class AdvantageEstimator(StrEnum):
    """What advantages and value targets are estimated with."""

    GAE = "gae"
    VTRACE = "vtrace"
    """Corrects for weights that have moved on since the actors loaded theirs."""


class OnActorFailure(StrEnum):
    """What follows when an actor dies or hangs."""

    RESTART = "restart"
    CONTINUE = "continue"
    STOP = "stop"


Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class TrainConfig(BaseModel):
    """Settings of `rollout-service train`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    # Environment
    env: str = "Memory/TMaze-v0"
    """Gymnasium id (`Namespace/Name-v0`, `module:Name-v0`) or `module:factory`; the current directory counts too."""
    env_kwargs: dict[str, Any] = {}
    """Arguments of the env, as key=value."""
    vectorize: Vectorize = Vectorize.NONE
    """none: single envs. sync, async: gymnasium's vector envs over them, made with env_kwargs' vector_kwargs.
    vector_entry_point: the id's own vector env. factory: module:factory, called with num_envs. envpool: that package's
    task of this name."""

    # Collection
    num_actors: Positive | Literal["auto"] = "auto"
    """Actor processes. auto: one per core this process may use (affinity and cgroup quota)."""
    max_actors: Positive | None = None
    """Actors that may be there at once: others than num_actors may then join and leave, and a batch is of those that
    are there. Default: num_actors, and a batch waits for whoever has left."""
    envs_per_actor: Positive = 8
    """Envs that one actor steps."""
    envs_per_forward: Positive | None = None
    """Rows of one inference call; must divide envs_per_actor. Default: all of the actor's envs."""
    num_steps: Positive = 128
    """T: steps of one rollout per env."""
    pin_actors: bool = False
    """Keep each actor to one core, in turns over those this process may use; the learner is not bound."""
    total_steps: Positive = 150_000
    """Env steps over all actors; training stops after the last whole rollout (of num_actors) that fits."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Root of every random stream."""
    obs_limit: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Largest magnitude that a number in an observation may have; beyond it, it is bad data, as NaN and infinities are.
    Default: any finite number."""
    on_bad_data: OnBadData = OnBadData.STOP
    """What follows when an env returns an observation or a reward that no transition can hold. stop: its actor ends
    with an error that names env, field, step and action. drop: the env's episode is dropped, counted and said, and the
    env begins a new one."""

    # Overlap of collection and learning
    max_policy_lag: Annotated[int, Field(ge=0, le=64)] = 0
    """Updates by which a rollout may be older than the weights it is trained with. 0: actors wait for each update,
    exactly on-policy. 1: actors fill the next batch while the learner works, the fastest for most runs. More: for
    actors of very different speed. Older rollouts are dropped and counted."""

    # Stragglers
    preempt_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the actors that must have committed before the others are asked to commit the steps they have; their
    envs go on in the next rollout. 1: never. Below 1 a run is as fast as its faster actors, and no longer repeats bit
    for bit."""
    preempt_min_steps_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25
    """Share of num_steps that an actor has in any case before it stops early."""
    min_actors: Positive | None = None
    """Actors without whose rollouts a batch does not go, once its deadline has passed. Default: all."""
    first_batch_deadline: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds for the first batch, process starts included; then it goes with min_actors, and the run stops if
    nobody came. Default: none."""
    batch_deadline: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds for every later batch, from the weights on; then it goes with min_actors, and what the others commit
    later is dropped. Default: none."""

    # Policy
    core: Core = Core.LSTM
    """lstm, or none: the feed-forward comparison arm."""
    hidden_dim: Positive = 64
    """H: width of the recurrent core (of the second layer when core is none)."""
    num_layers: Positive = 1
    """L: recurrent layers."""
    encoder_dim: Positive = 64
    """Width of the encoder in front of the core."""
    chrono_max: Annotated[float, Field(gt=2.0)] | None = None
    """Chrono initialisation of the gate biases for memories up to about this many steps (Tallec and Ollivier 2018)."""
    state_strategy: StateStrategy = StateStrategy.STORED
    """stored: training starts from the state the actor carried. zero: both start every rollout from zeros."""

    # Learning
    device: Device = Device.AUTO
    """Device of the learner; actors always compute on the CPU."""
    learner_threads: Positive | Literal["auto"] = "auto"
    """Threads that share a minibatch's rows on the CPU. auto: usable cores, as far as there are parts for them."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """Adam's step size at the start."""
    learning_rate_schedule: Schedule = Schedule.LINEAR
    """linear: falls to learning_rate_end_fraction of the start over total_steps."""
    learning_rate_end_fraction: Fraction = 0.05
    """Where the linear schedule ends, as a fraction of learning_rate."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    """Adam's denominator offset."""
    epochs: Positive = 4
    """Passes over one rollout."""
    envs_per_minibatch: Positive = 4
    """Whole env rows in one minibatch; the last one may be shorter."""
    gamma: Fraction = 0.99
    """Discount per step."""
    gae_lambda: Fraction = 0.95
    """Lambda of GAE; V-trace has none."""
    advantage_estimator: AdvantageEstimator = AdvantageEstimator.GAE
    """gae, or vtrace: targets of the weights as they are now, for max_policy_lag of 1 and more (Espeholt et al. 2018);
    costs one more forward pass per update."""
    vtrace_rho_bar: float = 1.0
    """Upper limit of V-trace's ratio in the value error: it sets which policy the values are of."""
    vtrace_c_bar: float = 1.0
    """Upper limit of V-trace's ratio along the trace: it sets how fast later errors reach back."""
    gae_rule: GaeRule = GaeRule.BOUNDARY_CORRECT
    """boundary_correct, or one of the original's two rules for comparison."""
    truncation_as_termination: bool = False
    """Ablation: treat time limits as real ends. Biased; never a default."""
    clip_range: Annotated[float, Field(gt=0)] = 0.2
    """Clip of the probability ratio."""
    value_clip_range: Annotated[float, Field(gt=0)] | None = None
    """Clip of the value's move from the stored value; None: no clip."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the entropy bonus."""
    value_coefficient: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the value loss, the mean squared error."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.5
    """Gradients are scaled down to this global norm."""
    normalize_advantages: bool = True
    """Zero mean, unit deviation over the valid rows of the rollout."""
    target_kl: Annotated[float, Field(gt=0)] | None = None
    """Stops the whole update once the approximate KL of a minibatch exceeds 1.5 times this."""
    normalize_observations: bool = False
    """Running mean and deviation per feature; travels with the weights."""
    normalize_returns: bool = False
    """Rewards divided by the running deviation of the discounted return, in the learner."""
    reward_scale: Annotated[float, Field(gt=0)] = 1.0
    """Fixed factor on rewards, in the learner; logged returns stay raw."""
    self_check: Annotated[int, Field(ge=0)] = 0
    """Every k-th iteration check that ratios are 1 before the first update; 0: never. A breach fails the run."""

    # Running
    run_dir: Path | None = None
    """Where configuration, logs and checkpoints go. Default: runs/<env>-<date>-<token>."""
    resume: bool = False
    """Go on from the newest checkpoint in run_dir."""
    serial: bool = False
    """All roles in one process, for a debugger."""
    json_output: bool = False
    """`--json`: print one last line with the result."""
    checkpoint_interval: Positive = 50
    """Updates between checkpoints."""
    deterministic: bool = False
    """The same numbers from every run with these settings, also from one that was killed and resumed, or whose
    processes died. Every checkpoint ends all episodes (as truncated), and all random streams begin anew behind it."""
    checkpoints_kept: Positive = 3
    """Newest checkpoints kept on disk."""
    keep_best: bool = True
    """Keep the checkpoint with the highest return_mean besides those; `eval --best` plays it."""
    silence_timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds without a heartbeat after which the service and its roles take each other for dead."""
    step_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds an env.step or reset may take before its actor is replaced."""
    learner_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without progress of a learner at work (one minibatch, one checkpoint) before it is replaced."""
    on_actor_failure: OnActorFailure = OnActorFailure.RESTART
    """restart: replace it within the budget. continue: go on without it, until none is left. stop: end the run with
    the actor's traceback."""
    max_restarts: Annotated[int, Field(ge=0)] = 10
    """Restarts allowed within restart_window over all actors, and as many of the learner, which goes on from its newest
    checkpoint; then the run stops with the last traceback."""
    restart_window: Annotated[float, Field(gt=0)] = 300.0
    """Seconds over which restarts are counted."""
    dump_batch: Path | None = None
    """Write one batch to this file, to look at it (safetensors; the names are those of docs/semantics.md)."""
    dump_batch_update: Positive | None = None
    """The update whose batch that is. Default: the first one of this command."""
    checksum_slots: bool = False
    """Actors add a checksum to what they commit, and the learner checks it before and after it reads: a slot that
    somebody else has written to ends the run. For tests of the service itself; costs a little time."""
    tensorboard: bool = True
    """Write TensorBoard events beside the JSONL log."""

    @field_validator("env", mode="before")
    @classmethod
    def _env_is_a_name(cls, env: object) -> object:
        if not isinstance(env, str):
            raise ValueError(
                f"{env!r:.80} is no name: envs are made in other processes, which have to find them; put what makes "
                "one into a module, and give 'module:factory'"
            )
        return env

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_env_kwargs()
        if self.envs_per_forward is not None and self.envs_per_actor % self.envs_per_forward:
            raise ValueError(
                f"envs_per_forward {self.envs_per_forward} does not divide envs_per_actor {self.envs_per_actor}; "
                "choose a divisor, so that every inference call has the same rows"
            )
        if isinstance(self.num_actors, int) and self.total_steps < (
            least := self.num_actors * self.envs_per_actor * self.num_steps
        ):
            raise ValueError(
                f"total_steps {self.total_steps} is less than one rollout of {least} "
                "(num_actors x envs_per_actor x num_steps); raise total_steps or lower num_steps"
            )
        self._check_vtrace()
        self._check_places()
        self._check_deterministic()
        if self.min_actors is not None and self.batch_deadline is None and self.first_batch_deadline is None:
            raise ValueError(
                f"min_actors {self.min_actors} has no effect without a deadline; set batch_deadline (seconds), "
                "first_batch_deadline, or both"
            )
        if self.pin_actors and self.serial:
            raise ValueError(
                "pin_actors has no effect with serial, which has no actor processes; leave one of them out"
            )
        if self.resume and self.run_dir is None:
            raise ValueError("resume needs run_dir: the run to go on from")
        return self

    def _check_env_kwargs(self) -> None:
        for name, value in self.env_kwargs.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"env_kwargs: {name}={value!r:.80} cannot be told to other processes ({error}); give finite "
                    "numbers, text, lists and dicts of these, and let 'module:factory' make anything else of them"
                ) from None

    def _check_places(self) -> None:
        if not isinstance(self.num_actors, int):
            return
        if self.max_actors is not None and self.max_actors < self.num_actors:
            raise ValueError(
                f"max_actors {self.max_actors} is less than num_actors {self.num_actors}, which are there from the "
                "start; raise max_actors or lower num_actors"
            )
        name = "num_actors" if self.max_actors is None else "max_actors"
        if self.min_actors is not None and self.min_actors > (most := self.max_actors or self.num_actors):
            raise ValueError(f"min_actors {self.min_actors} is more than {name} {most}; no batch could ever go")

    def _check_deterministic(self) -> None:
        if not self.deterministic:
            return
        speed, presence = "what is in a batch would depend on who was faster", "a batch has to be of all num_actors"
        unfit = {
            "max_policy_lag": (self.max_policy_lag > 0, speed),
            "preempt_share": (self.preempt_share < 1.0, speed),
            "batch_deadline": (self.batch_deadline is not None, speed),
            "first_batch_deadline": (self.first_batch_deadline is not None, speed),
            "min_actors": (self.min_actors is not None, presence),
            "max_actors": (self.max_actors is not None, presence),
            "on_actor_failure": (self.on_actor_failure is OnActorFailure.CONTINUE, presence),
            "vectorize": (self.vectorize is Vectorize.ENVPOOL, "an envpool cannot be seeded again once it is made"),
        }
        for name, (is_set, why) in unfit.items():
            if is_set:
                raise ValueError(
                    f"deterministic cannot be combined with {name} {getattr(self, name)}: {why}; leave one of them out"
                )

    def _check_vtrace(self) -> None:
        for name in ("vtrace_rho_bar", "vtrace_c_bar"):
            if not 0.0 < (bar := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} is {bar}; it must be above 0 and finite, 1 is the usual choice")
        if self.vtrace_c_bar > self.vtrace_rho_bar:
            raise ValueError(
                f"vtrace_c_bar {self.vtrace_c_bar} is above vtrace_rho_bar {self.vtrace_rho_bar}; V-trace is only "
                "known to converge with c_bar <= rho_bar, so lower the one or raise the other"
            )
        if self.advantage_estimator is AdvantageEstimator.VTRACE and self.gae_rule is not GaeRule.BOUNDARY_CORRECT:
            raise ValueError(
                f"gae_rule {self.gae_rule.value} cannot be combined with advantage_estimator vtrace, which is "
                "boundary_correct always; leave gae_rule out, or choose advantage_estimator gae"
            )

    @property
    def elastic(self) -> bool:
        """Whether a batch goes without an actor that has gone, instead of waiting for one in its place."""
        return self.max_actors is not None or self.on_actor_failure is OnActorFailure.CONTINUE

    @property
    def rows_per_forward(self) -> int:
        return self.envs_per_forward or self.envs_per_actor

    def policy_spec(self) -> PolicySpec:
        return PolicySpec(
            core=self.core,
            hidden_dim=self.hidden_dim,
            num_layers=self.num_layers,
            encoder_dim=self.encoder_dim,
            chrono_max=self.chrono_max,
            normalize_observations=self.normalize_observations,
        )

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)


def check_fits_one_rollout(config: TrainConfig, num_actors: int) -> int:
    """Updates of a run: whole rollouts that fit into total_steps. Raises ConfigError if not even one does."""
    per_rollout = num_actors * config.envs_per_actor * config.num_steps
    updates = config.total_steps // per_rollout
    if updates < 1:
        raise ConfigError(
            f"total_steps {config.total_steps} is less than one rollout of {per_rollout} steps "
            f"({num_actors} actors x {config.envs_per_actor} envs x {config.num_steps} steps); raise total_steps"
        )
    return updates
