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

import math
from collections import Counter
from typing import Any, Final

from rollout_service.control import events
from rollout_service.control.account import Account
from rollout_service.control.admission import Admission, LearnerSeat
from rollout_service.control.effects import Effect, Notify, Send
from rollout_service.control.filling import Filling
from rollout_service.control.handshake import join_mismatch
from rollout_service.control.leases import Leases
from rollout_service.control.ledger import Identity, Verdict
from rollout_service.control.losses import Losses, LostBatch
from rollout_service.control.messages import (
    Abort,
    Batch,
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
    Role,
    Status,
    StatusReport,
    Stop,
    Welcome,
    message_name,
)
from rollout_service.control.roster import SILENCE_S, Place, PlaceState, Rate, place_report, rounded_since
from rollout_service.control.scheduling import FormBatch, Lockstep, Scheduler, Streaming
from rollout_service.runspec import RunSpec

__all__ = ["FINISHED", "Coordinator", "Effect", "Notify", "Send"]

FINISHED: Final = "finished"
"""Reason of a stop after the last update."""
REASON_LIMIT: Final = 8000


def _plain_scheduler(spec: RunSpec) -> Scheduler:
    """Without any rule for slow actors."""
    return Streaming(spec.num_actors, spec.max_policy_lag) if spec.max_policy_lag else Lockstep(spec.num_actors)


