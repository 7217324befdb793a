"""The same settings give the same numbers: in one process or in many, and however envs are split over actors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_service import checkpoint as checkpoints
from rollout_service.launch.rundir import to_toml
from rollout_service.launch.serial import run_serial
from tests.fixtures.training import small_config

ROOT = Path(__file__).parents[2]
DEADLINE_S = 100


def final_arrays(run_dir: Path) -> dict[str, np.ndarray]:
    """What the last checkpoint of a run holds."""
    return checkpoints.require(run_dir).checkpoint.arrays


@pytest.mark.parametrize(
    "settings",
    [
        {"num_layers": 2, "normalize_observations": True, "normalize_returns": True},
        {"state_strategy": "zero", "value_clip_range": 0.2, "target_kl": 0.001},
    ],
    ids=["stored", "zero"],
)
def test_many_processes_train_to_the_bits_of_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = small_config(total_steps=64 * 8, self_check=1, learning_rate=1e-2, **settings)
    run_serial(config.model_copy(update={"run_dir": tmp_path / "serial"}))
    (tmp_path / "config.toml").write_text(to_toml(config))
    ended = subprocess.run(
        [
            sys.executable, "-m", "rollout_service", "train",
            "--config", str(tmp_path / "config.toml"), "--run-dir", str(tmp_path / "processes"), "--no-tensorboard",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    serial, processes = final_arrays(tmp_path / "serial"), final_arrays(tmp_path / "processes")
    assert set(serial) == set(processes)
    # The global generator of torch is none of the run's: nothing draws from it.
    for name in sorted(set(serial) - {"generator/torch"}):
        np.testing.assert_array_equal(serial[name], processes[name], err_msg=name)
    both = [checkpoints.require(tmp_path / name).checkpoint.manifest for name in ("serial", "processes")]
    assert both[0].generators == both[1].generators
    assert [manifest.update for manifest in both] == [8, 8]


def test_weights_do_not_depend_on_how_envs_are_split_over_actors() -> None:
    def digest(num_actors: int, envs_per_actor: int) -> str:
        config = small_config(
            num_actors=num_actors,
            envs_per_actor=envs_per_actor,
            envs_per_forward=2,
            total_steps=8 * 16 * 4,
            normalize_observations=True,
            normalize_returns=True,
            learning_rate=1e-2,
        )
        return str(run_serial(config)["weights_digest"])

    assert digest(1, 8) == digest(2, 4) == digest(4, 2)
