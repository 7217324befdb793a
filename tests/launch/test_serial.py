"""The serial run: every role in one process, the same numbers every time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rollout_service import checkpoint as checkpoints
from rollout_service.config import TrainConfig
from rollout_service.errors import ConfigError, EnvFault
from rollout_service.launch.serial import SerialUpdate, run_serial
from rollout_service.launch.train import train_serially
from tests.fixtures.random_ends import RandomEnds
from tests.fixtures.training import serial_run, small_config


def digest(**settings: Any) -> str:
    """Weights after four updates."""
    return str(run_serial(small_config(total_steps=256, **settings))["weights_digest"])


def test_a_run_ends_after_the_last_whole_rollout_that_fits() -> None:
    seen: list[SerialUpdate] = []
    result = run_serial(small_config(total_steps=64 * 3 + 63), seen.append)
    assert [update.summary.env_steps for update in seen] == [64, 128, 192]
    assert (result["env_steps"], result["updates"]) == (192, 3)
    assert result["episodes"] == seen[-1].summary.episodes > 0
    assert result["counters"].get("seed_mismatches", 0) == 0
    assert result["steps_per_second"] > 0


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first = digest(seed=1)
    assert digest(seed=1) == first
    assert digest(seed=2) != first


class WanderingEnv(RandomEnds):
    """Changes the directory of its process."""

    def __init__(self, where: str) -> None:
        super().__init__()
        os.chdir(where)


def test_an_env_that_changes_the_directory_does_not_move_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    kwargs = {"where": str(tmp_path / "elsewhere")}
    env = f"{__name__}:{WanderingEnv.__name__}"
    train_serially(small_config(env=env, env_kwargs=kwargs, total_steps=64, run_dir=Path("run"), tensorboard=False))
    assert checkpoints.require(tmp_path / "run").checkpoint.manifest.update == 1
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_small_maze_is_learned_in_seconds() -> None:
    config = TrainConfig(
        env="Memory/TMaze-v0",
        env_kwargs={"corridor": 4},
        num_actors=2,
        envs_per_actor=8,
        num_steps=64,
        hidden_dim=32,
        encoder_dim=32,
        chrono_max=16.0,
        learning_rate=5e-3,
        envs_per_minibatch=8,
        total_steps=25_000,
        self_check=1,
        learner_threads=1,
    )
    result = run_serial(config)
    assert result["return_mean"] > 0.9
    assert result["counters"].get("seed_mismatches", 0) == 0


def test_a_policy_lag_has_no_meaning_in_one_thread() -> None:
    with pytest.raises(ConfigError, match=r"max_policy_lag 0, not 2.*leave --serial out"):
        run_serial(small_config(max_policy_lag=2))


def test_checkpoints_are_written_first_at_the_interval_and_last(tmp_path: Path) -> None:
    result = run_serial(small_config(run_dir=tmp_path, total_steps=64 * 5, checkpoint_interval=2, checkpoints_kept=9))
    assert [int(path.name[-8:]) for path in checkpoints.listed(tmp_path)] == [0, 2, 4, 5]
    assert result["checkpoint"] == str(checkpoints.listed(tmp_path)[-1])


def test_without_a_run_dir_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serial_run(small_config()) as run:
        run.one_update()
    assert list(tmp_path.iterdir()) == []


def test_resume_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    run_serial(small_config(run_dir=tmp_path, total_steps=64 * 3))
    seen: list[SerialUpdate] = []
    result = run_serial(small_config(run_dir=tmp_path, total_steps=64 * 5, resume=True), seen.append)
    assert [(update.report.update, update.summary.env_steps) for update in seen] == [(4, 256), (5, 320)]
    assert (result["updates"], result["env_steps"]) == (5, 320)
    assert checkpoints.require(tmp_path).checkpoint.manifest.update == 5


def test_an_env_that_fails_shows_its_own_traceback_and_leaves_nothing_behind() -> None:
    with pytest.raises(EnvFault, match="boom-7") as raised:
        run_serial(small_config(env="tests.fixtures.envs:BoomEnv", env_kwargs={"at": 20}))
    assert raised.value.__cause__ is not None
