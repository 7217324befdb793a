"""`train --serial`: all roles of a run in one process and one thread, for a debugger.

The same Actor, Trainer and memory as in a run of many processes, in the same order: every actor fills its slot of a
bank with weights v, the learner updates from that bank and seeds the other one, weights v+1 are published. So it
gives the same numbers, bit for bit, and a breakpoint anywhere stops the whole run. No sockets, no leases, no child
processes; and no policy lag: here nothing happens while the learner works, so every rollout is of the newest weights.

Writers: this thread, everything. What must never happen: another order of operations than the coordinator's
(tests/parity compares them). Left to others: drawing (`on_update`), logs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rollout_service import checkpoint as checkpoints
from rollout_service.config import TrainConfig, check_fits_one_rollout
from rollout_service.control.barriers import Barriers
from rollout_service.control.messages import Grant, StartFrom
from rollout_service.errors import ConfigError
from rollout_service.launch.cpu import one_thread, usable_cores
from rollout_service.launch.probe import build_run_spec
from rollout_service.memory.schema import rollout_fields
from rollout_service.memory.slots import RolloutMemory
from rollout_service.memory.weights import WeightsMemory
from rollout_service.observe.metrics import RunMetrics, Summary
from rollout_service.observe.remarks import RemarkWatch
from rollout_service.runspec import NUM_BANKS, RunSpec, StateStrategy
from rollout_service.tally import TallyRecord

if TYPE_CHECKING:
    import numpy as np

    from learner.trainer import Trainer, UpdateReport
    from workers.actor import Actor

ACTOR_THREADS = 1
"""As in an actor's own process."""


@dataclass(frozen=True)
class SerialUpdate:
    """What a caller sees after every update."""

    report: UpdateReport
    summary: Summary
    remarks: tuple[str, ...] = ()
    """What the actors' commits said in words, and what became of a checkpoint that could not be written."""


def run_serial(
    config: TrainConfig,
    on_update: Callable[[SerialUpdate], None] | None = None,
    stop_asked: Callable[[], bool] | None = None,
    on_ready: Callable[[RunSpec], None] | None = None,
) -> dict[str, Any]:
    """Trains to the last whole rollout that fits into total_steps and returns the result, as `--json` prints it.

    stop_asked: asked after every step and between updates. True ends the run with a checkpoint of the last whole
    update; steps that no update has seen are dropped.
    on_ready: called once envs and memory are there, before anything is written.
    Checkpoints go to config.run_dir; without one nothing is written. Raises ConfigError for max_policy_lag above 0 and
    for max_actors, and what a role raises, with its own traceback.
    """
    require_lockstep(config)
    from learner.staging import keep_freed_memory
    from learner.trainer import Trainer

    if config.num_actors == "auto":
        config = config.model_copy(update={"num_actors": usable_cores().count})
    keep_freed_memory()
    spec = build_run_spec(config)
    total = check_fits_one_rollout(config, spec.num_actors)
    with one_thread(), SerialRun(config, spec, Trainer(config, spec, total_updates=total), on_ready) as run:
        stopped = stop_asked or (lambda: False)
        while not run.trainer.finished and not stopped():
            valid_steps = run.collect_bank(lambda _: stopped())
            if stopped():
                break
            update = run.learn(valid_steps)
            if on_update is not None:
                on_update(update)
        run.save_at_end()
        return run.result()


def require_lockstep(config: TrainConfig) -> None:
    """Raises ConfigError unless max_policy_lag is 0 and nobody may join."""
    if config.max_actors is not None:
        raise ConfigError(
            f"nobody can join a serial run, and max_actors is {config.max_actors}; leave max_actors out, or leave "
            "--serial out"
        )
    if config.max_policy_lag > 0:
        raise ConfigError(
            f"a serial run has max_policy_lag 0, not {config.max_policy_lag}: with one thread nothing is collected "
            "while the learner works; leave max_policy_lag out, or leave --serial out"
        )


