"""V-trace's recursion against the golden numbers, and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.vtrace import vtrace
from rollout_service.errors import ShapeError

CASES = json.loads((Path(__file__).parents[1] / "data" / "golden_vtrace.json").read_text())["cases"]


def on_tensors(*arrays: np.ndarray, **settings: float) -> list[np.ndarray]:
    return [result.numpy() for result in vtrace(*(torch.from_numpy(array) for array in arrays), **settings)]


def next_values(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """What follows each row, [1, T], and where the chain is cut: after an end, and behind the last row."""
    terminated = np.array(case["terminated"], bool)
    following = np.array([*case["values"][1:], case["bootstrap"]])
    cut = terminated | (np.arange(len(terminated)) == len(terminated) - 1)
    return np.where(terminated, 0.0, following)[None], cut[None]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_targets_and_advantages_are_the_golden_ones(case: dict[str, Any]) -> None:
    following, cut = next_values(case)
    targets, advantages = on_tensors(
        np.array([case["target_log_probs"]]) - np.array([case["behavior_log_probs"]]),
        np.array([case["rewards"]]),
        np.array([case["values"]]),
        following,
        cut,
        gamma=case["gamma"],
        rho_bar=case["rho_bar"],
        c_bar=case["c_bar"],
    )
    expected = case["last_row_terminal_masked"]
    np.testing.assert_allclose(targets[0], expected["targets"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(advantages[0], expected["advantages"], rtol=1e-9, atol=1e-9)


def test_arguments_stay_as_they_were_and_must_be_of_one_shape() -> None:
    rewards, ended = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    copies = [rewards.clone() for _ in range(4)]
    vtrace(*copies, ended, gamma=0.9, rho_bar=1.0, c_bar=1.0)
    assert all(torch.equal(copy, rewards) for copy in copies)
    assert not ended.any()
    with pytest.raises(ShapeError, match="one shape"):
        vtrace(rewards, rewards, rewards, rewards[:, :2], ended, gamma=0.9, rho_bar=1.0, c_bar=1.0)


def by_single_rows(log_ratios, rewards, values, next_values, ended, gamma, rho_bar, c_bar):
    """Targets and advantages of one env, each [T], row by row in plain Python: the oracle."""
    steps = len(rewards)
    targets, advantages = np.zeros(steps), np.zeros(steps)
    for t in reversed(range(steps)):
        rho, c = min(np.exp(log_ratios[t]), rho_bar), min(np.exp(log_ratios[t]), c_bar)
        targets[t] = values[t] + rho * (rewards[t] + gamma * next_values[t] - values[t])
        following = next_values[t]
        if not ended[t]:
            targets[t] += gamma * c * (targets[t + 1] - values[t + 1])
            following = targets[t + 1]
        advantages[t] = rho * (rewards[t] + gamma * following - values[t])
    return targets, advantages


@pytest.mark.parametrize("num_steps", [1, 2, 3, 17, 20, 64])
@pytest.mark.parametrize("end_rate", [0.0, 0.1, 1.0])
def test_it_equals_the_loop_over_single_rows_with_ends_and_fillers(num_steps: int, end_rate: float) -> None:
    draw = np.random.default_rng(num_steps)
    shape = (5, num_steps)
    log_ratios, rewards, values, next_values = draw.standard_normal((4, *shape))
    steps = draw.integers(1, num_steps + 1, 5)
    live = (draw.random(shape) < 0.9) & (np.arange(num_steps) < steps[:, None])
    ended = (draw.random(shape) < end_rate) | ~live | (np.arange(num_steps) == steps[:, None] - 1)
    ended[:, -1] = True
    for array in (log_ratios, rewards, values, next_values):
        array[~live] = 0.0
    settings = {"gamma": 0.9, "rho_bar": 1.3, "c_bar": 1.1}
    targets, advantages = on_tensors(log_ratios, rewards, values, next_values, ended, **settings)
    for env in range(5):
        each = (array[env] for array in (log_ratios, rewards, values, next_values, ended))
        expected = by_single_rows(*each, **settings)
        np.testing.assert_allclose(targets[env], expected[0], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(advantages[env], expected[1], rtol=1e-12, atol=1e-12)
    assert not targets[~live].any()
    assert not advantages[~live].any()
