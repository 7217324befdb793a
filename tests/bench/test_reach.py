"""Time to a return: from what the envs themselves write down, for every side alike."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_service.bench import reach
from rollout_service.bench.reach import Reached, outcome, speedups
from rollout_service.bench.runners import RUNNERS
from rollout_service.launch.settings import parse_train

STEPS = """
import peer_envs
for make in (peer_envs.make_null, peer_envs.make_cartpole):
    env = make()
    for _ in range(2):
        env.reset(seed=1)
        while not any(env.step(0)[2:4]):
            pass
"""


def episodes(returns: list[float]) -> list[dict[str, float]]:
    """One a second from 11 on, ten steps each."""
    return [{"time": 11.0 + number, "total": total, "length": 10} for number, total in enumerate(returns)]


def test_the_goal_is_reached_with_the_mean_of_the_last_hundred() -> None:
    notes = [{"first_step": 10.5}, {"first_step": 10.25}, *episodes([0.0] * 50 + [450.0] * 100)]
    # 450 k / 100 >= 400 from the 89th good episode on.
    found = outcome(notes, command=4.0, goal=400.0)
    assert found == Reached(4.0, 10.25, 11.0 + 138, 1390, 400.5)
    assert found.figures("ours") == {
        "ours_env_steps": 1390.0,
        "ours_best_return": 400.5,
        "ours_start_s": 6.25,
        "ours_training_s": 138.75,
        "ours_whole_s": 145.0,
    }


def test_fewer_than_a_hundred_episodes_reach_nothing() -> None:
    found = outcome(episodes([500.0] * 99), command=0.0, goal=400.0)
    assert (found.goal, found.best, found.env_steps) == (None, 0.0, 990)
    assert outcome([], 0.0, 400.0).figures("ours") == {"ours_env_steps": 0.0, "ours_best_return": 0.0}


def test_sooner_is_the_other_sides_time_over_ours() -> None:
    found = {"ours_training_s": 4.0, "ours_whole_s": 8.0, "peer_training_s": 10.0}
    assert speedups(found, ["ours", "peer"]) == {"ours_sooner_training_times": 2.5}
    assert speedups(found, ["ours"]) == {}


def test_our_settings_are_those_of_train() -> None:
    config = parse_train(reach.our_case(2).words()[1:])
    assert (config.seed, config.hidden_dim, config.env) == (2, 128, "peer_envs:make_cartpole")


@pytest.mark.parametrize(("where", "files"), [(None, 1), ("NOT_SET_ANYWHERE", 0)])
def test_envs_write_down_their_first_step_and_every_episode(where: str | None, files: int, tmp_path: Path) -> None:
    extra = {"PEER_EPISODES": str(tmp_path), "PYTHONPATH": str(RUNNERS)}
    if where is not None:
        extra["PEER_EPISODES_WHERE"] = where
    subprocess.run([sys.executable, "-c", STEPS], env={**os.environ, **extra}, check=True, timeout=60)
    assert len(list(tmp_path.iterdir())) == files
    notes = reach.notes_in(tmp_path)
    if files:
        assert ["first_step" in note for note in notes] == [True, False, False, False, False]
        assert [(note["total"], note["length"]) for note in notes[1:3]] == [(0.0, 200), (0.0, 200)]
        assert all(note["total"] == note["length"] for note in notes[3:])


def test_a_half_written_line_is_left_for_the_next_look(tmp_path: Path) -> None:
    (tmp_path / "7.jsonl").write_text(json.dumps({"first_step": 1.0}) + "\n" + '{"time": 2.0, "to')
    assert reach.notes_in(tmp_path) == [{"first_step": 1.0}]


def test_masked_cartpole_shows_position_and_angle_only() -> None:
    spec = importlib.util.spec_from_file_location("peer_envs_here", RUNNERS / "peer_envs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    env = module.make_cartpole()
    seen, _ = env.reset(seed=3)
    assert seen.tolist() == env.unwrapped.state[[0, 2]].astype("float32").tolist()
    assert env.observation_space.shape == (2,)
