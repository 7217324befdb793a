"""A run whose leases and batches the test decides, as the service does with max_policy_lag above 0."""

from __future__ import annotations

from typing import Any

from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.trainer import UpdateReport
from rollout_service.control.messages import Commit, Grant, StartFrom
from rollout_service.launch.serial import SerialRun
from rollout_service.runspec import StateStrategy
from tests.fixtures.training import after_steps


class Stream:
    """Of a serial run: its actors and trainer, without its order."""

    def __init__(self, run: SerialRun) -> None:
        self.run = run
        self.epoch = 0
        self._known: set[int] = set()

    def fill(self, actor: int, slot: int, steps: int | None = None) -> Commit:
        """This actor fills this slot with the newest weights; its state goes on from its lease before."""
        self.epoch += 1
        stored = self.run.spec.state_strategy is StateStrategy.STORED
        start = StartFrom.CARRY if stored and actor in self._known else StartFrom.FRESH
        self._known.add(actor)
        grant = Grant(slot=slot, epoch=self.epoch, version=self.run.version, start=start, update=1)
        return self.run.actors[actor].fill(grant, preempted=None if steps is None else after_steps(steps))

    def learn(self, *commits: Commit, **settings: Any) -> UpdateReport:
        """One update from these commits, in this order; the weights are published."""
        report = self.run.trainer.update(
            RecurrentRolloutBuffer.over(self.run.memory, [commit.slot for commit in commits], at_once=False),
            valid_steps=[commit.valid_steps for commit in commits],
            policy_lags=[self.run.version - commit.version for commit in commits],
            update=self.run.trainer.updates_done + 1,
            **settings,
        )
        self.run.publish()
        return report
