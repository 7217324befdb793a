"""Evaluation plays whole episodes with carried state under the weights and statistics of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from learner.evaluate import evaluate, load_policy, play, quotas
from learner.trainer import Trainer
from rollout_service import checkpoint as checkpoints
from rollout_service.cli import main
from rollout_service.config import TrainConfig
from rollout_service.errors import CheckpointError, ConfigError
from rollout_service.launch.probe import build_run_spec
from rollout_service.launch.serial import run_serial
from rollout_service.tally import TallyRecord
from tests.fixtures.counter_lstm import turn_into_counter
from tests.fixtures.training import small_config

TICK = "tests.fixtures.envs:TickEnv"
RECALL: dict[str, Any] = {
    "env": "tests.fixtures.envs:RecallEnv",
    "env_kwargs": {"steps": 8},
    "num_actors": 1,
    "envs_per_actor": 16,
    "num_steps": 64,
    "hidden_dim": 32,
    "encoder_dim": 32,
    "chrono_max": 16.0,
    "learning_rate": 5e-3,
    "envs_per_minibatch": 8,
    "total_steps": 20_000,
    "self_check": 1,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run directory with a policy that recalls a cue over 8 steps, and the training's own result."""
    run_dir = tmp_path_factory.mktemp("recall")
    result = run_serial(TrainConfig(run_dir=run_dir, **RECALL))
    return run_dir, result


@pytest.mark.parametrize("num_envs", [1, 7])
@pytest.mark.parametrize("argmax", [False, True])
def test_evaluation_agrees_with_training(trained: tuple[Path, dict[str, Any]], num_envs: int, argmax: bool) -> None:
    run_dir, result = trained
    assert result["return_mean"] >= 0.95
    evaluation = evaluate(run_dir, episodes=100, argmax=argmax, num_envs=num_envs, seed=3)
    assert evaluation.episodes == 100
    assert evaluation.return_mean >= result["return_mean"] - 0.03
    assert evaluation.length_mean == 8.0
    assert evaluation.success_rate == evaluation.return_mean
    assert evaluation.warnings == ()


def untrained(run_dir: Path, **settings: Any) -> Trainer:
    """Checkpoint 0 of a run that was never trained."""
    config = small_config(**settings)
    trainer = Trainer(config, build_run_spec(config), total_updates=1)
    trainer.save(run_dir, version=1)
    return trainer


