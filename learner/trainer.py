"""Trainer: one PPO update over one rollout, and everything that has to survive a restart.

    rollout (views) -> return statistics -> GAE -> batch -> row 0 of the next bank seeded -> ratio law
                    -> epochs of minibatches -> observation statistics -> weights to hand out

Writer and reader: the learner process, or the serial run; one thread. Reads the rollout's slots; writes their
advantages and returns, and row 0 of the FREE slots it is given. What must never happen: that observation statistics
change between the forward that chose the actions and the last epoch over them (the ratio law would break); that a
half-done update is handed out or saved (`should_stop` rolls back). Sockets, slots' states and files' places are left
to the caller.

Axis letters: T num_steps, N num_envs, n envs of a minibatch, L recurrent layers, H hidden_dim, K valid_steps.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from learner.dump import write_batch
from learner.ppo import PpoSettings, explained_variance, masked_mean, normalize_advantages, ppo_loss
from learner.return_normalizer import ReturnNormalizer
from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.sequences import SequenceBatch
from learner.staging import compute_exactly, select_device
from rollout_service import checkpoint as checkpoints
from rollout_service.checkpoint import POLICY_PREFIX, Checkpoint, Manifest
from rollout_service.config import Schedule, TrainConfig
from rollout_service.envs.seeding import Purpose, generator
from rollout_service.errors import CheckpointError, RatioLawBroken, RunFailed, ShapeError
from rollout_service.policy.actor_critic import ActorCritic, SequenceEvaluation
from rollout_service.recurrence import ended
from rollout_service.runspec import RunSpec, StateStrategy

RATIO_LIMIT_CPU: Final = 1e-4
RATIO_LIMIT_CUDA: Final = 1e-3
"""max |ratio - 1| before the first optimiser step: float32 rounding of one device, and of two different ones."""
KL_MARGIN: Final = 1.5
"""An update stops once the approximate KL of a minibatch exceeds this times target_kl."""


class Outcome(Enum):
    """How an update ended."""

    COMPLETE = "complete"
    STOPPED_BY_KL = "stopped_by_kl"
    SKIPPED = "skipped"
    """Not one valid row: weights are as before."""
    ABANDONED = "abandoned"
    """`should_stop` said so: the trainer is as before the update."""


@dataclass(frozen=True)
class UpdateReport:
    """What one update did. `metrics` are means over valid rows; `seconds` is the time split, phase -> seconds."""

    update: int
    outcome: Outcome
    metrics: dict[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True)
class TrainerState:
    """What an update depends on: arrays by name, and random generators as JSON."""

    arrays: dict[str, np.ndarray]
    generators: dict[str, str]


@dataclass
class TimeSplit:
    """Seconds per phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Trainer:
    """Policy, optimiser, schedule and statistics of one run. Callers read its attributes and write none."""

    def __init__(self, config: TrainConfig, spec: RunSpec, *, total_updates: int) -> None:
        """Raises ConfigError if the device is missing. total_updates: full rollouts that the run has steps for."""
        self.config = config
        self.spec = spec
        self.total_updates = total_updates
        self.device = select_device(config.device)
        compute_exactly(self.device)
        self.policy = ActorCritic(spec.spaces, spec.policy, seed=spec.seed)
        self.policy.to(self.device)
        self.updates_done = 0
        self.env_steps_done = 0
        self.updates_skipped = 0
        self._named = [(name, p) for name, p in self.policy.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in self._named]
        self._optimizer = torch.optim.Adam(
            self._parameters, lr=config.learning_rate, eps=config.adam_epsilon, fused=True
        )
        for parameter in self._parameters:
            # Made now and not at the first step, so that a checkpoint before it has the same arrays as one after it.
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=self.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        self._shuffle = generator(spec.seed, Purpose.MINIBATCH)
        self._dump_to = config.dump_batch
        self._returns = ReturnNormalizer(spec.num_envs, config.gamma) if config.normalize_returns else None
        self._lives = np.full(spec.num_envs, -1, np.int64)
        """[N] incarnation whose rows were taken into the return statistics last; -1: of an earlier run, or none."""
        self._settings = PpoSettings.from_config(config)
        self._ratio_limit = RATIO_LIMIT_CUDA if self.device.type == "cuda" else RATIO_LIMIT_CPU

    def learning_rate(self, env_steps: int) -> float:
        """The step size of the update that has so many env steps behind it; linear in their share of all.

        With full rollouts that is the share of updates; with partial ones, as with fillers, a run has more of them.
        """
        start = self.config.learning_rate
        match self.config.learning_rate_schedule:
            case Schedule.CONSTANT:
                return start
            case Schedule.LINEAR:
                behind = min(max(env_steps / (self.total_updates * self.spec.steps_per_rollout), 0.0), 1.0)
                return start * (1.0 - (1.0 - self.config.learning_rate_end_fraction) * behind)

    @property
    def finished(self) -> bool:
        """No further whole rollout fits into the run."""
        return self.spec.rollouts_that_fit(self.env_steps_done, self.total_updates) == 0

    def update(
        self,
        rollout: RecurrentRolloutBuffer,
        *,
        valid_steps: ArrayLike,
        seed_into: RecurrentRolloutBuffer | None,
        seed_where: ArrayLike = True,
        update: int,
        env_steps: int | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> UpdateReport:
        """One update.

        valid_steps: K, per slot (int [A]) or per env (int [N]).
        seed_into: the next rollout's slots; None for the same arrays of a standalone buffer.
        seed_where: which of them are FREE: bool, or per slot or env.
        env_steps: total behind this update, for the counters; by default the valid rows are added up.
        should_stop is asked before every minibatch; True gives the trainer back as it was.
        Raises RatioLawBroken if the self-check fails, RunFailed if a gradient is not finite.
        """
        counts = self._per_env(valid_steps)
        before = self.capture() if should_stop is not None else None
        split = TimeSplit()
        rate = self.learning_rate(self.env_steps_done)
        scale = self._reward_scale(rollout, counts)
        batch = self._estimate(rollout, counts, scale, split) if counts.any() else None
        with split.phase("seed"):
            if self.spec.state_strategy is StateStrategy.STORED:
                final = rollout.final_state().values()
                rollout.seed_warm_start(counts - 1, *final, into=seed_into, where=seed_where)
        steps_done = env_steps if env_steps is not None else self.env_steps_done + int(live_rows(rollout, counts).sum())
        if batch is None or not bool(batch.valid.any()):
            self._count(update, steps_done)
            self.updates_skipped += 1
            return UpdateReport(update, Outcome.SKIPPED, self._totals(rate, scale), split.seconds)
        metrics = _describe(batch)
        self._dump(batch, update)
        if self.config.normalize_advantages:
            batch = normalize_advantages(batch)
        if self.config.self_check and (update - 1) % self.config.self_check == 0:
            with split.phase("self_check"):
                metrics["self_check_deviation"] = self.check_ratio_law(batch)
        with split.phase("update"):
            outcome, figures = self._epochs(batch, rate, should_stop)
        if outcome is Outcome.ABANDONED and before is not None:
            self.load(before)
            return UpdateReport(update, outcome, {}, split.seconds)
        with split.phase("normalize"):
            self.policy.update_normalizer(batch.obs_seq, batch.valid)
        self._count(update, steps_done)
        return UpdateReport(update, outcome, {**metrics, **figures, **self._totals(rate, scale)}, split.seconds)

    def _estimate(
        self, rollout: RecurrentRolloutBuffer, counts: np.ndarray, scale: float, split: TimeSplit
    ) -> SequenceBatch:
        """Advantages, then the batch of every env with K > 0; both before row 0 may be seeded."""
        with split.phase("gae"):
            rollout.compute_advantages_partial(
                counts,
                rollout.last_values(),
                self.config.gamma,
                self.config.gae_lambda,
                rule=self.config.gae_rule,
                reward_scale=scale,
                truncation_as_termination=self.config.truncation_as_termination,
            )
        with split.phase("batch"):
            return rollout.to_training_batch(self.device)

    def _dump(self, batch: SequenceBatch, update: int) -> None:
        """The batch that was asked for goes to its file, once."""
        if self._dump_to is not None and self.config.dump_batch_update in (None, update):
            write_batch(batch, self._dump_to, update=update, env=self.spec.env)
            self._dump_to = None

    def check_ratio_law(self, batch: SequenceBatch) -> float:
        """Largest |ratio - 1| over all minibatches. Raises RatioLawBroken with the worst row's env, step and ratio."""
        worst = 0.0
        with torch.no_grad():
            for minibatch in batch.minibatches(self.config.envs_per_minibatch, False, None):
                deviation = _deviations(self._evaluate(minibatch), minibatch)
                row, step = divmod(int(deviation.argmax()), deviation.shape[1])
                largest = float(deviation[row, step])
                if largest > self._ratio_limit:
                    raise RatioLawBroken(
                        f"env {int(minibatch.env_ids[row])}, step {step}: |ratio - 1| is {largest:.3g} before the "
                        f"first optimiser step, the limit is {self._ratio_limit:g}; the learner does not see what the "
                        "actor saw (recurrent state, episode starts, normaliser statistics or weights version differ)"
                    )
                worst = max(worst, largest)
        return worst

    def _epochs(
        self, batch: SequenceBatch, learning_rate: float, should_stop: Callable[[], bool] | None
    ) -> tuple[Outcome, dict[str, float]]:
        """Clipped PPO over whole env rows. Returns how it ended and the figures' means over the rows that were used."""
        self._optimizer.param_groups[0]["lr"] = learning_rate
        limit = math.inf if self.config.target_kl is None else KL_MARGIN * self.config.target_kl
        outcome = Outcome.COMPLETE
        seen: list[dict[str, Tensor]] = []
        norms: list[Tensor] = []
        first_deviation = 0.0
        passes = (
            minibatch
            for _ in range(self.config.epochs)
            for minibatch in batch.minibatches(self.config.envs_per_minibatch, True, self._shuffle)
        )
        for minibatch in passes:
            if should_stop is not None and should_stop():
                return Outcome.ABANDONED, {}
            evaluation = self._evaluate(minibatch)
            loss, figures = ppo_loss(evaluation, minibatch, self._settings)
            if not seen:
                first_deviation = float(_deviations(evaluation, minibatch).max())
            seen.append({**figures, "rows": minibatch.valid.sum()})
            if math.isfinite(limit) and float(figures["approx_kl"]) > limit:
                outcome = Outcome.STOPPED_BY_KL
                break
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            norms.append(torch.nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm))
            self._optimizer.step()
        means = _weighted_means(seen)
        means["grad_norm"] = float(torch.stack(norms).mean()) if norms else 0.0
        if not math.isfinite(means["grad_norm"]):
            raise RunFailed(
                f"the gradient norm of the update is {means['grad_norm']}: the weights are not finite any more and "
                "were not handed out; lower learning_rate, or scale rewards (reward_scale, normalize_returns)"
            )
        return outcome, {**means, "ratio_deviation": first_deviation, "optimizer_steps": float(len(norms))}

    def _evaluate(self, minibatch: SequenceBatch) -> SequenceEvaluation:
        return self.policy.evaluate_sequences(
            minibatch.obs_seq, minibatch.actions, minibatch.episode_starts, minibatch.initial_state, minibatch.valid
        )

    def _reward_scale(self, rollout: RecurrentRolloutBuffer, counts: np.ndarray) -> float:
        """Factor on this rollout's rewards; takes the rollout into the return statistics first."""
        if self._returns is None:
            return self.config.reward_scale
        rewards = rollout.rewards().T
        valid = live_rows(rollout, counts)
        ends = ended(rollout.terminated().T, rollout.truncated().T, valid)
        self._returns.update(rewards, ends, valid, self._return_starts(rollout, counts))
        return self.config.reward_scale * self._returns.scale

    def _return_starts(self, rollout: RecurrentRolloutBuffer, counts: np.ndarray) -> np.ndarray:
        """[N] not 0 where row 0 begins an episode that the last row before it did not end: its env is a new one.

        The carry flag says so under `stored`. Under `zero` it is 1 in every rollout, and only a new actor tells.
        """
        if self.spec.state_strategy is StateStrategy.STORED:
            return np.asarray(rollout.episode_start_carry())
        lives = np.where(counts > 0, rollout.incarnations(), self._lives)
        starts: np.ndarray = lives != self._lives
        self._lives = lives
        return starts

    def _per_env(self, valid_steps: ArrayLike) -> np.ndarray:
        counts = np.asarray(valid_steps, np.int64).reshape(-1)
        if counts.size == self.spec.num_actors:
            counts = np.repeat(counts, self.spec.envs_per_actor)
        if counts.size != self.spec.num_envs:
            raise ShapeError(
                f"valid_steps has {counts.size} entries; give one per slot ({self.spec.num_actors}) "
                f"or one per env ({self.spec.num_envs})"
            )
        return counts

    def _count(self, update: int, env_steps: int) -> None:
        self.updates_done, self.env_steps_done = update, env_steps

    def _totals(self, learning_rate: float, scale: float) -> dict[str, float]:
        return {
            "learning_rate": learning_rate,
            "reward_scale": scale,
            "updates_skipped": float(self.updates_skipped),
        }

    def weights(self) -> dict[str, np.ndarray]:
        """Parameters and statistics to hand out, by name, in the order of the RunSpec's manifest."""
        return self.policy.to_arrays()

    def capture(self) -> TrainerState:
        """Copies of everything that the next update depends on, counters apart."""
        arrays = {POLICY_PREFIX + name: value for name, value in self.policy.to_arrays().items()}
        for name, parameter in self._named:
            for part, value in self._optimizer.state[parameter].items():
                arrays[f"adam/{part}/{name}"] = value.detach().cpu().numpy().copy()
        if self._returns is not None:
            arrays |= {f"returns/{name}": value for name, value in self._returns.to_arrays().items()}
        arrays["generator/torch"] = torch.get_rng_state().numpy().copy()
        return TrainerState(arrays, {"shuffle": json.dumps(self._shuffle.bit_generator.state)})

    def load(self, state: TrainerState) -> None:
        """The reverse of `capture`. Raises CheckpointError naming an array that is missing or of another shape."""
        arrays = state.arrays
        for name, value in self.capture().arrays.items():
            if name not in arrays:
                raise CheckpointError(f"the checkpoint has no array {name!r}; it belongs to another configuration")
            if arrays[name].shape != value.shape and name != "returns/carried":
                raise CheckpointError(
                    f"array {name!r} has shape {arrays[name].shape}, this run needs {value.shape}; "
                    "resume with the checkpoint's own policy settings"
                )
        self.policy.load_arrays({name: arrays[POLICY_PREFIX + name] for name in self.policy.to_arrays()})
        for name, parameter in self._named:
            for part, value in self._optimizer.state[parameter].items():
                value.copy_(torch.from_numpy(arrays[f"adam/{part}/{name}"]))
        if self._returns is not None:
            self._returns.load_arrays(arrays["returns/carried"], arrays["returns/statistics"])
        torch.set_rng_state(torch.from_numpy(arrays["generator/torch"]))
        self._shuffle.bit_generator.state = json.loads(state.generators["shuffle"])

    def save(self, run_dir: Path, *, version: int) -> Path:
        """Writes a checkpoint of the state after the last update, removes surplus ones, returns its directory."""
        state = self.capture()
        manifest = Manifest(
            update=self.updates_done,
            env_steps=self.env_steps_done,
            version=version,
            run_digest=self.spec.digest(),
            run_spec=self.spec,
            config=self.config.model_dump(mode="json"),
            counters={"updates_skipped": self.updates_skipped, "total_updates": self.total_updates},
            generators=state.generators,
        )
        path = checkpoints.save(run_dir, state.arrays, manifest)
        checkpoints.rotate(run_dir, self.config.checkpoints_kept)
        return path

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint, bit for bit.

        Raises CheckpointError, naming both values, if its env, spaces or policy are not this run's. The number of
        actors, the length of the run and every setting of learning may differ.
        """
        theirs = checkpoint.manifest.run_spec
        for name in ("env", "spaces", "policy", "state", "parameters", "state_strategy"):
            if getattr(theirs, name) != getattr(self.spec, name):
                raise CheckpointError(
                    f"{checkpoint.path} was made with {name} {getattr(theirs, name)}, this run has "
                    f"{getattr(self.spec, name)}; use the checkpoint's own setting, or start a new run_dir"
                )
        # A copy: arrays read from a file are not writable, which torch does not take.
        arrays = {name: np.array(array) for name, array in checkpoint.arrays.items()}
        self.load(TrainerState(arrays, checkpoint.manifest.generators))
        self._lives[:] = -1
        self.updates_done = checkpoint.manifest.update
        self.env_steps_done = checkpoint.manifest.env_steps
        self.updates_skipped = checkpoint.manifest.counters.get("updates_skipped", 0)


def live_rows(rollout: RecurrentRolloutBuffer, counts: np.ndarray) -> np.ndarray:
    """bool [N, T]: the first K rows of each env, without those that are not valid (autoreset fillers)."""
    valid = rollout.valid().T
    live: np.ndarray = valid & (np.arange(valid.shape[1]) < counts[:, None])
    return live


def _deviations(evaluation: SequenceEvaluation, minibatch: SequenceBatch) -> Tensor:
    """|ratio - 1| of every row [n, T]; 0 where a row is not valid, inf where the ratio is not a number."""
    with torch.no_grad():
        deviation = (torch.exp(evaluation.log_probs - minibatch.old_log_probs) - 1.0).abs()
        return torch.where(minibatch.valid, deviation.nan_to_num(nan=math.inf), 0.0)


def _weighted_means(seen: list[dict[str, Tensor]]) -> dict[str, float]:
    """Means of the minibatches' figures, weighted by their valid rows: means over all rows that were used."""
    rows = torch.stack([figures["rows"] for figures in seen]).double()
    return {
        name: float((torch.stack([figures[name] for figures in seen]).double() * rows).sum() / rows.sum())
        for name in seen[0]
        if name != "rows"
    }


def _describe(batch: SequenceBatch) -> dict[str, float]:
    """Means of what the batch holds before anything is normalised."""
    valid = batch.valid
    return {
        "explained_variance": float(explained_variance(batch.old_values, batch.returns, valid)),
        "value_mean": float(masked_mean(batch.old_values, valid)),
        "return_target_mean": float(masked_mean(batch.returns, valid)),
        "advantage_mean": float(masked_mean(batch.advantages, valid)),
        "valid_rows": float(valid.sum()),
    }
