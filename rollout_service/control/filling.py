"""The batch that is being filled: who is granted, who is asked to hurry, for whom it waits, and when it goes. Pure.

Writer: the coordinator. Brings together the schedule (when), the leases (which slot, from which state) and the roster
(who is there). What must never happen: a wait without an end that nobody is told of. Left to others: messages of the
learner, weights, and when a batch may form (coordinator).
"""

from __future__ import annotations

import math
from collections import Counter

from rollout_service.control import events
from rollout_service.control.effects import Effect, Notify, Send
from rollout_service.control.leases import Leases, TakenBatch
from rollout_service.control.ledger import Identity, SlotState
from rollout_service.control.messages import Heartbeat, Role
from rollout_service.control.roster import PlaceState, Roster, in_words, rounded_since
from rollout_service.control.scheduling import FormBatch, Scheduler
from rollout_service.control.waits import WORTH_A_WORD_S, Vigil, WaitShares


class Filling:
    """The batch that the learner waits for, if it waits, and the slots that are filled meanwhile."""

    def __init__(self, scheduler: Scheduler, leases: Leases, roster: Roster, counters: Counter[str]) -> None:
        self.scheduler = scheduler
        self.waits = WaitShares()
        self._leases = leases
        self._roster = roster
        self._counters = counters
        self._vigil = Vigil(0.0)
        self._started_at: float | None = None
        self._turns: dict[int, int] = {}
        """actor_id -> number of its last grant: who has waited longest comes first."""
        self._formed_one = False
        """Whatever was needed to begin is there."""

    @property
    def open_now(self) -> bool:
        return self.scheduler.waiting

    def open(self, now: float) -> None:
        first = not self._formed_one
        self.scheduler.open(now, first=first)
        deadline = self.scheduler.next_deadline()
        self._vigil = Vigil(now, now + WORTH_A_WORD_S if first and deadline == math.inf else deadline)

    def published(self) -> None:
        self.scheduler.published()

    def close(self) -> None:
        self.scheduler.close()

    def committed(self, now: float) -> None:
        """A slot was filled: from now on somebody may have to wait for others."""
        self._vigil.others_wait(now)

    def due(self, now: float) -> FormBatch | None:
        return self.scheduler.decide(self._leases.ledger, self._absent(), now)

    def take(self, due: FormBatch) -> TakenBatch:
        """The batch goes; places that nobody has taken are not waited for until somebody has."""
        taken = self._leases.take(due)
        for actor_id in due.unclaimed:
            self._roster.places[actor_id].awaited = False
        self._formed_one = True
        self.scheduler.formed()
        return taken

    def waited(self, taken: TakenBatch, now: float) -> tuple[int, float]:
        """Counts what that batch had to wait for: the place, and the seconds."""
        self._counters["late_actors"] += len(taken.due.late)
        waited_for, wait_s = self._leases.waited_for(taken, now)
        wait_s = min(wait_s, now - self._vigil.opened_at)
        self.waits.add(waited_for, wait_s, now)
        return waited_for, wait_s

    def seed_into(self, slots: tuple[int, ...]) -> tuple[int | None, ...]:
        """Per slot of a batch where its actor's next rollout will start, if that is known and may be written."""
        late = self._leases.quarantined(targets := self.scheduler.seeds(slots))
        return tuple(None if slot in late else slot for slot in targets)

    def grants(self, version: int, update: int) -> list[Effect]:
        """For everyone who has none and for whom there is a slot."""
        effects: list[Effect] = []
        absent = self._absent()
        for place in sorted(self._roster.places, key=lambda place: self._turns.get(place.actor_id, 0)):
            if place.state is not PlaceState.JOINED or place.peer is None:
                continue
            slot = self.scheduler.slot_for(place.actor_id, self._leases.ledger, absent)
            if slot is not None and self._leases.can_take(slot, place.identity):
                grant = self._leases.grant(slot, place.identity, version=version, update=update)
                self._turns[place.actor_id] = max(self._turns.values(), default=0) + 1
                effects.append(Send(place.peer, grant))
        return effects

    def preempts(self, version: int) -> list[Effect]:
        """Once enough have committed, the others are asked to; once per lease."""
        effects: list[Effect] = []
        for slot in self.scheduler.to_preempt(self._leases.ledger, self._absent(), version):
            if (asked := self._leases.preempt(slot, self.scheduler.preempt_min_steps)) is not None:
                holder, preempt = asked
                self._counters["preempted_leases"] += 1
                if (peer := self._roster.places[holder.actor_id].pulse_peer) is not None:
                    effects.append(Send(peer, preempt))
        return effects

    def preempt_again(self, peer: bytes, beat: Heartbeat) -> list[Effect]:
        """The request that holds, for an actor that may have missed it."""
        if beat.role is not Role.ACTOR or beat.actor_id is None:
            return []
        preempt = self._leases.preemption(Identity(beat.actor_id, beat.incarnation))
        return [] if preempt is None else [Send(peer, preempt)]

    # --- waiting -----------------------------------------------------------------------------------------------------

    def deadline(self) -> float:
        """The next moment at which time alone changes something here."""
        if not self.open_now:
            return self._start_deadline()
        return min(self._start_deadline(), self.scheduler.next_deadline(), self._vigil.due_at)

    def nobody_came(self, learner_is_there: bool, now: float) -> str | None:
        """Why the run cannot begin: who has not even said HELLO by the first deadline."""
        self._started_at = now if self._started_at is None else self._started_at
        if now < self._start_deadline():
            return None
        within = f"within {self.scheduler.first_deadline_s:g} s of the start (first_batch_deadline)"
        if not learner_is_there:
            return f"no learner came {within}"
        if not any(place.occupied for place in self._roster.places):
            return f"no actor came {within}; {sum(place.awaited for place in self._roster.places)} were waited for"
        return None

    def overdue(self, update: int, now: float) -> list[Effect]:
        """A word about a batch that is waited for too long; again each time the wait has doubled."""
        if not self.open_now or not self._vigil.due(now):
            return []
        ready = self._leases.ledger.count()[SlotState.READY]
        waited = now - self._vigil.opened_at
        missing = self.scheduler.missing(self._leases.ledger, self._absent())
        needed = min(self.scheduler.needed, ready + len(missing)) if missing else self.scheduler.least
        return [Notify(events.BatchOverdue(update, waited, ready, needed, tuple(self.waited_for())))]

    def waited_for(self) -> list[str]:
        """For whom the batch waits, in words; all that have not committed if nobody is left who could."""
        ledger, scheduler = self._leases.ledger, self.scheduler
        missing = scheduler.missing(ledger, self._absent()) or scheduler.missing(ledger, ())
        places = [self._roster.places[actor_id] for actor_id in missing]
        named = [place for place in places if place.awaited or place.occupied or not self._roster.elastic]
        anybody = [f"anybody who takes one of {empty} empty places"] if (empty := len(places) - len(named)) else []
        return [*map(in_words, named), *anybody]

    def waiting_seconds(self, now: float) -> float | None:
        """Since the learner waits."""
        return rounded_since(self._vigil.opened_at if self.open_now else None, now)

    def _start_deadline(self) -> float:
        if self._formed_one or self._started_at is None:
            return math.inf
        return self._started_at + self.scheduler.first_deadline_s

    def _absent(self) -> set[int]:
        """Places from which nothing can come now: nobody is there, or its actor has yet to let go of an older slot."""
        return self._roster.absent() | self._leases.late()
