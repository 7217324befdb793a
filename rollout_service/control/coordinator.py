"""The decisions of a run: who gets which slot, when a batch goes to the learner, when the run is over.

Pure: messages and `now` in, effects out; no IO, no clock, no threads. `server.Server` is the loop around it, the
supervisor speaks to it through `actor_lost`, `learner_lost`, `abandon_actor` and `stop`.

What must never happen: a slot with two writers, rows trained twice, rows older than the run's policy lag allows, or a
grant before weights exist. Everything a peer may repeat (it repeats whatever was not answered) is answered again and
changes nothing: messages may be lost in both directions.

Left to others: who is let in and who still moves (admission, roster), slot states (ledger), grants and where state
comes from (leases), when a bank is due (scheduling), for whom it waits (filling).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from rollout_service.control import events
from rollout_service.control.admission import Admission, LearnerSeat
from rollout_service.control.barriers import Barriers
from rollout_service.control.effects import Effect, Notify, Send
from rollout_service.control.filling import Filling
from rollout_service.control.handshake import join_mismatch
from rollout_service.control.leases import Leases
from rollout_service.control.ledger import Identity, Verdict
from rollout_service.control.messages import (
    Abort,
    Bye,
    Commit,
    Committed,
    Heartbeat,
    Hello,
    Join,
    Message,
    Publish,
    Ready,
    Refused,
    Release,
    Restore,
    Role,
    Status,
    StatusReport,
    Stop,
    Welcome,
    message_name,
)
from rollout_service.control.report import RunReport
from rollout_service.control.roster import SILENCE_S, Place, PlaceState, Rate, Roster
from rollout_service.control.scheduling import Scheduler, schedule
from rollout_service.control.updates import Updates
from rollout_service.runspec import RunSpec
from rollout_service.tally import LARGEST_COUNT, add_counts

__all__ = ["FINISHED", "Coordinator", "Effect", "Notify", "Send"]

FINISHED: Final = "finished"
"""Reason of a stop after the last update."""
REASON_LIMIT: Final = 8000


class Coordinator:
    """One run.

    updates_done and env_steps_done: where a resumed run stands; a learner's READY has the last word. elastic: batches
    go without actors that have gone. kept_places: those, from 0, whose actors the caller starts itself.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        run_id: str,
        config_json: str,
        rollout_segment: str,
        weights_segment: str,
        total_updates: int,
        step_timeout: float,
        heartbeat_interval: float = 1.0,
        silence_timeout: float = SILENCE_S,
        learner_timeout: float = math.inf,
        updates_done: int = 0,
        env_steps_done: int = 0,
        scheduler: Scheduler | None = None,
        elastic: bool = False,
        kept_places: int = 0,
    ) -> None:
        self.spec = spec
        self.total_updates = total_updates
        self.step_timeout = step_timeout
        self.learner_timeout = learner_timeout
        self.stopped: str | None = None
        """Why the run is over."""
        self.counters: Counter[str] = Counter()
        welcome = Welcome(
            run_id=run_id,
            run_spec=spec.to_json(),
            config=config_json,
            rollout_segment=rollout_segment,
            weights_segment=weights_segment,
            heartbeat_interval=heartbeat_interval,
            silence_timeout=silence_timeout,
        )
        self._run_id = run_id
        barriers = Barriers(spec.barrier_interval)
        self._leases = Leases(spec.num_slots, spec.state_strategy, spec.max_policy_lag, barriers)
        self._admission = Admission(
            spec,
            welcome,
            Roster(spec.num_places, spec.num_actors, elastic=elastic, kept=kept_places),
            self.counters,
            silence_timeout,
            has_lease=lambda identity: self._leases.ledger.lease_of(identity) is not None,
        )
        self._roster = self._admission.roster
        self._filling = Filling(
            scheduler or schedule(spec.num_places, spec.max_policy_lag), self._leases, self._roster, self.counters
        )
        self._updates = Updates(
            spec,
            self._leases,
            self._filling,
            self.counters,
            total=total_updates,
            done=updates_done,
            env_steps=env_steps_done,
        )
        self._stopped_at: float | None = None
        self._collected = Rate()
        self._report = RunReport(
            run_id, self._admission, self._leases, self._filling, self._updates, self._collected, self.counters
        )

    @property
    def version(self) -> int | None:
        """Newest weights; None before the first READY."""
        return self._updates.version

    @property
    def updates_done(self) -> int:
        return self._updates.done

    @property
    def env_steps(self) -> int:
        """Trained on so far."""
        return self._updates.env_steps

    # --- what the shell calls ----------------------------------------------------------------------------------------

    def handle(self, peer: bytes, message: Message, now: float) -> Iterable[Effect]:
        """What follows from one message of one peer, to be carried out in this order and to the end.

        BATCH comes first: the learner waits for it, and what else follows from a COMMIT is worked out behind it.
        """
        if type(message) is Commit and self.stopped is None:  # the learner may wait for it: no look at other types
            return self._commit(peer, message, now)
        match message:
            case Heartbeat():
                pong = self._admission.heartbeat(peer, message, self.stopped is not None, now)
                return [*pong, *self._filling.preempt_again(peer, message)]
            case Status():
                return [Send(peer, StatusReport(report=self.report(now)))]
            case Hello(role=Role.OBSERVER):
                return self._admission.hello(peer, message, self._updates.standing(), now)
            case Bye():
                return self._bye(peer, message, now)
            case Publish() | Release():
                return self._of_learner(peer, message, now)
            case Hello() | Join() | Ready() | Commit() | Abort() if self.stopped is not None:
                return [Send(peer, Stop(reason=self.stopped))]
            case Hello():
                return self._admission.hello(peer, message, self._updates.standing(), now)
            case Join():
                return self._join(peer, message, now)
            case Ready():
                return self._of_learner(peer, message, now)
            case Abort():
                return self._abort(peer, message, now)
            case _:
                return self.reject(peer, f"{message_name(type(message))} is not a message for the service")

    def tick(self, now: float) -> list[Effect]:
        """What follows from the passing of time."""
        if self.stopped is not None:
            return []
        if (why := self._filling.nobody_came(self._admission.learner is not None, now)) is not None:
            return self.stop(why, now)
        overdue = self._filling.overdue(self.updates_done + 1, now)
        return [*self._admission.stuck(now, self.step_timeout, self.learner_timeout), *self._proceed(now), *overdue]

    def next_deadline(self, now: float) -> float:
        """The next moment after `now` at which `tick` may have something to say; infinity if there is none."""
        moments = [*self._admission.deadlines(self.step_timeout, self.learner_timeout), self._filling.deadline()]
        return min((moment for moment in moments if moment > now), default=math.inf)

    def reject(self, peer: bytes, reason: str) -> list[Effect]:
        """A message that cannot be used is counted, and its sender told: it would send it for ever."""
        self.counters["rejected_messages"] += 1
        return [Send(peer, Refused(reason=reason[:REASON_LIMIT], run_id=self._run_id))]

    def actor_lost(self, actor_id: int, incarnation: int, reason: str, now: float) -> list[Effect]:
        """Proof that this actor process is gone: its slot is free, its place may be taken by a later incarnation."""
        place = self._roster.places[actor_id]
        if place.occupied and place.incarnation == incarnation:
            self.counters["lost_actors"] += 1
            self._free(place, reason)
        return self._proceed(now)

    def abandon_actor(self, actor_id: int, now: float) -> list[Effect]:
        """Nobody will take this vacant place again: from now on it counts as empty. No-op while somebody is there."""
        place = self._roster.places[actor_id]
        if not place.occupied:
            self.counters["abandoned_places"] += place.state is not PlaceState.ABANDONED
            self._roster.give_up(place)
        return self._proceed(now)

    def learner_lost(self, now: float, pid: int | None = None) -> list[Effect]:
        """Proof that the learner process is gone: what it read or would have read is dropped; no grants until READY.

        pid: of that process; another learner, which has come since, is left alone.
        """
        if self._admission.learner_gone(now, pid):
            self._updates.learner_lost(stopped=self.stopped is not None)
        return []

    def counted(self, name: str, total: int) -> list[Effect]:
        """What the process around this has counted, for whoever asks for the run's counters."""
        self.counters[name] = min(total, LARGEST_COUNT)
        return []

    def stop(self, reason: str, now: float) -> list[Effect]:
        """No more grants; everyone is told to leave. A second call changes nothing."""
        if self.stopped is not None:
            return []
        self.stopped, self._stopped_at = reason[:REASON_LIMIT], now
        self._updates.stop()
        told = [Send(peer, Stop(reason=self.stopped)) for peer in self.peers()]
        return [*told, Notify(events.RunFinished(reason))]

    def peers(self) -> list[bytes]:
        """Everyone who takes part."""
        return self._admission.peers()

    def report(self, now: float) -> dict[str, Any]:
        """The state of the run; JSON-able."""
        return self._report.at(now, stopped=self.stopped, stopped_at=self._stopped_at)

    # --- actors ------------------------------------------------------------------------------------------------------

    def _join(self, peer: bytes, join: Join, now: float) -> list[Effect]:
        place = self._roster.present(peer)
        if place is None:
            return self._stranger(peer, "JOIN")
        if place.state is PlaceState.JOINED:
            return self._grant_again(place)
        if (difference := join_mismatch(self.spec, join)) is not None:
            self._roster.vacate(place)
            return self._admission.refuse(peer, Role.ACTOR, place.pid, difference)
        place.state, place.awaited = PlaceState.JOINED, True
        return [Notify(events.ActorJoined(*place.identity, place.pid)), *self._proceed(now)]

    def _commit(self, peer: bytes, commit: Commit, now: float) -> Iterable[Effect]:
        identity = self._roster.once_was(peer)
        if identity is None:
            return self._stranger(peer, "COMMIT")
        if commit.valid_steps > self.spec.num_steps:
            return self.reject(peer, f"commit.valid_steps is {commit.valid_steps}, a slot has {self.spec.num_steps}")
        rows = commit.valid_steps * self.spec.envs_per_actor
        if commit.env_steps is not None and commit.env_steps > rows:
            return self.reject(peer, f"commit.env_steps is {commit.env_steps}, its valid_steps have {rows} rows")
        verdict, accepted = self._leases.commit(identity, commit, newest=self._updates.newest, now=now)
        if verdict is Verdict.UNKNOWN:
            return self.reject(
                peer, f"slot {commit.slot} epoch {commit.epoch} was never granted to actor {identity.actor_id}"
            )
        if verdict is Verdict.ACCEPTED:
            self._updates.accepted(commit)
        batch = self._hand_over(now)
        return itertools.chain(batch, self._answer(peer, identity, commit, verdict, accepted, now))

    def _answer(
        self, peer: bytes, identity: Identity, commit: Commit, verdict: Verdict, accepted: bool, now: float
    ) -> Iterator[Effect]:
        """All that follows from a commit but the batch that was due with it."""
        yield Send(peer, Committed(slot=commit.slot, epoch=commit.epoch, accepted=accepted))
        place = self._roster.present(peer)
        if verdict is not Verdict.REPEATED:
            add_counts(self.counters, commit.counters)
        if verdict is Verdict.STALE:
            yield from map(Notify, self._updates.refused(identity.actor_id, commit))
        if verdict is Verdict.ACCEPTED:
            yield self._accepted(identity, commit, place, now)
        if place is not None:
            yield from self._grant_again(place)
        yield from self._go_on(now)

    def _accepted(self, identity: Identity, commit: Commit, place: Place | None, now: float) -> Effect:
        rollout = self._updates.rollout(identity, commit)
        self._filling.committed(now)
        self._collected.add(now, rollout.env_steps)
        if place is not None:
            place.rate.add(now, rollout.env_steps)
            place.lag = self._updates.newest - commit.version
        return Notify(rollout)

    def _abort(self, peer: bytes, abort: Abort, now: float) -> list[Effect]:
        place = self._roster.present(peer)
        if place is None:
            return self._stranger(peer, "ABORT")
        if self._leases.give_back(place.identity, abort.slot, abort.epoch):
            self.counters["aborted_leases"] += 1
            return self._proceed(now)
        return self._grant_again(place)

    def _bye(self, peer: bytes, bye: Bye, now: float) -> list[Effect]:
        """A goodbye is a promise to write no more, and as good as proof."""
        match self._admission.seat_of(peer):
            case LearnerSeat(pid=pid):
                left = events.PeerLeft(Role.LEARNER, None, 0, pid, bye.reason, bye.traceback)
                return [Notify(left), *self.learner_lost(now)]
            case Place() as place:
                left = events.PeerLeft(Role.ACTOR, *place.identity, place.pid, bye.reason, bye.traceback)
                self._free(place, bye.reason or "left")
                return [Notify(left), *self._proceed(now)]
            case None:
                return []

    def _free(self, place: Place, reason: str) -> None:
        self._leases.holder_gone(place.identity, reason)
        self._roster.vacate(place)

    def _stranger(self, peer: bytes, what: str) -> list[Effect]:
        was = self._roster.once_was(peer)
        who = (
            "a peer that has not said HELLO" if was is None else f"actor {was.actor_id}, incarnation {was.incarnation}"
        )
        return self.reject(peer, f"{what} of {who}: it has no place in this run; say HELLO first")

    # --- grants and batches ------------------------------------------------------------------------------------------

    def _proceed(self, now: float) -> list[Effect]:
        """Forms the batch that is due, and grants what can be granted."""
        return [*self._hand_over(now), *self._go_on(now)]

    def _hand_over(self, now: float) -> list[Effect]:
        """The batch that is due; the learner waits for it."""
        learner = self._admission.learner
        if self.stopped is not None or learner is None:
            return []
        if learner.ready and self._updates.must_go_back:
            return self._restore(learner)
        due = self._filling.due(now)
        return [] if due is None else [Send(learner.peer, self._updates.form(due))]

    def _go_on(self, now: float) -> list[Effect]:
        """What there is to tell of that batch, and what actors are to do now: nothing without a learner."""
        if self.stopped is not None or self._admission.learner is None:
            return []
        grants = self._filling.grants(self._updates.newest, self.updates_done + 1)
        return [*map(Notify, self._updates.formed(now)), *grants, *self._filling.preempts(self._updates.newest)]

    def _grant_again(self, place: Place) -> list[Effect]:
        """The grant that holds, for a peer that may have missed it."""
        grant, peer = self._leases.standing(place.identity), place.peer
        return [] if grant is None or peer is None else [Send(peer, grant)]

    # --- learner -----------------------------------------------------------------------------------------------------

    def _restore(self, learner: LearnerSeat) -> list[Effect]:
        """The run goes back to the newest checkpoint."""
        self._updates.go_back()
        learner.ready, learner.told = False, Restore(version=self._updates.newest)
        return [Send(learner.peer, learner.told)]

    def _of_learner(self, peer: bytes, message: Ready | Publish | Release, now: float) -> list[Effect]:
        learner = self._admission.learner
        if learner is None or learner.peer != peer:
            what = message_name(type(message)).upper()
            return self.reject(peer, f"{what} of a peer that is not this run's learner; say HELLO first")
        match message:
            case Ready():
                return self._ready(learner, message, now)
            case Publish():
                return self._publish(learner, message, now)
            case Release():
                self._updates.release(message.update)
                return self._proceed(now)

    def _ready(self, learner: LearnerSeat, ready: Ready, now: float) -> list[Effect]:
        if learner.ready or (learner.told is not None and ready.version <= learner.told.version):
            return self._told_again(learner)
        if self.version is not None and ready.version <= self.version:
            return self.reject(
                learner.peer,
                f"ready.version {ready.version} is not above {self.version}, which actors may have; publish higher",
            )
        learner.ready, learner.told = True, None
        told = list(map(Notify, self._updates.ready(learner.pid, ready)))
        if not self._updates.another_fits(self.env_steps):
            return [*told, *self.stop(FINISHED, now)]
        self._filling.open(now)
        return [*told, *self._proceed(now)]

    def _publish(self, learner: LearnerSeat, publish: Publish, now: float) -> list[Effect]:
        peer, batch = learner.peer, self._updates.batch
        if publish.update <= self.updates_done:
            return self._told_again(learner) if self.stopped is None else [Send(peer, Stop(reason=self.stopped))]
        objection = self._updates.objection(publish)
        if batch is None or objection is not None:
            return self.reject(peer, objection or "no batch is out")
        told = [Notify(event) for event in self._updates.publish(batch, publish, now)]
        if self.stopped is not None:
            return [*told, Send(peer, Stop(reason=self.stopped))]
        if batch.last:
            return [*told, *self.stop(self._outcome(publish), now)]
        self._filling.open(now)
        return [*told, *self._proceed(now)]

    @staticmethod
    def _outcome(last: Publish) -> str:
        """A run whose last weights are in no checkpoint has not finished."""
        if last.checkpoint_failure is None:
            return FINISHED
        return f"all {last.update} updates were made, but the last is not saved: {last.checkpoint_failure}"

    def _told_again(self, learner: LearnerSeat) -> list[Effect]:
        """What the learner waits for, in case it has missed it."""
        told = learner.told or self._updates.batch
        return [] if told is None else [Send(learner.peer, told)]
