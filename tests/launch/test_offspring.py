"""What a role has started itself is ended once the role is gone, whichever way; and nobody else's processes are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from rollout_service import checkpoint
from rollout_service.launch.cleanup import clean_up
from rollout_service.lifeline import PARENT_VARIABLE
from rollout_service.offspring import MARK_VARIABLE, end, family_of, new_family
from tests.fixtures.machine import FaultyEnv, Service, dead_pid, environment, eventually, run_command, stand_ins
from tests.memory.other_process import can_run

START_S, GONE_S = 40.0, 20.0
DEAF = """
import signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
threading.Event().wait(120)
"""
Start = Callable[..., psutil.Process]


class SimulatorEnv(FaultyEnv):
    """Starts one process in a session of its own and forks another; appends both pids to `simulators`."""

    def __init__(self) -> None:
        super().__init__(step_s=0.002)
        command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
        simulator = subprocess.Popen(command, start_new_session=True)
        forked = os.fork()
        while forked == 0:
            signal.pause()
        with open("simulators", "a") as file:
            file.write(f"{simulator.pid}\n{forked}\n")

    def reset(self, *, seed=None, options=None) -> tuple[np.ndarray, dict]:
        return super().reset(seed=seed, options=options)


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def simulators(directory: Path) -> list[psutil.Process]:
    """That were started and live."""
    found = []
    for line in (directory / "simulators").read_text().split():
        if psutil.pid_exists(int(line)):
            found.append(psutil.Process(int(line)))
    return [each for each in found if not gone(each)]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process in a session of its own that ignores SIGTERM, with this environment besides."""
    with stand_ins() as start_one:

        def one(**extra: str) -> psutil.Process:
            command = [sys.executable, "-c", DEAF]
            return psutil.Process(start_one(command, env=environment(**extra), start_new_session=True).pid)

        yield one


def test_all_with_a_mark_are_ended_and_nobody_else(start: Start):
    family = new_family()
    ours = [start(**{MARK_VARIABLE: f"{family}{name}/"}) for name in ("actor-1.1", "actor-1.1", "actor-1.10")]
    others = [start(), start(**{MARK_VARIABLE: new_family()})]
    assert end(f"{family}actor-1.1/") == 2
    assert [gone(each) for each in ours] == [True, True, False]
    assert end(family_of(f"{family}actor-1.1/")) == 1
    assert end(family) == 0
    assert gone(ours[-1])
    assert not any(map(gone, others))


def test_clean_ends_what_nobody_is_left_to_end(start: Start):
    left = start(**{MARK_VARIABLE: f"{dead_pid()}/0123456789abcdef/actor-0.0/"})
    mine = start(**{MARK_VARIABLE: f"{os.getpid()}/0123456789abcdef/actor-0.0/"})
    strange = start(**{MARK_VARIABLE: "none of ours"})
    assert f"process {left.pid} ({left.name()}, started by a role" in "\n".join(clean_up(dry_run=True).lines())
    assert not gone(left)
    found = {each.process.pid for each in clean_up().processes}
    assert found & {left.pid, mine.pid, strange.pid} == {left.pid}
    assert gone(left)
    assert not gone(mine)
    assert not gone(strange)


CLEANER = """
import os, signal, subprocess, sys
bare = {name: value for name, value in os.environ.items() if name != sys.argv[1]}
stays = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait(120)"], env=bare)
ended = subprocess.run(["rollout-service", "clean"], env=bare, capture_output=True, text=True)
print(stays.poll(), ended.returncode, ended.stderr, flush=True)
stays.kill()
"""


def test_clean_spares_who_started_it_and_what_was_started_without_a_mark():
    """A shell that an env of a dead run had started, and a process that its user wants to stay."""
    mark = {MARK_VARIABLE: f"{dead_pid()}/0123456789abcdef/actor-0.0/"}
    bin_dir = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        [sys.executable, "-c", CLEANER, MARK_VARIABLE],
        env=environment(**mark, PATH=bin_dir),
        capture_output=True,
        text=True,
        timeout=GONE_S,
    )
    assert ran.stdout.split() == ["None", "0"], ran


