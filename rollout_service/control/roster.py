"""Who takes part: the A places of a run, which actor process holds each, and whether it still moves. Pure.

    VACANT --HELLO--> WELCOMED --JOIN--> JOINED --BYE, or proof of death--> VACANT --given up--> ABANDONED
                                                                              ^---HELLO---------------+

Writer: the coordinator. An actor's identity is (actor_id, incarnation); incarnations of a place only grow, so nothing
of an earlier process can be mistaken for the present one's. A place is never taken from a process that may still write.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from rollout_service.control.ledger import Identity
from rollout_service.control.messages import Heartbeat, Hello

WORKING_PHASES: Final = frozenset({"env.step", "env.reset", "policy"})
"""Phases of an actor in which progress has to grow; in others (waiting, loading) it may stand still."""
LEARNER_PHASES: Final = frozenset({"preparing", "updating", "checkpointing"})
"""The same for the learner: all but waiting for a batch."""
SILENCE_S: Final = 10.0
"""Ten heartbeats: a process at rest that sends none for so long is stopped or swapped out. One at work may be in native
code that holds the interpreter, and its heartbeats with it."""
SILENT_PHASE: Final = "silent"
RATE_WINDOW_S: Final = 60.0
"""Rates are means over this long, or since the first event if that is shorter."""


REMEMBERED_PEERS: Final = 256
"""Peers that have left and are still known by name: so many late commits can be told from a stranger's."""


class PlaceState(Enum):
    VACANT = "vacant"
    WELCOMED = "welcomed"
    JOINED = "joined"
    ABANDONED = "abandoned"


@dataclass
class Pulse:
    """How far a process was when it was last heard."""

    heard_at: float
    moved_at: float
    progress: int = 0
    phase: str = ""
    lost_writes: int = 0
    reported: bool = False
    """Stuck was said once; a move clears it."""
    working: frozenset[str] = WORKING_PHASES

    def beat(self, heartbeat: Heartbeat, now: float) -> int:
        """Returns how many writes to its log were lost since the last one."""
        if (heartbeat.progress, heartbeat.phase) != (self.progress, self.phase):
            self.moved_at, self.reported = now, False
        self.progress, self.phase, self.heard_at = heartbeat.progress, heartbeat.phase, now
        lost, self.lost_writes = heartbeat.lost_writes - self.lost_writes, heartbeat.lost_writes
        return max(0, lost)

    def stuck(self, now: float, step_timeout: float, silence: float = SILENCE_S) -> tuple[str, float] | None:
        """(phase, seconds) of one that does not move, once."""
        if self.reported:
            return None
        found = None
        if now - self.heard_at > silence:
            found = (SILENT_PHASE, now - self.heard_at)
        elif self.phase in self.working and now - self.moved_at > step_timeout:
            found = (self.phase, now - self.moved_at)
        self.reported = found is not None
        return found

    def deadline(self, step_timeout: float, silence: float = SILENCE_S) -> float:
        """When `stuck` could next say something."""
        if self.reported:
            return math.inf
        moves = self.moved_at + step_timeout if self.phase in self.working else math.inf
        return min(self.heard_at + silence, moves)


@dataclass
class Rate:
    """Amounts per second over a sliding window. The first event opens the window and is not counted."""

    amounts: deque[tuple[float, int]] = field(default_factory=deque)
    since: float | None = None

    def add(self, now: float, amount: int) -> None:
        if self.since is None:
            self.since = now
            return
        self.amounts.append((now, amount))
        self._forget(now)

    def per_second(self, now: float) -> float:
        self._forget(now)
        if self.since is None or now <= self.since:
            return 0.0
        return sum(amount for _, amount in self.amounts) / min(RATE_WINDOW_S, now - self.since)

    def _forget(self, now: float) -> None:
        while self.amounts and self.amounts[0][0] < now - RATE_WINDOW_S:
            self.amounts.popleft()


@dataclass
class Place:
    """One of the A places, and the process in it."""

    actor_id: int
    state: PlaceState = PlaceState.VACANT
    incarnation: int = -1
    """Of the process in it, or of the last one."""
    pid: int = 0
    peer: bytes | None = None
    pulse: Pulse = field(default_factory=lambda: Pulse(0.0, 0.0))
    rate: Rate = field(default_factory=Rate)
    lag: int | None = None
    """Policy lag of its last accepted commit."""
    pulse_peer: bytes | None = None
    """Where its heartbeats come from: what is sent there is read even while its main thread works."""
    awaited: bool = True
    """False in a place beyond num_actors, and once its actor has left an elastic run, a batch went without anyone here,
    or the place was given up; until somebody has joined."""
    kept: bool = False
    """For the process that the run's owner starts: only an actor that names the place gets it, until it is given up."""

    @property
    def identity(self) -> Identity:
        return Identity(self.actor_id, self.incarnation)

    @property
    def occupied(self) -> bool:
        return self.state in (PlaceState.WELCOMED, PlaceState.JOINED)


