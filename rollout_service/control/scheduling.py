"""When a bank is granted, and when it goes to the learner. Pure: states and `now` in, decisions out.

Lockstep, the schedule of policy lag 0: two banks of A slots, slot `bank * A + a` is actor a's. One bank is filled at a
time; it goes to the learner when every place has committed; the other bank opens only after the next weights are out.
A place whose actor will not come back counts as empty (K = 0), and so does a late one once `deadline_s` has passed with
at least `min_actors` committed.

`Scheduler` is the seam for other schedules. Left to the coordinator: messages, versions, who lives.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from rollout_service.control.ledger import Ledger, SlotState
from rollout_service.runspec import NUM_BANKS


@dataclass(frozen=True)
class FormBatch:
    """This bank goes to the learner now. late: its slots whose lease runs on, to be quarantined first."""

    bank: int
    late: tuple[int, ...] = ()


class Scheduler(Protocol):
    """Decides; never acts."""

    @property
    def filling(self) -> int | None:
        """The bank that is being filled; None while the learner works or there is none."""
        ...

    def open(self, bank: int, now: float) -> None: ...

    def close(self) -> None: ...

    def slots(self, bank: int) -> range: ...

    def after(self, bank: int) -> int: ...

    def slot_for(self, actor_id: int) -> int | None: ...

    def decide(self, ledger: Ledger, absent: Collection[int], now: float) -> FormBatch | None: ...

    def next_deadline(self) -> float: ...


class Lockstep:
    """The whole of bank b, then weights, then the whole of bank 1 - b."""

    def __init__(self, num_actors: int, *, min_actors: int | None = None, deadline_s: float = math.inf) -> None:
        self.num_actors = num_actors
        self.min_actors = num_actors if min_actors is None else max(1, min_actors)
        self.deadline_s = deadline_s
        self._filling: int | None = None
        self._opened_at = 0.0

    @property
    def filling(self) -> int | None:
        return self._filling

    def slots(self, bank: int) -> range:
        return range(bank * self.num_actors, (bank + 1) * self.num_actors)

    def after(self, bank: int) -> int:
        return (bank + 1) % NUM_BANKS

    def open(self, bank: int, now: float) -> None:
        self._filling, self._opened_at = bank, now

    def close(self) -> None:
        self._filling = None

    def slot_for(self, actor_id: int) -> int | None:
        """The slot this place fills now, or None if no bank is open."""
        return None if self._filling is None else self.slots(self._filling)[actor_id]

    def decide(self, ledger: Ledger, absent: Collection[int], now: float) -> FormBatch | None:
        """absent: places nobody will come back to. A bank without one committed slot never goes."""
        if self._filling is None:
            return None
        bank = self.slots(self._filling)
        ready = [slot for slot in bank if ledger.state(slot) is SlotState.READY]
        missing = [
            slot
            for actor_id, slot in enumerate(bank)
            if slot not in ready and (actor_id not in absent or ledger.state(slot) is SlotState.LEASED)
        ]
        if not ready:
            return None
        if not missing:
            return FormBatch(self._filling)
        if now >= self.next_deadline() and len(ready) >= self.min_actors:
            return FormBatch(self._filling, tuple(s for s in missing if ledger.state(s) is SlotState.LEASED))
        return None

    def next_deadline(self) -> float:
        return math.inf if self._filling is None else self._opened_at + self.deadline_s
