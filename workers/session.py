"""An actor's side of one run: the conversation with the service around an `Actor`.

    HELLO -> WELCOME (RunSpec, segments, identity)
    attach, build envs and policy -> JOIN
    GRANT -> fill the slot -> COMMIT, which asks for the next grant, over and over
    STOP, SIGTERM or a silent service -> BYE

Writers: the slot of the lease in hand. What must never happen: a write after BYE. Leaves to others: lost and repeated
messages (control/client.py), signals, errors and the last word (control/attendance.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from typing import Final

from rollout_service.control.attendance import Attendance
from rollout_service.control.client import Client
from rollout_service.control.messages import Committed, Grant, Stop, Welcome
from rollout_service.errors import ProtocolError
from rollout_service.memory.presence import Presence, actor_seat
from rollout_service.memory.slots import RolloutMemory
from rollout_service.memory.weights import WeightsMemory
from rollout_service.runspec import RunSpec
from workers.actor import Actor

ACTOR_VARIABLE: Final = "ROLLOUT_SERVICE_ACTOR"
"""Environment variable in which an env finds the number of its actor: for a port, a display or a seat of its own."""
RECEIVE_S: Final = 0.5
"""How long one wait for a message lasts, so that a stop flag set by a signal is seen soon."""


class ActorSession:
    """One actor and its attached memory."""

    def __init__(self, client: Client, welcome: Welcome) -> None:
        if welcome.actor_id is None:
            raise ProtocolError("the service welcomed this actor without giving it a place")
        spec = RunSpec.from_json(welcome.run_spec)
        self.client = client
        self.client.pulse.phase = "building envs"
        os.environ[ACTOR_VARIABLE] = str(welcome.actor_id)
        self.memory = RolloutMemory.attach(welcome.rollout_segment)
        self.weights = WeightsMemory.attach(welcome.weights_segment)
        self.actor = Actor(spec, self.memory, self.weights, welcome.actor_id, welcome.incarnation)

    def run(self) -> None:
        """Fill what is granted until a stop."""
        client = self.client
        client.send(self.actor.join_facts())
        while not client.stopping:
            client.pulse.phase = "waiting"
            match client.receive(RECEIVE_S):
                case Grant() as grant:
                    commit = self.actor.fill(grant, pulse=client.pulse, preempted=self._enough(grant))
                    if not client.stopping:
                        client.send(commit)
                case Stop():
                    break
                case Committed() | None:
                    pass
                case other:
                    raise ProtocolError(f"an actor was sent {type(other).__name__}; it expects Grant or Stop")

    def _enough(self, grant: Grant) -> Callable[[int], bool]:
        """Whether this lease ends after so many steps: the run stops, or the service asked for what there is."""
        client = self.client

        def enough(steps: int) -> bool:
            asked = client.preempt
            if asked is None or (asked.slot, asked.epoch) != (grant.slot, grant.epoch):
                return client.stopping
            return steps >= asked.min_steps or client.stopping

        return enough

    def close(self) -> None:
        self.actor.close()
        self.weights.close()
        self.memory.close()


def run(attendance: Attendance) -> int:
    """One actor from HELLO to BYE. Returns the process's exit code."""
    return attendance.attend(take_part, take_seat)


def take_part(client: Client, welcome: Welcome) -> None:
    """Everything between WELCOME and BYE."""
    with closing(ActorSession(client, welcome)) as session:
        session.run()


def take_seat(welcome: Welcome) -> Presence:
    """The sign of life of this actor's place; also the first look at the run's memory, before envs are made."""
    return Presence(welcome.rollout_segment, actor_seat(welcome.actor_id or 0))
