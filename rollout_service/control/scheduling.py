"""When a bank is granted, and when it goes to the learner. Pure: states and `now` in, decisions out.

Lockstep, the schedule of policy lag 0: two banks of A slots, slot `bank * A + a` is actor a's. One bank is filled at a
time; it goes to the learner when every place has committed; the other bank opens only after the next weights are out.
A place from which nothing can come now (given up, or its actor still has to let go of an older slot) counts as empty,
K = 0. Two rules keep slow actors from holding up the others, both off by default:

    preempt_share   once that share of the places has committed, the others are asked to commit what they have
    deadline        once it has passed and min_actors have committed, the bank goes without the others: K = 0

`Scheduler` is the seam for other schedules. Left to the coordinator: messages, versions, who lives.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Protocol, Self

from rollout_service.config import TrainConfig
from rollout_service.control.ledger import Ledger, SlotState
from rollout_service.runspec import NUM_BANKS

ROUNDING: Final = 1e-9
"""0.7 * 10 is a little more than 7; that share of ten actors is seven of them all the same."""


@dataclass(frozen=True)
class FormBatch:
    """This bank goes to the learner now.

    late: its slots whose lease runs on, to be quarantined first. unclaimed: its slots that nobody has taken, though
    somebody was waited for.
    """

    bank: int
    late: tuple[int, ...] = ()
    unclaimed: tuple[int, ...] = ()


class Scheduler(Protocol):
    """Decides; never acts. absent: places from which nothing can come now."""

    first_deadline_s: float
    preempt_min_steps: int

    @property
    def filling(self) -> int | None:
        """The bank that is being filled; None while the learner works or there is none."""
        ...

    @property
    def needed(self) -> int:
        """Committed slots without which a deadline changes nothing."""
        ...

    def open(self, bank: int, now: float, *, first: bool = False) -> None: ...

    def close(self) -> None: ...

    def slots(self, bank: int) -> range: ...

    def after(self, bank: int) -> int: ...

    def slot_for(self, actor_id: int) -> int | None: ...

    def decide(self, ledger: Ledger, absent: Collection[int], now: float) -> FormBatch | None: ...

    def missing(self, ledger: Ledger, absent: Collection[int]) -> list[int]: ...

    def to_preempt(self, ledger: Ledger, absent: Collection[int]) -> list[int]: ...

    def next_deadline(self) -> float: ...


class Lockstep:
    """The whole of bank b, then weights, then the whole of bank 1 - b."""

    def __init__(
        self,
        num_actors: int,
        *,
        min_actors: int | None = None,
        deadline_s: float = math.inf,
        first_deadline_s: float = math.inf,
        preempt_share: float = 1.0,
        preempt_min_steps: int = 1,
    ) -> None:
        """min_actors: what a batch needs in any case, and a deadline too; None: one, and at a deadline all."""
        self.num_actors = num_actors
        self.needed = num_actors if min_actors is None else max(1, min_actors)
        self.deadline_s = deadline_s
        self.first_deadline_s = first_deadline_s
        self.preempt_share = preempt_share
        self.preempt_min_steps = preempt_min_steps
        self._least = 1 if min_actors is None else self.needed
        self._filling: int | None = None
        self._deadline = math.inf

    @classmethod
    def of(cls, config: TrainConfig, num_actors: int) -> Self:
        """With the rules that the settings ask for."""
        return cls(
            num_actors,
            min_actors=config.min_actors,
            deadline_s=math.inf if config.batch_deadline is None else config.batch_deadline,
            first_deadline_s=math.inf if config.first_batch_deadline is None else config.first_batch_deadline,
            preempt_share=config.preempt_share,
            preempt_min_steps=math.ceil(config.preempt_min_steps_fraction * config.num_steps - ROUNDING),
        )

    @property
    def filling(self) -> int | None:
        return self._filling

    def slots(self, bank: int) -> range:
        return range(bank * self.num_actors, (bank + 1) * self.num_actors)

    def after(self, bank: int) -> int:
        return (bank + 1) % NUM_BANKS

    def open(self, bank: int, now: float, *, first: bool = False) -> None:
        """first: no batch was formed yet; actors may still be starting."""
        self._filling = bank
        self._deadline = now + (self.first_deadline_s if first else self.deadline_s)

    def close(self) -> None:
        self._filling = None

    def slot_for(self, actor_id: int) -> int | None:
        """The slot this place fills now, or None if no bank is open."""
        return None if self._filling is None else self.slots(self._filling)[actor_id]

    def decide(self, ledger: Ledger, absent: Collection[int], now: float) -> FormBatch | None:
        """A bank without one committed slot never goes."""
        if self._filling is None:
            return None
        ready = len(self._ready(ledger))
        missing = self.missing(ledger, absent)
        if not missing and ready >= self._least:
            return FormBatch(self._filling)
        if now >= self._deadline and ready >= self.needed:
            late = tuple(slot for slot in missing if ledger.state(slot) is SlotState.LEASED)
            return FormBatch(self._filling, late, tuple(slot for slot in missing if slot not in late))
        return None

    def missing(self, ledger: Ledger, absent: Collection[int]) -> list[int]:
        """Slots of the open bank that are waited for: leased ones, and those of places that somebody may yet join."""
        bank = range(0) if self._filling is None else self.slots(self._filling)
        ready = self._ready(ledger)
        return [
            slot
            for actor_id, slot in enumerate(bank)
            if slot not in ready and (actor_id not in absent or ledger.state(slot) is SlotState.LEASED)
        ]

    def to_preempt(self, ledger: Ledger, absent: Collection[int]) -> list[int]:
        """Leased slots of the open bank whose actors should commit what they have."""
        ready, missing = len(self._ready(ledger)), self.missing(ledger, absent)
        asked = self.preempt_share < 1.0 and ready > 0
        if not asked or ready < self.preempt_share * (ready + len(missing)) - ROUNDING:
            return []
        return [slot for slot in missing if ledger.state(slot) is SlotState.LEASED]

    def next_deadline(self) -> float:
        return math.inf if self._filling is None else self._deadline

    def _ready(self, ledger: Ledger) -> list[int]:
        bank = range(0) if self._filling is None else self.slots(self._filling)
        return [slot for slot in bank if ledger.state(slot) is SlotState.READY]
