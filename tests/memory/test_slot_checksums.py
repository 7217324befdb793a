"""A slot with a checksum tells whoever reads it whether it is what its actor committed."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_service.errors import TornSlot
from rollout_service.memory.checksum import CHECKED, slot_checksum
from rollout_service.memory.schema import Role, rollout_fields
from rollout_service.memory.slots import RolloutMemory
from rollout_service.runspec import Leaf, SpaceKind, Spaces

SPACES = Spaces(
    observation=(Leaf(kind=SpaceKind.BOX, shape=(3,), dtype="float32"),),
    action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=2),
)
ENVS, STEPS, VALID = 2, 5, 3


@pytest.fixture
def memory():
    fields = rollout_fields(SPACES, {"hidden": (1, 4)})
    with RolloutMemory.create(fields, num_slots=2, envs_per_slot=ENVS, num_steps=STEPS) as made:
        yield made


def fill(memory: RolloutMemory, *, checksummed: bool = True) -> None:
    """Slot 1, version 7, three valid steps."""
    writer = memory.writer(1, checksummed=checksummed)
    writer.open(epoch=4, actor=1, incarnation=2, version=7)
    for t in range(VALID):
        writer.observation_rows(t)["observations"][...] = t
        writer.write_state(t, {"hidden": np.full((ENVS, 1, 4), t / 10, np.float32)})
        writer.write_transition(t, actions=1, rewards=0.5, values=t, log_probs=-1.0, terminated=False, truncated=False)
    writer.close(VALID, last_values=0.0, final_state={"hidden": np.ones((ENVS, 1, 4), np.float32)})


def test_what_was_committed_is_found_as_it_was(memory: RolloutMemory) -> None:
    fill(memory)
    assert memory.header(1).checksum >= CHECKED
    assert memory.verify(1, version=7, valid_steps=VALID) is True
    assert memory.verify(1, version=7, valid_steps=VALID) is True


def test_without_a_checksum_nothing_is_claimed(memory: RolloutMemory) -> None:
    fill(memory, checksummed=False)
    assert memory.header(1).checksum == 0
    assert memory.verify(1, version=7, valid_steps=VALID) is False


@pytest.mark.parametrize(
    "field", [f.name for f in rollout_fields(SPACES, {"hidden": (1, 4)}) if f.role is not Role.LEARNER]
)
def test_one_byte_written_since_is_found_in_every_field(memory: RolloutMemory, field: str) -> None:
    fill(memory)
    memory.array(field)[1].view(np.uint8).reshape(-1)[0] ^= 1
    with pytest.raises(TornSlot, match=r"slot 1, epoch 4 of actor 1 \(incarnation 2\) has checksum .* written since"):
        memory.verify(1, version=7, valid_steps=VALID)


def test_what_the_learner_writes_and_rows_beyond_the_valid_ones_do_not_count(memory: RolloutMemory) -> None:
    fill(memory)
    memory.array("advantages")[1] = 3.0
    memory.array("returns")[1] = 3.0
    memory.array("rewards")[1, :, VALID:] = 3.0
    assert memory.verify(1, version=7, valid_steps=VALID) is True


@pytest.mark.parametrize(("version", "valid_steps"), [(8, VALID), (7, VALID - 1)])
def test_stamps_that_are_not_those_of_the_commit_are_found(
    memory: RolloutMemory, version: int, valid_steps: int
) -> None:
    fill(memory)
    with pytest.raises(TornSlot, match=rf"says committed epoch 4, version 7, 3 steps; .* version {version}"):
        memory.verify(1, version=version, valid_steps=valid_steps)


def test_a_lease_that_has_only_begun_has_no_checksum(memory: RolloutMemory) -> None:
    fill(memory)
    memory.writer(1, checksummed=True).open(epoch=5, actor=0, incarnation=0, version=8)
    assert memory.header(1).checksum == 0


def test_a_checksum_of_zero_is_one(memory: RolloutMemory) -> None:
    assert slot_checksum({}, (), 0) == CHECKED
