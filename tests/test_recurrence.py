"""The rules of recurrent state that actor and learner share, against golden numbers and a step-by-step oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_service.errors import ShapeError
from rollout_service.recurrence import ended, enter_state, episode_starts, warm_start

GOLDEN: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "data" / "golden_recurrent.json").read_text()
)


def flags(rows: list[list[int]]) -> np.ndarray:
    """[T][N] of 0/1 as bool [N, T]."""
    return np.array(rows, bool).T


@pytest.mark.parametrize(
    ("terminated", "truncated", "valid", "expected"),
    [(0, 0, 1, False), (1, 0, 1, True), (0, 1, 1, True), (1, 1, 1, True), (0, 0, 0, True), (1, 1, 0, True)],
)
def test_a_row_ended_if_it_was_terminated_or_truncated_or_is_not_valid(terminated, truncated, valid, expected):
    rows = [np.full((2, 3), flag, np.uint8) for flag in (terminated, truncated, valid)]
    result = ended(*rows)
    assert result.dtype == bool
    assert (result == expected).all()


@pytest.mark.parametrize("case", GOLDEN["episode_starts"], ids=lambda case: case["name"])
def test_episode_starts_are_the_carry_flag_and_then_the_ends_one_row_later(case):
    steps = case["valid_steps"]
    terminated, truncated = flags(case["terminated"])[:, :steps], flags(case["truncated"])[:, :steps]
    carry = np.array(case["carry_in"], np.float32)
    starts = episode_starts(ended(terminated, truncated, np.ones_like(terminated)), carry)
    assert starts.dtype == np.float32
    assert starts.tolist() == case["expected_env_major"]
    if steps and case["wrong_unshifted_env_major"] != case["expected_env_major"]:
        assert starts.tolist() != case["wrong_unshifted_env_major"]


@pytest.mark.parametrize("case", GOLDEN["filler_rows"], ids=lambda case: case["name"])
def test_the_row_after_a_filler_row_starts_an_episode(case):
    row_flags = (np.array([case[name]], bool) for name in ("terminated", "truncated", "valid"))
    row_ended = ended(*row_flags)
    assert episode_starts(row_ended, np.array([case["carry_in"]], np.float32)).tolist() == [
        case["expected_episode_starts"]
    ]
    assert float(row_ended[0, -1]) == case["expected_carry_out"]


@pytest.mark.parametrize("case", GOLDEN["warm_start"], ids=lambda case: case["name"])
def test_warm_start_carries_live_states_and_zeroes_ended_ones(case):
    if "terminated_last" in case:
        terminated, truncated = np.array(case["terminated_last"], bool), np.array(case["truncated_last"], bool)
    else:
        terminated, truncated = (
            flags(case[f"{name}_rows"])[:, case["last_step"]] for name in ("terminated", "truncated")
        )
    final = {name: np.array(case[f"final_{name}"], np.float32)[:, None] for name in ("hidden", "cell")}
    rows, carry = warm_start(ended(terminated, truncated, np.ones_like(terminated)), final)
    assert rows["hidden"][:, 0].tolist() == case["expected_hidden0"]
    assert rows["cell"][:, 0].tolist() == case["expected_cell0"]
    assert carry.tolist() == case["expected_carry"]


def test_a_state_that_is_dropped_may_be_nan():
    state = {"hidden": np.array([[[np.nan]], [[2.0]]], np.float32)}
    assert enter_state(state, np.array([1.0, 0.0]))["hidden"].tolist() == [[[0.0]], [[2.0]]]
    rows, carry = warm_start(np.array([True, False]), state)
    assert rows["hidden"].tolist() == [[[0.0]], [[2.0]]]
    assert carry.tolist() == [1.0, 0.0]


def test_entering_state_leaves_its_argument_alone_unless_told_to_write_there():
    state = {"cell": np.ones((2, 1, 3), np.float32)}
    entering = enter_state(state, np.array([True, False]))
    assert state["cell"].min() == 1.0
    assert not np.shares_memory(entering["cell"], state["cell"])
    same = enter_state(state, np.array([True, False]), out=state)
    assert same["cell"] is state["cell"]
    assert state["cell"][:, 0, 0].tolist() == [0.0, 1.0]


def test_what_the_learner_seeds_equals_what_the_actor_carries_bit_for_bit():
    generator = np.random.default_rng(3)
    live = {name: generator.standard_normal((5, 2, 4)).astype(np.float32) for name in ("hidden", "cell")}
    row_ended = generator.random(5) < 0.5
    actor = enter_state(live, row_ended)
    learner, _ = warm_start(row_ended, live)
    for name in live:
        assert actor[name].tobytes() == learner[name].tobytes()


def test_mismatched_rows_are_refused():
    with pytest.raises(ShapeError, match="same rows"):
        enter_state({"hidden": np.zeros((3, 1, 2), np.float32)}, np.zeros(2, bool))
    with pytest.raises(ShapeError, match="carry"):
        episode_starts(np.zeros((3, 2), bool), np.zeros(2, np.float32))
