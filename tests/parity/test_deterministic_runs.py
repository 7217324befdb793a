"""`--deterministic`: the same numbers from a run that was killed and resumed, that was slow here and there, whose
processes died, or that had its envs elsewhere. What is equal: arrays, counters and log lines, but for times."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rollout_service import checkpoint as checkpoints
from rollout_service.checkpoint import Checkpoint
from rollout_service.config import TrainConfig
from rollout_service.launch.rundir import to_toml
from rollout_service.launch.serial import run_serial
from tests.fixtures.machine import Pace, Service, eventually
from tests.fixtures.training import small_config
from tests.fixtures.unsteady import UNSTEADY

UPDATES = 20
INTERVAL = 5
END_S = 120.0
OF_TIME = ("wall_time", "time/", "split_", "actors/slowest")
OF_PROCESSES = (
    "actors/alive",
    "actors/restarts",
    "learner/restarts",
    "learner/version",
    "count/dropped",
    "count/rolled",
)
"""What died and what that cost."""


def config(num_actors: int = 2, **changes: Any) -> TrainConfig:
    """Eight envs, with everything that has a state of its own."""
    settings: dict[str, Any] = {
        "env": UNSTEADY,
        "num_actors": num_actors,
        "envs_per_actor": 8 // num_actors,
        "envs_per_forward": 2,
        "total_steps": UPDATES * 8 * 16,
        "checkpoint_interval": INTERVAL,
        "deterministic": True,
        "normalize_observations": True,
        "normalize_returns": True,
        "learning_rate": 1e-2,
        "epochs": 2,
    }
    return small_config(**settings | changes)


def start(tmp_path: Path, *words: str, **environment: str) -> Service:
    """A whole run in `tmp_path / "run"`."""
    (tmp_path / "settings.toml").write_text(to_toml(config()))
    return Service(
        *("--config", "settings.toml", "--run-dir", "run", "--no-tensorboard", "--json", "--restart-window", "0.2"),
        *words,
        cwd=tmp_path,
        **environment,
    )


def within(rollout: int) -> int:
    """Steps of an env that is in the middle of its so-manieth rollout, counted from 1."""
    return rollout * 16 - 8


def run(tmp_path: Path, *words: str, **environment: str) -> Path:
    """One from its start to its end. Returns its directory."""
    with start(tmp_path, *words, **environment) as service:
        assert service.wait(END_S) == 0, service.stderr()
    return tmp_path / "run"


def last(run_dir: Path) -> Checkpoint:
    return checkpoints.require(run_dir).checkpoint


def entries(run_dir: Path, *but: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(but)} for line in lines]


def require_equal(one: Path, other: Path) -> None:
    """Parameters, moments of Adam, normalisers, generators, counters and figures as of the last update."""
    first, second = last(one), last(other)
    assert set(first.arrays) == set(second.arrays)
    for name in sorted(first.arrays):
        np.testing.assert_array_equal(first.arrays[name], second.arrays[name], err_msg=name)
    for name in ("update", "env_steps", "counters", "generators", "figures"):
        assert getattr(first.manifest, name) == getattr(second.manifest, name), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    return run(tmp_path_factory.mktemp("undisturbed"))


def test_twenty_updates_are_ten_and_a_kill_and_ten_more(undisturbed: Path, tmp_path: Path) -> None:
    run_dir, pace = tmp_path / "run", Pace(tmp_path / "pace", within(2 * INTERVAL + 3))
    with start(tmp_path, UNSTEADY="1:0.004", PACE=str(pace.file)) as service:
        eventually(lambda: service.updates(run_dir) == 2 * INTERVAL + 2, END_S, "a few updates beyond a barrier")
        service.signal_group(signal.SIGKILL)
        assert service.wait(END_S) == -signal.SIGKILL
    assert last(run_dir).manifest.update == 2 * INTERVAL
    run(tmp_path, "--resume", UNSTEADY="0:0.002")
    require_equal(undisturbed, run_dir)
    assert last(run_dir).manifest.version == last(undisturbed).manifest.version
    assert last(run_dir).manifest.tally == last(undisturbed).manifest.tally
    assert last(run_dir).manifest.tally.episodes > 100
    assert entries(run_dir, *OF_TIME) == entries(undisturbed, *OF_TIME)
    assert len(entries(run_dir)) == UPDATES


def test_whoever_dies_the_end_is_the_same(undisturbed: Path, tmp_path: Path) -> None:
    """Each dies in the middle of a rollout, some updates behind a barrier: an actor first, then the learner."""
    run_dir, pace = tmp_path / "run", Pace(tmp_path / "pace", within(INTERVAL + 3))

    def kill(*words: str) -> psutil.Process:
        found = service.child(*words)
        assert found is not None
        found.kill()
        return found

    with start(tmp_path, UNSTEADY="*:0.002", PACE=str(pace.file)) as service:
        eventually(lambda: service.updates(run_dir) == INTERVAL + 2, END_S, "updates beyond a barrier")
        survivor = service.child("--actor", "0")
        kill("--actor", "1")
        eventually(lambda: "goes on from" in service.stderr(), END_S, "the learner has gone back")
        pace.allow(within(INTERVAL + 3 + INTERVAL + 4))
        eventually(lambda: service.updates(run_dir) > 2 * INTERVAL + 1, END_S, "updates beyond the next barrier")
        assert service.child("--actor", "0") == survivor
        kill("-m", "learner")
        pace.free()
        assert service.wait(END_S) == 0, service.stderr()
        said = service.stderr()
    assert "actor 1 (incarnation 0" in said
    assert said.count("goes on from") == 2
    require_equal(undisturbed, run_dir)
    assert entries(run_dir, *OF_TIME, *OF_PROCESSES) == entries(undisturbed, *OF_TIME, *OF_PROCESSES)
    assert entries(run_dir)[-1]["count/rolled_back_updates"] >= 2


def test_a_serial_run_however_its_envs_are_split_gives_the_same(undisturbed: Path, tmp_path: Path) -> None:
    for num_actors in (1, 2, 4):
        run_dir = tmp_path / f"{num_actors}"
        run_serial(config(num_actors, run_dir=run_dir))
        require_equal(undisturbed, run_dir)
        if num_actors == config().num_actors:
            assert last(run_dir).manifest.tally == last(undisturbed).manifest.tally


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_vector_envs_begin_anew_at_a_barrier_in_every_mode(mode: str, tmp_path: Path) -> None:
    run_dirs = [tmp_path / "whole", tmp_path / "halves"]
    settings = config(vectorize="sync", env_kwargs={"vector_kwargs": {"autoreset_mode": mode}})
    settings = settings.model_copy(update={"total_steps": 8 * 16 * INTERVAL * 2})
    run_serial(settings.model_copy(update={"run_dir": run_dirs[0]}))
    looks = iter(range(10_000))
    stopped = run_serial(
        settings.model_copy(update={"run_dir": run_dirs[1]}), stop_asked=lambda: next(looks) > 16 * 2 * (INTERVAL + 2)
    )
    assert INTERVAL < stopped["updates"] < 2 * INTERVAL
    assert last(run_dirs[1]).manifest.update == INTERVAL
    run_serial(settings.model_copy(update={"run_dir": run_dirs[1], "resume": True}))
    require_equal(*run_dirs)
