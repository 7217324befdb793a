"""A run of many processes on vector envs: the numbers of one process, and env steps without fillers in every count."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from rollout_service import checkpoint as checkpoints
from rollout_service.launch.rundir import to_toml
from rollout_service.launch.serial import run_serial
from rollout_service.runspec import Vectorize
from tests.fixtures.training import small_config

ROOT = Path(__file__).parents[2]
DEADLINE_S = 100


def test_many_processes_count_and_train_as_one_does_on_rows_that_are_real(tmp_path: Path) -> None:
    config = small_config(
        env_kwargs={"end": 0.3, "vector_kwargs": {"autoreset_mode": "next_step"}},
        vectorize=Vectorize.SYNC,
        total_steps=64 * 6,
        self_check=1,
        learning_rate=1e-2,
        normalize_returns=True,
    )
    serial = run_serial(config.model_copy(update={"run_dir": tmp_path / "serial"}))
    (tmp_path / "config.toml").write_text(to_toml(config))
    ended = subprocess.run(
        [
            sys.executable, "-m", "rollout_service", "train", "--json",
            "--config", str(tmp_path / "config.toml"), "--run-dir", str(tmp_path / "processes"), "--no-tensorboard",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["env_steps"] == serial["env_steps"]
    assert 64 * 5 < serial["env_steps"] <= 64 * 6
    assert serial["updates"] > 6, "fillers leave steps for more updates"
    found, expected = (checkpoints.require(tmp_path / name).checkpoint for name in ("processes", "serial"))
    assert found.manifest.env_steps == expected.manifest.env_steps == serial["env_steps"]
    for name in sorted(expected.arrays):
        np.testing.assert_array_equal(found.arrays[name], expected.arrays[name], err_msg=name)
