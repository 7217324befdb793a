"""`pin_actors`: which core an actor gets, that it stays there, and what is said where that cannot be."""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollout_service.config import TrainConfig
from rollout_service.errors import ConfigError
from rollout_service.launch.children import Launcher
from rollout_service.launch.cpu import children_on, cores_in_turn
from rollout_service.launch.run import Door
from rollout_service.launch.status import RunStatus, render
from rollout_service.launch.train import serve
from tests.control.world import started
from tests.fixtures.machine import Service, eventually, run_command


def topology(root: Path, siblings: dict[int, str]) -> Path:
    """A /sys/devices/system/cpu with these siblings."""
    for core, text in siblings.items():
        directory = root / f"cpu{core}" / "topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("siblings", "order"),
    [
        ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, (0, 1, 2, 3)),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, (0, 2, 1, 3)),
        ({}, (0, 1, 2, 3)),
        ({0: "nonsense", 1: "", 2: "2", 3: "7"}, (0, 1, 2, 3)),
    ],
)
def test_every_physical_core_gets_an_actor_before_one_gets_two(
    tmp_path: Path, siblings: dict[int, str], order: tuple[int, ...]
) -> None:
    assert cores_in_turn(allowed=range(4), root=topology(tmp_path, siblings)) == order


def test_only_cores_of_the_affinity_mask_are_given_out(tmp_path: Path) -> None:
    assert cores_in_turn(allowed={5, 3, 9}, root=tmp_path) == (3, 5, 9)
    assert set(cores_in_turn()) == os.sched_getaffinity(0)


def test_actors_take_turns_and_keep_their_core_over_incarnations(tmp_path: Path) -> None:
    pinned = Launcher(queue.SimpleQueue(), "ipc:///x", tmp_path, False, (4, 6))
    assert [pinned.core_of(actor_id) for actor_id in range(5)] == [4, 6, 4, 6, 4]
    free = Launcher(queue.SimpleQueue(), "ipc:///x", tmp_path, False)
    assert free.core_of(0) is None


def test_a_child_and_its_threads_live_on_the_core_and_the_parent_stays_free() -> None:
    before = os.sched_getaffinity(0)
    code = "import os, threading; print(sorted(os.sched_getaffinity(0)))"
    with children_on(max(before)):
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=30)
    assert json.loads(child.stdout) == [max(before)]
    assert os.sched_getaffinity(0) == before


def test_a_core_outside_the_mask_is_refused_with_the_cores_that_are_in_it() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=r"core 1000 cannot be chosen .* may use \[0"), children_on(1000):
        pytest.fail("went on")
    assert os.sched_getaffinity(0) == before


def test_a_process_that_may_not_choose_is_told_so_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cores: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.raises(ConfigError, match=r"cannot be chosen \(Operation not permitted\).*leave pin_actors out"):
        cores_in_turn()
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ConfigError, match="this system has no way"):
        cores_in_turn()


def test_actors_that_train_does_not_start_cannot_be_pinned_by_it() -> None:
    with pytest.raises(ValueError, match="no effect with serial"):
        TrainConfig(pin_actors=True, serial=True)
    with pytest.raises(ConfigError, match="taskset -c CORE"):
        serve(TrainConfig(pin_actors=True), Door())


def test_status_has_a_column_for_cores_where_an_actor_keeps_to_some() -> None:
    world, *_ = started(2)
    report = world.coordinator.report(world.now)
    run = RunStatus("run-1", "runs/x", 7, "ipc:///x", 60.0, 1 << 20, report)
    assert "cores" not in render(run)
    report["actors"][1]["cores"] = [3]
    header, first, second = render(run).splitlines()[-3:]
    assert header.split()[-1] == "cores"
    assert second.split()[-1] == "3"
    assert len(first.split()) == len(second.split()) - 1


def test_a_run_pins_its_actors_says_so_and_leaves_the_learner_free(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    words = ["--env", "tests.fixtures.machine:FaultyEnv", "--env-kwargs", "step_s=0.01", "--num-actors", "2",
             "--envs-per-actor", "2", "--num-steps", "8", "--epochs", "1", "--no-tensorboard", "--pin-actors",
             "--total-steps", "100000", "--run-dir", "run"]  # fmt: skip
    with Service(*words, cwd=tmp_path) as service:
        eventually(lambda: service.updates(tmp_path / "run") >= 1, 40, "an update")
        status = json.loads(run_command("status", "--json", cwd=tmp_path).stdout)
        actors = next(run for run in status["runs"] if run["pid"] == service.process.pid)["report"]["actors"]
        threads = [psutil.Process(thread.id) for thread in psutil.Process(actors[0]["pid"]).threads()]
        kept = {tuple(thread.cpu_affinity()) for thread in threads}
        learner = service.child("-m", "learner")
        assert learner is not None
        assert sorted(learner.cpu_affinity()) == allowed
        service.signal_group(signal.SIGINT)
        assert service.wait(30) == 130
    turns = (cores_in_turn() * 2)[:2]
    assert kept == {(turns[0],)}
    if len(allowed) > 1:
        assert [actor["cores"] for actor in actors] == [[core] for core in turns]
    said = f"actors keep to cores {turns[0]}, {turns[1]}, one each; the learner is not bound"
    assert said in (tmp_path / "run" / "run.log").read_text()
