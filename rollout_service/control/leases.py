"""Leases as grants and commits: the ledger's rules in the words of the protocol. Pure.

Writer: the coordinator. Adds to the ledger what a grant says beyond slot and epoch: which grant to repeat, and where
the recurrent state of row 0 comes from:

    fresh    this incarnation has not finished a lease yet, or the run's strategy is `zero`
    seeded   the learner seeded this slot from the very rows that this incarnation committed last
    carry    everything else: the actor's live state goes on, but nobody has written it into the slot

In a run that goes on from a checkpoint, `fresh` of a new incarnation also starts its envs and random streams anew,
from the update at hand: left alone, they would be those with which the first run began.

What must never happen: `seeded` where the live state has moved on. A seed serves one grant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout_service.control.ledger import Identity, Ledger, SlotState, Verdict
from rollout_service.control.messages import Commit, Grant, Preempt, StartFrom
from rollout_service.control.scheduling import FormBatch
from rollout_service.runspec import StateStrategy


@dataclass(frozen=True)
class TakenBank:
    """What the learner gets, per slot of the bank; 0 for a slot nobody filled."""

    valid_steps: tuple[int, ...]
    versions: tuple[int, ...]
    waited_for: int
    """The place that committed last, or the one that was not waited for any longer."""
    wait_s: float
    """From the first commit to the last, or to the deadline."""


class Leases:
    """All slots of a run, their leases and their seeds."""

    def __init__(self, num_slots: int, strategy: StateStrategy) -> None:
        self.ledger = Ledger(num_slots)
        self.resumed = False
        """The run began with updates behind it."""
        self._strategy = strategy
        self._grants: dict[Identity, Grant] = {}
        """The grant of each lease that holds, for whoever missed it."""
        self._preempts: dict[Identity, Preempt] = {}
        """What was asked of the holder of each lease that holds, for whoever missed it."""
        self._acted: set[Identity] = set()
        """Actors that have finished a lease: they have a live recurrent state."""
        self._seeded_slots: frozenset[int] = frozenset()
        self._seeded_from: dict[int, int] = {}
        """actor_id -> incarnation whose rows the learner read last; used up by the next grant."""
        self._filled_at: dict[int, float] = {}

    def standing(self, holder: Identity) -> Grant | None:
        """The grant that holds."""
        return self._grants.get(holder)

    def preempt(self, slot: int, min_steps: int) -> tuple[Identity, Preempt] | None:
        """What to ask of the holder of this leased slot; None if it was asked before."""
        lease = self.ledger.lease(slot)
        if lease is None or lease.holder in self._preempts:
            return None
        self._preempts[lease.holder] = Preempt(slot=slot, epoch=lease.epoch, min_steps=min_steps)
        return lease.holder, self._preempts[lease.holder]

    def preemption(self, holder: Identity) -> Preempt | None:
        """What was asked under the lease that holds."""
        return self._preempts.get(holder)

    def is_late(self, holder: Identity) -> bool:
        """The batch went without its slot, and it may still write there: it can be granted no other."""
        lease = self.ledger.lease_of(holder)
        return lease is not None and not self.ledger.holds(lease)

    def quarantined(self, slots: Iterable[int]) -> tuple[int, ...]:
        """Those of `slots` that a late actor may still write."""
        return tuple(slot for slot in slots if self.ledger.state(slot) is SlotState.QUARANTINED)

    def can_take(self, slot: int, holder: Identity) -> bool:
        return self.ledger.state(slot) is SlotState.FREE and self.ledger.lease_of(holder) is None

    def grant(self, slot: int, holder: Identity, *, version: int, update: int) -> Grant:
        """FREE -> LEASED."""
        lease = self.ledger.grant(slot, holder, version)
        grant = Grant(
            slot=slot,
            epoch=lease.epoch,
            version=version,
            start=self._start(slot, holder),
            update=update,
            reset_envs=self.resumed and holder not in self._acted,
        )
        self._grants[holder] = grant
        return grant

    def commit(self, holder: Identity, commit: Commit, *, newest: int, now: float) -> tuple[Verdict, bool]:
        """What became of it, and the answer: accepted, now or when it came first? Policy lag is 0: `newest` only."""
        verdict = self.ledger.commit(
            commit.slot,
            commit.epoch,
            holder,
            valid_steps=commit.valid_steps,
            version=commit.version,
            versions=range(newest, newest + 1),
        )
        if self._is_standing(holder, commit.slot, commit.epoch) and verdict in (Verdict.ACCEPTED, Verdict.STALE):
            self._ended(holder)
            self._acted.add(holder)
        if verdict is Verdict.ACCEPTED:
            self._filled_at[commit.slot] = now
        if verdict is Verdict.REPEATED:
            return verdict, self.ledger.accepted_before(commit.slot, commit.epoch)
        return verdict, verdict is Verdict.ACCEPTED

    def give_back(self, holder: Identity, slot: int, epoch: int) -> bool:
        """The holder will not fill it and writes no more. False if that lease does not hold."""
        if not self.ledger.abort(slot, epoch, holder):
            return False
        self._ended(holder)
        return True

    def holder_gone(self, holder: Identity, why: str) -> None:
        """Proof that this actor writes no more."""
        self.ledger.holder_gone(holder, why)
        self._ended(holder)
        self._acted.discard(holder)

    def take(self, due: FormBatch, bank: Sequence[int], now: float) -> TakenBank:
        """READY -> READING for the whole bank; late leases are quarantined."""
        for slot in due.late:
            self.ledger.quarantine(slot, "the batch went without it")
        filled = [self.ledger.filled(slot) for slot in bank]
        times = {slot: self._filled_at[slot] for slot, entry in zip(bank, filled, strict=True) if entry is not None}
        slowest, until = max(times, key=times.__getitem__), max(times.values())
        if given_up := due.late or due.unclaimed:
            slowest, until = given_up[0], now
        self.ledger.read(times)
        holders = [entry.holder for entry in filled if entry is not None and entry.valid_steps > 0]
        self._seeded_from = {holder.actor_id: holder.incarnation for holder in holders}
        return TakenBank(
            valid_steps=tuple(0 if entry is None else entry.valid_steps for entry in filled),
            versions=tuple(0 if entry is None else entry.version for entry in filled),
            waited_for=bank.index(slowest),
            wait_s=until - min(times.values()),
        )

    def release(self, bank: Iterable[int], seeded: Iterable[int]) -> None:
        """READING -> FREE; `seeded` are the slots of the next bank whose row 0 the learner wrote."""
        self.ledger.release(slot for slot in bank if self.ledger.state(slot) is SlotState.READING)
        self._seeded_slots = frozenset(seeded)

    def drop_filled(self, why: str) -> int:
        """Everything committed but not released is lost, and with it the seeds. Returns how many rollouts."""
        self._seeded_slots, self._seeded_from = frozenset(), {}
        return len(self.ledger.drop_filled(why))

    def _ended(self, holder: Identity) -> None:
        self._grants.pop(holder, None)
        self._preempts.pop(holder, None)

    def _is_standing(self, holder: Identity, slot: int, epoch: int) -> bool:
        grant = self._grants.get(holder)
        return grant is not None and (grant.slot, grant.epoch) == (slot, epoch)

    def _start(self, slot: int, holder: Identity) -> StartFrom:
        seeded_from = self._seeded_from.pop(holder.actor_id, None)
        if self._strategy is StateStrategy.ZERO or holder not in self._acted:
            return StartFrom.FRESH
        if slot in self._seeded_slots and seeded_from == holder.incarnation:
            return StartFrom.SEEDED
        return StartFrom.CARRY
