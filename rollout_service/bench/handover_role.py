"""`python -m rollout_service.bench.handover_role actor|learner ENDPOINT DESCRIPTOR`: one process of the hand-over.

    odd updates    GRANT -> the actor fills its slot -> COMMIT ... BATCH -> the learner reads the last row   (shared)
                   learner: "next" through the pipe -> the actor sends the same arrays -> received           (pickled)
    even updates   GRANT -> the slot is filled, all sleep for RESTED_S -> COMMIT ... the last row            (rested)
    learner: PUBLISH -> the next GRANT

Started by `handover` only. Takes down when a rollout set out, or could be read, and prints the moments as JSON, side
-> seconds of the monotonic clock. What must never happen: a rollout that is not the one that was announced; rewards
equal the lease's epoch, so that would show.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from rollout_service.bench.rig import STATE, fill_slot
from rollout_service.control.client import Client
from rollout_service.control.messages import Batch, Commit, Grant, Hello, Join, Publish, Ready, Role, Stop, Welcome
from rollout_service.errors import ProtocolError, WaitTimedOut
from rollout_service.lifeline import follow_parent
from rollout_service.memory.schema import Role as FieldRole
from rollout_service.memory.slots import RolloutMemory, SlotWriter
from rollout_service.runspec import RunSpec

DEADLINE_S: Final = 20.0
RESTED_S: Final = 0.025
"""Caches are then somebody else's, and cores asleep."""
Moments = dict[str, list[float]]


def main() -> int:
    role, endpoint, descriptor = Role(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    follow_parent()
    client = Client(endpoint, Hello(role=role, pid=os.getpid()), connect_deadline_s=DEADLINE_S)
    moments: Moments = {"shared": [], "rested": [], "pickled": []}
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
    rows: dict[str, np.ndarray] = {}
    while isinstance(grant := next_message(client), Grant):
        slot = memory.writer(grant.slot)
        if not rows:
            fill_slot(slot, grant.epoch, generator)
            rows = {name: slot.arrays[name].copy() for name in names}
        refill(slot, grant.epoch, rows)
        commit = Commit(slot=grant.slot, epoch=grant.epoch, valid_steps=slot.num_steps, version=grant.version)
        if rested := is_rested(grant.update):
            threading.Event().wait(RESTED_S)
        moments["rested" if rested else "shared"].append(time.perf_counter())
        client.send(commit)
        if not rested:
            receive(pipe)
            moments["pickled"].append(time.perf_counter())
            pipe.send({name: slot.arrays[name] for name in names})


def refill(slot: SlotWriter, epoch: int, rows: Mapping[str, np.ndarray]) -> None:
    """Another lease of the slot with the same rows, but for the rewards: drawing new ones would take longer."""
    slot.open(epoch=epoch, actor=0, incarnation=0, version=epoch)
    for name, array in rows.items():
        slot.arrays[name][...] = array
    slot.arrays["rewards"][...] = epoch
    final_state = {name: slot.arrays[name][:, -1] for name in STATE}
    slot.close(slot.num_steps, last_values=rows["last_values"], final_state=final_state)


def is_rested(update: int) -> bool:
    """Is this rollout handed over after a rest?"""
    return update % 2 == 0


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
        rested = is_rested(batch.update)
        moments["rested" if rested else "shared"].append(time.perf_counter())
        if not rested:
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
