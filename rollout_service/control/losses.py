"""What it costs that a learner was lost, or has to go back to its checkpoint: rollouts that nobody will train on, and
updates that have to be made again. Pure.

Writer: the coordinator. Counters are right at any moment; the whole is told once another learner is ready:

    dropped_rollouts, dropped_env_steps          committed, and neither trained on nor kept; at the end of a run too
    rolled_back_updates, rolled_back_env_steps   trained on, and not in the checkpoint that the run goes on from

What must never happen: a batch counted as dropped that is in the weights. A learner may die between its checkpoint and
its PUBLISH: its successor then stands one update further than the service knew, and that batch was not lost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rollout_service.control import events
from rollout_service.control.messages import Ready


@dataclass(frozen=True)
class LostBatch:
    """What a lost learner was working on."""

    update: int
    rollouts: int
    env_steps: int


class Losses:
    """Counts into `counters`, and remembers what came since the learner was lost."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._since: Counter[str] = Counter()
        self._batch: LostBatch | None = None
        self._goes_back = False

    def goes_back(self) -> None:
        """The next READY may stand further back than the run."""
        self._goes_back = True

    def learner_lost(self, batch: LostBatch | None) -> None:
        """Before its slots are dropped."""
        self.goes_back()
        self._batch = self._batch if batch is None else batch
        self._count(lost_learners=1)

    def dropped(self, rollouts: int, env_steps: int) -> None:
        self._count(dropped_rollouts=rollouts, dropped_env_steps=env_steps)

    def restored(self, pid: int, ready: Ready, *, updates: int, env_steps: int) -> events.LearnerReady:
        """A learner is ready. updates, env_steps: where the service stood until now."""
        batch = self._batch
        saved = batch is not None and ready.updates_done == batch.update
        if saved and batch is not None:
            self._count(dropped_rollouts=-batch.rollouts, dropped_env_steps=-batch.env_steps)
        if self._goes_back:
            self._count(
                rolled_back_updates=max(0, updates - ready.updates_done),
                rolled_back_env_steps=max(0, env_steps - ready.env_steps_done),
            )
        found, restored = self._since, self._goes_back
        self._since, self._batch, self._goes_back = Counter(), None, False
        return events.LearnerReady(
            pid=pid,
            version=ready.version,
            updates=ready.updates_done,
            env_steps=ready.env_steps_done,
            restored=restored,
            unannounced_update=saved,
            dropped_rollouts=found["dropped_rollouts"],
            dropped_env_steps=found["dropped_env_steps"],
            rolled_back_updates=found["rolled_back_updates"],
            rolled_back_env_steps=found["rolled_back_env_steps"],
            figures=ready.metrics,
            tally=ready.tally,
        )

    def _count(self, **counts: int) -> None:
        for name, count in counts.items():
            self._counters[name] += count
            self._since[name] += count