class SerialRun:
    """Actors, trainer and memory of one run, ready for its first update. A context manager."""

    def __init__(
        self, config: TrainConfig, spec: RunSpec, trainer: Trainer, on_ready: Callable[[RunSpec], None] | None = None
    ) -> None:
        from learner.rollout_buffer import RecurrentRolloutBuffer
        from learner.saving import Saving
        from workers.actor import Actor

        self.config = config
        self.spec = spec
        self.trainer = trainer
        self.version = 0
        self.checkpoint: Path | None = None
        self._epoch = 0
        self._watch = RemarkWatch()
        self._remarks: list[str] = []
        self._seeded: set[int] = set()
        self._to_reset: set[int] = set()
        """Actors whose first lease in a resumed run is still to come: their streams must not be those of its start."""
        self._barriers = Barriers(spec.barrier_interval)
        self._saving = None if config.run_dir is None else Saving(trainer, config.run_dir)
        self.bank = 0
        """The bank that is filled next."""
        self._open = ExitStack()
        with ExitStack() as stack:
            self.memory = stack.enter_context(
                RolloutMemory.create(
                    rollout_fields(spec.spaces, spec.state),
                    num_slots=spec.num_slots,
                    envs_per_slot=spec.envs_per_actor,
                    num_steps=spec.num_steps,
                )
            )
            stack.callback(trainer.close)
            trainer.attach(self.memory)
            self.weights = stack.enter_context(WeightsMemory.create(spec.parameters))
            self.rollouts = [RecurrentRolloutBuffer.over(self.memory, spec.bank(bank)) for bank in range(NUM_BANKS)]
            self.actors: list[Actor] = []
            for actor_id in range(spec.num_actors):
                self.actors.append(Actor(spec, self.memory, self.weights, actor_id))
                stack.callback(self.actors[-1].close)
            if on_ready is not None:
                on_ready(spec)
            tally = self._prepare()
            self._open = stack.pop_all()
        self.metrics = RunMetrics(
            total_steps=trainer.total_updates * spec.steps_per_rollout,
            total_updates=trainer.total_updates,
            num_actors=spec.num_actors,
            started=time.monotonic(),
            env_steps=trainer.env_steps_done,
            updates=trainer.updates_done,
        )
        self.metrics.restore(tally)
        for actor_id in range(spec.num_actors):
            self.metrics.actor_joined(actor_id)

    def _prepare(self) -> TallyRecord:
        """Goes on from the newest checkpoint, or writes the first; publishes the first weights. Returns the tally."""
        found = checkpoints.Found(None)
        if self.config.run_dir is not None and self.config.resume:
            found = checkpoints.newest(self.config.run_dir)
        if found.checkpoint is not None:
            self.trainer.restore(found.checkpoint)
            self.checkpoint = found.checkpoint.path
            if self._saving is not None:
                self._saving.restored()
            if self.trainer.updates_done > 0:
                self._to_reset = set(range(self.spec.num_actors))
            self._barriers.began_at = self.trainer.updates_done
            self.version = found.checkpoint.manifest.version - self.config.deterministic
        self.publish()
        if found.checkpoint is not None:
            return found.checkpoint.manifest.tally
        if self._saving is not None:
            self.checkpoint = self._saving.save(self.version)
        return TallyRecord()

    def one_update(self) -> SerialUpdate:
        """Every actor fills its slot, then the learner updates and publishes."""
        return self.learn(self.collect_bank())

    def collect_bank(self, preempted: Callable[[int], bool] | None = None) -> list[int]:
        """Every actor fills its slot, or what it can until `preempted`. Returns valid_steps per slot."""
        slots = self.spec.bank(self.bank)
        return [self.collect(actor, slot, preempted) for actor, slot in zip(self.actors, slots, strict=True)]

    def collect(self, actor: Actor, slot: int, preempted: Callable[[int], bool] | None = None) -> int:
        """One lease, as the coordinator would grant it. Returns its valid_steps; `preempted` may end it early."""
        import torch

        torch.set_num_threads(ACTOR_THREADS)
        self._epoch += 1
        update = self.trainer.updates_done + 1
        anew = self._barriers.behind(update - 1)
        grant = Grant(
            slot=slot,
            epoch=self._epoch,
            version=self.version,
            start=StartFrom.SEEDED if slot in self._seeded and not anew else StartFrom.FRESH,
            update=update,
            reset_envs=anew or actor.actor_id in self._to_reset,
            barrier_after=self._barriers.cut(update),
        )
        self._to_reset.discard(actor.actor_id)
        commit = actor.fill(grant, preempted=preempted)
        self.metrics.rollout(
            episodes=commit.episodes, seconds=commit.seconds, counters=commit.counters, now=time.monotonic()
        )
        self._remarks += self._watch.notice(commit.remarks, commit.counters)
        return commit.valid_steps

    def learn(self, valid_steps: list[int]) -> SerialUpdate:
        """One update from the bank that was filled, valid_steps per slot; then the other bank is to be filled."""
        update = self.trainer.updates_done + 1
        other = (self.bank + 1) % NUM_BANKS
        report = self.trainer.update(
            self.rollouts[self.bank], valid_steps=valid_steps, seed_into=self.rollouts[other], update=update
        )
        self.publish()
        self.bank = other
        self._seeded = set(self.spec.bank(other)) if self.spec.state_strategy is StateStrategy.STORED else set()
        self.metrics.tally.policy_lags.update([0] * len(valid_steps))
        now = time.monotonic()
        self.metrics.update(
            update=update,
            env_steps=self.trainer.env_steps_done,
            figures=report.metrics,
            seconds=report.seconds,
            now=now,
            version=self.version,
        )
        self._save_if_due(report.metrics)
        remarks, self._remarks = tuple(self._remarks), []
        return SerialUpdate(report, self.metrics.summary(now), remarks)

    def publish(self) -> None:
        """Hands out the trainer's weights under the next version."""
        self.version += 1
        self.weights.publish(self.version, self.trainer.weights())

    def save_at_end(self) -> None:
        """The checkpoint of a run that ends here, unless there is one or none is wanted. Raises CheckpointError."""
        if self._saving is not None:
            self.checkpoint = self._saving.at_end(self.version) or self.checkpoint

    def _save_if_due(self, figures: Mapping[str, float]) -> None:
        """The checkpoint behind the update just made; if it cannot be written the run goes on, and says so."""
        if self._saving is None:
            return
        last, tally = self.trainer.finished, self.metrics.tally.record()
        saved = self._saving.after_update(self.version, last=last, figures=figures, tally=tally)
        self.checkpoint = saved.path or self.checkpoint
        text = self.metrics.checkpoint(self.trainer.updates_done, saved.path, saved.failure)
        self._remarks += [] if text is None else [text]

    def result(self) -> dict[str, Any]:
        """The figures of the run so far, JSON-able."""
        summary = self.metrics.summary(time.monotonic())
        return {
            "run_dir": None if self.config.run_dir is None else str(self.config.run_dir),
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "env_steps": summary.env_steps,
            "updates": summary.updates,
            "episodes": summary.episodes,
            "return_mean": summary.return_mean,
            "success_rate": summary.success_rate,
            "length_mean": summary.length_mean,
            "steps_per_second": summary.steps_per_second,
            "elapsed_s": summary.elapsed_s,
            "counters": dict(summary.counters),
            "weights_digest": weights_digest(self.trainer.weights()),
        }

    def close(self) -> None:
        """Closes envs and memory."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def weights_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """32 hex digits over names and bytes of all arrays: equal weights, equal digest."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()[:32]