class Recorder:
    """A policy that writes down what enters every step, and the first env's odds of action 1 and value."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.entering: list[np.ndarray] = []
        self.seen: list[np.ndarray] = []
        self.chosen: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def step(self, observations: Any, state: Any, noise: Any) -> Any:
        self.entering.append(state["cell"].numpy().copy())
        self.seen.append(observations["observations"].numpy().copy())
        step = self.policy.step(observations, state, noise)
        taken = float(step.log_probs[0].double().exp())
        self.chosen.append((taken if int(step.actions[0]) == 1 else 1.0 - taken, float(step.values[0])))
        return step


@pytest.mark.parametrize("num_envs", [1, 3])
def test_state_is_fed_back_within_an_episode_and_zero_at_the_start_of_each(tmp_path: Path, num_envs: int) -> None:
    trainer = untrained(tmp_path, env=TICK, env_kwargs={"length": 3}, hidden_dim=4)
    counter = Recorder(turn_into_counter(trainer.policy))
    finished = play(counter, trainer.spec, quotas(10 * num_envs, num_envs), argmax=True, seed=1)  # type: ignore[arg-type]
    assert len(finished) == 10 * num_envs
    cells = np.stack(counter.entering)
    assert cells.shape == (30, num_envs, 1, 4)
    expected = np.tile([0.0, 0.1, 0.2], 10)[:, None, None, None]
    np.testing.assert_allclose(cells, np.broadcast_to(expected, cells.shape), atol=1e-5)


def test_one_env_that_ends_leaves_the_state_of_its_neighbours_alone(tmp_path: Path) -> None:
    trainer = untrained(tmp_path, env="tests.fixtures.envs:RandomTickEnv", env_kwargs={"longest": 5}, hidden_dim=2)
    counter = Recorder(turn_into_counter(trainer.policy))
    play(counter, trainer.spec, [20, 20, 20], argmax=True, seed=1)  # type: ignore[arg-type]
    cells = np.stack(counter.entering)[..., 0, 0]
    steps_into_episode = np.rint(cells / 0.1)
    np.testing.assert_allclose(cells, 0.1 * steps_into_episode, atol=1e-5)
    rises = steps_into_episode[1:] - steps_into_episode[:-1]
    assert set(np.unique(rises[steps_into_episode[1:] > 0])) == {1.0}
    fresh = steps_into_episode == 0
    assert (fresh.any(axis=1) & ~fresh.all(axis=1)).any()


class PastEnv(gymnasium.Env[Any, Any]):
    """Shows `past` for 5 steps and then zero; an episode has 6 steps."""

    def __init__(self, past: float) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.past = past
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.full(1, self.past, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.full(1, self.past if self.t < 5 else 0.0, np.float32), 0.0, self.t == 6, False, {}


def test_two_pasts_with_the_same_present_are_evaluated_differently(tmp_path: Path) -> None:
    last_rows = []
    for past in (1.0, -1.0):
        trainer = untrained(tmp_path, env=f"{__name__}:PastEnv", env_kwargs={"past": past}, hidden_dim=16)
        with torch.no_grad():
            trainer.policy.policy.weight.mul_(100.0)  # a fresh action head hardly reacts to anything
        recorder = Recorder(trainer.policy)
        play(recorder, trainer.spec, [1], argmax=True, seed=1)  # type: ignore[arg-type]
        assert recorder.seen[5].tolist() == [[0.0]]
        last_rows.append(recorder.chosen[5])
    for first, second in zip(*last_rows, strict=True):
        assert abs(first - second) > 1e-3


def test_two_histories_that_end_in_the_same_observation_lead_to_different_actions(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    checkpoint = checkpoints.require(trained[0]).checkpoint
    policy = load_policy(checkpoint.manifest.run_spec, checkpoint.arrays)
    answers = []
    for cue in (1.0, -1.0):
        state = policy.initial_state(1)
        for seen in (cue, *[0.0] * 7):
            step = policy.step({"observations": torch.tensor([[seen]])}, state, None)
            state = step.state
        answers.append(int(step.actions[0]))
    assert answers == [1, 0]


def test_statistics_are_those_of_the_checkpoint_and_stay_frozen(tmp_path: Path) -> None:
    config = small_config(env_kwargs={"end": 0.2}, normalize_observations=True, total_steps=64 * 3, run_dir=tmp_path)
    run_serial(config)
    checkpoint = checkpoints.require(tmp_path).checkpoint
    policy = load_policy(checkpoint.manifest.run_spec, checkpoint.arrays)
    before = {name: array.tobytes() for name, array in policy.to_arrays().items()}
    assert {name: array.tobytes() for name, array in checkpoint.arrays.items() if name.startswith("policy/")} == {
        f"policy/{name}": content for name, content in before.items()
    }
    play(policy, checkpoint.manifest.run_spec, [5, 5], argmax=False, seed=1)
    assert {name: array.tobytes() for name, array in policy.to_arrays().items()} == before


def test_equal_seeds_play_equal_episodes_and_other_seeds_others(tmp_path: Path) -> None:
    untrained(tmp_path)
    first, again, other = (evaluate(tmp_path, episodes=20, num_envs=4, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.return_mean != other.return_mean


def test_each_env_plays_its_quota_so_short_episodes_are_not_favoured(tmp_path: Path) -> None:
    assert quotas(10, 4) == [3, 3, 2, 2]
    assert quotas(2, 1) == [2]
    trainer = untrained(tmp_path)
    finished = play(trainer.policy, trainer.spec, [3, 3, 2, 2], argmax=False, seed=1)
    assert [sum(episode.env == env for episode in finished) for env in range(4)] == [3, 3, 2, 2]


def test_fewer_episodes_than_envs_are_played_once_each(tmp_path: Path) -> None:
    untrained(tmp_path, env=TICK, env_kwargs={"length": 4, "end": "trunc"})
    evaluation = evaluate(tmp_path, episodes=3, num_envs=8)
    assert (evaluation.episodes, evaluation.return_mean, evaluation.return_std, evaluation.length_mean) == (3, 4, 0, 4)


def test_success_is_reported_where_the_env_reports_it(tmp_path: Path) -> None:
    untrained(tmp_path, env="Memory/TMaze-v0", env_kwargs={"corridor": 2})
    evaluation = evaluate(tmp_path, episodes=40, num_envs=4)
    assert evaluation.success_rate is not None
    assert 0.2 < evaluation.success_rate < 0.8
    assert evaluation.return_mean == pytest.approx(2 * evaluation.success_rate - 1)


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    trainer = untrained(tmp_path)
    trainer.updates_done = 1
    newest = trainer.save(tmp_path, version=2)
    (newest / checkpoints.ARRAYS_FILE).write_bytes(b"no")
    evaluation = evaluate(tmp_path, episodes=2, num_envs=1)
    assert evaluation.checkpoint.name == "checkpoint-00000000"
    assert len(evaluation.warnings) == 1


def test_one_checkpoint_can_be_named(tmp_path: Path) -> None:
    trainer = untrained(tmp_path)
    trainer.updates_done = 1
    trainer.save(tmp_path, version=2)
    chosen = checkpoints.listed(tmp_path)[0]
    assert evaluate(chosen, episodes=1, num_envs=1).checkpoint == chosen


def test_the_best_checkpoint_of_a_run_is_played_if_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = untrained(tmp_path)
    for update, score in ((1, 4.0), (2, -4.0)):
        trainer.updates_done = update
        trainer.save(tmp_path, version=1, tally=TallyRecord(episodes=1, returns=(score,)))
    assert evaluate(tmp_path, episodes=1, num_envs=1, best=True).checkpoint.name == "checkpoint-00000001"
    assert evaluate(tmp_path, episodes=1, num_envs=1).checkpoint.name == "checkpoint-00000002"
    assert main(["eval", str(tmp_path), "--best", "--episodes", "1"]) == 0
    assert "checkpoint-00000001" in capsys.readouterr().out


def test_counts_below_one_and_missing_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="episodes is 0"):
        evaluate(tmp_path, episodes=0)
    with pytest.raises(ConfigError, match="num_envs is -1"):
        evaluate(tmp_path, num_envs=-1)
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        evaluate(tmp_path)
