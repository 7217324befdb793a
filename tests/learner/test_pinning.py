"""Shared memory is registered with CUDA where it lies; the runtime is played by the test."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from mmap import PAGESIZE

import numpy as np
import pytest
import torch

from learner.pinning import PinnedFields, page_ranges
from learner.staging import DeviceStaging
from learner.upload import HostLane, is_uploaded_whole
from rollout_service.memory.schema import rollout_fields
from rollout_service.memory.slots import RolloutMemory
from rollout_service.runspec import Leaf, SpaceKind, Spaces

ACTION = Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=2)
OUT_OF_MEMORY = 2
ALREADY_REGISTERED = 712


class PlayedRuntime:
    """As the CUDA runtime: refuses empty and overlapping ranges, and what is beyond `limit` bytes of locked memory;
    keeps the code of a refusal until it is asked to forget it."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}
        self.last_error = 0
        self.calls = 0

    def register(self, address: int, nbytes: int) -> int:
        self.calls += 1
        code = 0
        if nbytes == 0:
            code = 1
        elif any(address < start + size and start < address + nbytes for start, size in self.registered.items()):
            code = ALREADY_REGISTERED
        elif self.limit is not None and sum(self.registered.values()) + nbytes > self.limit:
            code = OUT_OF_MEMORY
        else:
            self.registered[address] = nbytes
        self.last_error = code or self.last_error
        return code

    def unregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 713

    def describe(self, code: int) -> str:
        return f"error {code}"

    def forget_error(self) -> None:
        self.last_error = 0


def make_memory(*leaves: Leaf) -> RolloutMemory:
    observation = leaves or (Leaf(kind=SpaceKind.BOX, shape=(5,), dtype="float32"),)
    fields = rollout_fields(Spaces(observation=observation, action=ACTION), {"hidden": (1, 2), "cell": (1, 2)})
    return RolloutMemory.create(fields, num_slots=4, envs_per_slot=3, num_steps=16)


@pytest.fixture
def memory() -> Iterator[RolloutMemory]:
    with make_memory() as made:
        yield made


def uploaded(memory: RolloutMemory) -> list[str]:
    return [field.name for field in memory.fields if is_uploaded_whole(field)]


def test_what_actors_write_per_step_is_uploaded_whole_and_nothing_else(memory: RolloutMemory) -> None:
    assert uploaded(memory) == [
        "observations", "actions", "rewards", "values", "log_probs", "terminated", "truncated", "valid",
        "truncation_values",
    ]  # fmt: skip


def test_ranges_are_whole_pages_of_their_own_around_all_slots_of_a_field(memory: RolloutMemory) -> None:
    ranges = page_ranges(memory, uploaded(memory))
    assert all(pages.address % PAGESIZE == 0 and pages.nbytes % PAGESIZE == 0 for pages in ranges)
    assert all(first.address + first.nbytes <= second.address for first, second in itertools.pairwise(ranges))
    for pages in ranges:
        array = memory.array(pages.name)
        assert pages.address == array.ctypes.data
        assert 0 <= pages.nbytes - array.nbytes < PAGESIZE
    segment = np.byte_bounds if hasattr(np, "byte_bounds") else np.lib.array_utils.byte_bounds
    assert ranges[-1].address + ranges[-1].nbytes <= segment(memory._segment.root)[1]


def test_every_field_is_pinned_and_given_back(memory: RolloutMemory) -> None:
    runtime = PlayedRuntime()
    pinned = PinnedFields(memory, uploaded(memory), runtime)
    assert pinned.warning is None
    assert pinned.names == tuple(uploaded(memory))
    assert pinned.nbytes == sum(runtime.registered.values())
    pinned.close()
    pinned.close()
    assert runtime.registered == {}


def test_a_field_without_bytes_is_left_out() -> None:
    runtime = PlayedRuntime()
    empty = Leaf(kind=SpaceKind.BOX, shape=(0,), dtype="float32", path=".nothing")
    some = Leaf(kind=SpaceKind.BOX, shape=(2,), dtype="float32", path=".something")
    with make_memory(empty, some) as memory:
        pinned = PinnedFields(memory, uploaded(memory), runtime)
        assert pinned.warning is None
        assert "observations.nothing" not in pinned.names
        assert "observations.something" in pinned.names
        assert runtime.last_error == 0
        pinned.close()


def test_a_refusal_is_one_warning_its_code_is_not_left_behind_and_nothing_more_is_tried(memory: RolloutMemory) -> None:
    first = page_ranges(memory, uploaded(memory))[0].nbytes
    runtime = PlayedRuntime(limit=first)
    staging = DeviceStaging(torch_cpu(), lane=HostLane(), runtime=runtime)
    warning = staging.prepare(memory)
    assert warning is not None
    assert warning.startswith("CUDA could not pin field actions (error 2); ")
    assert "ulimit -l" in warning
    assert "\n" not in warning
    assert runtime.last_error == 0
    assert runtime.calls == 2
    assert staging.pinned[0].names == ("observations",)
    staging.close()
    assert runtime.registered == {}


def test_pages_stay_mapped_until_they_are_given_back() -> None:
    runtime = PlayedRuntime()
    memory = make_memory()
    name, pinned = memory.name, PinnedFields(memory, ["observations"], runtime)
    address = page_ranges(memory, ["observations"])[0].address
    memory.close()
    gc.collect()
    assert is_mapped(address), "the mapping is gone, its pages are still registered"
    pinned.close()
    gc.collect()
    assert not any(name in line for line in mappings())


def test_memory_is_reopened_twenty_times_without_a_trace() -> None:
    runtime = PlayedRuntime()
    for _ in range(20):
        with make_memory() as memory:
            staging = DeviceStaging(torch_cpu(), lane=HostLane(), runtime=runtime)
            assert staging.prepare(memory) is None
            assert len(runtime.registered) == len(uploaded(memory))
            staging.close()
    assert runtime.registered == {}
    assert runtime.last_error == 0


def torch_cpu() -> torch.device:
    return torch.device("cpu")


def mappings() -> list[str]:
    with open("/proc/self/maps") as file:
        return file.read().splitlines()


def is_mapped(address: int) -> bool:
    bounds = (line.split(" ")[0].split("-") for line in mappings() if "/dev/shm/rs-" in line)
    return any(int(low, 16) <= address < int(high, 16) for low, high in bounds)