class Coordinator:
    """One run. updates_done and env_steps_done: where a resumed run stands; a learner's READY has the last word."""

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
    ) -> None:
        self.spec = spec
        self.total_updates = total_updates
        self.step_timeout = step_timeout
        self.learner_timeout = learner_timeout
        self.updates_done = updates_done
        self.env_steps = env_steps_done
        """Trained on so far."""
        self.version: int | None = None
        """Newest weights; None before the first READY."""
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
        self._leases = Leases(spec.num_slots, spec.state_strategy, spec.max_policy_lag)
        self._admission = Admission(
            spec,
            welcome,
            self.counters,
            silence_timeout,
            has_lease=lambda identity: self._leases.ledger.lease_of(identity) is not None,
        )
        self._roster = self._admission.roster
        self._scheduler = scheduler or _plain_scheduler(spec)
        self._filling = Filling(self._scheduler, self._leases, self._roster, self.counters)
        self._batch: Batch | None = None
        """The batch the learner works on."""
        self._released = False
        """Its slots are filled anew already."""
        self._losses = Losses(self.counters)
        self._account = Account(self.counters)
        self._env_steps: dict[int, int] = {}
        """Slot -> env steps of the newest commit that was accepted for it."""
        self._lags: Counter[int] = Counter()
        """Policy lag -> rollouts that went to the learner with it."""
        self._stopped_at: float | None = None
        self._rates = {"env_steps": Rate(), "updates": Rate()}

    # --- what the shell calls ----------------------------------------------------------------------------------------

    def handle(self, peer: bytes, message: Message, now: float) -> list[Effect]:
        """What follows from one message of one peer."""
        match message:
            case Heartbeat():
                pong = self._admission.heartbeat(peer, message, self.stopped is not None, now)
                return [*pong, *self._filling.preempt_again(peer, message)]
            case Status():
                return [Send(peer, StatusReport(report=self.report(now)))]
            case Hello(role=Role.OBSERVER):
                return self._admission.hello(peer, message, self._progress(), now)
            case Bye():
                return self._bye(peer, message, now)
            case Publish():
                return self._publish(peer, message, now)
            case Release():
                return self._release(peer, message, now)
            case Hello() | Join() | Ready() | Commit() | Abort() if self.stopped is not None:
                return [Send(peer, Stop(reason=self.stopped))]
            case Hello():
                return self._admission.hello(peer, message, self._progress(), now)
            case Join():
                return self._join(peer, message, now)
            case Ready():
                return self._ready(peer, message, now)
            case Commit():
                return self._commit(peer, message, now)
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
            self._roster.give_up(place)
        return self._proceed(now)

    def learner_lost(self, now: float, pid: int | None = None) -> list[Effect]:
        """Proof that the learner process is gone: what it read or would have read is dropped; no grants until READY.

        pid: of that process; another learner, which has come since, is left alone.
        """
        if not self._admission.learner_gone(now, pid):
            return []
        batch = self._batch
        if self.stopped is None:
            lost = None if batch is None else self._lost(batch)
            self._losses.learner_lost(lost)
            if lost is not None and self._released:
                self._losses.dropped(lost.rollouts, lost.env_steps)
        self._batch = None
        self._scheduler.close()
        self._drop_filled("the learner was lost")
        return []

    def stop(self, reason: str, now: float) -> list[Effect]:
        """No more grants; everyone is told to leave. A second call changes nothing."""
        if self.stopped is not None:
            return []
        self.stopped, self._stopped_at = reason[:REASON_LIMIT], now
        self._scheduler.close()
        told = [Send(peer, Stop(reason=self.stopped)) for peer in self.peers()]
        return [*told, Notify(events.RunFinished(reason))]

    def peers(self) -> list[bytes]:
        """Everyone who takes part."""
        return self._admission.peers()

    def report(self, now: float) -> dict[str, Any]:
        """The state of the run; JSON-able."""
        return {
            "run_id": self._run_id,
            "state": self._state(),
            "stop_reason": self.stopped,
            "stopped_seconds": rounded_since(self._stopped_at, now),
            "without_learner_seconds": rounded_since(self._admission.learner_gone_at, now),
            "version": self.version,
            "updates": self.updates_done,
            "total_updates": self.updates_done + self.spec.rollouts_that_fit(self.env_steps, self.total_updates),
            "env_steps": self.env_steps,
            "waiting_for": self._filling.waited_for(),
            "waiting_seconds": self._filling.waiting_seconds(now),
            "slots": {state.value: count for state, count in self._leases.ledger.count().items()},
            "actors": [
                place_report(place, self._doing(place), self._filling.waits.share(place.actor_id), now)
                for place in self._roster.places
            ],
            "learner": self._learner_report(now),
            "rates": {f"{name}_per_second": round(rate.per_second(now), 3) for name, rate in self._rates.items()},
            "policy_lags": {str(lag): count for lag, count in sorted(self._lags.items())},
            "account": self._account.balance(self.env_steps, self._in_hand()),
            "counters": dict(sorted((+self.counters).items())),
        }

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

    def _commit(self, peer: bytes, commit: Commit, now: float) -> list[Effect]:
        identity, place = self._roster.once_was(peer), self._roster.present(peer)
        if identity is None:
            return self._stranger(peer, "COMMIT")
        if commit.valid_steps > self.spec.num_steps:
            return self.reject(peer, f"commit.valid_steps is {commit.valid_steps}, a slot has {self.spec.num_steps}")
        rows = commit.valid_steps * self.spec.envs_per_actor
        if commit.env_steps is not None and commit.env_steps > rows:
            return self.reject(peer, f"commit.env_steps is {commit.env_steps}, its valid_steps have {rows} rows")
        verdict, accepted = self._leases.commit(identity, commit, newest=self.version or 0, now=now)
        effects: list[Effect] = []
        match verdict:
            case Verdict.UNKNOWN:
                return self.reject(
                    peer, f"slot {commit.slot} epoch {commit.epoch} was never granted to actor {identity.actor_id}"
                )
            case Verdict.REPEATED:
                pass
            case Verdict.STALE:
                self.counters.update(commit.counters)
                effects += self._stale(identity, commit)
            case Verdict.ACCEPTED:
                self.counters.update(commit.counters)
                effects.append(self._accepted(identity, commit, place, now))
        answer = Send(peer, Committed(slot=commit.slot, epoch=commit.epoch, accepted=accepted))
        again = [] if place is None else self._grant_again(place)
        return [answer, *effects, *again, *self._proceed(now)]

    def _stale(self, identity: Identity, commit: Commit) -> list[Effect]:
        """A commit that comes too late."""
        lag = (self.version or 0) - commit.version
        if lag > self.spec.max_policy_lag > 0:
            return self._too_old(identity.actor_id, lag, self._env_steps_of(commit))
        self.counters["dropped_stale_commits"] += 1
        return []

    def _too_old(self, actor_id: int, lag: int, env_steps: int) -> list[Effect]:
        """A rollout that the newest weights have left too far behind is not trained on."""
        self.counters["dropped_over_lag"] += 1
        self.counters["dropped_over_lag_env_steps"] += env_steps
        return [Notify(events.RolloutTooOld(actor_id, lag, env_steps))]

    def _env_steps_of(self, commit: Commit) -> int:
        return commit.valid_steps * self.spec.envs_per_actor if commit.env_steps is None else commit.env_steps

    def _accepted(self, identity: Identity, commit: Commit, place: Place | None, now: float) -> Effect:
        env_steps = self._env_steps_of(commit)
        self._env_steps[commit.slot] = env_steps
        self._account.committed += env_steps
        self._filling.committed(now)
        self._rates["env_steps"].add(now, env_steps)
        if place is not None:
            place.rate.add(now, env_steps)
            place.lag = (self.version or 0) - commit.version
        return Notify(
            events.RolloutCommitted(
                actor_id=identity.actor_id,
                incarnation=identity.incarnation,
                slot=commit.slot,
                env_steps=env_steps,
                version=commit.version,
                episodes=commit.episodes,
                seconds=commit.seconds,
                counters=commit.counters,
            )
        )

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
        learner = self._admission.learner
        if self.stopped is not None or learner is None:
            return []
        due = self._filling.due(now)
        formed = [] if due is None else self._form(due, learner.peer, now)
        grants = self._filling.grants(self.version or 0, self.updates_done + 1)
        return [*formed, *grants, *self._filling.preempts(self.version or 0)]

    def _grant_again(self, place: Place) -> list[Effect]:
        """The grant that holds, for a peer that may have missed it."""
        grant, peer = self._leases.standing(place.identity), place.peer
        return [] if grant is None or peer is None else [Send(peer, grant)]

    def _form(self, due: FormBatch, learner: bytes, now: float) -> list[Effect]:
        taken = self._filling.take(due, now)
        rollouts = list(zip(taken.slots, taken.holders, taken.valid_steps, taken.versions, strict=True))
        update, version = self.updates_done + 1, self.version or 0
        env_steps = self.env_steps + sum(self._env_steps[slot] for slot, _, steps, _ in rollouts if steps > 0)
        lags = [version - loaded for _, holder, _, loaded in rollouts if holder is not None]
        self._lags.update(lags)
        self._released = False
        self._batch = Batch(
            update=update,
            slots=taken.slots,
            valid_steps=taken.valid_steps,
            versions=taken.versions,
            env_steps=env_steps,
            last=not self._rollout_fits(env_steps),
            seed_into=self._filling.seed_into(taken.slots),
        )
        formed = events.BatchFormed(
            update,
            env_steps,
            taken.waited_for,
            taken.wait_s,
            partial=tuple(
                holder.actor_id for _, holder, steps, _ in rollouts if holder and 0 < steps < self.spec.num_steps
            ),
            late=taken.late,
            unclaimed=due.unclaimed,
            lags=tuple(lags),
        )
        self.counters["partial_rollouts"] += len(formed.partial)
        return [Send(learner, self._batch), Notify(formed)]

    def _rollout_fits(self, env_steps: int) -> bool:
        return self.spec.rollouts_that_fit(env_steps, self.total_updates) > 0

    # --- learner -----------------------------------------------------------------------------------------------------

    def _ready(self, peer: bytes, ready: Ready, now: float) -> list[Effect]:
        learner = self._admission.learner
        if learner is None or learner.peer != peer:
            return self.reject(peer, "READY of a peer that is not this run's learner; say HELLO first")
        if learner.ready:
            return self._batch_again(peer)
        if self.version is not None and ready.version <= self.version:
            return self.reject(
                peer,
                f"ready.version {ready.version} is not above {self.version}, which actors may have; publish higher",
            )
        learner.ready = True
        if self.version is None:
            self._leases.resumed = ready.updates_done > 0
        self._drop_filled("older than the restored learner's weights")
        stands = self._losses.restored(learner.pid, ready, updates=self.updates_done, env_steps=self.env_steps)
        self.version, self.updates_done, self.env_steps = ready.version, ready.updates_done, ready.env_steps_done
        if self._account.began_at is None:
            self._account.began_at = ready.env_steps_done
        told: list[Effect] = [Notify(stands)]
        if stands.unannounced_update:
            update = events.UpdateFinished(stands.updates, stands.version, stands.env_steps, {}, {}, None)
            told = [Notify(update), *told]
        if not self._rollout_fits(self.env_steps):
            return [*told, *self.stop(FINISHED, now)]
        self._filling.open(now)
        return [*told, *self._proceed(now)]

    def _publish(self, peer: bytes, publish: Publish, now: float) -> list[Effect]:
        learner, batch = self._admission.learner, self._batch
        if learner is None or learner.peer != peer:
            return self.reject(peer, "PUBLISH of a peer that is not this run's learner; say HELLO first")
        if publish.update <= self.updates_done:
            return self._batch_again(peer) if self.stopped is None else [Send(peer, Stop(reason=self.stopped))]
        if batch is None or publish.update != batch.update:
            wanted = "no batch is out" if batch is None else f"update {batch.update} is out"
            return self.reject(peer, f"publish of update {publish.update}: {wanted}")
        if wrong := set(publish.seeded) - set(batch.seed_into):
            return self.reject(peer, f"publish.seeded has slots {sorted(wrong)}, which BATCH did not name")
        if self.version is not None and publish.version <= self.version:
            return self.reject(peer, f"publish.version {publish.version} is not above {self.version}")
        self._leases.release(batch.slots)
        self._leases.seeded(publish.seeded)
        self._batch = None
        self._scheduler.published()
        self.version, self.updates_done, self.env_steps = publish.version, batch.update, batch.env_steps
        self._rates["updates"].add(now, 1)
        finished = Notify(
            events.UpdateFinished(
                update=batch.update,
                version=publish.version,
                env_steps=batch.env_steps,
                metrics=publish.metrics,
                seconds=publish.seconds,
                checkpoint=publish.checkpoint,
            )
        )
        if self.stopped is not None:
            return [finished, Send(peer, Stop(reason=self.stopped))]
        if batch.last:
            return [finished, *self.stop(FINISHED, now)]
        self._filling.open(now)
        return [finished, *self._drop_outdated(), *self._proceed(now)]

    def _release(self, peer: bytes, release: Release, now: float) -> list[Effect]:
        """The learner has copied what it needs. One that comes late or twice changes nothing."""
        learner, batch = self._admission.learner, self._batch
        if learner is None or learner.peer != peer:
            return self.reject(peer, "RELEASE of a peer that is not this run's learner; say HELLO first")
        if batch is None or release.update != batch.update:
            return []
        self._leases.release(batch.slots)
        self._released = True
        return self._proceed(now)

    def _batch_again(self, peer: bytes) -> list[Effect]:
        return [] if self._batch is None else [Send(peer, self._batch)]

    def _lost(self, batch: Batch) -> LostBatch:
        rollouts = sum(version > 0 for version in batch.versions)
        return LostBatch(batch.update, rollouts, batch.env_steps - self.env_steps)

    def _drop_outdated(self) -> list[Effect]:
        """Rollouts that the newest weights have left too far behind."""
        told: list[Effect] = []
        for slot, filled in self._leases.drop_outdated(self.version or 0):
            self._account.outdated += self._env_steps[slot]
            told += self._too_old(filled.holder.actor_id, (self.version or 0) - filled.version, self._env_steps[slot])
        return told

    def _drop_filled(self, why: str) -> None:
        env_steps = self._in_slots()
        self._losses.dropped(self._leases.drop_filled(why), env_steps)

    def _in_slots(self) -> int:
        """Env steps in slots that are READY or READING."""
        ledger = self._leases.ledger
        return sum(self._env_steps[slot] for slot in range(len(ledger)) if ledger.filled(slot) is not None)

    def _in_hand(self) -> int:
        """The same, and what the learner has copied out of its slots."""
        copied = self._batch.env_steps - self.env_steps if self._batch is not None and self._released else 0
        return self._in_slots() + copied

    # --- words for WELCOME and the report ----------------------------------------------------------------------------

    def _progress(self) -> dict[str, Any]:
        return {
            "version": self.version or 0,
            "updates_done": self.updates_done,
            "env_steps_done": self.env_steps,
        }

    def _state(self) -> str:
        learner = self._admission.learner
        if self.stopped is not None:
            return "stopped"
        if learner is None or not learner.ready:
            return "waiting for the learner"
        return "collecting" if self._batch is None else "updating"

    def _doing(self, place: Place) -> str:
        if self._leases.is_late(place.identity):
            return "late"
        return "waiting" if self._leases.ledger.lease_of(place.identity) is None else "collecting"

    def _learner_report(self, now: float) -> dict[str, Any] | None:
        learner = self._admission.learner
        if learner is None:
            return None
        return {
            "pid": learner.pid,
            "state": "preparing" if not learner.ready else "waiting" if self._batch is None else "updating",
            "phase": learner.pulse.phase,
            "silent_seconds": rounded_since(learner.pulse.heard_at, now),
        }
