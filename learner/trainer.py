"""Trainer: one PPO update over one rollout, and everything that has to survive a restart.

    rollout (views) -> return statistics -> GAE -> batch -> row 0 of the next bank seeded
                    -> `copied`: nothing of the slots is read any more
                    -> V-trace, if asked for -> ratio law -> epochs of minibatches -> observation statistics
                    -> weights to hand out

Writer and reader: the learner process, or the serial run; one thread. Reads the rollout's slots; writes their
advantages and returns, and row 0 of the FREE slots it is given. What must never happen: that observation statistics
change between the forward that chose the actions and the last epoch over them (the ratio law would break); that a
half-done update is handed out or saved (`should_stop` rolls back). Sockets, slots' states and files' places are left
to the caller.

Axis letters: T num_steps, N num_envs, n envs of a minibatch, L recurrent layers, H hidden_dim, K valid_steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import ArrayLike

from learner.dump import write_batch
from learner.epochs import Epochs, Outcome, deviations
from learner.gae import Estimator
from learner.off_policy import TraceRows, with_current_targets
from learner.ppo import explained_variance, masked_mean, normalize_advantages
from learner.reward_scale import RewardScale, live_rows
from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.sequences import SequenceBatch
from learner.staging import compute_exactly, select_device, staging_for
from rollout_service import checkpoint as checkpoints
from rollout_service.checkpoint import POLICY_PREFIX, Checkpoint, Manifest
from rollout_service.config import AdvantageEstimator, Schedule, TrainConfig
from rollout_service.envs.seeding import Purpose, generator
from rollout_service.errors import CheckpointError, RatioLawBroken, ShapeError
from rollout_service.memory.slots import RolloutMemory
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import RunSpec, StateStrategy
from rollout_service.tally import TallyRecord

RATIO_LIMIT_CPU: Final = 1e-4
RATIO_LIMIT_CUDA: Final = 1e-3
"""max |ratio - 1| before the first optimiser step: float32 rounding of one device, and of two different ones."""


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
        compute_exactly(self.device, deterministic=config.deterministic)
        self._staging = staging_for(self.device)
        self.policy = ActorCritic(spec.spaces, spec.policy, seed=spec.seed)
        self.policy.to(self.device)
        self.updates_done = 0
        self.env_steps_done = 0
        self.updates_skipped = 0
        self.epochs = Epochs(self.policy, config)
        self._shuffle = generator(spec.seed, Purpose.MINIBATCH)
        # Nothing draws from torch's global generator; it is saved, and so is the same in equal runs.
        torch.manual_seed(spec.seed)
        self._dump_to = config.dump_batch
        self._reward_scale = RewardScale(config, spec)
        self._ratio_limit = RATIO_LIMIT_CUDA if self.device.type == "cuda" else RATIO_LIMIT_CPU

    def attach(self, memory: RolloutMemory) -> None:
        """Before the first rollout of that memory, which must stay open until `close`: a GPU pins it, if it can."""
        warning = self._staging.prepare(memory)
        if warning is not None:
            print(f"learner: {warning}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Lets go of attached memory, before it is closed. Closing twice is harmless."""
        self._staging.close()

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
        seed_into: RecurrentRolloutBuffer | None = None,
        seed_where: ArrayLike = True,
        update: int,
        env_steps: int | None = None,
        policy_lags: ArrayLike | None = None,
        copied: Callable[[], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> UpdateReport:
        """One update.

        valid_steps: K, per slot (int [slots]) or per env (int [N]). Slots of one actor are in the order of its commits.
        seed_into: the next rollout's slots; None: the same arrays of a standalone buffer, and of others nothing.
        seed_where: which of them are FREE: bool, or per slot or env.
        env_steps: total behind this update, for the counters; by default the valid rows are added up.
        policy_lags: by how many versions the weights that acted are older than the trainer's, per slot or env; None: 0.
            The ratio law is checked where it is 0.
        copied is called once nothing of the rollout's slots will be read or written any more, before the epochs.
        should_stop is asked before every minibatch; True gives the trainer back as it was.
        Raises RatioLawBroken if the self-check fails, RunFailed if a gradient is not finite.
        """
        counts = self._per_env("valid_steps", valid_steps, rollout)
        lags = np.zeros_like(counts) if policy_lags is None else self._per_env("policy_lags", policy_lags, rollout)
        before = self.capture() if should_stop is not None else None
        split = TimeSplit()
        rate = self.learning_rate(self.env_steps_done)
        scale = self._reward_scale.take_in(rollout, counts)
        batch, rows = self._estimate(rollout, counts, scale, split) if counts.any() else (None, None)
        seeds = seed_into is not None or rollout.is_standalone
        with split.phase("seed"):
            if seeds and self.spec.state_strategy is StateStrategy.STORED:
                final = rollout.final_state().values()
                rollout.seed_warm_start(counts - 1, *final, into=seed_into, where=seed_where)
        steps_done = env_steps if env_steps is not None else self.env_steps_done + int(live_rows(rollout, counts).sum())
        if copied is not None:
            copied()
        if batch is None or not bool(batch.valid.any()):
            self._count(update, steps_done)
            self.updates_skipped += 1
            return UpdateReport(update, Outcome.SKIPPED, self._totals(rate, scale), split.seconds)
        traces: dict[str, float] = {}
        if rows is not None:
            with split.phase("vtrace"):
                batch, traces = with_current_targets(batch, rows, self.epochs.evaluate, self.config)
        metrics = {**_describe(batch), **_describe_lags(lags, counts), **traces}
        self._dump(batch, update)
        if self.config.normalize_advantages:
            batch = normalize_advantages(batch)
        checked = torch.from_numpy(lags[counts > 0] == 0)
        if self.config.self_check and (update - 1) % self.config.self_check == 0 and bool(checked.any()):
            with split.phase("self_check"):
                lawful = batch if bool(checked.all()) else batch.take(checked.nonzero()[:, 0])
                metrics["self_check_deviation"] = self.check_ratio_law(lawful)
        with split.phase("update"):
            outcome, figures = self.epochs.run(
                batch,
                learning_rate=rate,
                shuffle=self._shuffle,
                should_stop=should_stop,
                checked=checked.to(self.device),
            )
        if outcome is Outcome.ABANDONED and before is not None:
            self.load(before)
            return UpdateReport(update, outcome, {}, split.seconds)
        with split.phase("normalize"):
            self.policy.update_normalizer(batch.obs_seq, batch.valid)
        self._count(update, steps_done)
        return UpdateReport(update, outcome, {**metrics, **figures, **self._totals(rate, scale)}, split.seconds)

    def _estimate(
        self, rollout: RecurrentRolloutBuffer, counts: np.ndarray, scale: float, split: TimeSplit
    ) -> tuple[SequenceBatch, TraceRows | None]:
        """Advantages, then the batch of every env with K > 0; both before row 0 may be seeded.

        Where V-trace is asked for, also what it needs. GAE runs in any case: it is what checks the rows.
        """
        estimator = Estimator(
            gamma=self.config.gamma,
            lam=self.config.gae_lambda,
            rule=self.config.gae_rule,
            reward_scale=scale,
            truncation_as_termination=self.config.truncation_as_termination,
        )
        traced = self.config.advantage_estimator is AdvantageEstimator.VTRACE
        batch, rows = self._staging.batch(rollout, counts, estimator, split.phase, rows_too=traced)
        if rows is None:
            return batch, None
        with split.phase("batch"):
            return batch, TraceRows.of(rows, batch, estimator)

    def _dump(self, batch: SequenceBatch, update: int) -> None:
        """The batch that was asked for goes to its file, once. A file that cannot be written ends no training."""
        if self._dump_to is not None and self.config.dump_batch_update in (None, update):
            try:
                write_batch(batch, self._dump_to, update=update, env=self.spec.env)
            except OSError as error:
                print(f"learner: dump_batch {self._dump_to} was not written: {error}", file=sys.stderr, flush=True)
            self._dump_to = None

    def check_ratio_law(self, batch: SequenceBatch) -> float:
        """Largest |ratio - 1| over all minibatches. Raises RatioLawBroken with the worst row's env, step and ratio."""
        worst = 0.0
        with torch.no_grad():
            for minibatch in batch.minibatches(self.config.envs_per_minibatch, False, None):
                deviation = deviations(self.epochs.evaluate(minibatch), minibatch)
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

    def _per_env(self, name: str, given: ArrayLike, rollout: RecurrentRolloutBuffer) -> np.ndarray:
        """int [N] from one number per slot, or per env, of this rollout."""
        numbers = np.asarray(given, np.int64).reshape(-1)
        num_envs = rollout.shape()[1]
        slots = num_envs // self.spec.envs_per_actor
        if numbers.size == slots:
            numbers = np.repeat(numbers, self.spec.envs_per_actor)
        if numbers.size != num_envs:
            raise ShapeError(
                f"{name} has {numbers.size} entries; give one per slot ({slots}) or one per env ({num_envs})"
            )
        return numbers

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
        arrays |= self.epochs.to_arrays()
        arrays |= self._reward_scale.to_arrays()
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
        self.epochs.load_arrays(arrays)
        self._reward_scale.load_arrays(arrays)
        torch.set_rng_state(torch.from_numpy(arrays["generator/torch"]))
        self._shuffle.bit_generator.state = json.loads(state.generators["shuffle"])

    def save(
        self,
        run_dir: Path,
        *,
        version: int,
        figures: Mapping[str, float] | None = None,
        tally: TallyRecord | None = None,
    ) -> Path:
        """Writes a checkpoint of the state after the last update, removes surplus ones, returns its directory.

        figures, tally: of that update, for whoever goes on from here; by the tally's score the best one is told.
        Raises CheckpointError if the disk refuses.
        """
        state, tally = self.capture(), tally or TallyRecord()
        manifest = Manifest(
            update=self.updates_done,
            env_steps=self.env_steps_done,
            version=version,
            return_mean=tally.score,
            run_digest=self.spec.digest(),
            run_spec=self.spec,
            config=self.config.model_dump(mode="json"),
            counters={"updates_skipped": self.updates_skipped, "total_updates": self.total_updates},
            figures=dict(figures or {}),
            tally=tally,
            generators=state.generators,
        )
        path = checkpoints.save(run_dir, state.arrays, manifest)
        checkpoints.rotate(run_dir, self.config.checkpoints_kept, keep_best=self.config.keep_best)
        return path

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint, bit for bit. Raises CheckpointError if this run cannot (`require_fits`)."""
        checkpoints.require_fits(checkpoint.path, checkpoint.manifest.run_spec, self.spec)
        # A copy: arrays read from a file are not writable, which torch does not take.
        arrays = {name: np.array(array) for name, array in checkpoint.arrays.items()}
        self.load(TrainerState(arrays, checkpoint.manifest.generators))
        self._reward_scale.forget_lives()
        self.updates_done = checkpoint.manifest.update
        self.env_steps_done = checkpoint.manifest.env_steps
        self.updates_skipped = checkpoint.manifest.counters.get("updates_skipped", 0)


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


def _describe_lags(lags: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Mean over the first K rows of the envs, and largest. lags, counts (K): int [N], some K above 0."""
    return {
        "policy_lag_mean": float((lags * counts).sum() / counts.sum()),
        "policy_lag_max": float(lags[counts > 0].max()),
    }
