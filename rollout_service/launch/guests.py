"""Processes of a run that this one did not start: who is here, and proof that one of them is gone.

    PeerWelcomed -> here -> PeerLeft: it said goodbye
                         -> its lock on its seat is free again: it is dead, whatever it was doing
                         -> silent, without ever having locked its seat: dead if it can write nothing any more

The seats are bytes of the run's segment (memory/presence), so the proof holds between containers too. A process that
does not lock its seat (a program of the user's that speaks the protocol) is judged by its silence and its pid, which
is a proof on one host only; an actor that has not joined never had a slot, and its silence is enough.

Who calls: the supervisor, with every message of its inbox. A guest that is dead makes room for another one; one that
hangs is named, and never killed. What must never happen: a place taken from a process that may still write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rollout_service.control import events
from rollout_service.control.messages import Role
from rollout_service.control.roster import SILENT_PHASE
from rollout_service.errors import SegmentError
from rollout_service.launch.run import Run
from rollout_service.memory.presence import LEARNER, actor_seat, is_present
from rollout_service.offspring import alive

LOOK_EVERY_S: Final = 1.0
"""Between two looks at the seats, each a few system calls per guest."""
LOOK_WHILE_LEAVING_S: Final = 0.1
"""The same once they have been told to leave."""


@dataclass
class Guest:
    """One process that came by itself."""

    role: Role
    actor_id: int | None
    incarnation: int
    pid: int
    """As it sees itself: in a container of its own another process may have this number here."""
    joined: bool = False
    seated: bool = False
    """Its seat was seen locked."""
    silent: bool = False

    @property
    def name(self) -> str:
        if self.role is Role.ACTOR:
            return f"actor {self.actor_id} (incarnation {self.incarnation}, pid {self.pid})"
        return f"learner (pid {self.pid})"

    @property
    def seat(self) -> int:
        return LEARNER if self.actor_id is None else actor_seat(self.actor_id)


class Guests:
    """Everyone who takes part without having been started here.

    is_child tells of a role and pid whether it was started here; failed is called when an actor has died, or left with
    an error.
    """

    def __init__(self, run: Run, *, is_child: Callable[[Role, int], bool], failed: Callable[[str], None]) -> None:
        self._run = run
        self._is_child = is_child
        self._failed = failed
        self._here: dict[int | None, Guest] = {}
        """By actor_id; None is the learner's place."""
        self._told_to_leave = False

    def __bool__(self) -> bool:
        return bool(self._here)

    @property
    def actors(self) -> int:
        """How many of them are actors."""
        return sum(guest.role is Role.ACTOR for guest in self._here.values())

    @property
    def look_every_s(self) -> float:
        """How often `look` is due while somebody is here."""
        return LOOK_WHILE_LEAVING_S if self._told_to_leave else LOOK_EVERY_S

    def notice(self, message: object) -> bool:
        """Takes note of what an event says of a guest. True if it says nothing of anybody else."""
        guest: Guest | None
        match message:
            case events.PeerWelcomed() if not self._is_child(message.role, message.pid):
                self._welcome(Guest(message.role, message.actor_id, message.incarnation, message.pid))
            case events.ActorJoined(actor_id=actor_id, pid=pid) if guest := self._find(actor_id, pid):
                guest.joined = True
                self._look_at_seat(guest)
                self._run.metrics.actor_joined(actor_id)
            case events.ActorStuck(actor_id=actor_id, pid=pid) if guest := self._find(actor_id, pid):
                self._stuck(guest, message.phase, message.seconds)
            case events.LearnerStuck(pid=pid) if guest := self._find(None, pid):
                self._stuck(guest, message.phase, message.seconds)
            case events.LearnerSilent(pid=pid) if guest := self._find(None, pid):
                guest.silent = True
            case events.PeerLeft(actor_id=actor_id, pid=pid) if guest := self._find(actor_id, pid):
                self._left(guest, message.reason or "goodbye", message.traceback)
                if message.traceback and guest.role is Role.ACTOR:
                    self._failed(f"{guest.name} left: {message.reason}")
            case events.LearnerReady(pid=pid) if guest := self._find(None, pid):
                self._look_at_seat(guest)
                return False
            case _:
                return False
        return True

    def look(self) -> None:
        """Makes room where a guest is proven to be dead."""
        for guest in [guest for guest in self._here.values() if self._is_dead(guest)]:
            self._free_place_of(guest)
            self._left(guest, "died, without a goodbye", "")
            if guest.joined:
                self._failed(f"{guest.name} died, without a goodbye")

    def told_to_leave(self) -> None:
        self._told_to_leave = True

    def give_up(self, role: Role, waited_s: float) -> None:
        """No more waiting for those of this role: they have had their time, and are nobody's children."""
        for guest in [guest for guest in self._here.values() if guest.role is role]:
            self._run.journal.say(f"{guest.name} did not leave within {waited_s:.1f} s of being told")
            del self._here[guest.actor_id]

    def _welcome(self, guest: Guest) -> None:
        self._here[guest.actor_id] = guest
        self._run.journal.say(f"{guest.name} is here")

    def _free_place_of(self, guest: Guest) -> None:
        actor_id, incarnation, pid = guest.actor_id, guest.incarnation, guest.pid
        if actor_id is None:
            self._run.server.submit(lambda coordinator, now: coordinator.learner_lost(now, pid))
        else:
            self._run.server.submit(lambda coordinator, now: coordinator.actor_lost(actor_id, incarnation, "died", now))

    def _find(self, actor_id: int | None, pid: int) -> Guest | None:
        guest = self._here.get(actor_id)
        return guest if guest is not None and guest.pid == pid else None

    def _stuck(self, guest: Guest, phase: str, seconds: float) -> None:
        guest.silent = phase == SILENT_PHASE
        if not guest.silent:
            text = f"{guest.name} is stuck in {phase} since {seconds:.1f} s; it was not started here: end it yourself"
            self._run.journal.say(text)

    def _left(self, guest: Guest, reason: str, traceback: str) -> None:
        del self._here[guest.actor_id]
        if guest.actor_id is not None:
            self._run.metrics.actor_left(guest.actor_id)
        if self._told_to_leave:
            self._run.journal.note(f"{guest.name} left: {reason}")
        else:
            self._run.journal.say(f"{guest.name} left, its place is free: {reason}\n{traceback}".rstrip())
            if guest.role is Role.LEARNER:
                self._run.journal.say("the run waits for another learner")

    def _look_at_seat(self, guest: Guest) -> bool:
        try:
            present = is_present(self._run.segment, guest.seat)
        except SegmentError:  # for want of a descriptor to look with: it may be there
            return True
        guest.seated = guest.seated or present
        return present

    def _is_dead(self, guest: Guest) -> bool:
        if self._look_at_seat(guest):
            return False
        if guest.seated:
            return True
        may_write = guest.joined or guest.role is Role.LEARNER
        return guest.silent and not (may_write and alive(guest.pid))
