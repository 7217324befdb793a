"""`python -m rollout_service.bench.handover_role actor|learner ENDPOINT DESCRIPTOR`: one process of the hand-over.

    GRANT -> the actor fills its slot -> COMMIT ... BATCH -> the learner reads the last row           (shared)
    learner: "next" through the pipe -> the actor sends the same rollout's arrays -> received         (pickled)
    learner: PUBLISH -> the next GRANT

Started by `handover` only. Takes down when a rollout set out, or could be read, and prints the moments as JSON, side
-> seconds of the monotonic clock. What must never happen: a rollout that is not the one that was announced; rewards
equal the lease's epoch, so that would show.
"""

from __future__ import annotations

import json
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from rollout_service.bench.rig import fill_slot
from rollout_service.control.client import Client
from rollout_service.control.messages import Batch, Commit, Grant, Hello, Join, Publish, Ready, Role, Stop, Welcome
from rollout_service.errors import ProtocolError, WaitTimedOut
from rollout_service.lifeline import follow_parent
from rollout_service.memory.schema import Role as FieldRole
from rollout_service.memory.slots import RolloutMemory
from rollout_service.runspec import RunSpec

DEADLINE_S: Final = 20.0
Moments = dict[str, list[float]]


def main() -> int:
    role, endpoint, descriptor = Role(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    follow_parent()
    client = Client(endpoint, Hello(role=role, pid=os.getpid()), connect_deadline_s=DEADLINE_S)
    moments: Moments = {"shared": [], "pickled": []}
    try:
        welcome = client.connect()
        with RolloutMemory.attach(welcome.rollout_segment) as memory, Connection(descriptor) as pipe:
            play = play_actor if role is Role.ACTOR else play_learner
            play(client, welcome, memory, pipe, moments)
        client.bye("finished")
    finally:
        client.close()
    print(json.dumps(moments))
    return 0


def play_actor(client: Client, welcome: Welcome, memory: RolloutMemory, pipe: Connection, moments: Moments) -> None:
    """Hands over one rollout per grant, twice, until told to stop."""
    spec = RunSpec.from_json(welcome.run_spec)
    client.send(
        Join(
            spaces=spec.spaces,
            autoreset=spec.autoreset,
            run_digest=spec.digest(),
            state_strategy=spec.state_strategy,
        )
    )
    generator = np.random.default_rng(spec.seed)
    names = [field.name for field in memory.fields if field.role is not FieldRole.LEARNER]
    while isinstance(grant := next_message(client), Grant):
        slot = memory.writer(grant.slot)
        fill_slot(slot, grant.epoch, generator)
        arrays = {name: slot.arrays[name].copy() for name in names}
        commit = Commit(slot=grant.slot, epoch=grant.epoch, valid_steps=slot.num_steps, version=grant.version)
        moments["shared"].append(time.perf_counter())
        client.send(commit)
        receive(pipe)
        moments["pickled"].append(time.perf_counter())
        pipe.send(arrays)


def play_learner(client: Client, welcome: Welcome, memory: RolloutMemory, pipe: Connection, moments: Moments) -> None:
    """Takes every rollout both ways, until told to stop."""
    spec = RunSpec.from_json(welcome.run_spec)
    rollouts = {slot: memory.rollout(range(slot, slot + 1)) for slot in range(spec.num_slots)}
    version = welcome.version + 1
    client.send(Ready(version=version))
    while isinstance(batch := next_message(client), Batch):
        slot = batch.slots[0]
        header = memory.header(slot)
        check(float(rollouts[slot]["rewards"][-1, -1]), header.epoch if header.committed else -1)
        moments["shared"].append(time.perf_counter())
        pipe.send("next")
        arrays = receive(pipe)
        check(float(arrays["rewards"][-1, -1]), header.epoch)
        moments["pickled"].append(time.perf_counter())
        version += 1
        client.send(Publish(update=batch.update, version=version))


def next_message(client: Client) -> Grant | Batch | None:
    """The next piece of work; None at the end. Raises WaitTimedOut, ProtocolError."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        match client.receive(DEADLINE_S):
            case Grant() | Batch() as work:
                return work
            case Stop():
                return None
            case None if client.stopping:
                return None
    raise WaitTimedOut(f"no GRANT, BATCH or STOP within {DEADLINE_S:g} s")


def receive(pipe: Connection) -> dict[str, np.ndarray]:
    """What the other process sends. Raises WaitTimedOut."""
    if not pipe.poll(DEADLINE_S):
        raise WaitTimedOut(f"the other process sent nothing within {DEADLINE_S:g} s")
    received: dict[str, np.ndarray] = pipe.recv()
    return received


def check(reward: float, epoch: int) -> None:
    """Rewards equal the epoch of their lease."""
    if reward != epoch:
        raise ProtocolError(f"the rollout of epoch {epoch} holds reward {reward}: it is not the one that was announced")


if __name__ == "__main__":
    sys.exit(main())
