"""The device's path gives the batch of the CPU's, field by field, and V-trace's rows; here both run on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from learner import gathering
from learner.gae import Estimator
from learner.off_policy import TraceRows
from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.sequences import SequenceBatch
from learner.staging import DeviceStaging, HostStaging, compute_exactly, staging_for
from learner.trainer import TimeSplit
from learner.upload import HostLane, upload
from rollout_service.config import GaeRule
from rollout_service.errors import IncompleteRollout, OutOfOrder
from rollout_service.memory.schema import rollout_fields
from rollout_service.memory.slots import RolloutMemory
from rollout_service.runspec import Leaf, SpaceKind, Spaces
from tests.fixtures.training import serial_run, small_config
from tests.learner.stream import Stream

CPU = torch.device("cpu")
STATE = {"hidden": (2, 3), "cell": (2, 3)}
NUM_STEPS = 13
ENVS = 3
LEAVES = (
    Leaf(kind=SpaceKind.BOX, shape=(4,), dtype="float32", path=".numbers"),
    Leaf(kind=SpaceKind.BOX, shape=(2, 3), dtype="uint8", path=".picture"),
    Leaf(kind=SpaceKind.BOX, shape=(), dtype="uint16", path=".wide"),
    Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=5, path=".choice"),
    Leaf(kind=SpaceKind.BOX, shape=(0,), dtype="float32", path=".nothing"),
)
ESTIMATOR = Estimator(0.99, 0.95, reward_scale=0.5)


def make_memory(*leaves: Leaf) -> RolloutMemory:
    spaces = Spaces(
        observation=leaves or LEAVES, action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=6, start=3)
    )
    return RolloutMemory.create(rollout_fields(spaces, STATE), num_slots=4, envs_per_slot=ENVS, num_steps=NUM_STEPS)


def fill(memory: RolloutMemory, slot: int, seed: int, valid_steps: int = NUM_STEPS, fillers: float = 0.2) -> None:
    """One commit of noise: some rows end, some are fillers; NaN wherever an actor may leave it."""
    rng = np.random.default_rng(seed)
    writer = memory.writer(slot)
    writer.open(epoch=seed + 1, actor=slot, incarnation=0, version=1)
    arrays = writer.arrays
    live = np.arange(NUM_STEPS) < valid_steps
    for field in memory.fields:
        array = arrays[field.name]
        if field.dtype.kind == "f":
            array[...] = rng.standard_normal(array.shape)
        elif field.name not in ("terminated", "truncated", "valid"):
            array[...] = rng.integers(3, 5, array.shape)
    shape = arrays["rewards"].shape
    arrays["valid"][...] = (rng.random(shape) >= fillers) & live
    arrays["terminated"][...] = rng.random(shape) < 0.2
    arrays["truncated"][...] = rng.random(shape) < 0.2
    arrays["truncation_values"][...] = np.where(arrays["truncated"] != 0, arrays["truncation_values"], np.nan)
    arrays["episode_start_carry"][...] = rng.integers(0, 2, ENVS)
    for name in ("rewards", "values", "log_probs", "observations.numbers"):
        arrays.get(name, arrays["rewards"])[:, valid_steps:] = np.nan
    writer.close(
        valid_steps, last_values=arrays["last_values"].copy(),
        final_state={name: np.zeros((ENVS, *shape), np.float32) for name, shape in STATE.items()},
    )  # fmt: skip


@pytest.fixture
def memory() -> Iterator[RolloutMemory]:
    with make_memory() as made:
        yield made


def no_phase(name: str) -> AbstractContextManager[None]:
    return nullcontext()


def both(
    memory: RolloutMemory, slots: list[int], counts: list[int], estimator: Estimator = ESTIMATOR
) -> tuple[SequenceBatch, SequenceBatch]:
    """The batch of the device's path, then that of the CPU's; what V-trace takes of their rows is the same."""
    steps = np.repeat(np.array(counts, np.int64), ENVS)
    batches, traced = [], []
    for way in (DeviceStaging(CPU), HostStaging()):
        rollout = RecurrentRolloutBuffer.over(memory, slots, at_once=False)
        batch, rows = way.batch(rollout, steps, estimator, no_phase, rows_too=True)
        batches.append(batch)
        traced.append(vars(TraceRows.of(rows, batch, estimator)))
    for name, expected in traced[1].items():
        torch.testing.assert_close(traced[0][name], expected, rtol=0, atol=0, equal_nan=True)
    return batches[0], batches[1]


def require_same(device: SequenceBatch, host: SequenceBatch) -> None:
    """Copied fields to the bit, estimates up to the order of float64 sums; dtypes, shapes and strides."""
    theirs, ours = ({**vars(batch), **batch.initial_state, "initial_state": None} for batch in (device, host))
    for batch in (theirs, ours):
        leaves = batch.pop("obs_seq")
        batch.update(leaves if isinstance(leaves, dict) else {"observations": leaves})
    assert theirs.keys() == ours.keys()
    for name, expected in ours.items():
        if expected is None:
            continue
        found = theirs[name]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        assert (found.is_contiguous(), expected.is_contiguous()) == (True, True), name
        if name in ("advantages", "returns"):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        else:
            assert found.numpy().tobytes() == expected.numpy().tobytes(), name


@pytest.mark.parametrize("rule", GaeRule)
@pytest.mark.parametrize("folded", [False, True])
def test_whole_rollouts_of_adjacent_slots(memory: RolloutMemory, rule: GaeRule, folded: bool) -> None:
    for slot in (1, 2):
        fill(memory, slot, seed=slot)
    require_same(*both(memory, [1, 2], [13, 13], replace(ESTIMATOR, rule=rule, truncation_as_termination=folded)))


@pytest.mark.parametrize("counts", [[13, 5], [7, 5], [0, 9], [1, 0]])
@pytest.mark.parametrize("slots", [[0, 1], [3, 1]])
def test_partial_rollouts_and_slots_in_any_order(memory: RolloutMemory, slots: list[int], counts: list[int]) -> None:
    for slot, count in zip(slots, counts, strict=True):
        fill(memory, slot, seed=10 + slot, valid_steps=count)
    require_same(*both(memory, slots, counts))


def test_rows_of_which_none_is_valid_and_rows_of_which_all_are(memory: RolloutMemory) -> None:
    fill(memory, 0, seed=1, fillers=1.1)
    require_same(*both(memory, [0], [13]))
    fill(memory, 0, seed=2, fillers=0.0)
    require_same(*both(memory, [0], [13]))


def test_one_plain_observation_is_one_tensor() -> None:
    with make_memory(Leaf(kind=SpaceKind.BOX, shape=(4,), dtype="float32")) as memory:
        fill(memory, 2, seed=3, valid_steps=8)
        device, host = both(memory, [2], [8])
        assert isinstance(device.obs_seq, torch.Tensor)
        require_same(device, host)


def test_a_batch_owns_its_memory_and_products_stay_off_the_slots(memory: RolloutMemory) -> None:
    fill(memory, 0, seed=4, fillers=0.0)
    before = {field.name: memory.array(field.name).tobytes() for field in memory.fields}
    steps = np.full(ENVS, NUM_STEPS)
    rollout = RecurrentRolloutBuffer.over(memory, [0])
    batch, _ = DeviceStaging(CPU).batch(rollout, steps, ESTIMATOR, no_phase)
    batch.actions.fill_(9)
    batch.old_values.fill_(9.0)
    batch.initial_state["hidden"].fill_(9.0)
    assert {field.name: memory.array(field.name).tobytes() for field in memory.fields} == before
    kept = batch.old_log_probs.clone()
    memory.array("log_probs")[...] = 0.0
    assert torch.equal(batch.old_log_probs, kept)
    with pytest.raises(OutOfOrder, match="GAE has not run"):
        rollout.to_training_batch()


def test_slots_that_are_no_neighbours_are_uploaded_run_by_run_from_where_they_lie(memory: RolloutMemory) -> None:
    for slot in (2, 3, 0):
        fill(memory, slot, seed=slot)
    rollout = RecurrentRolloutBuffer.over(memory, [2, 3, 0], at_once=False)
    rows = rollout.training_rows(NUM_STEPS)
    for name, pieces in (*rows.steps.items(), *rows.envs.items()):
        assert [len(piece) for piece in pieces] == [2 * ENVS, ENVS], name
        assert all(np.shares_memory(piece, memory.array(name)) for piece in pieces if piece.size), name
    there = upload(rows, CPU, HostLane())
    gathered = RecurrentRolloutBuffer.over(memory, [2, 3, 0])
    for name, pieces in gathered.training_rows(NUM_STEPS).steps.items():
        assert there.steps[name].numpy().tobytes() == pieces[0].tobytes(), name
    memory.array("rewards")[...] = 0.0
    assert there.steps["rewards"].numpy().any()


class WatchedLane:
    """Notes what happens, in order."""

    def __init__(self) -> None:
        self.story: list[str] = []

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.story.append("copies begin")
        yield
        self.story.append("copies are queued")

    def wait(self) -> None:
        self.story.append("copies are complete")


def test_slots_are_free_only_behind_the_copies_also_after_an_error(memory: RolloutMemory) -> None:
    fill(memory, 0, seed=5)
    lane = WatchedLane()
    staging = DeviceStaging(CPU, lane=lane)
    steps = np.full(ENVS, NUM_STEPS)
    staging.batch(RecurrentRolloutBuffer.over(memory, [0]), steps, ESTIMATOR, no_phase)
    assert lane.story == ["copies begin", "copies are queued", "copies are complete"]
    memory.array("rewards")[0, 1, 4] = np.inf
    memory.array("valid")[0, 1, 4] = 1
    lane.story.clear()
    with pytest.raises(IncompleteRollout, match="step 4, env 1 holds rewards"):
        staging.batch(RecurrentRolloutBuffer.over(memory, [0]), steps, ESTIMATOR, no_phase)
    assert lane.story[-1] == "copies are complete"


def test_rows_that_were_not_committed_are_refused(memory: RolloutMemory) -> None:
    fill(memory, 0, seed=6, valid_steps=4)
    with pytest.raises(IncompleteRollout, match="step 4 of env 0 was not written"):
        DeviceStaging(CPU).batch(RecurrentRolloutBuffer.over(memory, [0]), np.full(ENVS, 5), ESTIMATOR, no_phase)


def test_phases_are_timed(memory: RolloutMemory) -> None:
    fill(memory, 0, seed=7)
    split = TimeSplit()
    DeviceStaging(CPU).batch(RecurrentRolloutBuffer.over(memory, [0]), np.full(ENVS, 13), ESTIMATOR, split.phase)
    assert list(split.seconds) == ["upload", "gae", "batch"]


def test_a_cpu_needs_no_upload() -> None:
    assert isinstance(staging_for(CPU), HostStaging)


@pytest.mark.parametrize("settings", [{}, {"advantage_estimator": "vtrace"}, {"normalize_returns": True}])
def test_a_run_trains_alike_on_both_paths(settings: dict[str, object]) -> None:
    weights = []
    for device_path in (False, True):
        with serial_run(small_config(self_check=1, total_steps=64 * 3, **settings)) as run:
            if device_path:
                run.trainer._staging = DeviceStaging(CPU)
            for _ in range(3):
                report = run.one_update().report
            assert ("upload" in report.seconds) is device_path
            weights.append(run.trainer.weights())
    for name in weights[0]:
        np.testing.assert_allclose(weights[1][name], weights[0][name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_of_slots_that_are_no_neighbours_a_device_has_nothing_gathered_but_what_the_cpu_itself_reads() -> None:
    with serial_run(small_config(max_policy_lag=1)) as run:
        run.trainer._staging = DeviceStaging(CPU)
        stream = Stream(run)
        commits = stream.fill(0, 2), stream.fill(1, 0)
        with mock.patch.object(gathering, "_joined", wraps=gathering._joined) as joined:
            stream.learn(*commits)
    assert [call.args[0].name for call in joined.call_args_list] == ["valid"]


def test_only_a_deterministic_run_on_cuda_asks_torch_for_kernels_that_add_up_in_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    try:
        for device, asked in (("cpu", True), ("cuda", False), ("cuda", True)):
            compute_exactly(torch.device(device), deterministic=asked)
            assert torch.are_deterministic_algorithms_enabled() == (device == "cuda" and asked)
    finally:
        torch.use_deterministic_algorithms(False)
