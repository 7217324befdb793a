"""Who holds the others up, in words, said once. Pure.

Writer: the supervisor's main thread. Readers: people. What must never happen: a line per batch.
Leaves to others: measuring (`control/waits`), and what to do about it (the settings it names).
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from rollout_service.control.events import BatchFormed, BatchOverdue, RolloutTooOld
from rollout_service.control.waits import Slowest

NOTICED_SHARE: Final = 0.2
"""Share of the time that the others wait for one actor, from which on it is named."""
NOTICED_AFTER_S: Final = 5.0
"""Of batches that the share has to be over: a hiccup is no straggler."""
REMEDY: Final = (
    "; preempt_share (e.g. 0.75) takes the steps it has instead of waiting for all of them",
    "; it has preempt_min_steps_fraction of its steps in any case, and ends no sooner than one step of its envs",
)


class StragglerWatch:
    """Names the slowest actor when it becomes one, and again after it had caught up or another had taken its place."""

    def __init__(self, *, preempts: bool, streaming: bool = False) -> None:
        self._streaming = streaming
        self._remedy = REMEDY[preempts]
        self._named: int | None = None

    def notice(self, slowest: Slowest | None) -> str | None:
        """What to say now, if anything."""
        if slowest is None or slowest.seconds < NOTICED_AFTER_S:
            return None
        if slowest.share < NOTICED_SHARE / 2:
            self._named = None
        if slowest.share < NOTICED_SHARE or slowest.actor_id == self._named:
            return None
        self._named = slowest.actor_id
        if self._streaming:
            return (
                f"actor {slowest.actor_id} is the slowest: in the last {slowest.seconds:.0f} s it brought "
                f"{1 - slowest.share:.0%} of the steps of a typical actor; nobody waits for it, its envs count for less"
            )
        return (
            f"actor {slowest.actor_id} is the slowest: the others waited for it in {slowest.share:.0%} of the last "
            f"{slowest.seconds:.0f} s{self._remedy}"
        )


def overdue(event: BatchOverdue) -> str:
    """A bank waits for longer than it should."""
    return (
        f"update {event.update} has waited for {event.seconds:.1f} s: {event.committed} actors have committed, "
        f"{event.needed} are needed (min_actors); waiting for {', '.join(event.awaited)}"
    )


def gone_without(event: BatchFormed) -> str | None:
    """A batch went without somebody; None if everybody is in it."""
    if not event.late and not event.unclaimed:
        return None
    parts = []
    if event.late:
        parts.append(f"{_actors(event.late)} (still at work: what comes late is dropped)")
    if event.unclaimed:
        parts.append(f"{_actors(event.unclaimed)} (not there: waited for again once joined)")
    return f"update {event.update} went without {' and '.join(parts)}, after a wait of {event.wait_s:.1f} s"


def _actors(numbers: tuple[int, ...]) -> str:
    return ("actor " if len(numbers) == 1 else "actors ") + ", ".join(map(str, numbers))


class AgeWatch:
    """Says that rollouts are dropped for their policy lag: the first of each actor, then whenever they have doubled."""

    def __init__(self, max_policy_lag: int) -> None:
        self._limit = max_policy_lag
        self._dropped: Counter[int] = Counter()

    def notice(self, event: RolloutTooOld) -> str | None:
        """What to say now, if anything."""
        self._dropped[event.actor_id] += 1
        count = self._dropped[event.actor_id]
        if count & (count - 1):
            return None
        dropped = "a rollout" if count == 1 else f"{count} rollouts so far"
        return (
            f"dropped {dropped} of actor {event.actor_id}: the last was {event.lag} updates old, max_policy_lag is "
            f"{self._limit}; raise it, or let preempt_share (e.g. 0.75) take the steps that slow actors have"
        )
