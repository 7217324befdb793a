"""Waiting, measured: who costs the others how much time, and when a wait is worth a word. Pure.

Writers: the coordinator (its report), the supervisor's metrics (progress and logs). A wait counts from the first
committed slot of a bank until it goes: that long at least one actor was idle because of another. Left to others: what
to do about it (scheduling), whom to name (filling).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final

LEAST_TO_COMPARE: Final = 3
"""Of two actors none is typical."""
WINDOW_S: Final = 60.0
"""Shares are of the last so many seconds."""
WORTH_A_WORD_S: Final = 30.0
"""Without a deadline a wait is spoken of after this long: longer than most rollouts, shorter than most patience."""


@dataclass(frozen=True)
class Slowest:
    """The actor that the others waited for longest, or that is furthest behind them."""

    actor_id: int
    share: float
    """Of the time in the window, or of a typical actor's steps in it."""
    seconds: float
    """That this share is of."""


class WaitShares:
    """Seconds that others waited for each actor, as shares of the last WINDOW_S."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, int, float]] = deque()
        self._totals: dict[int, float] = {}
        self._since: float | None = None

    def add(self, waited_for: int, wait_s: float, now: float) -> None:
        """One batch. The first one only starts the clock: before it actors are still starting."""
        if self._since is None:
            self._since = now
            return
        self._waits.append((now, waited_for, wait_s))
        self._totals[waited_for] = self._totals.get(waited_for, 0.0) + wait_s
        while self._waits[0][0] < now - WINDOW_S:
            self._since, actor_id, forgotten = self._waits.popleft()
            self._totals[actor_id] -= forgotten

    def share(self, actor_id: int) -> float:
        seconds = self._seconds()
        return min(1.0, max(0.0, self._totals.get(actor_id, 0.0)) / seconds) if seconds > 0 else 0.0

    def slowest(self) -> Slowest | None:
        """None before the second batch."""
        if not self._waits:
            return None
        actor_id = max(self._totals, key=self._totals.__getitem__)
        return Slowest(actor_id, self.share(actor_id), self._seconds())

    def _seconds(self) -> float:
        return self._waits[-1][0] - self._since if self._waits and self._since is not None else 0.0


class Pace:
    """Env steps that each actor brought in the last WINDOW_S, where nobody waits for anybody."""

    def __init__(self) -> None:
        self._brought: deque[tuple[float, int, int]] = deque()
        self._totals: dict[int, int] = {}
        self._since: float | None = None

    def add(self, actor_id: int, env_steps: int, now: float) -> None:
        """One rollout."""
        self._since = now if self._since is None else self._since
        self._brought.append((now, actor_id, env_steps))
        self._totals[actor_id] = self._totals.get(actor_id, 0) + env_steps
        while self._brought[0][0] < now - WINDOW_S:
            self._since, theirs, forgotten = self._brought.popleft()
            if theirs in self._totals:
                self._totals[theirs] -= forgotten

    def forget(self, actor_id: int) -> None:
        """It has left."""
        self._totals.pop(actor_id, None)
        self._brought = deque(entry for entry in self._brought if entry[1] != actor_id)

    def slowest(self) -> Slowest | None:
        """share: what it lacks of the median actor's steps, 0 to 1. None before three actors can be compared."""
        if len(self._totals) < LEAST_TO_COMPARE or not self._brought or self._since is None:
            return None
        actor_id = min(self._totals, key=self._totals.__getitem__)
        typical = median(self._totals.values())
        seconds = self._brought[-1][0] - self._since
        return Slowest(actor_id, 1.0 - self._totals[actor_id] / typical, seconds) if typical > 0 else None


class Vigil:
    """The wait for one open bank: since when, and when it is next worth a word."""

    def __init__(self, opened_at: float, due_at: float = math.inf) -> None:
        self.opened_at = opened_at
        self.due_at = due_at

    def others_wait(self, now: float) -> None:
        """Somebody has committed: from now on there is an actor that waits."""
        if self.due_at == math.inf:
            self.due_at = now + WORTH_A_WORD_S

    def due(self, now: float) -> bool:
        """Once when it is due, and then each time the wait has doubled."""
        if now < self.due_at:
            return False
        self.due_at = now + max(1.0, now - self.opened_at)
        return True
