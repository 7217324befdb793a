"""Whole runs that collect while they learn: max_policy_lag 1, with V-trace."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fixtures.machine import logged_steps, run_command
from tests.fixtures.random_ends import RANDOM_ENDS

STEPS, ACTORS, ENVS, UPDATES = 16, 3, 2, 30
ROLLOUT = STEPS * ACTORS * ENVS


def test_a_run_learns_from_rollouts_within_its_lag_and_holds_the_law_where_it_applies(tmp_path: Path) -> None:
    command = [
        "train", "--env", RANDOM_ENDS, "--num-actors", str(ACTORS), "--envs-per-actor", str(ENVS),
        "--num-steps", str(STEPS), "--hidden-dim", "8", "--encoder-dim", "8", "--self-check", "1",
        "--total-steps", str(UPDATES * ROLLOUT), "--max-policy-lag", "1", "--advantage-estimator", "vtrace",
        "--normalize-returns", "--normalize-observations", "--no-tensorboard", "--run-dir", "run", "--json",
    ]  # fmt: skip
    ran = run_command(*command, cwd=tmp_path, timeout=100)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result["updates"] == log[-1]["update"] == UPDATES
    assert result["env_steps"] == logged_steps(tmp_path / "run")[-1] == UPDATES * ROLLOUT
    assert {entry["learner/valid_rows"] for entry in log} == {ROLLOUT}
    assert max(entry["learner/policy_lag_max"] for entry in log) == 1
    assert log[-1]["policy_lag/0"] + log[-1]["policy_lag/1"] == UPDATES * ACTORS
    checked = [entry["learner/self_check_deviation"] for entry in log if "learner/self_check_deviation" in entry]
    assert 0 < len(checked) < UPDATES
    assert max(checked) <= 1e-4
    assert all(0.0 < entry["learner/vtrace_rho_mean"] <= 1.0 for entry in log)
