"""Service, learner and actors as commands of their own: whoever comes first, whoever leaves, whoever dies.

Each run costs seconds of process starts, so each test looks at everything its run can show.
"""

from __future__ import annotations

import json
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from rollout_service import checkpoint
from rollout_service.memory.room import SHARED_MEMORY
from rollout_service.memory.segment import list_segments
from tests.fixtures.by_hand import START_S, Hands, Process, died_of_a_signal, ended
from tests.fixtures.machine import Pace, logged_steps, run_command
from tests.memory.other_process import can_run

STEPS = 8
STEPS_PER_UPDATE = 2 * 2 * STEPS
TINY = ["--num-actors", "2", "--envs-per-actor", "2", "--num-steps", str(STEPS), "--epochs", "1", "--no-tensorboard"]
MAZE = ["--env", "Memory/TMaze-v0", "--env-kwargs", "corridor=3"]
SLOW = ["--env", "tests.fixtures.machine:FaultyEnv", "--env-kwargs", "step_s=0.005"]
UPDATES = 30
LEAVE_S = 15.0
"""Within so long whoever lost its service has left, whatever it was doing."""
OWN_PIDS = ["--pid", "--fork", "--mount-proc"]
THREADS_PER_ACTOR = 8


def words(*more: str, updates: int) -> list[str]:
    return [*TINY, "--total-steps", str(updates * STEPS_PER_UPDATE), *more]


def paced(pace: Pace) -> list[str]:
    return ["--env", "tests.fixtures.machine:FaultyEnv", "--env-kwargs", f"pace={pace.file}"]


@pytest.fixture
def hands(tmp_path: Path) -> Iterator[Hands]:
    with Hands(tmp_path) as found:
        yield found


def check_finished(hands: Hands, service: Process, roles: list[Process], updates: int) -> None:
    assert ended([service, *roles], START_S) == [0] * (1 + len(roles)), service.stderr()
    result = service.result()
    assert (result["updates"], result["env_steps"]) == (updates, updates * STEPS_PER_UPDATE)
    assert logged_steps(hands.run_dir) == [update * STEPS_PER_UPDATE for update in range(1, updates + 1)]
    assert checkpoint.require(hands.run_dir).checkpoint.manifest.update == updates
    last_words = {role.stderr().splitlines()[-1].partition(": ")[2] for role in roles}
    assert last_words <= {"leaving, finished", "leaving, the service is stopping"}
    assert not any("resource_tracker" in each.stderr() for each in (service, *roles))


def modes(run_id: str, endpoint: str) -> list[int]:
    socket = Path(endpoint.removeprefix("ipc://"))
    paths = [*SHARED_MEMORY.glob(f"rs-{run_id}-*"), socket, socket.parent]
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


def test_a_service_comes_first_and_is_joined_by_what_it_says(hands: Hands):
    pace = Pace(hands.directory / "pace", STEPS + 4)
    service = hands.serve(*words(*paced(pace), "--json", "--dump-batch", "batch", updates=30), endpoint=False)
    endpoint = hands.listening(service)
    service.says(f"start 2 x   python -m workers --connect {endpoint}")
    assert f"start 1 x   python -m learner --connect {endpoint}" in service.stderr()
    runs = json.loads(run_command("status", "--json", cwd=hands.directory).stdout)["runs"]
    (mine,) = [run for run in runs if run["endpoint"] == endpoint]
    assert (mine["run_dir"], mine["report"]["state"]) == (str(hands.run_dir), "waiting for the learner")
    assert modes(mine["run_id"], endpoint) == [0o600, 0o600, 0o600, 0o700]
    actors = [hands.actor(endpoint=endpoint) for _ in range(2)]
    learner = hands.learner(endpoint=endpoint)
    hands.reaches(1)
    assert all(psutil.Process(actor.pid).num_threads() <= THREADS_PER_ACTOR for actor in actors)
    pace.free()
    check_finished(hands, service, [learner, *actors], 30)
    batch = load_file(service.err.parent / "batch")
    assert (batch["advantages"].shape, batch["initial_state/cell"].shape[1]) == ((4, 8), 4)
    assert {f"actor {number} (incarnation 0, pid" in service.stderr() for number in (0, 1)} == {True}


def test_roles_come_first_and_wait_for_a_service(hands: Hands):
    roles = [hands.learner("--wait-for-service", "60"), *(hands.actor("--wait-for-service", "60") for _ in range(2))]
    service = hands.serve(*words(*MAZE, "--json", updates=4))
    check_finished(hands, service, roles, 4)
    assert not Path(hands.endpoint.removeprefix("ipc://")).exists()


def test_a_run_waits_for_the_actor_that_comes_late(hands: Hands):
    where = ["--endpoint", "tcp://127.0.0.1:*", "--allow-tcp"]
    service = hands.serve(*words(*MAZE, *where, "--json", updates=4), endpoint=False)
    endpoint = hands.listening(service)
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", endpoint)
    early = [hands.learner(endpoint=endpoint), hands.actor(endpoint=endpoint)]
    service.says("actor 0 (incarnation 0, pid")
    service.says("learner (pid")
    assert hands.updates() == 0
    check_finished(hands, service, [*early, hands.actor(endpoint=endpoint)], 4)


