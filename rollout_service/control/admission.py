"""Who is let in, as what, and whether it still moves: HELLO, the learner's seat, heartbeats. Pure.

Writer: the coordinator, which owns this and the roster in it. A refusal names both values, is counted, and leaves no
trace in the run. Heartbeats come from a second socket of the same process, so their sender is known by what it says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rollout_service.control import events
from rollout_service.control.effects import Effect, Notify, Send
from rollout_service.control.handshake import hello_mismatch
from rollout_service.control.messages import Heartbeat, Hello, Pong, Refused, Role, Welcome
from rollout_service.control.roster import Place, Pulse, Roster
from rollout_service.runspec import RunSpec


@dataclass
class LearnerSeat:
    """The learner process of the run."""

    peer: bytes
    pid: int
    pulse: Pulse
    ready: bool = False
    """Its weights are out: grants may go."""


class Admission:
    """The door of a run. `welcome` is what every admitted peer gets, completed by its identity and the progress."""

    def __init__(self, spec: RunSpec, welcome: Welcome, counters: Counter[str]) -> None:
        self.spec = spec
        self.roster = Roster(spec.num_actors)
        self.learner: LearnerSeat | None = None
        self.learner_gone_at: float | None = None
        self._welcome = welcome
        self._counters = counters

    def hello(self, peer: bytes, hello: Hello, progress: dict[str, Any], now: float) -> list[Effect]:
        """WELCOME or REFUSED; the same again for a HELLO sent again."""
        if (difference := hello_mismatch(self.spec, hello)) is not None:
            return self.refuse(peer, hello.role, hello.pid, difference)
        identity: dict[str, int] = {}
        match hello.role:
            case Role.OBSERVER:
                pass
            case Role.LEARNER:
                if self.learner is None:
                    self.learner, self.learner_gone_at = LearnerSeat(peer, hello.pid, Pulse(now, now)), None
                elif self.learner.peer != peer:
                    reason = f"this run has a learner (pid {self.learner.pid}); this is another (pid {hello.pid})"
                    return self.refuse(peer, hello.role, hello.pid, reason)
            case Role.ACTOR:
                place = self.roster.present(peer) or self.roster.seat(peer, hello, now)
                if isinstance(place, str):
                    return self.refuse(peer, hello.role, hello.pid, place)
                identity = {"actor_id": place.actor_id, "incarnation": place.incarnation}
        return [Send(peer, self._welcome.model_copy(update={**progress, **identity}))]

    def heartbeat(self, peer: bytes, beat: Heartbeat, leave: bool, now: float) -> list[Effect]:
        """PONG; it also tells a process that has been replaced to leave."""
        match beat.role:
            case Role.ACTOR if beat.actor_id is not None and beat.actor_id < len(self.roster.places):
                place = self.roster.places[beat.actor_id]
                if place.occupied and place.incarnation == beat.incarnation:
                    place.pulse.beat(beat, now)
                else:
                    leave = True
            case Role.LEARNER if self.learner is not None and self.learner.pid == beat.pid:
                self.learner.pulse.beat(beat, now)
            case _:
                pass
        return [Send(peer, Pong(stopping=leave))]

    def stuck(self, now: float, step_timeout: float) -> list[Effect]:
        """Each actor that does not move, told once."""
        effects: list[Effect] = []
        for place in self.roster.places:
            if place.occupied and (found := place.pulse.stuck(now, step_timeout)) is not None:
                self._counters["stuck_actors"] += 1
                effects.append(Notify(events.ActorStuck(*place.identity, place.pid, *found)))
        return effects

    def deadlines(self, step_timeout: float) -> list[float]:
        return [place.pulse.deadline(step_timeout) for place in self.roster.places if place.occupied]

    def refuse(self, peer: bytes, role: Role, pid: int, reason: str) -> list[Effect]:
        self._counters["refused_handshakes"] += 1
        return [Send(peer, Refused(reason=reason)), Notify(events.PeerRefused(role, pid, reason))]

    def seat_of(self, peer: bytes) -> LearnerSeat | Place | None:
        """What this peer is in the run."""
        if self.learner is not None and self.learner.peer == peer:
            return self.learner
        return self.roster.present(peer)

    def learner_gone(self, now: float) -> None:
        self.learner, self.learner_gone_at = None, now

    def peers(self) -> list[bytes]:
        return self.roster.peers() + ([] if self.learner is None else [self.learner.peer])
