"""How often a lost process is replaced, and how soon. Pure: takes `now`, returns a delay.

Who asks: the supervisor, once per death. What must never happen: an endless restart loop, on an env that always fails
or on an update that always gets its learner killed, however long it takes to get there.
"""

from __future__ import annotations

from collections import deque
from typing import Final

FIRST_DELAY_S: Final = 0.5
"""Before an actor's second restart within the window; doubles with each further one. The first is immediate."""
LONGEST_DELAY_S: Final = 10.0


class RestartBudget:
    """At most `max_restarts` within the last `window_s` seconds, over all actors."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._granted: deque[tuple[float, int]] = deque()

    def spend(self, actor_id: int, now: float) -> float | None:
        """Seconds to wait before this actor is started again, or None if the budget is spent."""
        while self._granted and self._granted[0][0] <= now - self.window_s:
            self._granted.popleft()
        if len(self._granted) >= self.max_restarts:
            return None
        before = sum(1 for _, other in self._granted if other == actor_id)
        self._granted.append((now, actor_id))
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (before - 1)) if before else 0.0

    @property
    def used_up(self) -> str:
        """What to say once it is."""
        return f"all {self.max_restarts} restarts within {self.window_s:g} s are used up (max_restarts, restart_window)"

    @property
    def spent(self) -> int:
        """Restarts granted within the window, as of the last question."""
        return len(self._granted)


class RestartsFromCheckpoint:
    """Whether a process is started again for which the run goes back: the learner, in a deterministic run any.

    A budget of its own, and proof that starting it again helps: what came after the checkpoint is repeated, and may end
    it again. Progress is an update that the run had never reached before. Without any, it is started as often as the
    budget has restarts, however slowly its deaths come.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.budget = RestartBudget(max_restarts, window_s)
        self._reached = -1
        self._deaths = 0
        """Without progress between them."""

    def after_death(self, *, reached: int, now: float, actor_id: int = 0) -> float | str:
        """Seconds to wait before it is started again, or why it is not.

        reached: the highest update that this run has ever finished. actor_id: whose place it had.
        """
        if reached > self._reached:
            self._reached, self._deaths = reached, 0
        self._deaths += 1
        if 0 < self.budget.max_restarts < self._deaths:
            return f"it died {self._deaths} times while the run got no further than update {reached} (max_restarts)"
        delay = self.budget.spend(actor_id, now)
        return self.budget.used_up if delay is None else delay