def test_whoever_leaves_or_dies_makes_room_for_the_next_and_a_killed_service_is_followed_by_another(hands: Hands):
    """Whenever somebody comes, leaves or dies, the envs are held back: the run makes ten updates by then at most."""
    pace = Pace(hands.directory / "pace", STEPS + 4)
    settings = words(*paced(pace), "--checkpoint-interval", "1", "--silence-timeout", "2", "--json", updates=UPDATES)
    service = hands.serve(*settings)
    hands.listening(service)
    stays = hands.actor("--reconnect", "60")
    leaves = hands.actor()
    learner = hands.learner()
    hands.reaches(1)
    (segment,) = [each.name for each in list_segments() if each.owner_pid == service.pid and each.kind == "rollout"]

    leaves.send(signal.SIGTERM)
    pace.allow(STEPS + 6)
    assert leaves.wait(LEAVE_S) == 0
    assert (SHARED_MEMORY / segment).exists()
    service.says("left, its place is free: stopped by SIGTERM")
    dies = hands.actor()
    pace.allow(5 * STEPS + 4)
    hands.reaches(3)
    assert stays.running

    dies.popen.kill()
    learner.popen.kill()
    service.says(f"pid {dies.pid}) left, its place is free: died, without a goodbye")
    service.says(f"learner (pid {learner.pid}) left, its place is free: died, without a goodbye")
    learner, without = hands.learner("--reconnect", "60"), hands.actor()
    service.says("goes on from update")
    before = hands.updates()
    pace.allow(10 * STEPS + 4)
    hands.reaches(before + 2)

    service.popen.kill()
    pace.free()
    assert without.wait(LEAVE_S) == 1
    assert "actor: leaving, the service at" in without.stderr()
    assert "has not answered for" in without.stderr()
    stays.says("actor: waiting up to 60 s for a service at", LEAVE_S)
    learner.says("learner: waiting up to 60 s for a service at", LEAVE_S)
    service = hands.serve(*settings, "--resume")
    check_finished(hands, service, [learner, stays, hands.actor("--wait-for-service", "60")], UPDATES)


def test_a_service_that_is_process_1_stops_on_sigterm_and_knows_the_dead_of_other_pid_namespaces(hands: Hands):
    namespace = ["unshare", *OWN_PIDS] if can_run("unshare", *OWN_PIDS, "true") else []
    service = hands.serve(*words(*SLOW, "--checkpoint-interval", "1000000", updates=1_000_000), within=namespace)
    hands.listening(service)
    learner, actor, killed = hands.learner(), hands.actor(), hands.actor()
    hands.reaches(2)
    killed.popen.kill()
    service.says(f"pid {killed.pid}) left, its place is free: died, without a goodbye", 5.0)
    process = psutil.Process(service.pid).children()[0] if namespace else psutil.Process(service.pid)
    process.send_signal(signal.SIGTERM)
    assert service.wait(5.0) == 143
    assert ended([learner, actor], 5.0) == [0, 0]
    assert "Traceback" not in service.stderr()
    assert checkpoint.require(hands.run_dir).checkpoint.manifest.update >= 2


@pytest.mark.parametrize("moment", [0.3, 1.5, 2.6])
def test_a_stop_at_any_moment_kills_nobody_by_a_signal(hands: Hands, moment: float):
    service = hands.serve(*words(*MAZE, updates=1_000_000))
    hands.listening(service)
    roles = [hands.learner("--wait-for-service", "2"), *(hands.actor("--wait-for-service", "2") for _ in range(2))]
    with pytest.raises(Exception, match="timed out"):
        service.wait(moment)
    service.send(signal.SIGTERM)
    assert service.wait(5.0) == 143
    codes = ended(roles, START_S)
    assert not any(died_of_a_signal(code) for code in codes), codes
    assert set(codes) <= {0, 1}
    assert not any("Traceback" in role.stderr() for role in roles)


LATE = ["--min-actors", "1", "--first-batch-deadline", "4", "--batch-deadline", "0.5"]


@pytest.mark.learning
@pytest.mark.parametrize("order", ["service first", "roles first", "an actor joins late"])
def test_roles_by_hand_learn_a_t_maze(hands: Hands, order: str):
    settings = ["--preset", "tmaze", "--env-kwargs", "corridor=5", "--num-actors", "2", "--envs-per-actor", "8"]
    settings += ["--num-steps", "32", "--total-steps", "20480", "--chrono-max", "8", "--no-tensorboard", "--json"]
    wait = ["--wait-for-service", "60"]
    if order == "roles first":
        roles = [hands.actor(*wait), hands.learner(*wait), hands.actor(*wait)]
        service = hands.serve(*settings)
    else:
        late = order == "an actor joins late"
        service = hands.serve(*settings, *(LATE if late else []))
        hands.listening(service)
        roles = [hands.learner(), hands.actor()]
        if late:
            hands.reaches(2)
        roles.append(hands.actor())
    assert ended([service, *roles], 100.0) == [0] * 4
    played = run_command("eval", str(hands.run_dir), "--episodes", "100", "--json", cwd=hands.directory)
    assert json.loads(played.stdout)["success_rate"] >= 0.95
    valid = [json.loads(line)["learner/valid_rows"] for line in (hands.run_dir / "metrics.jsonl").open()]
    assert (valid[0], valid[-1]) == ((256 if order == "an actor joins late" else 512), 512)
