"""The learning suite in streaming: the same arms, and a table that puts them beside lag 0."""

from __future__ import annotations

from typing import Any

from bench.learning import ARMS, beside_lag_0, table, train_words
from rollout_service.launch.settings import parse_train


def record(training_success: float, eval_return: float = 1.0) -> dict[str, Any]:
    evaluated = {"return_mean": eval_return, "success_rate": 1.0}
    return {
        "task": "tmaze20",
        "arm": "stored",
        "seed": 1,
        "command": "rollout-service train",
        "training": {"return_mean": 0.5, "success_rate": training_success, "steps_per_second": 1000.0},
        "sampled": evaluated,
        "argmax": evaluated,
    }


def test_an_arm_with_lag_differs_in_its_lag_only() -> None:
    for arm in ARMS:
        lockstep, streaming = (parse_train(train_words(arm, 3, lag)[1:]) for lag in (0, 1))
        assert lockstep.model_copy(update={"max_policy_lag": 1}) == streaming


def test_scores_stand_beside_those_of_lag_0_with_the_difference() -> None:
    lines = beside_lag_0([record(0.75)], [record(0.875)])
    assert lines[-2] == "| tmaze20 | stored | 1.0 / 1.0 (0.0) | 1.000 / 1.000 (0.000) | 0.5 / 0.5 (0.0) | " \
        "0.750 / 0.875 (-0.125) | 1000 / 1000 (0) |"  # fmt: skip
    assert "| 0.750 / - |" in beside_lag_0([record(0.75)], [])[-2]


def test_the_page_of_lag_0_has_no_such_table() -> None:
    header = {"date": "2030-01-01"}
    assert "Beside lag 0" not in table([record(0.75)], header)
    assert "Beside lag 0" in table([record(0.75)], header, [record(0.875)])
