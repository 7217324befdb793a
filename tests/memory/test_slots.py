"""Slots of a rollout segment: what is written by one process is read in place by another, whole or not at all."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rollout_service.errors import IncompleteRollout, OutOfRange, SegmentMismatch, ShapeError
from rollout_service.memory.schema import Field, Per, rollout_fields
from rollout_service.memory.segment import Segment
from rollout_service.memory.slots import RolloutMemory, SlotHeader, SlotWriter, all_finite
from rollout_service.memory.weights import WeightsMemory
from rollout_service.runspec import ArraySpec, Leaf, SpaceKind, Spaces
from tests.memory.other_process import OtherProcess

S, E, T, L, H = 4, 3, 5, 2, 4
SPACES = Spaces(
    observation=(
        Leaf(path=".image", kind=SpaceKind.BOX, shape=(2, 2, 1), dtype="uint8"),
        Leaf(path=".place", kind=SpaceKind.BOX, shape=(3,), dtype="float32"),
    ),
    action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=7),
)
FIELDS = rollout_fields(SPACES, {"hidden": (L, H), "cell": (L, H)})


@pytest.fixture
def memory() -> Iterator[RolloutMemory]:
    with RolloutMemory.create(FIELDS, num_slots=S, envs_per_slot=E, num_steps=T) as made:
        yield made


def marks(slot: int, step: int) -> np.ndarray[Any, Any]:
    """A number per env that names its place: 1000 * slot + 100 * env + step, float [E]."""
    return np.array([1000 * slot + 100 * env + step for env in range(E)], np.float32)


def state(slot: int, step: int, offset: float = 0.0) -> dict[str, np.ndarray[Any, Any]]:
    hidden = np.broadcast_to(marks(slot, step)[:, None, None], (E, L, H)) + np.float32(offset)
    return {"hidden": hidden, "cell": -hidden}


def write_row(writer: SlotWriter, step: int, **changes: Any) -> None:
    """One complete row of identifiable data, all envs, with `changes`."""
    place = marks(writer.slot, step)
    writer.write_state(step, state(writer.slot, step))
    rows = writer.observation_rows(step)
    rows["observations.image"][...] = step
    rows["observations.place"][...] = place[:, None]
    row = {
        "actions": np.full(E, step % 7),
        "rewards": place,
        "values": place + 0.25,
        "log_probs": -place,
        "terminated": np.zeros(E, bool),
        "truncated": np.zeros(E, bool),
    }
    writer.write_transition(step, **{**row, **changes})


def fill(writer: SlotWriter, steps: int = T, *, epoch: int = 1) -> None:
    writer.open(epoch=epoch, actor=7, incarnation=2, version=9)
    for step in range(steps):
        write_row(writer, step)


def close(writer: SlotWriter, steps: int = T, **changes: Any) -> None:
    arguments = {"last_values": marks(writer.slot, steps), "final_state": state(writer.slot, steps), **changes}
    writer.close(steps, **arguments)


# A new segment


def test_a_first_rollout_starts_fresh_and_everything_else_is_a_sentinel(memory: RolloutMemory) -> None:
    assert np.isnan(memory.array("rewards")).all()
    assert np.isnan(memory.array("truncation_values")).all()
    assert np.isnan(memory.array("final_hidden")).all()
    assert np.isnan(memory.array("hidden")[:, :, 1:]).all()
    assert (memory.array("hidden")[:, :, 0] == 0).all()
    assert (memory.array("cell")[:, :, 0] == 0).all()
    assert (memory.array("episode_start_carry") == 1).all()
    for name in ("valid", "terminated", "truncated", "advantages", "returns"):
        assert not memory.array(name).any()
    assert memory.header(0) == SlotHeader(0, 0, 0, 0, 0, 0)
    assert not memory.header(0).committed


def test_arrays_have_the_shapes_and_dtypes_of_their_fields(memory: RolloutMemory) -> None:
    assert memory.array("observations.image").shape == (S, E, T, 2, 2, 1)
    assert memory.array("observations.image").dtype == np.uint8
    assert memory.array("hidden").shape == (S, E, T, L, H)
    assert memory.array("final_cell").shape == (S, E, L, H)
    assert memory.array("actions").dtype == np.int64
    assert memory.array("last_values").shape == (S, E)


def test_who_attaches_learns_fields_sizes_and_spec_from_the_header() -> None:
    with (
        RolloutMemory.create(FIELDS, num_slots=S, envs_per_slot=E, num_steps=T, spec=b"the run") as owner,
        RolloutMemory.attach(owner.name) as other,
    ):
        assert [field.name for field in other.fields] == [field.name for field in FIELDS]
        assert (other.num_slots, other.envs_per_slot, other.num_steps) == (S, E, T)
        assert (other.nbytes, other.spec, other.owner) == (owner.nbytes, b"the run", False)
        owner.array("rewards")[3, 2, 4] = 3204.0
        assert other.array("rewards")[3, 2, 4] == 3204.0


def test_a_layout_that_does_not_fit_its_segment_is_refused(memory: RolloutMemory) -> None:
    layout = memory.layout.to_json()
    with Segment.create(memory.nbytes - 1, kind="rollout", layout=layout) as short:
        short.mark_ready()
        with pytest.raises(SegmentMismatch, match=f"its layout needs {memory.nbytes}"):
            RolloutMemory.attach(short.name)


def test_a_weights_segment_is_no_rollout_segment() -> None:
    with (
        WeightsMemory.create((ArraySpec(name="w", shape=(2,), dtype="float32"),)) as weights,
        pytest.raises(SegmentMismatch, match="holds weights, wanted was rollout"),
    ):
        RolloutMemory.attach(weights.name)


def test_unknown_fields_and_slots_are_named(memory: RolloutMemory) -> None:
    with pytest.raises(OutOfRange, match=r"no field 'reward'.*'rewards'"):
        memory.array("reward")
    for slot in (-1, S):
        with pytest.raises(OutOfRange, match=rf"slot {slot} is not one of 0\.\.3"):
            memory.writer(slot)
        with pytest.raises(OutOfRange, match=rf"slot {slot} is not one of 0\.\.3"):
            memory.header(slot)


def test_a_segment_without_the_transition_fields_has_no_writer() -> None:
    fields = (Field("rewards", Per.STEP, np.dtype(np.float32)),)
    with (
        RolloutMemory.create(fields, num_slots=1, envs_per_slot=1, num_steps=1) as memory,
        pytest.raises(ShapeError, match=r"no fields .*'actions'"),
    ):
        memory.writer(0)


# Views


def test_adjacent_slots_are_one_env_major_rollout_without_a_copy(memory: RolloutMemory) -> None:
    for slot in range(S):
        fill(memory.writer(slot))
    rollout = memory.rollout(range(1, 3))
    assert rollout["rewards"].shape == (2 * E, T)
    assert rollout["hidden"].shape == (2 * E, T, L, H)
    assert rollout["last_values"].shape == (2 * E,)
    for name, array in rollout.items():
        assert array.base is not None, name
        assert np.shares_memory(array, memory.array(name)), name
    expected = [[1000 * (1 + row // E) + 100 * (row % E) + step for step in range(T)] for row in range(2 * E)]
    assert rollout["rewards"].tolist() == expected
    rollout["advantages"][E, 0] = 5.0
    assert memory.array("advantages")[2, 0, 0] == 5.0


def test_a_partial_rollout_is_a_view_too(memory: RolloutMemory) -> None:
    assert np.shares_memory(memory.rollout(range(2))["rewards"][:, :2], memory.array("rewards"))


@pytest.mark.parametrize("slots", [range(0), range(2, 1), range(-1, 2), range(3, 5), range(0, 4, 2)])
def test_slots_that_are_no_adjacent_run_are_refused(memory: RolloutMemory, slots: range) -> None:
    with pytest.raises(OutOfRange, match="not adjacent slots"):
        memory.rollout(slots)


def test_slots_do_not_share_a_byte(memory: RolloutMemory) -> None:
    fill(memory.writer(2))
    close(memory.writer(2))
    for slot in (1, 3):
        assert memory.header(slot) == SlotHeader(0, 0, 0, 0, 0, 0)
        assert np.isnan(memory.array("rewards")[slot]).all()


def test_stamps_of_different_writers_share_no_cache_line_and_every_field_begins_with_one(memory: RolloutMemory) -> None:
    """The stamps are the only words in memory that a process writes while others look at theirs."""
    lines = [memory.writer(slot)._header.ctypes.data for slot in range(S)]
    assert [line % 64 for line in lines] == [0] * S
    assert [after - line for line, after in itertools.pairwise(lines)] == [64] * (S - 1)
    first_field = min(memory.array(field.name).ctypes.data for field in memory.fields)
    assert lines[-1] + 64 <= first_field
    assert {field.name: memory.array(field.name).ctypes.data % 64 for field in memory.fields} == {
        field.name: 0 for field in memory.fields
    }


def test_views_and_writers_outlive_their_memory() -> None:
    memory = RolloutMemory.create(FIELDS, num_slots=1, envs_per_slot=E, num_steps=T)
    rewards, writer = memory.array("rewards"), memory.writer(0)
    memory.close()
    del memory
    gc.collect()
    fill(writer)
    assert rewards[0, 1, 2] == 102.0


# Writing


def test_what_another_process_wrote_is_read_in_place(memory: RolloutMemory) -> None:
    actor = """