@pytest.mark.skipif(
    os.geteuid() != 0 or not can_run("unshare", "--pid", "--fork", "true"), reason="only root can make a pid namespace"
)
def test_clean_works_where_proc_shows_another_pid_namespace():
    command = ["unshare", "--pid", "--fork", sys.executable, "-m", "rollout_service", "clean", "--dry-run"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=GONE_S)
    assert (ran.returncode, ran.stderr) == (0, "")


ORPHANED_COMMAND = """
import os, signal, sys, time
from rollout_service import lifeline
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lifeline.COMMAND_GRACE_S = 0.1
lifeline.follow_owner()
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
OWNER = """
import os, subprocess, sys
from rollout_service.lifeline import owned
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=owned(os.environ))
"""


def test_a_command_that_outlives_its_owner_ends_no_family_that_it_was_started_in(start: Start):
    mark = {MARK_VARIABLE: f"{new_family()}actor-0.0/", PARENT_VARIABLE: str(dead_pid())}
    brother = start(**mark)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, ORPHANED_COMMAND], env=environment(**mark), stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        command = psutil.Process(int(owner.stdout.readline()))
        eventually(lambda: gone(command), GONE_S, "the command is gone")
    assert not gone(brother)


BY_HAND = """
import subprocess, sys
from rollout_service.lifeline import begin, leave
assert begin("actor")
started = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(started.pid, flush=True)
sys.stdin.readline()
leave(3)
"""


def test_a_role_by_hand_ends_its_own_on_its_way_out():
    clean = {name: value for name, value in environment().items() if name != PARENT_VARIABLE}
    role = subprocess.Popen(
        [sys.executable, "-c", BY_HAND, DEAF], env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert role.stdin is not None
    assert role.stdout is not None
    with role:
        words = {role.stdout.readline().strip() for _ in range(2)}
        [started] = [psutil.Process(int(word)) for word in words - {"up"}]
        role.stdin.write("leave\n")
        role.stdin.flush()
        assert role.wait(GONE_S) == 3
        assert gone(started)


WORDS = [
    *("--env", f"{__name__}:SimulatorEnv", "--num-actors", "2", "--envs-per-actor", "1", "--num-steps", "8"),
    *("--epochs", "1", "--no-tensorboard", "--run-dir", "run", "--checkpoint-interval", "1000000"),
]


def test_simulators_end_with_their_actor_and_with_the_parent_whose_learner_saves_all_the_same(tmp_path: Path):
    run_dir = tmp_path / "run"
    with Service(*WORDS, "--total-steps", "100000000", cwd=tmp_path) as service:
        eventually(lambda: service.updates(run_dir) >= 1, START_S, "an update")
        assert len(simulators(tmp_path)) == 4, "the probe's are gone, and each actor has two"
        victim = service.child("--actor", "1", "--incarnation", "0")
        assert victim is not None
        victim.kill()
        said = f"left behind by actor 1 (incarnation 0, pid {victim.pid}), and ended: 2 processes"
        eventually(lambda: said in service.stderr(), GONE_S, "the dead actor's are ended")
        before = service.updates(run_dir)
        eventually(lambda: service.updates(run_dir) > before + 1, START_S, "the run goes on")
        assert len(simulators(tmp_path)) == 4
        service.process.kill()
        service.wait(5.0)
        logged = service.updates(run_dir)
        eventually(lambda: not simulators(tmp_path), GONE_S, "all are gone, of which the learner is the last to leave")
    assert checkpoint.require(run_dir).checkpoint.manifest.update >= logged
    run_command("clean", cwd=tmp_path)


def test_a_run_that_ends_leaves_no_simulator(tmp_path: Path):
    ran = run_command("train", *WORDS, "--total-steps", "64", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["updates"] == 4
    assert "left behind by the processes of the run, and ended: 4 processes" in ran.stderr
    assert simulators(tmp_path) == []
