"""What a writer stored before it sent a message is what a reader finds once it has received it: whole rows."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np

from rollout_service.control.endpoints import remove_socket_directory, socket_endpoint
from rollout_service.control.transport import Router
from rollout_service.memory.schema import Field, Per
from rollout_service.memory.slots import RolloutMemory
from tests.fixtures.machine import environment

WRITERS = 3
"""With the reader more processes than this machine is sure to have cores for."""
ROW = (1 << 18,)
"""float32: 1 MiB."""
ROWS_PER_WRITER = 120
DEADLINE_S = 30.0
WRITER = """
import sys
from rollout_service.control.transport import Dealer
from rollout_service.memory.slots import RolloutMemory
name, endpoint, slot, rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
memory, dealer = RolloutMemory.attach(name), Dealer(endpoint)
row = memory.array("row")[slot, 0, 0]
for k in range(1, rows + 1):
    row[...] = 1000 * slot + k
    dealer.send(b"%d %d" % (slot, k))
    assert dealer.receive(30.0) == b"next"
dealer.close()
del row
memory.close()
"""


def test_no_row_is_ever_a_mixture():
    endpoint = socket_endpoint(f"rows-{os.getpid()}")
    fields = (Field("row", Per.STEP, np.dtype("float32"), ROW),)
    with RolloutMemory.create(fields, num_slots=WRITERS, envs_per_slot=1, num_steps=1) as memory:
        router = Router(endpoint)
        words = [memory.name, endpoint]
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, *words, str(slot), str(ROWS_PER_WRITER)], env=environment())
            for slot in range(WRITERS)
        ]
        try:
            seen = read(router, memory)
            assert [writer.wait(DEADLINE_S) for writer in writers] == [0] * WRITERS
        finally:
            for writer in writers:
                writer.kill()
                writer.wait()
            router.close()
            remove_socket_directory(endpoint)
    assert seen == [ROWS_PER_WRITER] * WRITERS


def read(router: Router, memory: RolloutMemory) -> list[int]:
    """Checks every row that is announced. Returns how many there were per writer."""
    rows = memory.array("row")
    seen = [0] * WRITERS
    deadline = time.monotonic() + DEADLINE_S
    while sum(seen) < WRITERS * ROWS_PER_WRITER and time.monotonic() < deadline:
        for peer, message in router.receive(1.0):
            slot, k = (int(word) for word in message.split())
            found = rows[slot, 0, 0]
            assert (found.min(), found.max()) == (1000 * slot + k, 1000 * slot + k), "a mixed row"
            seen[slot] += 1
            assert seen[slot] == k
            router.send(peer, b"next")
    return seen
