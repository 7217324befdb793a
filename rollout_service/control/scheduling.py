"""When slots are granted, and when a batch goes to the learner. Pure: states and `now` in, decisions out.

    Lockstep    policy lag 0. Two banks of A slots, one per place; slot `bank * A + a` is actor a's. One bank is filled
                at a time; it goes to the learner when every place that is waited for has committed; the other opens
                once the next weights are out.
    Streaming   policy lag up to `max_policy_lag`. Any actor takes any free slot, also while the learner works; a
                batch is the oldest committed slots, as many as there are places that are waited for.

A place from which nothing can come now (empty and not waited for, or its actor still has to let go of an older slot)
is `absent`. Actors that join or leave an elastic run thereby make batches larger or smaller.
Two rules keep slow actors from holding up the others, both off by default:

    preempt_share   once that share of a batch has been committed, others are asked to commit what they have: in
                    Lockstep all others, in Streaming those whose rows would be too old for the batch after this one
    deadline        once it has passed and min_actors have committed, the batch goes without the others

`Scheduler` is the seam for other schedules. Left to the coordinator: messages, versions, who lives.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from rollout_service.config import TrainConfig
from rollout_service.control.ledger import Ledger, SlotState
from rollout_service.runspec import NUM_BANKS

ROUNDING: Final = 1e-9
"""0.7 * 10 is a little more than 7; that share of ten actors is seven of them all the same."""


@dataclass(frozen=True)
class FormBatch:
    """These slots go to the learner now, in this order.

    late: those of them whose lease runs on, to be quarantined first. unclaimed: places that nobody has taken, though
    somebody was waited for.
    """

    slots: tuple[int, ...]
    late: tuple[int, ...] = ()
    unclaimed: tuple[int, ...] = ()


class Scheduler(Protocol):
    """Decides; never acts. absent: places from which nothing can come now.

    idle --opened--> collecting a batch --formed--> the learner works on it --opened--> ...; `closed` at any time.
    """

    max_policy_lag: int
    first_deadline_s: float
    preempt_min_steps: int

    @property
    def waiting(self) -> bool:
        """Whether the learner has nothing to do but to wait for a batch."""
        ...

    @property
    def needed(self) -> int:
        """Committed slots without which a deadline changes nothing."""
        ...

    @property
    def least(self) -> int:
        """Committed slots without which no batch goes."""
        ...

    def open(self, now: float, *, first: bool = False) -> None:
        """The learner waits. first: no batch was formed yet; actors may still be starting."""
        ...

    def formed(self) -> None:
        """A batch has gone to the learner."""
        ...

    def published(self) -> None:
        """Its weights are out."""
        ...

    def close(self) -> None:
        """No learner: nothing is granted and nothing formed. A batch that was out comes to nothing."""
        ...

    def slot_for(self, actor_id: int, ledger: Ledger, absent: Collection[int]) -> int | None:
        """The slot this place may take now; None if none."""
        ...

    def seeds(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Per slot of a batch the one in which its actor's next rollout starts; () if that is not known yet."""
        ...

    def decide(self, ledger: Ledger, absent: Collection[int], now: float) -> FormBatch | None: ...

    def missing(self, ledger: Ledger, absent: Collection[int]) -> list[int]:
        """Places that the batch waits for."""
        ...

    def to_preempt(self, ledger: Ledger, absent: Collection[int], version: int) -> list[int]:
        """Leased slots whose actors should commit what they have. version: of the newest weights."""
        ...

    def next_deadline(self) -> float: ...


@dataclass
class Patience:
    """The rules for slow actors that both schedules share."""

    min_actors: int | None = None
    """What a batch needs in any case, and a deadline too; None: one, and at a deadline all."""
    deadline_s: float = math.inf
    first_deadline_s: float = math.inf
    preempt_share: float = 1.0
    preempt_min_steps: int = 1

    @classmethod
    def of(cls, config: TrainConfig) -> Patience:
        """What the settings ask for."""
        return cls(
            min_actors=config.min_actors,
            deadline_s=math.inf if config.batch_deadline is None else config.batch_deadline,
            first_deadline_s=math.inf if config.first_batch_deadline is None else config.first_batch_deadline,
            preempt_share=config.preempt_share,
            preempt_min_steps=math.ceil(config.preempt_min_steps_fraction * config.num_steps - ROUNDING),
        )