class Roster:
    """The places, and which peer is who.

    num_actors: of the num_places those that are waited for from the start. elastic: who has gone is not waited for.
    kept: places, from 0, whose processes the run's owner starts itself.
    """

    def __init__(self, num_places: int, num_actors: int, *, elastic: bool = False, kept: int = 0) -> None:
        self.elastic = elastic
        self.places = tuple(
            Place(actor_id, awaited=actor_id < num_actors, kept=actor_id < kept) for actor_id in range(num_places)
        )
        self._by_peer: dict[bytes, Identity] = {}

    def present(self, peer: bytes) -> Place | None:
        """The place this peer holds now."""
        identity = self._by_peer.get(peer)
        if identity is None:
            return None
        place = self.places[identity.actor_id]
        return place if place.peer == peer else None

    def once_was(self, peer: bytes) -> Identity | None:
        """Who this peer is or was."""
        return self._by_peer.get(peer)

    def peers(self) -> list[bytes]:
        return [place.peer for place in self.places if place.peer is not None]

    def absent(self) -> set[int]:
        """Places that count as empty until somebody has joined in them."""
        return {place.actor_id for place in self.places if not place.awaited}

    def give_up(self, place: Place) -> None:
        """Nobody will come to this vacant place by itself."""
        place.state, place.awaited, place.kept = PlaceState.ABANDONED, False, False

    def seat(self, peer: bytes, hello: Hello, now: float) -> Place | str:
        """The place for an actor that says HELLO, or why there is none."""
        place = self._find(hello)
        if isinstance(place, str):
            return place
        place.state = PlaceState.WELCOMED
        place.incarnation = max(hello.incarnation, place.incarnation + 1)
        place.pid, place.peer = hello.pid, peer
        place.pulse, place.rate, place.lag, place.pulse_peer = Pulse(now, now), Rate(), None, None
        self._by_peer[peer] = place.identity
        self._forget_old_peers()
        return place

    def _forget_old_peers(self) -> None:
        """Those that left long ago: a late word of theirs is then a stranger's."""
        present = {place.peer for place in self.places}
        for peer in [peer for peer in self._by_peer if peer not in present][: -REMEMBERED_PEERS or None]:
            del self._by_peer[peer]

    def vacate(self, place: Place) -> None:
        """Its process is gone."""
        if self.elastic and place.state is PlaceState.JOINED:
            place.awaited = False
        place.state, place.peer, place.pulse_peer = PlaceState.VACANT, None, None

    def _find(self, hello: Hello) -> Place | str:
        if hello.requested_actor is None:
            free = [place for place in self.places if not place.occupied and not place.kept]
            return min(free, key=lambda place: not place.awaited) if free else self._full()
        if hello.requested_actor >= len(self.places):
            return f"actor {hello.requested_actor} does not exist: this run has {len(self.places)} actors, from 0"
        place = self.places[hello.requested_actor]
        if place.occupied:
            return (
                f"actor {place.actor_id} is here already (incarnation {place.incarnation}, pid {place.pid}); "
                f"incarnation {hello.incarnation} may come once that process is proven to be gone"
            )
        return place

    def _full(self) -> str:
        if kept := sum(place.kept and not place.occupied for place in self.places):
            return f"no place is free: this run has {len(self.places)} (max_actors), and fills {kept} of them itself"
        return f"no place is free: all {len(self.places)} actors of this run are here"


def in_words(place: Place) -> str:
    """Who is waited for, e.g. `actor 2 (pid 4711, env.reset)`."""
    if not place.occupied:
        return f"actor {place.actor_id} (no process)"
    doing = place.pulse.phase or place.state.value
    return f"actor {place.actor_id} (pid {place.pid}, {doing})"


def rounded_since(moment: float | None, now: float) -> float | None:
    """Seconds since `moment` to a tenth, for reports."""
    return None if moment is None else round(max(0.0, now - moment), 1)
