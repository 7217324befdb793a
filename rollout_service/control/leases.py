"""Leases as grants and commits: the ledger's rules in the words of the protocol. Pure.

Writer: the coordinator. Adds to the ledger what a grant says beyond slot and epoch: which grant to repeat, and where
the recurrent state of row 0 comes from:

    fresh    this incarnation has not finished a lease yet, or the run's strategy is `zero`
    seeded   the learner seeded this slot from the very rows that this incarnation committed last
    carry    everything else: the actor's live state goes on, but nobody has written it into the slot

In a run that goes on from a checkpoint, `fresh` of a new incarnation also starts its envs and random streams anew,
from the update at hand: left alone, they would be those with which the first run began. Behind a barrier everybody's
start is `fresh` in that sense.

What must never happen: `seeded` where the live state has moved on. A seed serves one grant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollout_service.control.barriers import Barriers
from rollout_service.control.ledger import Filled, Identity, Ledger, SlotState, Verdict
from rollout_service.control.messages import Commit, Grant, Preempt, StartFrom
from rollout_service.control.scheduling import FormBatch
from rollout_service.runspec import StateStrategy


@dataclass(frozen=True)
class TakenBatch:
    """What the learner gets."""

    due: FormBatch
    filled: tuple[Filled | None, ...]
    """What is in each of its slots; None where nobody filled it."""
    late: tuple[int, ...]
    """Places whose lease runs on."""

    def rollouts(self) -> list[tuple[int, Filled]]:
        """The slots that somebody filled, in order."""
        return [(slot, entry) for slot, entry in zip(self.due.slots, self.filled, strict=True) if entry is not None]


class Leases:
    """All slots of a run, their leases and their seeds."""

    def __init__(
        self, num_slots: int, strategy: StateStrategy, max_policy_lag: int = 0, barriers: Barriers | None = None
    ) -> None:
        self.ledger = Ledger(num_slots)
        self.barriers = barriers or Barriers(every=0)
        self.max_policy_lag = max_policy_lag
        self.resumed = False
        """The run began with updates behind it."""
        self.first_version = 0
        """Of the learner at work. What older weights collected belongs to updates that were rolled back."""
        self._strategy = strategy
        self._grants: dict[Identity, Grant] = {}
        """The grant of each lease that holds, for whoever missed it."""
        self._preempts: dict[Identity, Preempt] = {}
        """What was asked of the holder of each lease that holds, for whoever missed it."""
        self._acted: set[Identity] = set()
        """Actors that have finished a lease: they have a live recurrent state."""
        self._torn: set[int] = set()
        """Places whose envs were lost with their actor, until a lease there begins anew."""
        self._seeded_slots: frozenset[int] = frozenset()
        self._seeded_from: dict[int, int] = {}
        """actor_id -> incarnation whose rows the learner read last; used up by the next grant."""
        self._filled_at: dict[int, float] = {}

    def is_torn(self, update: int) -> bool:
        """Whether behind this update somebody would have to go on with episodes that are lost."""
        return self.barriers.every > 0 and bool(self._torn) and not self.barriers.behind(update)

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

    def late(self) -> set[int]:
        """Places whose actor is late."""
        return {lease.holder.actor_id for lease in self.ledger.quarantined()}

    def quarantined(self, slots: Iterable[int]) -> tuple[int, ...]:
        """Those of `slots` that a late actor may still write."""
        return tuple(slot for slot in slots if self.ledger.state(slot) is SlotState.QUARANTINED)

    def can_take(self, slot: int, holder: Identity) -> bool:
        return self.ledger.state(slot) is SlotState.FREE and self.ledger.lease_of(holder) is None

    def grant(self, slot: int, holder: Identity, *, version: int, update: int) -> Grant:
        """FREE -> LEASED."""
        lease = self.ledger.grant(slot, holder, version)
        anew = self.barriers.behind(update - 1)
        start = self._start(slot, holder)
        grant = Grant(
            slot=slot,
            epoch=lease.epoch,
            version=version,
            start=StartFrom.FRESH if anew else start,
            update=update,
            reset_envs=anew or (self.resumed and holder not in self._acted),
            barrier_after=self.barriers.cut(update),
        )
        self._grants[holder] = grant
        if anew:
            self._torn.discard(holder.actor_id)
        return grant

    def commit(self, holder: Identity, commit: Commit, *, newest: int, now: float) -> tuple[Verdict, bool]:
        """What became of it, and the answer: accepted, now or when it came first?

        Rows older than the newest weights by more than max_policy_lag are not taken, nor another learner's.
        """
        verdict = self.ledger.commit(
            commit.slot,
            commit.epoch,
            holder,
            valid_steps=commit.valid_steps,
            version=commit.version,
            versions=range(max(self.first_version, newest - self.max_policy_lag), newest + 1),
        )
        if verdict is Verdict.REPEATED:
            return verdict, self.ledger.accepted_before(commit.slot, commit.epoch)
        if verdict is not Verdict.UNKNOWN and self._is_standing(holder, commit.slot, commit.epoch):
            self._ended(holder)
            self._acted.add(holder)
        if verdict is Verdict.ACCEPTED:
            self._filled_at[commit.slot] = now
        return verdict, verdict is Verdict.ACCEPTED

    def give_back(self, holder: Identity, slot: int, epoch: int) -> bool:
        """The holder will not fill it and writes no more. False if that lease does not hold."""
        if not self.ledger.abort(slot, epoch, holder):
            return False
        self._ended(holder)
        self._torn.add(holder.actor_id)
        return True

    def holder_gone(self, holder: Identity, why: str) -> None:
        """Proof that this actor writes no more."""
        self.ledger.holder_gone(holder, why)
        self._ended(holder)
        self._acted.discard(holder)
        self._torn.add(holder.actor_id)

    def take(self, due: FormBatch) -> TakenBatch:
        """READY -> READING for all its slots; late leases are quarantined."""
        late = tuple(lease.holder.actor_id for slot in due.late if (lease := self.ledger.lease(slot)) is not None)
        for slot in due.late:
            self.ledger.quarantine(slot, "the batch went without it")
        batch = TakenBatch(due, tuple([self.ledger.filled(slot) for slot in due.slots]), late)
        rollouts = batch.rollouts()
        self.ledger.read(slot for slot, _ in rollouts)
        holders = [entry.holder for _, entry in rollouts if entry.valid_steps > 0]
        self._seeded_from = {holder.actor_id: holder.incarnation for holder in holders}
        return batch

    def waited_for(self, batch: TakenBatch, now: float) -> tuple[int, float]:
        """The place that committed last, or one that was not waited for any longer; seconds since the first commit."""
        times = {entry.holder.actor_id: self._filled_at[slot] for slot, entry in batch.rollouts()}
        slowest, until = max(times, key=times.__getitem__), max(times.values())
        if given_up := batch.late or batch.due.unclaimed:
            slowest, until = given_up[0], now
        return slowest, until - min(times.values())

    def release(self, slots: Iterable[int]) -> None:
        """READING -> FREE, for those that are still READING."""
        self.ledger.release(slot for slot in slots if self.ledger.state(slot) is SlotState.READING)

    def seeded(self, slots: Iterable[int]) -> None:
        """The learner wrote row 0 of these."""
        self._seeded_slots = frozenset(slots)

    def drop_outdated(self, newest: int) -> list[tuple[int, Filled]]:
        """READY -> FREE where no batch may take the rows any more. Returns what they were."""
        oldest = newest - self.max_policy_lag
        ready = [(slot, entry) for slot in self.ledger.ready() if (entry := self.ledger.filled(slot)) is not None]
        outdated = [(slot, entry) for slot, entry in ready if entry.version < oldest]
        for slot, _ in outdated:
            self.ledger.drop(slot, "older than max_policy_lag")
        return outdated

    def filled(self) -> list[int]:
        """Slots that are READY or READING."""
        return [slot for slot in range(len(self.ledger)) if self.ledger.filled(slot) is not None]

    def drop_ready(self, why: str) -> list[int]:
        """READY -> FREE. Returns the slots."""
        slots = self.ledger.ready()
        for slot in slots:
            self.ledger.drop(slot, why)
        return slots

    def drop_filled(self, why: str) -> list[int]:
        """Everything committed but not released is lost, and with it the seeds. Returns the slots."""
        self._seeded_slots, self._seeded_from = frozenset(), {}
        slots = self.filled()
        self.ledger.drop_filled(why)
        return slots

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
