"""Running statistics in whole runs: rewards of any size, actors that see different things, an evaluation afterwards."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from learner.evaluate import load_policy, play
from rollout_service import checkpoint as checkpoints
from rollout_service.launch.serial import run_serial
from tests.fixtures.machine import run_command
from tests.fixtures.training import serial_run, sharpen, small_config

ONE = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)


class StagedRewardEnv(gymnasium.Env[np.ndarray, np.int64]):
    """Rewards 0 for `stage` steps, then 1 for as many, then 1e30; episodes of 25 steps."""

    observation_space = ONE
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, stage: int = 500) -> None:
        self.stage = stage
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = (0.0, 1.0, 1e30)[min(self.steps // self.stage, 2)]
        self.steps += 1
        return self.np_random.normal(size=1).astype(np.float32), reward, self.steps % 25 == 0, False, {}


class NoiseEnv(gymnasium.Env[np.ndarray, np.int64]):
    """Observations N(mean, 1), 0 until a test says otherwise to one of those that were made; episodes without end."""

    observation_space = ONE
    action_space = gymnasium.spaces.Discrete(3)
    made: ClassVar[list[NoiseEnv]] = []

    def __init__(self) -> None:
        self.mean = 0.0
        NoiseEnv.made.append(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._observation(), float(self.np_random.normal()), False, False, {}

    def _observation(self) -> np.ndarray:
        return self.np_random.normal(self.mean, 1.0, 1).astype(np.float32)


class SideEnv(gymnasium.Env[np.ndarray, np.int64]):
    """Observations N(50, 10): reward 1 for saying on which side of 50 they are; episodes of 10 steps."""

    observation_space = ONE
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._draw(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        right = float(int(action) == (self.level > 50.0))
        self.t += 1
        return self._draw(), right, self.t == 10, False, {}

    def _draw(self) -> np.ndarray:
        self.level = self.np_random.normal(50.0, 10.0)
        return np.array([self.level], np.float32)


def test_rewards_of_nothing_then_of_one_then_huge_ones_train_on_and_are_logged_raw() -> None:
    config = small_config(
        env=f"{__name__}:StagedRewardEnv", num_actors=1, num_steps=125, total_steps=10_000, normalize_returns=True,
        self_check=1,
    )  # fmt: skip
    raw: list[float] = []
    with serial_run(config) as run:
        for _ in range(12):
            rollout = run.rollouts[run.bank]
            update = run.one_update()
            raw.append(float(rollout.rewards().max()))
            assert all(map(math.isfinite, update.report.metrics.values())), update.report.metrics
            scaled = rollout.advantages()
            assert np.isfinite(scaled).all()
            assert np.abs(scaled).max() < 1e3
        assert all(np.isfinite(array).all() for array in run.trainer.weights().values())
        last_hundred = [0.0] * 20 + [25.0] * 40 + [25e30] * 40
        assert update.summary.return_mean == pytest.approx(np.mean(last_hundred), rel=1e-6)
    assert raw == [0.0] * 4 + [1.0] * 4 + [np.float32(1e30)] * 4


def test_actors_that_see_different_things_use_the_same_statistics_of_all_of_them() -> None:
    config = small_config(
        env=f"{__name__}:NoiseEnv", envs_per_actor=8, num_steps=250, total_steps=10**6, envs_per_minibatch=8,
        epochs=1, normalize_observations=True, self_check=1,
    )  # fmt: skip
    with serial_run(config) as run:
        for env in NoiseEnv.made[-8:]:  # those of the second actor
            env.mean = 10.0
        sharpen(run)
        for _ in range(10):
            slots = run.spec.bank(run.bank)
            update = run.one_update()
            # The learner recomputes what both stored, under the statistics of the weights that it published before.
            assert update.report.metrics["self_check_deviation"] <= 1e-4
        weights = run.trainer.weights()
        seen = [run.memory.array("observations")[slot].mean() for slot in slots]
    assert seen == pytest.approx([0.0, 10.0], abs=0.2), "what is stored is raw"
    assert weights["normalizers.0.count"].tolist() == [40_000.0]
    assert weights["normalizers.0.mean"][0] == pytest.approx(5.0, abs=0.1)
    assert weights["normalizers.0.variance"][0] == pytest.approx(26.0, abs=1.0)


def test_an_evaluation_in_another_process_uses_the_statistics_that_were_saved_and_leaves_them(tmp_path: Path) -> None:
    config = small_config(
        env=f"{__name__}:SideEnv", core="none", num_actors=1, envs_per_actor=16, num_steps=64, total_steps=64 * 16 * 25,
        envs_per_minibatch=4, learning_rate=1e-2, normalize_observations=True, run_dir=tmp_path / "run",
        tensorboard=False,
    )  # fmt: skip
    trained = run_serial(config)
    assert trained["return_mean"] > 9.0
    found = checkpoints.require(tmp_path / "run").checkpoint
    assert found.arrays["policy/normalizers.0.variance"][0] == pytest.approx(100.0, rel=0.1)
    before = hashes(tmp_path)
    words = ("eval", "run", "--episodes", "200", "--json")
    played = json.loads(run_command(*words, cwd=tmp_path).stdout)
    assert played["return_mean"] == pytest.approx(trained["return_mean"], rel=0.05)
    assert hashes(tmp_path) == before

    fresh = load_policy(found.manifest.run_spec, found.arrays)
    weights = {name.removeprefix("policy/"): a for name, a in found.arrays.items() if name.startswith("policy/")}
    fresh.load_arrays({**weights, "normalizers.0.mean": np.zeros(1), "normalizers.0.variance": np.ones(1)})
    blind = play(fresh, found.manifest.run_spec, [20] * 4, argmax=False, seed=1)
    assert np.mean([episode.total_reward for episode in blind]) < 7.0, "without them it would be another policy"


def hashes(root: Path) -> dict[str, str]:
    """Every file of the run."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