class _Waiting:
    """What both schedules know: whether the learner waits, and until when."""

    def __init__(self, num_places: int, patience: Patience) -> None:
        self.num_places = num_places
        self.first_deadline_s = patience.first_deadline_s
        self.preempt_min_steps = patience.preempt_min_steps
        self.needed = num_places if patience.min_actors is None else max(1, patience.min_actors)
        self._patience = patience
        self.least = 1 if patience.min_actors is None else self.needed
        self._waiting = False
        self._deadline = math.inf

    @property
    def waiting(self) -> bool:
        return self._waiting

    def open(self, now: float, *, first: bool = False) -> None:
        self._waiting = True
        self._deadline = now + (self._patience.first_deadline_s if first else self._patience.deadline_s)

    def formed(self) -> None:
        self._waiting = False

    def close(self) -> None:
        self._waiting = False

    def next_deadline(self) -> float:
        return self._deadline if self._waiting else math.inf

    def _share_reached(self, ready: int, of: int) -> bool:
        share = self._patience.preempt_share
        return share < 1.0 and ready > 0 and ready >= share * of - ROUNDING


class Lockstep(_Waiting):
    """The whole of bank b, then weights, then the whole of bank 1 - b."""

    max_policy_lag = 0

    def __init__(self, num_places: int, patience: Patience | None = None) -> None:
        super().__init__(num_places, patience or Patience())
        self.bank = 0
        """The one that is filled now, or that the learner works on."""

    def published(self) -> None:
        self.bank = (self.bank + 1) % NUM_BANKS

    def slots(self, bank: int) -> range:
        return range(bank * self.num_places, (bank + 1) * self.num_places)

    def slot_for(self, actor_id: int, ledger: Ledger, absent: Collection[int]) -> int | None:  # noqa: ARG002
        """Its own slot of the open bank."""
        slot = self.slots(self.bank)[actor_id]
        return slot if self._waiting and ledger.state(slot) is SlotState.FREE else None

    def seeds(self, slots: Sequence[int]) -> tuple[int, ...]:
        """The same place of the other bank."""
        return tuple((slot + self.num_places) % (NUM_BANKS * self.num_places) for slot in slots)

    def decide(self, ledger: Ledger, absent: Collection[int], now: float) -> FormBatch | None:
        """A bank without one committed slot never goes."""
        if not self._waiting:
            return None
        bank = self.slots(self.bank)
        ready = len(self._ready(ledger))
        missing = self.missing(ledger, absent)
        if not missing and ready >= self.least:
            return FormBatch(tuple(bank))
        if now >= self._deadline and ready >= self.needed:
            late = tuple(bank[place] for place in missing if ledger.state(bank[place]) is SlotState.LEASED)
            return FormBatch(tuple(bank), late, tuple(place for place in missing if bank[place] not in late))
        return None

    def missing(self, ledger: Ledger, absent: Collection[int]) -> list[int]:
        """Places whose slot is leased, or that somebody may yet join."""
        if not self._waiting:
            return []
        states = [ledger.state(slot) for slot in self.slots(self.bank)]
        return [
            place
            for place, state in enumerate(states)
            if state is SlotState.LEASED or (state is not SlotState.READY and place not in absent)
        ]

    def to_preempt(self, ledger: Ledger, absent: Collection[int], version: int) -> list[int]:  # noqa: ARG002
        ready, missing = len(self._ready(ledger)), self.missing(ledger, absent)
        if not self._share_reached(ready, ready + len(missing)):
            return []
        bank = self.slots(self.bank)
        return [bank[place] for place in missing if ledger.state(bank[place]) is SlotState.LEASED]

    def _ready(self, ledger: Ledger) -> list[int]:
        return (
            [slot for slot in self.slots(self.bank) if ledger.state(slot) is SlotState.READY] if self._waiting else []
        )


