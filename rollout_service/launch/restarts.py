"""How often a lost actor is replaced, and how soon. Pure: takes `now`, returns a delay.

Who asks: the supervisor, once per death. What must never happen: an endless restart loop on an env that always fails.
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
    def spent(self) -> int:
        """Restarts granted within the window, as of the last question."""
        return len(self._granted)
