"""An actor's side of one run: the conversation with the service around an `Actor`.

    HELLO -> WELCOME (RunSpec, segments, identity)
    attach, build envs and policy -> JOIN
    GRANT -> fill the slot -> COMMIT, which asks for the next grant, over and over
    STOP, SIGTERM or a silent service -> BYE

Writers: the slot of the lease in hand. What must never happen: an exit without a word (an error goes out as BYE with
its traceback), a write after BYE. Leaves to others: lost and repeated messages (control/client.py).
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import Final

import torch

from rollout_service.control.client import Client
from rollout_service.control.messages import Committed, Grant, Hello, Role, Stop, Welcome
from rollout_service.errors import ProtocolError, RolloutServiceError
from rollout_service.memory.slots import RolloutMemory
from rollout_service.memory.weights import WeightsMemory
from rollout_service.runspec import RunSpec
from workers.actor import Actor

CONNECT_DEADLINE_S: Final = 30.0
"""The service listens before it starts children; an actor started by hand may come first."""
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
                    commit = self.actor.fill(grant, pulse=client.pulse, preempted=lambda: client.stopping)
                    if not client.stopping:
                        client.send(commit)
                case Stop():
                    break
                case Committed() | None:
                    pass
                case other:
                    raise ProtocolError(f"an actor was sent {type(other).__name__}; it expects Grant or Stop")

    def close(self) -> None:
        self.actor.close()
        self.weights.close()
        self.memory.close()


def run(endpoint: str, actor_id: int | None, incarnation: int) -> int:
    """One actor from HELLO to BYE. Returns the process's exit code."""
    torch.set_num_threads(1)
    hello = Hello(role=Role.ACTOR, pid=os.getpid(), requested_actor=actor_id, incarnation=incarnation)
    client = Client(endpoint, hello, connect_deadline_s=CONNECT_DEADLINE_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: client.stop())
    session: ActorSession | None = None
    try:
        session = ActorSession(client, client.connect())
        session.run()
        print(f"actor: leaving, {client.stop_reason}", file=sys.stderr, flush=True)
        client.bye("finished")
        return 0
    except Exception as error:
        text = str(error) if isinstance(error, RolloutServiceError) else f"{type(error).__name__}: {error}"
        print(f"actor: {text}", file=sys.stderr, flush=True)
        client.bye(text, traceback.format_exc())
        return 1
    finally:
        if session is not None:
            session.close()
        client.close()
