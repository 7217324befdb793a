"""The tasks that ship: episode lengths, cues, rewards, and what a policy without memory can get."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.utils.env_checker import check_env

from rollout_service.envs.make import make_env
from rollout_service.envs.memory_tasks import (
    CARTPOLE_STEPS,
    TASKS,
    FlickeringCartPole,
    PositionCartPole,
    Recall,
    TMaze,
)
from rollout_service.errors import ConfigError

Episode = list[tuple[Any, float, bool, bool, dict[str, Any]]]


def play(env: gymnasium.Env[Any, Any], act: Any, seed: int | None = None) -> tuple[Any, Episode]:
    """One episode; act(t, first observation) chooses. Returns the first observation and all steps."""
    first, _ = env.reset(seed=seed)
    steps: Episode = []
    while not steps or not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(act(len(steps), first)))
    return first, steps


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.filterwarnings("ignore:.*Box observation space (minimum|maximum) value:UserWarning")
def test_every_task_passes_gymnasiums_own_check(task: str) -> None:
    env = gymnasium.make(task)
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


def test_the_t_maze_shows_its_cue_once_and_rewards_the_right_turn() -> None:
    env = TMaze(corridor=4)
    cues = set()
    for seed in range(8):
        for right in (True, False):
            first, steps = play(env, lambda t, first, right=right: int((first[0] > 0) == right), seed)
            cues.add(float(first[0]))
            assert first.tolist() == [first[0], 1, 0]
            assert [step[0].tolist() for step in steps] == [[0, 1, 0]] * 3 + [[0, 0, 1], [0, 0, 0]]
            assert [step[1] for step in steps] == [0, 0, 0, 0, 1.0 if right else -1.0]
            assert [step[2] for step in steps] == [False] * 4 + [True]
            assert not any(step[3] for step in steps)
            assert [step[4].get("success") for step in steps] == [None] * 4 + [right]
    assert cues == {-1.0, 1.0}


@pytest.mark.parametrize("corridor", [1, 10, 64])
def test_a_t_maze_episode_has_one_step_more_than_its_corridor(corridor: int) -> None:
    _, steps = play(TMaze(corridor), lambda t, first: 0)
    assert len(steps) == corridor + 1


def test_recall_rewards_the_cue_at_the_last_step_only() -> None:
    env = Recall(delay=5)
    for seed in range(8):
        for right in (True, False):
            # The answer counts at the last step alone: before it, always the other action.
            first, steps = play(env, lambda t, first, right=right: int((first[0] > 0) == (right == (t == 4))), seed)
            assert abs(first[0]) == 1
            assert [step[0].tolist() for step in steps] == [[0]] * 5
            assert [step[1] for step in steps] == [0, 0, 0, 0, float(right)]
            assert steps[-1][2:] == (True, False, {"success": right})


def test_without_memory_recall_pays_one_half() -> None:
    env = Recall(delay=2)
    env.reset(seed=3)
    returns = [play(env, lambda t, first: 1)[1][-1][1] for _ in range(2000)]
    assert np.mean(returns) == pytest.approx(0.5, abs=0.05)


def push(t: int, first: Any) -> int:
    return (t // 2) % 2


def test_position_cart_pole_is_gymnasiums_without_velocities() -> None:
    ours, theirs = PositionCartPole(), CartPoleEnv()
    assert ours.reset(seed=5)[0].tolist() == theirs.reset(seed=5)[0][[0, 2]].tolist()
    for t in range(60):
        observation, reward, terminated, truncated, _ = ours.step(push(t, None))
        expected = theirs.step(push(t, None))
        np.testing.assert_allclose(observation, expected[0][[0, 2]], rtol=1e-5, atol=1e-6)
        assert (reward, terminated, truncated) == (1.0, expected[2], False)
        if terminated:
            break
    assert t > 20


def balance(env: PositionCartPole | FlickeringCartPole) -> int:
    """Keeps the pole up, from the physics rather than from what the env shows."""
    _, x_dot, theta, theta_dot = env._physics
    return int(theta + 0.5 * theta_dot + 0.05 * x_dot > 0)


@pytest.mark.parametrize("env", [PositionCartPole(), FlickeringCartPole()])
def test_cart_pole_tasks_are_truncated_after_500_steps(env: PositionCartPole | FlickeringCartPole) -> None:
    _, steps = play(env, lambda t, first: balance(env), seed=1)
    assert len(steps) == CARTPOLE_STEPS == 500
    assert sum(step[1] for step in steps) == 500.0
    assert steps[-1][2:4] == (False, True)
    assert not any(step[2] or step[3] for step in steps[:-1])


def blanks(env: FlickeringCartPole) -> np.ndarray:
    first, steps = play(env, lambda t, first: balance(env), seed=2)
    shown = np.array([first, *(step[0] for step in steps)])
    assert shown.shape == (501, 4)
    return (shown == 0).all(axis=1)


def test_half_of_the_frames_flicker() -> None:
    assert blanks(FlickeringCartPole(0.5)).mean() == pytest.approx(0.5, abs=0.07)
    assert not blanks(FlickeringCartPole(0.0)).any()
    assert blanks(FlickeringCartPole(1.0)).all()


def test_bursts_blank_whole_runs_of_frames() -> None:
    dark = blanks(FlickeringCartPole(0.1, burst_length=4))[:-3]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], dark.astype(int), [0]])))
    runs = (edges[1::2] - edges[::2])[:-1]
    assert len(runs) > 10
    assert (runs % 4 == 0).all()


def test_flicker_and_start_come_from_the_seed() -> None:
    first, second = (play(FlickeringCartPole(), push, seed=9) for _ in range(2))
    assert np.array([step[0] for step in first[1]]).tobytes() == np.array([step[0] for step in second[1]]).tobytes()


@pytest.mark.parametrize(
    ("task", "kwargs", "says"),
    [
        ("Memory/TMaze-v0", {"corridor": 0}, "corridor is 0"),
        ("Memory/Recall-v0", {"delay": 0}, "delay is 0"),
        ("Memory/FlickeringCartPole-v0", {"blank_probability": 1.5}, "blank_probability is 1.5"),
        ("Memory/FlickeringCartPole-v0", {"burst_length": 0}, "burst_length is 0"),
    ],
)
def test_impossible_settings_are_refused(task: str, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_env(task, kwargs)
