"""The same settings give the same numbers: in one process or in many, and however envs are split over actors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_service import checkpoint as checkpoints
from rollout_service.config import TrainConfig
from rollout_service.launch.rundir import to_toml
from rollout_service.launch.serial import SerialUpdate, run_serial
from tests.fixtures.training import small_config

ROOT = Path(__file__).parents[2]
DEADLINE_S = 100


FIGURES = ("env_steps", "updates", "return_mean", "success_rate")


def train_in_processes(config: TrainConfig, run_dir: Path, *more: str) -> dict[str, Any]:
    """The whole command, with its service, actors and learner as processes. Returns what `--json` prints."""
    file = run_dir.with_suffix(".toml")
    file.write_text(to_toml(config))
    words = ["train", "--config", str(file), "--run-dir", str(run_dir), "--no-tensorboard", "--json", *more]
    ended = subprocess.run(
        [sys.executable, "-m", "rollout_service", *words], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return result


def require_equal(first: Path, second: Path) -> None:
    """The last checkpoints of two runs hold the same arrays, bit for bit."""
    one, other = (checkpoints.require(run_dir).checkpoint.arrays for run_dir in (first, second))
    assert set(one) == set(other)
    for name in sorted(one):
        np.testing.assert_array_equal(one[name], other[name], err_msg=f"{name} of {first.name} and {second.name}")


def test_many_processes_train_to_the_bits_of_one_under_the_zero_strategy(tmp_path: Path) -> None:
    config = small_config(
        state_strategy="zero",
        value_clip_range=0.2,
        target_kl=0.001,
        total_steps=64 * 32,
        self_check=1,
        learning_rate=1e-2,
    )
    serial = run_serial(config.model_copy(update={"run_dir": tmp_path / "serial"}))
    processes = train_in_processes(config, tmp_path / "processes")
    require_equal(tmp_path / "serial", tmp_path / "processes")
    both = [checkpoints.require(tmp_path / name).checkpoint.manifest for name in ("serial", "processes")]
    assert both[0].generators == both[1].generators
    assert [manifest.update for manifest in both] == [32, 32]
    assert {name: processes[name] for name in FIGURES} == {name: serial[name] for name in FIGURES}


def test_a_resumed_run_is_the_same_in_one_process_and_in_many_and_draws_nothing_again(tmp_path: Path) -> None:
    config = small_config(total_steps=64 * 2, learning_rate=1e-12, self_check=1)
    serial, processes = tmp_path / "serial", tmp_path / "processes"
    targets: list[float] = []

    def note(update: SerialUpdate) -> None:
        targets.append(update.report.metrics["return_target_mean"])

    run_serial(config.model_copy(update={"run_dir": serial}), note)
    shutil.copytree(serial, processes)
    longer = config.model_copy(update={"resume": True, "total_steps": 64 * 4})
    run_serial(longer.model_copy(update={"run_dir": serial}), note)
    train_in_processes(longer, processes, "--resume")
    require_equal(serial, processes)
    assert len(targets) == len(set(targets)) == 4


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


def test_one_two_and_four_actors_train_to_the_bits_of_the_serial_run_over_the_same_eight_envs(tmp_path: Path) -> None:
    def config(num_actors: int) -> TrainConfig:
        return small_config(
            num_actors=num_actors,
            envs_per_actor=8 // num_actors,
            envs_per_forward=2,
            total_steps=8 * 16 * 3,
            num_layers=2,
            normalize_observations=True,
            normalize_returns=True,
            learning_rate=1e-2,
            self_check=1,
        )

    run_serial(config(1).model_copy(update={"run_dir": tmp_path / "serial"}))
    for num_actors in (1, 2, 4):
        train_in_processes(config(num_actors), tmp_path / f"{num_actors}-actors")
        require_equal(tmp_path / "serial", tmp_path / f"{num_actors}-actors")


@pytest.mark.filterwarnings("ignore::rollout_service.launch.probe.EnvWarning")
def test_many_processes_drop_what_one_process_drops(tmp_path: Path) -> None:
    """Lockstep, envs that are bad at random: equal to the last bit, counters included."""
    config = small_config(
        env="tests.fixtures.bad_data:FlakyEnds", env_kwargs={"bad": 0.05}, on_bad_data="drop", obs_limit=1e6,
        total_steps=64 * 6, self_check=1, normalize_observations=True, normalize_returns=True,
    )  # fmt: skip
    serial = run_serial(config.model_copy(update={"run_dir": tmp_path / "serial"}))
    processes = train_in_processes(config, tmp_path / "processes")
    require_equal(tmp_path / "serial", tmp_path / "processes")
    names = ("bad_observations", "bad_rewards", "dropped_episodes", "dropped_bad_env_steps")
    assert [processes["counters"][name] for name in names] == [serial["counters"][name] for name in names]
    assert min(serial["counters"][name] for name in names) > 2
