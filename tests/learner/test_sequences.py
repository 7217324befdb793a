"""Sequence batches: layout, episode starts, padding, ownership of memory, minibatches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.sequences import SequenceBatch, materialize
from rollout_service.errors import OutOfOrder, OutOfRange

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "golden_recurrent.json").read_text())
FLOATS = ("old_log_probs", "old_values", "advantages", "returns")


def rollout(num_envs: int, num_steps: int, layers: int = 1, hidden: int = 2) -> dict[str, np.ndarray]:
    """Arrays of a rollout in which every cell says where it is: 1000 * env + step."""
    cells = 1000.0 * np.arange(num_envs)[:, None] + np.arange(num_steps)
    arrays = {name: cells.astype(np.float32) for name in ("values", "log_probs", "advantages", "returns")}
    arrays["observations"] = np.repeat(cells[..., None], 3, axis=2).astype(np.float32)
    arrays["actions"] = cells.astype(np.int64) + 3
    for name, flag in (("terminated", 0), ("truncated", 0), ("valid", 1)):
        arrays[name] = np.full((num_envs, num_steps), flag, np.uint8)
    for number, name in enumerate(("hidden", "cell")):
        units = 10.0 * np.arange(layers)[:, None] + np.arange(hidden)
        arrays[name] = (cells[..., None, None] + 0.25 * number + 0.01 * units).astype(np.float32)
    arrays["episode_start_carry"] = np.zeros(num_envs, np.float32)
    return arrays


def batch_of(arrays, valid_steps=None, env_ids=None) -> SequenceBatch:
    num_envs, num_steps = arrays["values"].shape
    return materialize(
        arrays,
        state_names=tuple(name for name in ("hidden", "cell") if name in arrays),
        valid_steps=np.full(num_envs, num_steps) if valid_steps is None else np.array(valid_steps),
        env_ids=np.arange(num_envs) if env_ids is None else np.array(env_ids),
        device="cpu",
    )


def fields(batch: SequenceBatch) -> dict[str, torch.Tensor]:
    plain = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return plain | batch.initial_state


def test_each_sequence_is_one_env_in_the_order_of_its_steps():
    batch = batch_of(rollout(3, 4))
    assert batch.obs_seq.shape == (3, 4, 3)
    assert batch.obs_seq[:, :, 0].tolist() == [[1000.0 * env + t for t in range(4)] for env in range(3)]
    for name in FLOATS:
        assert getattr(batch, name).tolist() == batch.obs_seq[:, :, 0].tolist()
        assert getattr(batch, name).dtype == torch.float32
    assert batch.actions.tolist() == [[1000 * env + t + 3 for t in range(4)] for env in range(3)]
    assert batch.actions.dtype == torch.int64
    assert batch.valid.all()
    assert batch.env_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("env_ids", "steps", "shared"),
    [
        ([0, 1, 2], [4, 4, 4], True),
        ([2, 0, 1], [4, 4, 4], False),
        ([0, 1, 2], [3, 2, 1], False),
        ([0, 2], [4] * 3, False),
    ],
)
def test_arrays_that_are_its_own_are_shared_where_every_row_is_taken_in_order(env_ids, steps, shared):
    arrays = rollout(3, 4)
    batches = [
        materialize(
            arrays,
            state_names=("hidden", "cell"),
            valid_steps=np.array(steps),
            env_ids=np.array(env_ids),
            device="cpu",
            owned=owned,
        )
        for owned in (False, True)
    ]
    for name, tensor in fields(batches[0]).items():
        assert torch.equal(tensor, fields(batches[1])[name]), name
    assert np.shares_memory(batches[1].obs_seq.numpy(), arrays["observations"]) is shared
    assert not np.shares_memory(batches[0].obs_seq.numpy(), arrays["observations"])


def test_the_initial_state_is_row_0s_with_layers_first():
    arrays = rollout(3, 4, layers=2, hidden=5)
    batch = batch_of(arrays)
    assert list(batch.initial_state) == ["hidden", "cell"]
    for name, state in batch.initial_state.items():
        assert state.shape == (2, 3, 5)
        for env in range(3):
            np.testing.assert_array_equal(state[:, env].numpy(), arrays[name][env, 0])


@pytest.mark.parametrize("case", GOLDEN["episode_starts"], ids=lambda case: case["name"])
def test_episode_starts_follow_the_carry_flag_and_the_ends_one_row_later(case):
    terminated = np.array(case["terminated"], np.uint8).T
    arrays = rollout(*terminated.shape)
    arrays |= {"terminated": terminated, "truncated": np.array(case["truncated"], np.uint8).T}
    arrays["episode_start_carry"][:] = case["carry_in"]
    batch = batch_of(arrays, [case["valid_steps"]] * len(terminated))
    assert batch.episode_starts.tolist() == case["expected_env_major"]
    assert batch.episode_starts.dtype == torch.float32


def test_a_partial_batch_has_as_many_columns_as_its_longest_env():
    batch = batch_of(rollout(3, 8), [3, 0, 2])
    assert batch.valid.tolist() == [[True] * 3, [False] * 3, [True, True, False]]
    assert batch.obs_seq.shape == (3, 3, 3)


def test_no_valid_steps_at_all_give_a_batch_without_columns():
    batch = batch_of(rollout(3, 4), [0, 0, 0])
    assert batch.obs_seq.shape == (3, 0, 3)
    assert batch.episode_starts.shape == batch.valid.shape == batch.actions.shape == (3, 0)
    assert batch.initial_state["cell"].shape == (1, 3, 2)


def test_rows_that_are_not_valid_hold_nothing_that_can_do_harm():
    arrays = rollout(2, 5)
    arrays["valid"][0, 1] = 0
    for name in ("observations", "values", "log_probs"):
        arrays[name][0, 1] = np.nan
        arrays[name][1, 2:] = np.nan
    arrays["actions"][0, 1] = arrays["actions"][1, 2:] = -1
    batch = batch_of(arrays, [5, 2])
    assert batch.valid.tolist() == [[True, False, True, True, True], [True, True, False, False, False]]
    for name in (*FLOATS, "obs_seq"):
        assert not getattr(batch, name)[~batch.valid].any()
        assert torch.isfinite(getattr(batch, name)).all()
    assert batch.actions[~batch.valid].tolist() == [3] * 4  # a choice that was really made, so it is legal
    assert batch.obs_seq[batch.valid][:, 0].tolist() == [0, 2, 3, 4, 1000, 1001]


def test_padding_does_not_start_episodes():
    arrays = rollout(2, 5)
    arrays["terminated"][1, 1:] = 1
    batch = batch_of(arrays, [5, 2])
    assert batch.episode_starts.tolist() == [[0.0] * 5, [0.0] * 5]
    assert batch_of(arrays, [5, 3]).episode_starts[1].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_a_sequence_without_valid_rows_is_all_zeros():
    arrays = rollout(1, 2)
    arrays["valid"][:] = 0
    batch = batch_of(arrays)
    assert not batch.valid.any()
    assert not batch.actions.any()
    assert not batch.obs_seq.any()


def test_a_batch_owns_its_memory():
    arrays = rollout(2, 3)
    before = {name: array.tobytes() for name, array in arrays.items()}
    batch = batch_of(arrays)
    for tensor in fields(batch).values():
        tensor.zero_()
    assert {name: array.tobytes() for name, array in arrays.items()} == before
    batch = batch_of(arrays)
    kept = {name: tensor.clone() for name, tensor in fields(batch).items()}
    for array in arrays.values():
        array[...] = 77
    assert all(torch.equal(tensor, kept[name]) for name, tensor in fields(batch).items())


def test_a_minibatch_owns_its_memory():
    batch = batch_of(rollout(2, 3))
    for minibatch in batch.minibatches(2, False):
        minibatch.advantages.zero_()
        minibatch.initial_state["hidden"].zero_()
    assert batch.advantages[1, 2] == 1002.0
    assert batch.initial_state["hidden"][0, 1, 0] == 1000.0


def test_tensors_made_under_inference_mode_can_be_trained_on():
    with torch.inference_mode():
        batch = batch_of(rollout(1, 2))
    weight = torch.ones(3, requires_grad=True)
    (batch.obs_seq @ weight).sum().backward()
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]


def test_several_leaves_come_by_field_name_in_their_own_dtype():
    arrays = rollout(2, 3)
    arrays["observations/image"] = np.full((2, 3, 4, 4, 1), 255, np.uint8)
    arrays["observations/choice"] = np.full((2, 3), 5, np.int64)
    del arrays["observations"]
    batch = batch_of(arrays, [3, 1])
    assert sorted(batch.obs_seq) == ["observations/choice", "observations/image"]
    assert batch.obs_seq["observations/image"].dtype == torch.uint8
    assert batch.obs_seq["observations/image"][0].min() == 255
    assert batch.obs_seq["observations/image"][1, 1:].max() == 0
    assert batch.obs_seq["observations/choice"].tolist() == [[5] * 3] * 2  # 0 may be no choice of the space
    rows = batch.take(torch.tensor([1]))
    assert rows.obs_seq["observations/image"].shape == (1, 3, 4, 4, 1)


def test_without_a_recurrent_core_the_initial_state_is_empty():
    arrays = {name: array for name, array in rollout(2, 3).items() if name not in ("hidden", "cell")}
    batch = batch_of(arrays)
    assert batch.initial_state == {}
    assert [len(minibatch) for minibatch in batch.minibatches(1, False)] == [1, 1]


@pytest.mark.parametrize(
    "case", GOLDEN["minibatch"], ids=lambda case: f"{case['num_envs']}-{case['envs_per_minibatch']}"
)
def test_minibatches_are_chunks_of_whole_envs(case):
    batch = batch_of(rollout(case["num_envs"], 2))
    plain = [m.env_ids.tolist() for m in batch.minibatches(case["envs_per_minibatch"], False)]
    assert plain == case["unshuffled"]
    shuffled = list(batch.minibatches(case["envs_per_minibatch"], True, torch.Generator().manual_seed(1)))
    assert [len(m) for m in shuffled] == case["expected_sizes"]
    assert sorted(env for m in shuffled for env in m.env_ids.tolist()) == list(range(case["num_envs"]))


def test_five_envs_in_twos_over_three_passes():
    batch = batch_of(rollout(5, 2))
    generator = torch.Generator().manual_seed(0)
    orders = set()
    for _ in range(3):
        chunks = [m.env_ids.tolist() for m in batch.minibatches(2, True, generator)]
        assert [len(chunk) for chunk in chunks] == [2, 2, 1]
        assert sorted(env for chunk in chunks for env in chunk) == [0, 1, 2, 3, 4]
        orders.add(str(chunks))
    assert len(orders) > 1
    assert [m.env_ids.tolist() for m in batch.minibatches(2, False)] == [[0, 1], [2, 3], [4]]


def test_every_field_of_a_minibatch_is_shuffled_alike():
    batch = batch_of(rollout(6, 2))
    for minibatch in batch.minibatches(4, True, torch.Generator().manual_seed(3)):
        expected = 1000.0 * minibatch.env_ids
        assert torch.equal(minibatch.obs_seq[:, 0, 0], expected)
        assert torch.equal(minibatch.actions[:, 0], 1000 * minibatch.env_ids + 3)
        assert torch.equal(minibatch.initial_state["hidden"][0, :, 0], expected)
        assert torch.equal(minibatch.initial_state["cell"][0, :, 0], expected + 0.25)
        for name in FLOATS:
            assert torch.equal(getattr(minibatch, name)[:, 0], expected)


@pytest.mark.parametrize("make", [lambda seed: torch.Generator().manual_seed(seed), np.random.default_rng])
def test_a_shuffle_is_seedable(make):
    batch = batch_of(rollout(16, 1))

    def order(seed: int) -> list[int]:
        return [int(m.env_ids[0]) for m in batch.minibatches(1, True, make(seed))]

    assert order(5) == order(5)
    assert order(5) != order(6)


@pytest.mark.parametrize("wrong", [0, -3, 1.5, True])
def test_fewer_than_one_env_per_minibatch_is_refused_at_once_naming_the_value(wrong):
    with pytest.raises(OutOfRange, match=f"envs_per_minibatch is {wrong}"):
        batch_of(rollout(2, 1)).minibatches(wrong, False)


def test_a_shuffle_without_a_generator_is_refused():
    with pytest.raises(OutOfOrder, match="generator"):
        batch_of(rollout(2, 1)).minibatches(1, True)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 6))
def test_any_batch_equals_one_made_cell_by_cell(seed, num_envs, num_steps):
    draw = np.random.default_rng(seed)
    arrays = rollout(num_envs, num_steps)
    for name in ("terminated", "truncated", "valid"):
        arrays[name][...] = draw.random(arrays[name].shape) < (0.8 if name == "valid" else 0.3)
    arrays["episode_start_carry"][:] = draw.random(num_envs) < 0.5
    steps = draw.integers(0, num_steps + 1, num_envs)
    env_ids = draw.permutation(num_envs)[: draw.integers(1, num_envs + 1)]
    batch = batch_of(arrays, steps, env_ids)
    assert batch.valid.shape == (len(env_ids), max(steps[env_ids]))
    for row, env in enumerate(env_ids):
        start = arrays["episode_start_carry"][env]
        for t in range(batch.valid.shape[1]):
            valid = bool(t < steps[env] and arrays["valid"][env, t])
            assert bool(batch.valid[row, t]) == valid
            assert batch.episode_starts[row, t] == (start if t < steps[env] else 0.0)
            assert batch.returns[row, t] == (arrays["returns"][env, t] if valid else 0.0)
            start = float(arrays["terminated"][env, t] or arrays["truncated"][env, t] or not valid)
