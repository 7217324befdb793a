"""Who is let in, as what, and whether it still moves: HELLO, the learner's seat, heartbeats. Pure.

Writer: the coordinator, which owns this and the roster in it. A refusal names both values, is counted, and leaves no
trace in the run. Heartbeats come from a second socket of the same process, so their sender is known by what it says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rollout_service.control import events
from rollout_service.control.effects import Effect, Notify, Send
from rollout_service.control.handshake import hello_mismatch
from rollout_service.control.ledger import Identity
from rollout_service.control.messages import Heartbeat, Hello, Pong, Refused, Restore, Role, Welcome
from rollout_service.control.roster import (
    LEARNER_PHASES,
    SILENCE_S,
    SILENT_PHASE,
    WORKING_PHASES,
    Place,
    PlaceState,
    Pulse,
    Roster,
)
from rollout_service.runspec import RunSpec

TOLD_REFUSALS: Final = 100
"""Refused handshakes that are told one by one."""


@dataclass
class LearnerSeat:
    """The learner process of the run."""

    peer: bytes
    pid: int
    pulse: Pulse
    ready: bool = False
    """Its weights are out: grants may go."""
    told: Restore | None = None
    """What it was told last, until it is ready again."""


class Admission:
    """The door of a run. `welcome` is what every admitted peer gets, completed by its identity and the progress."""

    def __init__(
        self,
        spec: RunSpec,
        welcome: Welcome,
        roster: Roster,
        counters: Counter[str],
        silence_timeout: float = SILENCE_S,
        *,
        has_lease: Callable[[Identity], bool] = lambda _: False,
    ) -> None:
        self.spec = spec
        self.roster = roster
        self.learner: LearnerSeat | None = None
        self.learner_gone_at: float | None = None
        self._last_learner: int | None = None
        self._never_came: set[int] = set()
        """Pids of learners that died before their HELLO was read; it may still be on its way."""
        self._welcome = welcome
        self._counters = counters
        self._silence_timeout = silence_timeout
        self._has_lease = has_lease

    def hello(self, peer: bytes, hello: Hello, progress: dict[str, Any], now: float) -> list[Effect]:
        """WELCOME or REFUSED; the same again for a HELLO sent again."""
        if (difference := hello_mismatch(self.spec, hello)) is not None:
            return self.refuse(peer, hello.role, hello.pid, difference)
        identity: dict[str, int] = {}
        came: list[Effect] = []
        match hello.role:
            case Role.OBSERVER:
                pass
            case Role.LEARNER:
                if hello.pid in self._never_came:
                    self._never_came.discard(hello.pid)
                    return self.refuse(peer, hello.role, hello.pid, f"the learner with pid {hello.pid} is dead")
                if self.learner is None:
                    pulse = Pulse(now, now, working=LEARNER_PHASES)
                    self.learner, self.learner_gone_at = LearnerSeat(peer, hello.pid, pulse), None
                    self._last_learner = hello.pid
                    came = [Notify(events.PeerWelcomed(Role.LEARNER, None, 0, hello.pid))]
                elif self.learner.peer != peer:
                    reason = f"this run has a learner (pid {self.learner.pid}); this is another (pid {hello.pid})"
                    return self.refuse(peer, hello.role, hello.pid, reason)
            case Role.ACTOR:
                before = self.roster.present(peer)
                place = before or self.roster.seat(peer, hello, now)
                if isinstance(place, str):
                    return self.refuse(peer, hello.role, hello.pid, place)
                if before is None:
                    came = [Notify(events.PeerWelcomed(Role.ACTOR, *place.identity, place.pid))]
                identity = {"actor_id": place.actor_id, "incarnation": place.incarnation}
        return [Send(peer, self._welcome.model_copy(update={**progress, **identity})), *came]

    def heartbeat(self, peer: bytes, beat: Heartbeat, leave: bool, now: float) -> list[Effect]:
        """PONG; it also tells a process that has been replaced to leave."""
        lost = 0
        match beat.role:
            case Role.ACTOR if beat.actor_id is not None and beat.actor_id < len(self.roster.places):
                place = self.roster.places[beat.actor_id]
                if place.occupied and place.incarnation == beat.incarnation:
                    lost = place.pulse.beat(beat, now)
                    place.pulse_peer = peer
                else:
                    leave = True
            case Role.LEARNER if self.learner is not None and self.learner.pid == beat.pid:
                lost = self.learner.pulse.beat(beat, now)
            case Role.LEARNER:
                leave = True
            case _:
                pass
        told = [Notify(events.OutputLost(beat.role, beat.actor_id, lost))] if lost else []
        return [Send(peer, Pong(stopping=leave, run_id=self._welcome.run_id)), *told]

    def stuck(self, now: float, step_timeout: float, learner_timeout: float) -> list[Effect]:
        """Each actor, and the learner, that does not move or is not heard of any more, told once."""
        effects: list[Effect] = []
        for place in self.roster.places:
            silence = self._patience(self._at_work(place), step_timeout)
            if place.occupied and (found := place.pulse.stuck(now, step_timeout, silence)) is not None:
                self._counters["stuck_actors"] += 1
                effects.append(Notify(events.ActorStuck(*place.identity, place.pid, *found)))
        seat = self.learner
        if seat is None:
            return effects
        silence = self._patience(not seat.ready, step_timeout)
        if (found := seat.pulse.stuck(now, learner_timeout, silence)) is not None:
            self._counters["stuck_learners"] += 1
            phase, seconds = found
            silent = events.LearnerSilent(seat.pid, seconds)
            effects.append(Notify(silent if phase == SILENT_PHASE else events.LearnerStuck(seat.pid, phase, seconds)))
        return effects

    def deadlines(self, step_timeout: float, learner_timeout: float) -> list[float]:
        moments = [
            place.pulse.deadline(step_timeout, self._patience(self._at_work(place), step_timeout))
            for place in self.roster.places
            if place.occupied
        ]
        if (seat := self.learner) is not None:
            moments.append(seat.pulse.deadline(learner_timeout, self._patience(not seat.ready, step_timeout)))
        return moments

    def _at_work(self, place: Place) -> bool:
        """May this actor be in code of its env? Heartbeats are too rare to tell it from the phase alone."""
        making_envs = place.state is PlaceState.WELCOMED
        return making_envs or place.pulse.phase in WORKING_PHASES or self._has_lease(place.identity)

    def _patience(self, at_work: bool, step_timeout: float) -> float:
        """Seconds without a heartbeat that prove a hang. Native code may hold the interpreter while a step may last."""
        return max(self._silence_timeout, step_timeout) if at_work else self._silence_timeout

    def refuse(self, peer: bytes, role: Role, pid: int, reason: str) -> list[Effect]:
        self._counters["refused_handshakes"] += 1
        refused = Refused(reason=reason, run_id=self._welcome.run_id)
        return [Send(peer, refused), *([Notify(events.PeerRefused(role, pid, reason))] if self._worth_a_word() else [])]

    def _worth_a_word(self) -> bool:
        """The first refusals, and then each time their number has doubled: a flood of them must not fill the log."""
        count = self._counters["refused_handshakes"]
        return count <= TOLD_REFUSALS or count & (count - 1) == 0

    def seat_of(self, peer: bytes) -> LearnerSeat | Place | None:
        """What this peer is in the run."""
        if self.learner is not None and self.learner.peer == peer:
            return self.learner
        return self.roster.present(peer)

    def learner_gone(self, now: float, pid: int | None) -> bool:
        """Proof that the learner, the one with this pid if given, is dead. False if it had no seat."""
        if self.learner is None or pid not in (None, self.learner.pid):
            if pid not in (None, self._last_learner):
                self._never_came.add(pid)
            return False
        self.learner, self.learner_gone_at = None, now
        return True

    def peers(self) -> list[bytes]:
        return self.roster.peers() + ([] if self.learner is None else [self.learner.peer])
