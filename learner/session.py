"""The learner's side of one run: attached memory, trainer, checkpoints, and the conversation with the service.

    HELLO -> WELCOME (RunSpec, settings, segments, counters)
    attach, build, restore        with resume the newest usable checkpoint, else checkpoint 0 is written
    publish the version above every earlier one -> READY
    BATCH -> update -> weights of the next version -> PUBLISH, over and over
             in streaming RELEASE in between, once the batch is copied
    RESTORE -> as with resume, READY once more
    STOP, SIGTERM or a silent service -> checkpoint of the last whole update -> BYE
             not in a deterministic run, where checkpoints lie at barriers only

Writers: this process writes the weights segment, its slots' products and seeds, and the run's checkpoints. A stop
inside an update is noticed before the next minibatch; that update leaves no trace. A learner that was killed, at
whatever moment, is followed by one with `resume`: it trusts the newest checkpoint and nothing else of its
predecessor's. What must never happen: a checkpoint of a half-done update, or weights published under a version that
was used before, also one that was published and never announced. Signals and exit codes are left to
`learner.__main__`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Final

import torch

from learner import single_pass
from learner.epochs import Outcome
from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.saving import Saving
from learner.trainer import Trainer
from rollout_service import checkpoint as checkpoints
from rollout_service.checkpoint import Checkpoint
from rollout_service.config import TrainConfig, check_fits_one_rollout
from rollout_service.control.client import Client
from rollout_service.control.messages import Batch, Publish, Ready, Release, Restore, Stop, Welcome
from rollout_service.errors import CheckpointError, ConfigError, ProtocolError
from rollout_service.memory.presence import LEARNER, Presence
from rollout_service.memory.slots import RolloutMemory
from rollout_service.memory.weights import WeightsMemory
from rollout_service.policy import compiled
from rollout_service.runspec import NUM_BANKS, RunSpec, StateStrategy
from rollout_service.tally import TallyRecord

RECEIVE_S: Final = 0.5
"""How long one wait for a message lasts, so that a stop flag set by a signal is seen soon."""


class LearnerSession:
    """The learner's side of one run: attached memory, trainer, and the version that was published last."""

    def __init__(self, client: Client, welcome: Welcome, run_dir: Path | None = None) -> None:
        """run_dir: where this process finds the run's directory; by default where the service has it."""
        self.client = client
        self.spec = RunSpec.from_json(welcome.run_spec)
        self.config = TrainConfig.model_validate_json(welcome.config)
        self.run_dir = _required(run_dir or self.config.run_dir)
        torch.set_num_threads(1)  # threads share blocks of rows, not operations
        total = check_fits_one_rollout(self.config, self.spec.num_actors)
        self.trainer = Trainer(self.config, self.spec, total_updates=total)
        self.memory = RolloutMemory.attach(welcome.rollout_segment)
        self.trainer.attach(self.memory)
        self.weights = WeightsMemory.attach(welcome.weights_segment)
        banks = range(NUM_BANKS) if self.spec.max_policy_lag == 0 else ()
        self.banks = {
            (slots := tuple(self.spec.bank(bank))): RecurrentRolloutBuffer.over(self.memory, slots) for bank in banks
        }
        """Lockstep: the two rollouts there are, by their slots. In streaming every batch has slots of its own."""
        self.version = welcome.version
        self.goes_on = run_dir is None or self.config.resume or welcome.version > 0
        """Checkpoints in run_dir are of this very run: the service puts those of an earlier one aside."""
        self.saving = Saving(self.trainer, self.run_dir)
        self._published: Publish | None = None

    def prepare(self, resume: bool) -> None:
        """Restores or writes checkpoint 0, publishes the first weights, says READY."""
        self.client.pulse.phase = "preparing"
        for built, what in ((single_pass.BUILT, single_pass.NOT_BUILT), (compiled.BUILT, compiled.NOT_BUILT)):
            if not built:
                print(f"learner: {what}", file=sys.stderr, flush=True)
        found = self._newest_checkpoint() if resume else None
        # The segment knows of weights whose PUBLISH was never sent, the checkpoint of those of an earlier run.
        above, figures, tally = max(self.version, self.weights.newest_version()), {}, TallyRecord()
        if found is not None:
            self.trainer.restore(found)
            self.saving.restored()
            manifest = found.manifest
            figures, tally = manifest.figures, manifest.tally
            # Of a barrier the weights are the same whenever they are published: so is their version, where it is free.
            above = max(above, manifest.version - self.config.deterministic)
        self.version = above + 1
        if found is None:
            self.client.pulse.phase = "checkpointing"
            self.saving.save(self.version)
        self.weights.publish(self.version, self.trainer.weights())
        self.client.send(
            Ready(
                version=self.version,
                updates_done=self.trainer.updates_done,
                env_steps_done=self.trainer.env_steps_done,
                metrics=figures,
                tally=tally,
            )
        )

    def _newest_checkpoint(self) -> Checkpoint | None:
        """What to go on from; None if none was ever written. Raises CheckpointError if all there are are damaged."""
        found = checkpoints.newest(self.run_dir)
        for warning in found.warnings():
            print(f"learner: {warning}", file=sys.stderr, flush=True)
        if found.checkpoint is None and found.damaged:
            raise CheckpointError(
                f"no usable checkpoint is left in {self.run_dir}; bring back a copy of one, or start a new run_dir"
            )
        checkpoints.set_aside(found.damaged)
        return found.checkpoint

    def run(self) -> None:
        """Serves batches until a stop."""
        while not self.client.stopping:
            self.client.pulse.phase = "waiting"
            match self.client.receive(RECEIVE_S):
                case Batch() as batch:
                    self.learn(batch)
                case Restore():
                    self.prepare(resume=True)
                case Stop():
                    break
                case None:
                    pass
                case other:
                    raise ProtocolError(
                        f"the learner was sent {type(other).__name__}; it expects Batch, Restore or Stop"
                    )
        self.client.pulse.phase = "checkpointing"
        self.saving.at_end(self.version)

    def learn(self, batch: Batch) -> None:
        """One update, from BATCH to PUBLISH. A batch that comes again gets the same answer again."""
        if batch.update <= self.trainer.updates_done:
            if self._published is not None and self._published.update == batch.update:
                self.client.send(self._published)
            return
        self.client.pulse.phase = "updating"
        checked = self._verify(batch)
        report = self.trainer.update(
            self.banks.get(batch.slots) or RecurrentRolloutBuffer.over(self.memory, batch.slots, at_once=False),
            valid_steps=batch.valid_steps,
            seed_into=self._seed_target(batch),
            seed_where=[slot is not None for slot in batch.seed_into],
            update=batch.update,
            env_steps=batch.env_steps,
            policy_lags=[max(0, self.version - version) for version in batch.versions],
            copied=partial(self._release, batch),
            should_stop=self._between_minibatches,
        )
        if report.outcome is Outcome.ABANDONED:
            return
        self.version += 1
        self.weights.publish(self.version, self.trainer.weights())
        self.client.pulse.phase = "checkpointing"
        figures = report.metrics | ({"slots_checked": float(checked)} if checked else {})
        saved = self.saving.after_update(self.version, last=batch.last, figures=figures, tally=batch.tally)
        self._published = Publish(
            update=batch.update,
            version=self.version,
            seeded=self._seeded(batch),
            metrics=figures,
            seconds=report.seconds,
            checkpoint=None if saved.path is None else str(saved.path),
            checkpoint_failure=saved.failure,
        )
        self.client.send(self._published)

    def _seed_target(self, batch: Batch) -> RecurrentRolloutBuffer | None:
        """The other bank, if any slot of it may be seeded. Raises ProtocolError if seeds would go elsewhere."""
        named = [slot for slot in batch.seed_into if slot is not None]
        if not named:
            return None
        bank = tuple(self.spec.bank(named[0] // self.spec.num_places))
        if bank not in self.banks or not all(
            slot in (None, own) for slot, own in zip(batch.seed_into, bank, strict=True)
        ):
            raise ProtocolError(f"batch {batch.update} has seeds for slots {batch.seed_into}; a bank is {bank}")
        return self.banks[bank]

    def _seeded(self, batch: Batch) -> tuple[int, ...]:
        """Slots whose row 0 now comes from their actor's own last commit."""
        if self.spec.state_strategy is not StateStrategy.STORED or not batch.seed_into:
            return ()
        pairs = zip(batch.seed_into, batch.valid_steps, strict=True)
        return tuple(slot for slot, steps in pairs if slot is not None and steps > 0)

    def _release(self, batch: Batch) -> None:
        """Lets actors have the slots while the update goes on. In lockstep PUBLISH does: nobody could fill them yet."""
        self._verify(batch)
        if self.spec.max_policy_lag > 0:
            self.client.send(Release(update=batch.update))

    def _verify(self, batch: Batch) -> int:
        """How many slots have a checksum. Raises TornSlot if one of them is not as it was committed."""
        committed = zip(batch.slots, batch.versions, batch.valid_steps, strict=True)
        return sum(
            self.memory.verify(slot, version=version, valid_steps=steps)
            for slot, version, steps in committed
            if version > 0 and steps > 0
        )

    def close(self) -> None:
        self.banks.clear()
        self.trainer.close()
        self.weights.close()
        self.memory.close()

    def _between_minibatches(self) -> bool:
        self.client.pulse.progress += 1
        return bool(self.client.stopping)


def take_seat(welcome: Welcome) -> Presence:
    """The sign of life of the run's learner; also the first look at the run's memory, before anything is built."""
    return Presence(welcome.rollout_segment, LEARNER)


def _required(run_dir: Path | None) -> Path:
    if run_dir is None:
        raise ConfigError("the service names no run directory; say where checkpoints go: --run-dir DIR")
    return run_dir
