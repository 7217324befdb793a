"""Whole runs of processes whose envs return bad data in one actor: the run goes on, and says what it dropped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from rollout_service import checkpoint
from tests.fixtures.machine import Pace, run_command

STEPS, ENVS, UPDATES = 8, 2, 10
ROLLOUT = 2 * ENVS * STEPS


def test_a_streaming_run_drops_the_episodes_says_so_and_goes_on(tmp_path: Path) -> None:
    """Every 10th step of both envs of actor 1 is bad, in turns a reward, a NaN and 1e38.

    Actor 0 is never ahead of it. Before the eighth rollout of actor 1, which has the sixth bad step, the two have
    filled 15 at most: too few for ten updates.
    """
    bad = {kind: [*range(10 * k, 1000, 30)] for k, kind in enumerate(("reward", "nan", "huge"), 1)}
    pace = str(Pace(tmp_path / "pace").file)
    kwargs = [f"{name}={json.dumps(value)}" for name, value in {**bad, "only_actor": 1, "pace": pace}.items()]
    ran = run_command(
        "train", "--env", "tests.fixtures.bad_data:BadTickEnv", "--env-kwargs", *kwargs, "--num-actors", "2",
        "--envs-per-actor", str(ENVS), "--num-steps", str(STEPS), "--total-steps", str(UPDATES * ROLLOUT),
        "--hidden-dim", "8", "--encoder-dim", "8", "--self-check", "1", "--normalize-observations",
        "--normalize-returns", "--obs-limit", "1e6", "--on-bad-data", "drop", "--no-tensorboard", "--run-dir", "run",
        "--json", "--max-policy-lag", "1", "--advantage-estimator", "vtrace", cwd=tmp_path, timeout=100,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    counters = json.loads(ran.stdout)["counters"]
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # Bad steps come in both envs at once: 10, 20, 30, ...; each costs the steps of its episode in the slot at hand.
    assert counters["dropped_episodes"] == counters["bad_rewards"] + counters["bad_observations"] >= 2 * 6
    assert counters["dropped_bad_env_steps"] >= 2 * (2 + 4 + 6 + 8 + 2 + 4)
    for name in ("dropped_episodes", "bad_rewards", "bad_observations", "dropped_bad_env_steps"):
        assert log[-1][f"count/{name}"] == counters[name]
    assert log[-1]["env_steps"] == sum(entry["learner/valid_rows"] for entry in log) < len(log) * ROLLOUT
    said = (tmp_path / "run" / "run.log").read_text()
    assert "env 0 of actor 1 (tests.fixtures.bad_data:BadTickEnv, global index 2), step 10 of its episode" in said
    assert "reward is inf, which is not a finite float32; the episode is dropped" in said
    assert said.count("; the episode is dropped") == 5
    assert "10 episodes were dropped for bad data so far" in said
    assert not re.search(r"env \d of actor 0", said)
    assert ran.stderr.count("; the episode is dropped") == 5
    arrays = checkpoint.require(tmp_path / "run").checkpoint.arrays
    assert all(np.isfinite(array).all() for array in arrays.values())