import sys
import numpy as np
from rollout_service.memory.slots import RolloutMemory
from tests.memory.test_slots import close, fill
memory = RolloutMemory.attach(sys.argv[1])
writer = memory.writer(2)
fill(writer, epoch=6)
close(writer)
memory.close()
print("committed", flush=True)
"""
    with OtherProcess(actor, memory.name) as other:
        assert other.answer() == "committed"
        assert other.leave() == (0, "")
    assert memory.header(2) == SlotHeader(6, 7, 2, 9, T, 6)
    assert memory.header(2).committed
    assert memory.array("rewards")[2, 1].tolist() == [2100.0, 2101.0, 2102.0, 2103.0, 2104.0]
    assert memory.array("hidden")[2, 2, 3, 1, 0] == 2203.0
    assert memory.array("observations.image")[2, 0, 4, 0, 0, 0] == 4
    assert memory.array("last_values")[2].tolist() == [2005.0, 2105.0, 2205.0]
    assert memory.array("final_cell")[2, 0, 0, 0] == -2005.0
    assert memory.array("valid")[2].all()


def test_a_writer_knows_its_slot_and_sizes(memory: RolloutMemory) -> None:
    writer = memory.writer(1)
    assert (writer.slot, writer.num_envs, writer.num_steps) == (1, E, T)
    assert writer.arrays["hidden"].shape == (E, T, L, H)
    assert np.shares_memory(writer.arrays["hidden"], memory.array("hidden")[1])


def test_observation_rows_are_views_of_one_step(memory: RolloutMemory) -> None:
    rows = memory.writer(1).observation_rows(3)
    assert rows.keys() == {"observations.image", "observations.place"}
    rows["observations.place"][2] = (1, 2, 3)
    assert memory.array("observations.place")[1, 2, 3].tolist() == [1, 2, 3]


def test_rows_are_views_of_every_field_per_step_with_sentinels_after_open(memory: RolloutMemory) -> None:
    writer = memory.writer(1)
    fill(writer)
    writer.open(epoch=2, actor=0, incarnation=0, version=0)
    rows = writer.rows(2)
    assert rows.keys() == {field.name for field in FIELDS if field.per is Per.STEP}
    assert not any(rows[name].any() for name in ("terminated", "truncated", "valid"))
    assert np.isnan(rows["truncation_values"]).all()
    rows["rewards"][...] = range(E)
    assert memory.array("rewards")[1, :, 2].tolist() == list(range(E))


@pytest.mark.parametrize(
    ("values", "finite"),
    [([0.0, 1.0], True), ([3e38, 3e38], True), ([1.0, np.nan], False), ([np.inf, 0.0], False), ([0.0, -np.inf], False)],
)
def test_finite_is_what_has_no_nan_and_no_infinity(values: list[float], finite: bool) -> None:
    assert all_finite(np.array(values, np.float32)) is finite
    assert all_finite(np.tile(np.array(values, np.float32), (3, 4))[:, 2:]) is finite


def test_one_env_a_run_of_envs_and_a_selection_can_be_written(memory: RolloutMemory) -> None:
    writer = memory.writer(0)
    writer.open(epoch=1, actor=0, incarnation=0, version=0)
    common = {"actions": 1, "values": 0.0, "log_probs": 0.0, "terminated": False, "truncated": True}
    writer.write_transition(0, **common, rewards=1.0, truncation_values=8.0, envs=1)
    writer.write_transition(1, **common, rewards=np.array([2.0, 3.0]), envs=slice(1, 3))
    writer.write_transition(2, **common, rewards=np.array([4.0, 5.0]), valid=False, envs=np.array([2, 0]))
    writer.write_state(0, {"hidden": np.full((L, H), 6.0)}, 1)
    assert np.nan_to_num(memory.array("rewards")[0, :, :3], nan=-1).tolist() == [[-1, -1, 5], [1, 2, -1], [-1, 3, 4]]
    assert memory.array("valid")[0, :, :3].tolist() == [[0, 0, 0], [1, 1, 0], [0, 1, 0]]
    assert memory.array("truncated")[0, :, :3].tolist() == [[0, 0, 1], [1, 1, 0], [0, 1, 1]]
    assert memory.array("truncation_values")[0, 1, 0] == 8.0
    assert np.isnan(memory.array("truncation_values")[0, 1, 1])
    assert (memory.array("hidden")[0, 1, 0] == 6.0).all()


def test_writing_a_row_again_forgets_its_truncation_value(memory: RolloutMemory) -> None:
    writer = memory.writer(0)
    write_row(writer, 1, truncated=True, truncation_values=8.0)
    write_row(writer, 1)
    assert np.isnan(memory.array("truncation_values")[0, :, 1]).all()


def test_a_new_lease_keeps_the_seed_and_forgets_the_rest(memory: RolloutMemory) -> None:
    writer = memory.writer(0)
    fill(writer)
    close(writer)
    memory.array("hidden")[0, :, 0] = 0.5
    memory.array("episode_start_carry")[0] = (0, 1, 0)
    memory.array("returns")[0] = 3.0
    writer.open(epoch=2, actor=1, incarnation=4, version=10)
    assert memory.header(0) == SlotHeader(2, 1, 4, 10, 0, 0)
    assert (memory.array("hidden")[0, :, 0] == 0.5).all()
    assert memory.array("episode_start_carry")[0].tolist() == [0, 1, 0]
    assert np.isnan(memory.array("hidden")[0, :, 1:]).all()
    for name in ("rewards", "values", "log_probs", "truncation_values", "last_values", "final_hidden"):
        assert np.isnan(memory.array(name)[0]).all(), name
    assert np.isnan(memory.array("observations.place")[0]).all()
    assert not memory.array("valid")[0].any()
    assert (memory.array("returns")[0] == 3.0).all()  # the learner's, not the actor's to clear


# Completeness


def test_a_partial_rollout_needs_only_its_own_rows(memory: RolloutMemory) -> None:
    writer = memory.writer(1)
    fill(writer, 2)
    close(writer, 2)
    assert memory.header(1).valid_steps == 2
    assert memory.header(1).committed


def test_a_rollout_of_no_steps_needs_nothing(memory: RolloutMemory) -> None:
    writer = memory.writer(1)
    writer.open(epoch=3, actor=0, incarnation=0, version=0)
    writer.close(0, last_values=np.nan, final_state={})
    assert memory.header(1).valid_steps == 0
    assert memory.header(1).committed


def test_a_skipped_row_is_found_by_step_and_the_slot_stays_uncommitted(memory: RolloutMemory) -> None:
    writer = memory.writer(2)
    fill(writer, 2)
    write_row(writer, 3)
    with pytest.raises(IncompleteRollout, match="rewards of slot 2 is nan at step 2, env 0"):
        close(writer, 4)
    assert not memory.header(2).committed


@pytest.mark.parametrize("name", ["rewards", "values", "log_probs", "hidden", "cell", "observations.place"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_found_by_field_step_and_env(
    memory: RolloutMemory, name: str, value: float
) -> None:
    writer = memory.writer(2)
    fill(writer)
    writer.arrays[name][1, 3, ...] = value
    with pytest.raises(IncompleteRollout, match=f"{name} of slot 2 is {value} at step 3, env 1"):
        close(writer)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"last_values": np.array([0, np.nan, 0])}, "last_values of slot 1 is nan at env 1"),
        ({"final_state": {"hidden": np.zeros((E, L, H))}}, "final_cell of slot 1 is nan at env 0"),
    ],
)
def test_what_follows_the_last_step_must_be_there_too(
    memory: RolloutMemory, changes: dict[str, Any], named: str
) -> None:
    writer = memory.writer(1)
    fill(writer)
    with pytest.raises(IncompleteRollout, match=named):
        close(writer, **changes)


def test_a_filler_row_needs_a_reward_and_a_state_and_nothing_else(memory: RolloutMemory) -> None:
    writer = memory.writer(1)
    fill(writer)
    filler = {"rewards": 0.0, "values": np.nan, "log_probs": np.nan, "valid": np.array([True, False, True])}
    write_row(writer, 3, **{**filler, "values": np.array([0, np.nan, 0]), "log_probs": np.array([0, np.nan, 0])})
    writer.observation_rows(3)["observations.place"][1] = np.nan
    close(writer)
    assert memory.header(1).committed
    writer.arrays["hidden"][1, 3] = np.nan
    with pytest.raises(IncompleteRollout, match="hidden of slot 1 is nan at step 3, env 1"):
        close(writer)


def test_a_missing_truncation_value_is_left_to_gae_but_an_infinite_one_is_not(memory: RolloutMemory) -> None:
    writer = memory.writer(1)
    fill(writer)
    write_row(writer, 2, truncated=True)
    close(writer)
    write_row(writer, 2, truncated=True, truncation_values=np.array([1.0, 2.0, -np.inf]))
    with pytest.raises(IncompleteRollout, match="truncation_values of slot 1 is -inf at step 2, env 2"):
        close(writer)


@pytest.mark.parametrize("steps", [-1, T + 1])
def test_valid_steps_outside_the_slot_are_refused(memory: RolloutMemory, steps: int) -> None:
    with pytest.raises(OutOfRange, match=rf"valid_steps is {steps}, it must lie in 0\.\.5"):
        memory.writer(0).close(steps, last_values=0.0, final_state={})


def test_the_smallest_slot_works() -> None:
    spaces = Spaces(
        observation=(Leaf(kind=SpaceKind.BOX, shape=(1,), dtype="float32"),),
        action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=2),
    )
    fields = rollout_fields(spaces, {"hidden": (1, 1)})
    with RolloutMemory.create(fields, num_slots=1, envs_per_slot=1, num_steps=1) as memory:
        writer = memory.writer(0)
        writer.open(epoch=1, actor=0, incarnation=0, version=0)
        writer.observation_rows(0)["observations"][...] = 1
        ordinary = {"actions": 1, "rewards": 1, "values": 1, "log_probs": 1, "terminated": 0, "truncated": 0}
        writer.write_transition(0, **ordinary)
        writer.close(1, last_values=[2.0], final_state={"hidden": np.ones((1, 1, 1))})
        assert memory.rollout(range(1))["hidden"].shape == (1, 1, 1, 1)
        assert memory.header(0).committed


def test_a_field_without_bytes_is_committed_and_read_like_any_other() -> None:
    fields = rollout_fields(
        Spaces(
            observation=(
                Leaf(kind=SpaceKind.BOX, shape=(0,), dtype="float32", path=".nothing"),
                Leaf(kind=SpaceKind.BOX, shape=(2,), dtype="uint8", path=".something"),
            ),
            action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=2),
        ),
        {},
    )
    with RolloutMemory.create(fields, num_slots=2, envs_per_slot=3, num_steps=4) as memory:
        writer = memory.writer(1)
        writer.open(epoch=1, actor=0, incarnation=0, version=1)
        for t in range(4):
            writer.write_transition(
                t, actions=0, rewards=1.0, values=0.0, log_probs=-0.5, terminated=False, truncated=False
            )
        writer.close(4, last_values=0.0, final_state={})
        assert memory.rollout(range(2))["observations.nothing"].shape == (6, 4, 0)
        assert memory.header(1).valid_steps == 4
