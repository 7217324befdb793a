"""The learner's side of one run: attached memory, trainer, checkpoints, and the conversation with the service.

    HELLO -> WELCOME (RunSpec, settings, segments, counters)
    attach, build, restore        with resume the newest usable checkpoint, else checkpoint 0 is written
    publish version v+1 -> READY
    BATCH -> update -> weights of the next version -> PUBLISH, over and over
    STOP, SIGTERM or a silent service -> checkpoint of the last whole update -> BYE

Writers: this process writes the weights segment, its slots' products and seeds, and the run's checkpoints. A stop
inside an update is noticed before the next minibatch; that update leaves no trace. What must never happen: a
checkpoint of a half-done update, or weights published under a version that was used before. Signals and exit codes
are left to `learner.__main__`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import torch

from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.staging import thread_count
from learner.trainer import Outcome, Trainer
from rollout_service import checkpoint as checkpoints
from rollout_service.config import TrainConfig, check_fits_one_rollout
from rollout_service.control.client import Client
from rollout_service.control.messages import Batch, Publish, Ready, Stop, Welcome
from rollout_service.errors import ProtocolError
from rollout_service.memory.slots import RolloutMemory
from rollout_service.memory.weights import WeightsMemory
from rollout_service.runspec import NUM_BANKS, RunSpec, StateStrategy

RECEIVE_S: Final = 0.5
"""How long one wait for a message lasts, so that a stop flag set by a signal is seen soon."""


class LearnerSession:
    """The learner's side of one run: attached memory, trainer, and the version that was published last."""

    def __init__(self, client: Client, welcome: Welcome, run_dir: Path) -> None:
        self.client = client
        self.run_dir = run_dir
        self.spec = RunSpec.from_json(welcome.run_spec)
        self.config = TrainConfig.model_validate_json(welcome.config)
        torch.set_num_threads(thread_count(self.config, self.spec.num_envs))
        total = check_fits_one_rollout(self.config, self.spec.num_actors)
        self.trainer = Trainer(self.config, self.spec, total_updates=total)
        self.memory = RolloutMemory.attach(welcome.rollout_segment)
        self.weights = WeightsMemory.attach(welcome.weights_segment)
        self.banks = [RecurrentRolloutBuffer.over(self.memory, self.spec.bank(bank)) for bank in range(NUM_BANKS)]
        self.version = welcome.version
        self.saved_update = -1

    def prepare(self, resume: bool) -> None:
        """Restores or writes checkpoint 0, publishes the first weights, says READY."""
        self.client.pulse.phase = "preparing"
        found = checkpoints.newest(self.run_dir) if resume else checkpoints.Found(None)
        for warning in found.warnings():
            print(f"learner: {warning}", file=sys.stderr, flush=True)
        if found.checkpoint is not None:
            self.trainer.restore(found.checkpoint)
            self.saved_update = self.trainer.updates_done
        self.version += 1
        if found.checkpoint is None:
            self.checkpoint()
        self.weights.publish(self.version, self.trainer.weights())
        self.client.send(
            Ready(
                version=self.version,
                updates_done=self.trainer.updates_done,
                env_steps_done=self.trainer.env_steps_done,
            )
        )

    def run(self) -> None:
        """Serves batches until a stop."""
        while not self.client.stopping:
            self.client.pulse.phase = "waiting"
            match self.client.receive(RECEIVE_S):
                case Batch() as batch:
                    self.learn(batch)
                case Stop():
                    break
                case None:
                    pass
                case other:
                    raise ProtocolError(f"the learner was sent {type(other).__name__}; it expects Batch or Stop")
        if self.saved_update != self.trainer.updates_done:
            self.checkpoint()

    def learn(self, batch: Batch) -> None:
        """One update, from BATCH to PUBLISH."""
        self.client.pulse.phase = "updating"
        other = (batch.bank + 1) % NUM_BANKS
        report = self.trainer.update(
            self.banks[batch.bank],
            valid_steps=batch.valid_steps,
            seed_into=self.banks[other],
            update=batch.update,
            env_steps=batch.env_steps,
            should_stop=self._between_minibatches,
        )
        if report.outcome is Outcome.ABANDONED:
            return
        self.version += 1
        self.weights.publish(self.version, self.trainer.weights())
        due = batch.last or batch.update % self.config.checkpoint_interval == 0
        self.client.send(
            Publish(
                update=batch.update,
                version=self.version,
                bank=batch.bank,
                seeded=self._seeded(other, batch.valid_steps),
                metrics=report.metrics,
                seconds=report.seconds,
                checkpoint=str(self.checkpoint()) if due else None,
            )
        )

    def _seeded(self, bank: int, valid_steps: tuple[int, ...]) -> tuple[int, ...]:
        """Slots of `bank` whose row 0 now comes from their actor's own last commit."""
        if self.spec.state_strategy is not StateStrategy.STORED:
            return ()
        return tuple(slot for slot, steps in zip(self.spec.bank(bank), valid_steps, strict=True) if steps > 0)

    def checkpoint(self) -> Path:
        self.client.pulse.phase = "checkpointing"
        path = self.trainer.save(self.run_dir, version=self.version)
        self.saved_update = self.trainer.updates_done
        return path

    def close(self) -> None:
        self.banks.clear()
        self.weights.close()
        self.memory.close()

    def _between_minibatches(self) -> bool:
        self.client.pulse.progress += 1
        return bool(self.client.stopping)