class Streaming(_Waiting):
    """Collection goes on while the learner works; no rows are collected that would be too old once they are used.

    An actor that starts now is behind `ahead` slots that are leased or committed. With B slots to a batch its own goes
    to the learner after `ahead // B` other batches, and after the one that the learner works on now: so many updates
    older than the newest weights its rows will be. It starts only where that is within max_policy_lag. With equal
    actors nothing is then dropped, and lag 1 is double buffering.
    """

    def __init__(self, num_places: int, max_policy_lag: int, patience: Patience | None = None) -> None:
        super().__init__(num_places, patience or Patience())
        self.max_policy_lag = max_policy_lag
        self._learning = False
        """A batch is out, and its weights are not."""
        self._closed = True

    def open(self, now: float, *, first: bool = False) -> None:
        super().open(now, first=first)
        self._learning = self._closed = False

    def formed(self) -> None:
        super().formed()
        self._learning = True

    def published(self) -> None:
        self._learning = False

    def close(self) -> None:
        super().close()
        self._learning, self._closed = False, True

    def slot_for(self, actor_id: int, ledger: Ledger, absent: Collection[int]) -> int | None:  # noqa: ARG002
        """The lowest free slot, if its rows would be young enough."""
        if self._closed:
            return None
        states = [ledger.state(slot) for slot in range(len(ledger))]
        ahead = states.count(SlotState.LEASED) + states.count(SlotState.READY)
        lag = ahead // self._batch_size(absent) + self._learning
        if lag > self.max_policy_lag or SlotState.FREE not in states:
            return None
        return states.index(SlotState.FREE)

    def seeds(self, slots: Sequence[int]) -> tuple[int, ...]:  # noqa: ARG002
        """Nobody knows which slot an actor takes next."""
        return ()

    def decide(self, ledger: Ledger, absent: Collection[int], now: float) -> FormBatch | None:
        """The oldest committed slots; with fewer than asked for only once the deadline has passed."""
        if not self._waiting:
            return None
        ready, size = ledger.ready(), self._batch_size(absent)
        if len(ready) >= size:
            return FormBatch(tuple(ready[:size]))
        if ready and now >= self._deadline and len(ready) >= self.needed:
            at_work = {lease.holder.actor_id for lease in ledger.leases()}
            unclaimed = tuple(place for place in self.missing(ledger, absent) if place not in at_work)
            return FormBatch(tuple(ready), unclaimed=unclaimed)
        return None

    def missing(self, ledger: Ledger, absent: Collection[int]) -> list[int]:
        """Places that have nothing in the batch so far."""
        if not self._waiting:
            return []
        there = {filled.holder.actor_id for slot in ledger.ready() if (filled := ledger.filled(slot)) is not None}
        return [place for place in range(self.num_places) if place not in there and place not in absent]

    def to_preempt(self, ledger: Ledger, absent: Collection[int], version: int) -> list[int]:
        if not self._share_reached(len(ledger.ready()), self._batch_size(absent)):
            return []
        return [lease.slot for lease in ledger.leases() if version + 1 - lease.version > self.max_policy_lag]

    def _batch_size(self, absent: Collection[int]) -> int:
        return max(self.least, self.num_places - len(absent))


def schedule(num_places: int, max_policy_lag: int, patience: Patience | None = None) -> Lockstep | Streaming:
    """One knob chooses. patience: the rules for slow actors; by default none."""
    if max_policy_lag == 0:
        return Lockstep(num_places, patience)
    return Streaming(num_places, max_policy_lag, patience)


def scheduler_for(config: TrainConfig, num_places: int) -> Lockstep | Streaming:
    """What the settings ask for."""
    return schedule(num_places, config.max_policy_lag, Patience.of(config))
