"""V-trace's recursion against the golden numbers, and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.vtrace import vtrace
from rollout_service.errors import ShapeError

CASES = json.loads((Path(__file__).parents[1] / "data" / "golden_vtrace.json").read_text())["cases"]


def next_values(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """What follows each row, [1, T], and where the chain is cut: after an end, and behind the last row."""
    terminated = np.array(case["terminated"], bool)
    following = np.array([*case["values"][1:], case["bootstrap"]])
    cut = terminated | (np.arange(len(terminated)) == len(terminated) - 1)
    return np.where(terminated, 0.0, following)[None], cut[None]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_targets_and_advantages_are_the_golden_ones(case: dict[str, Any]) -> None:
    following, cut = next_values(case)
    targets, advantages = vtrace(
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
    rewards, ended = np.ones((2, 3)), np.zeros((2, 3), bool)
    copies = [rewards.copy() for _ in range(4)]
    vtrace(*copies, ended, gamma=0.9, rho_bar=1.0, c_bar=1.0)
    assert all((copy == rewards).all() for copy in copies)
    with pytest.raises(ShapeError, match="one shape"):
        vtrace(rewards, rewards, rewards, rewards[:, :2], ended, gamma=0.9, rho_bar=1.0, c_bar=1.0)
