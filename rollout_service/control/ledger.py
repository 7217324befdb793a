"""Who may touch which slot: the only authority over slot states, epochs and commits. Pure: no IO, no clock.

    FREE ----------> LEASED ------> READY ------> READING ------> FREE
      grant,           | commit of    | batch       release, or
      epoch + 1        | that epoch   | formed      learner lost
                       |              +--> FREE     another version, or learner lost (counted by the caller)
                       +--> FREE                    ABORT of that same lease
                       +--> QUARANTINED --> FREE    lost or late; freed by proof of death, or by that same
                                                    lease's late COMMIT or ABORT

Writer: the coordinator. The epoch is a fencing token: it grows by one with every grant of a slot, and a commit counts
only with the epoch of the lease that holds. A commit sent again gets the answer it got first.
What must never happen: two leases on one slot, or rows of one lease trained twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final, NamedTuple

from rollout_service.errors import ProtocolError

STORY_LENGTH: Final = 12
"""Changes of a slot that are kept to explain an illegal one."""
ANSWERS_KEPT: Final = 16
"""Answered epochs per slot: far more than messages of one actor can be in flight."""


class SlotState(StrEnum):
    FREE = "free"
    LEASED = "leased"
    READY = "ready"
    READING = "reading"
    QUARANTINED = "quarantined"


class Verdict(Enum):
    """What became of a commit."""

    ACCEPTED = "accepted"
    STALE = "stale"
    """Too late or too old: not trained on. The caller counts it."""
    REPEATED = "repeated"
    """Seen before; `accepted_before` has the answer it got then."""
    UNKNOWN = "unknown"
    """No such lease was ever granted to this actor."""


class Identity(NamedTuple):
    """Who an actor is: its place, and which process in that place."""

    actor_id: int
    incarnation: int


@dataclass(frozen=True)
class Lease:
    """The right to write one slot, until the commit with this epoch."""

    slot: int
    epoch: int
    holder: Identity
    version: int


@dataclass(frozen=True)
class Filled:
    """What a READY or READING slot holds."""

    holder: Identity
    valid_steps: int
    version: int
    order: int = 0
    """Grows with every accepted commit."""


LEGAL: Final = frozenset(
    {
        (SlotState.FREE, SlotState.LEASED),
        (SlotState.LEASED, SlotState.READY),
        (SlotState.LEASED, SlotState.QUARANTINED),
        (SlotState.LEASED, SlotState.FREE),  # aborted by its own actor, which writes no more
        (SlotState.READY, SlotState.READING),
        (SlotState.READY, SlotState.FREE),
        (SlotState.READING, SlotState.FREE),
        (SlotState.QUARANTINED, SlotState.FREE),
    }
)


@dataclass
class _Slot:
    number: int
    state: SlotState = SlotState.FREE
    epoch: int = 0
    lease: Lease | None = None
    """Set while LEASED or QUARANTINED."""
    filled: Filled | None = None
    """Set while READY or READING."""
    answers: dict[int, tuple[Identity, bool]] = field(default_factory=dict)
    """epoch -> whose commit it was, and whether it was accepted."""
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))


class Ledger:
    """States of all slots. Every change goes through `_move`."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot(number) for number in range(num_slots)]
        self._leases: dict[Identity, Lease] = {}
        self._accepted = 0

    def __len__(self) -> int:
        return len(self._slots)

    def state(self, slot: int) -> SlotState:
        return self._slots[slot].state

    def epoch(self, slot: int) -> int:
        return self._slots[slot].epoch

    def filled(self, slot: int) -> Filled | None:
        return self._slots[slot].filled

    def lease(self, slot: int) -> Lease | None:
        """The lease of a slot that is LEASED or QUARANTINED."""
        return self._slots[slot].lease

    def ready(self) -> list[int]:
        """READY slots, the oldest commit first."""
        found = [
            (slot.filled.order, slot.number) for slot in self._slots if slot.state is SlotState.READY and slot.filled
        ]
        return [number for _, number in sorted(found)]

    def leases(self) -> list[Lease]:
        """Leases that are good: their slots are LEASED."""
        return [slot.lease for slot in self._slots if slot.state is SlotState.LEASED and slot.lease is not None]

    def quarantined(self) -> list[Lease]:
        """Leases whose holder may still write, and whose rows nobody will take: their slots are QUARANTINED."""
        return [slot.lease for slot in self._slots if slot.state is SlotState.QUARANTINED and slot.lease is not None]

    def lease_of(self, holder: Identity) -> Lease | None:
        """The lease this actor may still be writing under: LEASED or QUARANTINED."""
        return self._leases.get(holder)

    def holds(self, lease: Lease) -> bool:
        """Is the lease good, not quarantined?"""
        slot = self._slots[lease.slot]
        return slot.lease == lease and slot.state is SlotState.LEASED

    def count(self) -> dict[SlotState, int]:
        states = [slot.state for slot in self._slots]
        return {state: states.count(state) for state in SlotState}

    def grant(self, slot: int, holder: Identity, version: int) -> Lease:
        """FREE -> LEASED under the next epoch. One lease per actor."""
        if (held := self._leases.get(holder)) is not None:
            raise ProtocolError(f"{holder} already holds slot {held.slot} (epoch {held.epoch}); slot {slot} is another")
        entry = self._slots[slot]
        self._move(entry, SlotState.LEASED, f"granted to actor {holder.actor_id}.{holder.incarnation}")
        entry.epoch += 1
        entry.lease = self._leases[holder] = Lease(slot, entry.epoch, holder, version)
        return entry.lease

    def commit(
        self, slot: int, epoch: int, holder: Identity, *, valid_steps: int, version: int, versions: range
    ) -> Verdict:
        """LEASED -> READY if this is the commit of the lease that holds and its version is one of `versions`.

        Idempotent: the same (slot, epoch) of the same actor never counts twice.
        """
        if not 0 <= slot < len(self._slots):
            return Verdict.UNKNOWN
        entry = self._slots[slot]
        if epoch in entry.answers:
            return Verdict.REPEATED if entry.answers[epoch][0] == holder else Verdict.UNKNOWN
        lease = entry.lease
        if not 0 < epoch <= entry.epoch or (lease is not None and lease.epoch == epoch and lease.holder != holder):
            return Verdict.UNKNOWN
        if lease is None or lease.epoch != epoch:
            verdict = Verdict.STALE  # the lease ended without it
        elif entry.state is SlotState.QUARANTINED:
            self._move(entry, SlotState.FREE, "late commit")
            verdict = Verdict.STALE
        else:
            self._move(entry, SlotState.READY, f"commit of epoch {epoch}, {valid_steps} steps")
            self._accepted += 1
            entry.filled = Filled(holder, valid_steps, version, self._accepted)
            verdict = Verdict.ACCEPTED
            if version not in versions:
                self._move(entry, SlotState.FREE, f"version {version} is not in {versions}")
                verdict = Verdict.STALE
        self._remember(entry, epoch, holder, verdict is Verdict.ACCEPTED)
        return verdict

    def accepted_before(self, slot: int, epoch: int) -> bool:
        """The answer that the commit of this epoch got."""
        return self._slots[slot].answers[epoch][1]

    def abort(self, slot: int, epoch: int, holder: Identity) -> bool:
        """The lease's own actor gives it back and writes no more. False if it does not hold."""
        lease = self._leases.get(holder)
        if lease is None or (lease.slot, lease.epoch) != (slot, epoch):
            return False
        entry = self._slots[slot]
        self._move(entry, SlotState.FREE, "aborted")
        self._remember(entry, epoch, holder, False)
        return True

    def quarantine(self, slot: int, why: str) -> None:
        """LEASED -> QUARANTINED: nobody may use the slot while a late actor may still write it."""
        self._move(self._slots[slot], SlotState.QUARANTINED, why)

    def holder_gone(self, holder: Identity, why: str) -> Lease | None:
        """Proof that this actor writes no more: its slot becomes FREE. Returns the lease that ended, if any."""
        lease = self._leases.get(holder)
        if lease is not None:
            entry = self._slots[lease.slot]
            if entry.state is SlotState.LEASED:
                self._move(entry, SlotState.QUARANTINED, why)
            self._move(entry, SlotState.FREE, f"proof: {why}")
        return lease

    def read(self, slots: Iterable[int]) -> None:
        """READY -> READING: the learner's."""
        for slot in slots:
            self._move(self._slots[slot], SlotState.READING, "batch formed")

    def release(self, slots: Iterable[int]) -> None:
        """READING -> FREE: nothing will read them again."""
        for slot in slots:
            self._move(self._slots[slot], SlotState.FREE, "released")

    def drop_filled(self, why: str) -> list[Filled]:
        """READY and READING -> FREE. Returns what was lost."""
        lost = []
        for entry in self._slots:
            if entry.state in (SlotState.READY, SlotState.READING):
                lost.extend([entry.filled] if entry.filled is not None else [])
                self._move(entry, SlotState.FREE, f"dropped: {why}")
        return lost

    def drop(self, slot: int, why: str) -> None:
        """READY -> FREE: nobody will read it."""
        self._move(self._slots[slot], SlotState.FREE, f"dropped: {why}")

    def story(self, slot: int) -> str:
        return "; ".join(self._slots[slot].story)

    def check(self) -> None:
        """Raises ProtocolError unless states, leases and contents agree. For tests and debugging."""
        for entry in self._slots:
            leased = entry.state in (SlotState.LEASED, SlotState.QUARANTINED)
            filled = entry.state in (SlotState.READY, SlotState.READING)
            if leased != (entry.lease is not None) or filled != (entry.filled is not None):
                raise ProtocolError(f"slot {entry.number} contradicts itself: {entry}")
            if entry.lease is not None and self._leases.get(entry.lease.holder) != entry.lease:
                raise ProtocolError(f"slot {entry.number} has a lease its holder does not know: {entry}")
        if len(self._leases) != sum(entry.lease is not None for entry in self._slots):
            raise ProtocolError(f"leases without a slot: {self._leases}")

    def _remember(self, entry: _Slot, epoch: int, holder: Identity, accepted: bool) -> None:
        entry.answers[epoch] = (holder, accepted)
        while len(entry.answers) > ANSWERS_KEPT:
            del entry.answers[next(iter(entry.answers))]

    def _move(self, entry: _Slot, to: SlotState, why: str) -> None:
        """The only place where a slot changes state."""
        if (entry.state, to) not in LEGAL:
            raise ProtocolError(
                f"slot {entry.number} cannot go from {entry.state} to {to} ({why}); its story: "
                f"{self.story(entry.number) or 'none yet'}"
            )
        entry.story.append(f"{entry.state} -> {to} at epoch {entry.epoch} ({why})")
        entry.state = to
        if to not in (SlotState.LEASED, SlotState.QUARANTINED) and entry.lease is not None:
            del self._leases[entry.lease.holder]
            entry.lease = None
        if to not in (SlotState.READY, SlotState.READING):
            entry.filled = None
