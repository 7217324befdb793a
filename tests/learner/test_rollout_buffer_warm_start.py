"""Row 0 and the carry flag of the next rollout, and when the next rollout begins."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from learner import RecurrentRolloutBuffer
from rollout_service.errors import IncompleteRollout, OutOfOrder, OutOfRange, ShapeError
from tests.learner.filled_rollouts import contents, fill

WARM_START = json.loads((Path(__file__).parent.parent / "data" / "golden_recurrent.json").read_text())["warm_start"]


def state(num_envs: int, number: float) -> tuple[np.ndarray, np.ndarray]:
    """Final hidden and cell [N, 3], hidden = number + env, cell = -hidden."""
    hidden = np.repeat(number + np.arange(num_envs, dtype=np.float32)[:, None], 3, axis=1)
    return hidden, -hidden


@pytest.fixture
def buffer():
    """2 envs, 4 steps, filled: env 0 truncates on the last row, env 1 lives on."""
    truncated = np.zeros((4, 2), int)
    truncated[3, 0] = 1
    with RecurrentRolloutBuffer(4, 2, 1, 3) as made:
        yield fill(made, {"truncated": truncated, "truncation_values": truncated * 0.5})


@pytest.mark.parametrize("case", WARM_START, ids=lambda case: case["name"])
def test_golden_numbers(case):
    num_steps, num_envs, last = case["num_steps"], case["num_envs"], case["last_step"]
    flags = {}
    for name in ("terminated", "truncated"):
        rows = np.zeros((num_steps, num_envs), int) if f"{name}_last" in case else np.array(case[f"{name}_rows"])
        if f"{name}_last" in case:
            rows[last] = case[f"{name}_last"]
        flags[name] = rows
    with RecurrentRolloutBuffer(num_steps, num_envs, 1, len(case["final_hidden"][0])) as buffer:
        fill(buffer, flags)
        buffer.seed_warm_start(last, case["final_hidden"], case["final_cell"])
        assert buffer.hidden()[0, :, 0].tolist() == case["expected_hidden0"]
        assert buffer.cell()[0, :, 0].tolist() == case["expected_cell0"]
        assert buffer.episode_start_carry().tolist() == case["expected_carry"]


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_an_end_on_the_very_last_row_leaves_nothing_behind(buffer, kind):
    flags = {"terminated": kind == "terminated", "truncated": kind == "truncated"}
    buffer.add(3, 0, [0.0], 0, 0.0, 0.0, 0.0, **flags, truncation_value=0.5)
    buffer.seed_warm_start(3, *state(2, 0.4))
    assert not buffer.hidden()[0, 0].any()
    assert not buffer.cell()[0, 0].any()
    np.testing.assert_allclose(buffer.hidden()[0, 1, 0], 1.4)
    assert buffer.episode_start_carry().tolist() == [1.0, 0.0]


def test_three_rollouts_carry_the_state_of_the_last_one_on():
    with RecurrentRolloutBuffer(8, 1, 1, 1) as buffer:
        entered = []
        cell = 0.0
        for _ in range(3):
            for step in range(8):
                if step:
                    buffer.add_recurrent_state(step, 0, [np.tanh(cell)], [cell])
                buffer.add(step, 0, [0.0], 0, 1.0, 0.0, -0.7, False, False)
                cell += 0.1
            buffer.compute_advantages([0.0], 0.99, 0.95)
            entered.append(float(buffer.to_sequence_batch().initial_state["cell"]))
            buffer.seed_warm_start(7, [[np.tanh(cell)]], [[cell]])
        np.testing.assert_allclose(entered, [0.0, 0.8, 1.6], atol=1e-6)


def test_the_last_step_may_differ_per_env_and_only_its_flags_are_read():
    terminated = [[0, 1, 0], [1, 0, 1], [0, 1, 0], [1, 1, 1]]
    with RecurrentRolloutBuffer(4, 3, 1, 3) as buffer:
        fill(buffer, {"terminated": terminated})
        buffer.seed_warm_start([2, 1, 1], *state(3, 5.0))
        assert buffer.episode_start_carry().tolist() == [0.0, 0.0, 1.0]
        assert buffer.hidden()[0, :, 0, 0].tolist() == [5.0, 6.0, 0.0]


def test_an_env_without_a_step_hands_its_row_0_and_carry_on_unchanged(buffer):
    buffer.seed_warm_start(3, *state(2, 7.0))
    fill(buffer, {}, steps=2)
    hidden = buffer.hidden()[0].copy()
    buffer.seed_warm_start([1, -1], *state(2, 20.0))
    assert buffer.hidden()[0, 0, 0].tolist() == [20.0] * 3
    assert buffer.hidden()[0, 1].tolist() == hidden[1].tolist() == [[8.0] * 3]
    assert buffer.episode_start_carry().tolist() == [0.0, 0.0]
    buffer.seed_warm_start(-1, *state(2, 30.0))
    assert buffer.hidden()[0, :, 0, 0].tolist() == [20.0, 8.0]


def test_a_fresh_env_that_never_stepped_stays_fresh():
    with RecurrentRolloutBuffer(2, 1, 1, 3) as buffer:
        buffer.seed_warm_start(-1, np.full((1, 3), np.nan), np.full((1, 3), np.nan))
        assert buffer.episode_start_carry().tolist() == [1.0]
        assert not buffer.hidden()[0].any()


def test_a_filler_on_the_last_row_counts_as_ended():
    with RecurrentRolloutBuffer(2, 1, 1, 3) as buffer:
        fill(buffer, {"valid": [[1], [0]]})
        buffer.seed_warm_start(1, *state(1, 5.0))
        assert buffer.episode_start_carry().tolist() == [1.0]
        assert not buffer.cell()[0].any()


def test_the_final_state_of_an_ended_env_may_be_anything(buffer):
    hidden, cell = state(2, 1.0)
    hidden[0] = cell[0] = np.nan
    buffer.seed_warm_start(3, hidden, cell)
    assert not buffer.hidden()[0, 0].any()
    hidden[1] = np.inf
    with pytest.raises(IncompleteRollout, match="final_hidden of env 1"):
        buffer.seed_warm_start(3, hidden, cell)


def test_state_may_come_with_its_layer_axis():
    with RecurrentRolloutBuffer(1, 2, 1, 3, num_layers=2) as buffer:
        fill(buffer, {})
        final = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
        buffer.seed_warm_start(0, final, final + 100)
        np.testing.assert_array_equal(buffer.hidden()[0], final)
        np.testing.assert_array_equal(buffer.cell()[0], final + 100)
        np.testing.assert_array_equal(buffer.final_state()["cell"], final + 100)


def test_batches_are_refused_between_the_seed_and_the_next_rollout(buffer):
    buffer.compute_advantages(np.zeros(2), 0.9, 0.9)
    buffer.seed_warm_start(3, *state(2, 1.0))
    for take in (
        buffer.to_sequence_batch,
        lambda: buffer.to_minibatches(1),
        lambda: buffer.to_sequence_batch_partial(2),
    ):
        with pytest.raises(OutOfOrder, match="seeded for the next rollout"):
            take()
    assert buffer.valid_steps.tolist() == [4, 4]
    buffer.reset()
    buffer.compute_advantages(np.zeros(2), 0.9, 0.9)
    with pytest.raises(OutOfOrder, match="seeded for the next rollout"):
        buffer.to_sequence_batch()


@pytest.mark.parametrize("first", ["add", "add_recurrent_state"])
def test_the_next_rollout_begins_with_its_first_write(buffer, first):
    buffer.compute_advantages(np.ones(2), 0.9, 0.9)
    buffer.seed_warm_start(3, *state(2, 1.0))
    assert buffer.valid().all()
    if first == "add":
        buffer.add(0, 0, [0.0], 0, 1.0, 0.0, 0.0, False, False)
    else:
        buffer.add_recurrent_state(0, 1, *(array[1] for array in state(2, 1.0)))
    assert buffer.valid().sum() == (1 if first == "add" else 0)
    assert buffer.hidden()[0, 1, 0].tolist() == [2.0] * 3
    assert buffer.episode_start_carry().tolist() == [1.0, 0.0]
    assert not buffer.advantages().any()
    with pytest.raises(IncompleteRollout, match="was not written in this rollout"):
        buffer.compute_advantages(np.zeros(2), 0.9, 0.9)
    fill(buffer, {})
    buffer.compute_advantages(np.zeros(2), 0.9, 0.9)
    assert buffer.to_sequence_batch().initial_state["hidden"][0, :, 0].tolist() == [0.0, 2.0]


def test_a_refused_write_does_not_begin_the_next_rollout(buffer):
    buffer.seed_warm_start(3, *state(2, 1.0))
    before = contents(buffer)
    with pytest.raises(ShapeError):
        buffer.add(0, 0, [0.0, 1.0], 0, 1.0, 0.0, 0.0, False, False)
    assert contents(buffer) == before


def test_reset_mid_rollout_keeps_the_rows(buffer):
    buffer.seed_warm_start(3, *state(2, 1.0))
    fill(buffer, {}, steps=2)
    buffer.reset()
    buffer.compute_advantages_partial(2, np.zeros(2), 0.9, 0.9)
    assert len(buffer.to_sequence_batch_partial(2)) == 2


def test_seeding_into_another_rollout_leaves_this_one_readable(buffer):
    buffer.compute_advantages(np.zeros(2), 0.9, 0.9)
    before = contents(buffer)
    with RecurrentRolloutBuffer(6, 2, 1, 3) as following:
        buffer.seed_warm_start(3, *state(2, 4.0), into=following)
        assert contents(buffer) == before
        assert len(buffer.to_sequence_batch()) == 2
        assert following.hidden()[0, :, 0, 0].tolist() == [0.0, 5.0]
        assert following.episode_start_carry().tolist() == [1.0, 0.0]
        fill(following, {})
        following.compute_advantages(np.zeros(2), 0.9, 0.9)
        assert following.to_sequence_batch().episode_starts[:, 0].tolist() == [1.0, 0.0]


def test_an_env_without_a_step_hands_its_row_0_into_the_next_slots(buffer):
    buffer.seed_warm_start(3, *state(2, 7.0))
    fill(buffer, {})
    with RecurrentRolloutBuffer(4, 2, 1, 3) as following:
        buffer.seed_warm_start(-1, *state(2, 99.0), into=following)
        np.testing.assert_array_equal(following.hidden()[0], buffer.hidden()[0])
        assert following.episode_start_carry().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("where", [[True, False], np.array([1, 0], bool)])
def test_rows_that_somebody_else_may_write_are_left_alone(buffer, where):
    with RecurrentRolloutBuffer(4, 2, 1, 3) as following:
        following.add_recurrent_state(0, slice(None), np.full((2, 1, 3), 77.0), np.full((2, 1, 3), 78.0))
        buffer.seed_warm_start(3, *state(2, 7.0), into=following, where=where)
        assert following.hidden()[0, :, 0, 0].tolist() == [0.0, 77.0]
        assert following.cell()[0, :, 0, 0].tolist() == [0.0, 78.0]
        assert following.episode_start_carry().tolist() == [1.0, 1.0]
        buffer.seed_warm_start(1, *state(2, 7.0), into=following, where=where)
        assert following.episode_start_carry().tolist() == [0.0, 1.0]


def test_a_wrong_target_is_refused(buffer):
    with pytest.raises(OutOfOrder, match="very rollout"):
        buffer.seed_warm_start(3, *state(2, 1.0), into=buffer)
    with RecurrentRolloutBuffer(4, 3, 1, 3) as more, pytest.raises(ShapeError, match="envs 3, this rollout has 2"):
        buffer.seed_warm_start(3, *state(2, 1.0), into=more)
    with RecurrentRolloutBuffer(4, 2, 1, 4) as wider, pytest.raises(ShapeError, match="into= has state"):
        buffer.seed_warm_start(3, *state(2, 1.0), into=wider)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((4, *state(2, 0.0)), OutOfRange, r"last_step is 4 for env 0; it must be in -1\.\.3"),
        (([0, -2], *state(2, 0.0)), OutOfRange, "last_step is -2 for env 1"),
        ((3, *state(3, 0.0)), ShapeError, r"final_hidden has shape \(3, 3\); it needs \(2, 1, 3\)"),
        ((3, state(2, 0.0)[0]), ShapeError, "1 of the state arrays final_hidden, final_cell were given"),
    ],
)
def test_wrong_arguments_are_refused_by_name(buffer, arguments, error, message):
    before = contents(buffer)
    with pytest.raises(error, match=message):
        buffer.seed_warm_start(*arguments)
    assert contents(buffer) == before


def test_the_last_row_must_have_been_written():
    with RecurrentRolloutBuffer(3, 1, 1, 3) as buffer:
        fill(buffer, {}, steps=2)
        with pytest.raises(IncompleteRollout, match="step 2 of env 0 was not written"):
            buffer.seed_warm_start(2, *state(1, 0.0))
        buffer.seed_warm_start(1, *state(1, 0.0))
