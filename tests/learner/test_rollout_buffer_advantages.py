"""GAE, batches and their order, as the standalone buffer offers them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from learner import GaeRule, RecurrentRolloutBuffer
from rollout_service.errors import IncompleteRollout, OutOfOrder, OutOfRange, ShapeError
from tests.learner.filled_rollouts import contents, fill

DATA = Path(__file__).parent.parent / "data"
GOLDEN = json.loads((DATA / "golden_gae.json").read_text())["cases"]
RECURRENT = json.loads((DATA / "golden_recurrent.json").read_text())
GOLDEN_NAMES = {
    GaeRule.BOUNDARY_CORRECT: "boundary_correct",
    GaeRule.ORIGINAL_STATED: "seed_stated",
    GaeRule.ORIGINAL_ACTUAL: "seed_actual",
}


@pytest.fixture
def buffer():
    """3 envs, 4 steps, filled; env 1 truncates at step 1."""
    truncated = np.zeros((4, 3), int)
    truncated[1, 1] = 1
    rewards = np.arange(12.0).reshape(4, 3)
    with RecurrentRolloutBuffer(4, 3, 2, 5) as made:
        yield fill(made, {"rewards": rewards, "truncated": truncated, "truncation_values": 2.0 * truncated})


@pytest.mark.parametrize("rule", GaeRule)
@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden_numbers(case, rule):
    num_steps, num_envs, steps = case["num_steps"], case["num_envs"], case["valid_steps"]
    names = {"truncation_values": "final_values"}
    columns = {
        name: case[names.get(name, name)]
        for name in ("rewards", "values", "terminated", "truncated", "truncation_values")
    }
    with RecurrentRolloutBuffer(num_steps, num_envs, 1, 1) as buffer:
        fill(buffer, columns)
        buffer.advantages()[...] = buffer.returns()[...] = case["prefill"]
        call = (case["last_values"], case["gamma"], case["gae_lambda"])
        if steps == num_steps:
            buffer.compute_advantages(*call, rule=rule)
        else:
            buffer.compute_advantages_partial(steps, *call, rule=rule)
        expected = {name: np.array(case["expected"][GOLDEN_NAMES[rule]][name]) for name in ("advantages", "returns")}
        largest = max(1.0, np.abs(expected["advantages"]).max())
        for name, numbers in expected.items():
            result = getattr(buffer, name)()
            assert result.dtype == np.float32
            np.testing.assert_allclose(result, numbers, rtol=1e-5, atol=1e-5 * largest, err_msg=name)


@pytest.mark.parametrize("case", RECURRENT["filler_rows"], ids=lambda case: case["name"])
def test_filler_rows_through_the_buffer(case):
    names = ("rewards", "values", "terminated", "truncated", "valid", "truncation_values")
    steps = len(case["rewards"])
    with RecurrentRolloutBuffer(steps, 1, 1, 1) as buffer:
        if case["carry_in"] == 0.0:  # an earlier rollout that goes on
            fill(buffer, {})
            buffer.seed_warm_start(steps - 1, [[0.0]], [[0.0]])
        fill(buffer, {name: np.array(case[name])[:, None] for name in names})
        buffer.compute_advantages([case["last_value"]], case["gamma"], case["gae_lambda"])
        np.testing.assert_allclose(buffer.advantages()[:, 0], case["expected_advantages"], rtol=1e-5)
        np.testing.assert_allclose(buffer.returns()[:, 0], case["expected_returns"], rtol=1e-5)
        batch = buffer.to_sequence_batch()
        assert batch.episode_starts[0].tolist() == case["expected_episode_starts"]
        assert batch.valid[0].int().tolist() == case["valid"]
        buffer.seed_warm_start(steps - 1, [[0.5]], [[0.5]])
        assert buffer.episode_start_carry()[0] == case["expected_carry_out"]


@pytest.mark.parametrize("case", RECURRENT["episode_starts"], ids=lambda case: case["name"])
def test_episode_starts_through_the_buffer(case):
    num_steps, num_envs = np.shape(case["terminated"])
    with RecurrentRolloutBuffer(num_steps, num_envs, 1, 1) as buffer:
        carry = np.array(case["carry_in"])
        fill(buffer, {"terminated": np.tile(carry, (num_steps, 1))})  # an earlier rollout
        buffer.seed_warm_start(num_steps - 1, np.ones((num_envs, 1)), np.ones((num_envs, 1)))
        flags = {name: case[name] for name in ("terminated", "truncated")}
        fill(buffer, {**flags, "truncation_values": np.zeros((num_steps, num_envs))})
        steps = case["valid_steps"]
        buffer.compute_advantages_partial(steps, np.zeros(num_envs), 0.9, 0.9)
        batch = buffer.to_sequence_batch_partial(steps)
        assert batch.episode_starts.tolist() == case["expected_env_major"]
        buffer.seed_warm_start(steps - 1, np.ones((num_envs, 1)), np.ones((num_envs, 1)))
        assert buffer.episode_start_carry().tolist() == case["carry_out"]


@pytest.mark.parametrize("case", RECURRENT["layout"], ids=lambda case: case["name"])
def test_a_time_major_rollout_becomes_an_env_major_batch(case):
    num_steps, num_envs, obs_dim = case["T"], case["N"], case["D"]
    with RecurrentRolloutBuffer(num_steps, num_envs, obs_dim, 1) as buffer:
        for step in range(num_steps):
            for env in range(num_envs):
                buffer.add(step, env, case["stored"][step][env], step + env, step, env * 0.5, -0.1 * step, False, False)
        assert buffer.observations().tolist() == case["stored"]
        buffer.compute_advantages(np.zeros(num_envs), 0.9, 0.9)
        batch = buffer.to_sequence_batch()
        assert batch.obs_seq.shape == (num_envs, num_steps, obs_dim)
        assert batch.obs_seq.flatten().tolist() == case["expected_flat_env_major"]
        assert batch.actions.tolist() == [[s + e for s in range(num_steps)] for e in range(num_envs)]
        assert batch.old_values.tolist() == [[e * 0.5] * num_steps for e in range(num_envs)]
        torch.testing.assert_close(batch.old_log_probs, torch.tensor([[-0.1 * s for s in range(num_steps)]] * num_envs))


@pytest.mark.parametrize(
    "case", RECURRENT["minibatch"], ids=lambda case: f"{case['num_envs']}-{case['envs_per_minibatch']}"
)
def test_minibatches_through_the_buffer(case):
    with RecurrentRolloutBuffer(2, case["num_envs"], 1, 1) as buffer:
        fill(buffer, {})
        buffer.compute_advantages(np.zeros(case["num_envs"]), 0.9, 0.9)
        chunks = [m.env_ids.tolist() for m in buffer.to_minibatches(case["envs_per_minibatch"], False)]
        assert chunks == case["unshuffled"]
        sizes = [len(m) for m in buffer.to_minibatches(case["envs_per_minibatch"], True)]
        assert sizes == case["expected_sizes"]


def test_worked_case_and_the_rows_before_a_truncation_stay_bit_identical():
    columns = {
        "rewards": [[1], [2], [3], [4]],
        "values": [[10], [20], [30], [40]],
        "truncated": [[0], [1], [0], [0]],
        "truncation_values": [[0], [8], [0], [0]],
    }
    with RecurrentRolloutBuffer(4, 1, 1, 1) as buffer:
        fill(buffer, columns)
        buffer.compute_advantages([16.0], 0.5, 0.5)
        assert buffer.advantages()[:, 0].tolist() == [-2.5, -14.0, -14.0, -28.0]
        before = buffer.advantages()[:2].tobytes()
        fill(buffer, columns | {"rewards": [[1], [2], [1003], [1004]]})
        buffer.compute_advantages([16.0], 0.5, 0.5)
        assert buffer.advantages()[:2].tobytes() == before
        fill(buffer, columns)
        buffer.compute_advantages([16.0], 0.5, 0.5, rule=GaeRule.ORIGINAL_ACTUAL)
        assert buffer.advantages()[:, 0].tolist() == [-0.625, -6.5, -14.0, -28.0]


def test_each_env_may_have_its_own_valid_steps(buffer):
    alone = {}
    for steps in (1, 4):
        buffer.compute_advantages_partial(steps, [1.0, 2.0, 3.0], 0.9, 0.8)
        alone[steps] = buffer.advantages().copy()
    buffer.advantages()[...] = 77.0
    buffer.compute_advantages_partial([4, 0, 1], [1.0, np.nan, 3.0], 0.9, 0.8)
    result = buffer.advantages()
    assert result[:, 0].tolist() == alone[4][:, 0].tolist()
    assert result[:, 1].tolist() == [77.0] * 4
    assert result[0, 2] == alone[1][0, 2]
    assert result[1:, 2].tolist() == [77.0] * 3
    assert buffer.valid_steps.tolist() == [4, 0, 1]


def test_rows_beyond_valid_steps_need_not_be_written():
    with RecurrentRolloutBuffer(8, 1, 1, 1) as buffer:
        fill(buffer, {"rewards": np.ones((8, 1))}, steps=3)
        buffer.compute_advantages_partial(3, [0.0], 0.5, 0.5)
        batch = buffer.to_sequence_batch_partial(3)
        assert batch.obs_seq.shape == (1, 3, 1)  # no padding over which a state could run on
        assert batch.valid.all()
        with pytest.raises(IncompleteRollout, match="step 3 of env 0 was not written"):
            buffer.compute_advantages_partial(4, [0.0], 0.5, 0.5)


def test_a_truncated_row_without_its_value_names_step_and_env(buffer):
    buffer.add(3, 2, [0.0, 0.0], 0, 0.0, 0.0, 0.0, False, True)
    with pytest.raises(IncompleteRollout, match="step 3, env 2 is truncated"):
        buffer.compute_advantages(np.zeros(3), 0.9, 0.9)
    buffer.compute_advantages_partial(3, np.zeros(3), 0.9, 0.9)
    buffer.compute_advantages(np.zeros(3), 0.9, 0.9, rule=GaeRule.ORIGINAL_ACTUAL)


def test_the_stored_rewards_stay_raw(buffer):
    before = contents(buffer)
    buffer.compute_advantages(np.zeros(3), 0.9, 0.9, reward_scale=0.1)
    assert contents(buffer) == before
    scaled = buffer.advantages().copy()
    buffer.compute_advantages(np.zeros(3), 0.9, 0.9)
    assert not np.allclose(buffer.advantages(), scaled)


def test_nothing_that_is_done_to_batches_reaches_the_buffer(buffer):
    buffer.compute_advantages(np.ones(3), 0.9, 0.9)
    before = contents(buffer) | {name: getattr(buffer, name)().tobytes() for name in ("advantages", "returns")}
    for _ in range(4):
        for batch in (buffer.to_sequence_batch(), *buffer.to_minibatches(2, True)):
            for tensor in (*vars(batch).values(), *batch.initial_state.values()):
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()
    after = contents(buffer) | {name: getattr(buffer, name)().tobytes() for name in ("advantages", "returns")}
    assert after == before


def test_a_batch_does_not_change_when_the_buffer_is_written_again(buffer):
    buffer.compute_advantages(np.ones(3), 0.9, 0.9)
    batch = buffer.to_sequence_batch()
    kept = batch.obs_seq.clone(), batch.initial_state["hidden"].clone()
    buffer.seed_warm_start(3, np.ones((3, 5)), np.ones((3, 5)))
    fill(buffer, {"rewards": np.full((4, 3), 9.0)})
    assert torch.equal(batch.obs_seq, kept[0])
    assert torch.equal(batch.initial_state["hidden"], kept[1])
    assert not batch.initial_state["hidden"].any()


def test_batches_are_refused_before_gae_and_after_new_rows(buffer):
    takes = (buffer.to_sequence_batch, lambda: buffer.to_minibatches(2), lambda: buffer.to_sequence_batch_partial(1))
    for take in takes:
        with pytest.raises(OutOfOrder, match="GAE has not run"):
            take()
    buffer.compute_advantages(np.zeros(3), 0.9, 0.9)
    for take in takes:
        take()
    buffer.add_recurrent_state(0, 0, np.ones(5), np.ones(5))
    with pytest.raises(OutOfOrder, match="GAE has not run"):
        buffer.to_sequence_batch()
    buffer.compute_advantages(np.zeros(3), 0.9, 0.9)
    buffer.reset()
    with pytest.raises(OutOfOrder, match="GAE has not run"):
        buffer.to_sequence_batch()
    with pytest.raises(OutOfOrder, match="GAE has not run"):
        buffer.valid_steps  # noqa: B018


def test_a_batch_of_rows_that_gae_did_not_cover_is_refused(buffer):
    buffer.compute_advantages_partial([4, 2, 3], np.zeros(3), 0.9, 0.9)
    with pytest.raises(OutOfOrder, match="a batch of 4 steps was asked for, but GAE has covered 2 of env 1"):
        buffer.to_sequence_batch()
    assert buffer.to_sequence_batch_partial(2).obs_seq.shape == (3, 2, 2)
    assert buffer.to_sequence_batch_partial([4, 0, 3]).valid.sum(dim=1).tolist() == [4, 0, 3]


def test_minibatches_hold_every_env_with_a_valid_step_once(buffer):
    buffer.compute_advantages_partial([4, 0, 2], np.zeros(3), 0.9, 0.9)
    chunks = [(m.env_ids.tolist(), m.valid.shape) for m in buffer.to_minibatches(1, False)]
    assert chunks == [([0], (1, 4)), ([2], (1, 4))]
    assert len(buffer.to_training_batch()) == 2
    buffer.compute_advantages_partial(0, np.zeros(3), 0.9, 0.9)
    assert list(buffer.to_minibatches(2, True)) == []
    assert buffer.to_sequence_batch_partial(0).obs_seq.shape == (3, 0, 2)


def test_the_shuffle_of_minibatches_is_seedable():
    with RecurrentRolloutBuffer(1, 32, 1, 1) as buffer:
        fill(buffer, {})
        buffer.compute_advantages(np.zeros(32), 0.9, 0.9)

        def order(generator: torch.Generator | None) -> list[int]:
            return [int(m.env_ids[0]) for m in buffer.to_minibatches(1, True, "cpu", generator)]

        assert order(torch.Generator().manual_seed(1)) == order(torch.Generator().manual_seed(1))
        assert order(torch.Generator().manual_seed(1)) != order(torch.Generator().manual_seed(2))
        torch.manual_seed(4)
        first = order(None)
        torch.manual_seed(4)
        assert order(None) == first


def test_reset_zeroes_advantages_and_returns_only(buffer):
    buffer.add_recurrent_state(2, 0, np.ones(5), np.ones(5))
    buffer.compute_advantages(np.ones(3), 0.9, 0.9)
    assert buffer.advantages().any()
    before = contents(buffer)
    buffer.reset()
    assert contents(buffer) == before
    assert not buffer.advantages().any()
    assert not buffer.returns().any()
    buffer.compute_advantages(np.ones(3), 0.9, 0.9)
    assert len(buffer.to_sequence_batch()) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((5, np.zeros(3), 0.9, 0.9), OutOfRange, r"valid_steps is 5 for env 0; it must be in 0\.\.4"),
        (([1, -1, 2], np.zeros(3), 0.9, 0.9), OutOfRange, "valid_steps is -1 for env 1"),
        (([1, 2], np.zeros(3), 0.9, 0.9), ShapeError, r"valid_steps has shape \(2,\)"),
        ((2.0, np.zeros(3), 0.9, 0.9), ShapeError, "valid_steps is 2.0; it must be a whole number"),
        ((True, np.zeros(3), 0.9, 0.9), ShapeError, "valid_steps is True"),
        ((4, np.zeros(2), 0.9, 0.9), ShapeError, r"last_values has shape \(2,\)"),
        ((4, np.zeros((3, 1)), 0.9, 0.9), ShapeError, r"last_values has shape \(3, 1\)"),
        ((4, np.zeros(3), 1.1, 0.9), OutOfRange, "gamma is 1.1"),
        ((4, np.zeros(3), 0.9, np.nan), OutOfRange, "gae_lambda is nan"),
        ((4, np.full(3, np.nan), 0.9, 0.9), IncompleteRollout, "step 3, env 0 is followed by a value"),
    ],
)
def test_wrong_arguments_are_refused_by_name(buffer, arguments, error, message):
    with pytest.raises(error, match=message):
        buffer.compute_advantages_partial(*arguments)
    with pytest.raises(OutOfOrder):
        buffer.to_sequence_batch()


def test_a_reward_scale_must_be_positive_and_finite(buffer):
    for scale in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(OutOfRange, match="reward_scale"):
            buffer.compute_advantages(np.zeros(3), 0.9, 0.9, reward_scale=scale)


@pytest.mark.parametrize("wrong", [0, -1])
def test_envs_per_minibatch_below_one_is_refused_before_anything_else(buffer, wrong):
    with pytest.raises(OutOfRange, match=f"envs_per_minibatch is {wrong}"):
        buffer.to_minibatches(wrong)


def test_a_rollout_with_every_kind_of_row_gives_what_the_loop_over_rows_gives():
    draw = np.random.default_rng(7)
    shape = (64, 8)
    columns = {
        "rewards": draw.normal(size=shape),
        "values": draw.normal(size=shape),
        "terminated": draw.random(shape) < 0.1,
        "truncated": draw.random(shape) < 0.1,
        "valid": draw.random(shape) < 0.9,
        "truncation_values": draw.normal(size=shape),
    }
    last = draw.normal(size=8)
    with RecurrentRolloutBuffer(64, 8, 1, 1) as buffer:
        fill(buffer, columns)
        buffer.compute_advantages(last, 0.99, 0.95)
        for env in range(8):
            following = 0.0
            for t in reversed(range(64)):
                at = {name: float(column[t, env]) for name, column in columns.items()}
                after = last[env] if t == 63 else columns["values"][t + 1, env]
                after = 0.0 if at["terminated"] else at["truncation_values"] if at["truncated"] else after
                cut = at["terminated"] or at["truncated"]
                delta = at["rewards"] + 0.99 * after - at["values"]
                following = delta + (0.0 if cut else 0.99 * 0.95 * following) if at["valid"] else 0.0
                np.testing.assert_allclose(buffer.advantages()[t, env], following, rtol=1e-5, atol=1e-5)
