"""Whole runs in which the number of actors changes: guests join and leave, and those that fail are not replaced.

Each run costs seconds of process starts, so each test looks at everything its run can show.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.watched import WORKING
from rollout_service import checkpoint
from rollout_service.launch.status import RunStatus, render, running
from rollout_service.launch.train import ACCOUNT_NOTE
from tests.fixtures.by_hand import Hands
from tests.fixtures.machine import Pace, Service, eventually

ENVS, STEPS, UPDATES = 2, 8, 150
ROLLOUT = ENVS * STEPS
START_S = 40.0


@pytest.fixture
def hands(tmp_path: Path) -> Iterator[Hands]:
    with Hands(tmp_path) as found:
        yield found


def words(*more: str, actors: int, updates: int = UPDATES, **settings: Any) -> list[str]:
    options = ["--num-actors", str(actors), "--envs-per-actor", str(ENVS), "--num-steps", str(STEPS), "--epochs", "1"]
    options += ["--total-steps", str(updates * actors * ROLLOUT), "--self-check", "1", "--normalize-returns"]
    options += ["--env", "tests.fixtures.machine:FaultyEnv", "--no-tensorboard", "--run-dir", "run", "--json", *more]
    return [*options, "--env-kwargs", *(f"{name}={json.dumps(value)}" for name, value in settings.items())]


def entries(run_dir: Path) -> list[dict[str, Any]]:
    log = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def rows_of_a_batch(run_dir: Path) -> float:
    """Of the newest one."""
    log = entries(run_dir)
    return log[-1]["learner/valid_rows"] if log else 0


def account(run_dir: Path) -> dict[str, int]:
    (found,) = re.findall(f"{re.escape(ACCOUNT_NOTE)}(.*)$", (run_dir / "run.log").read_text(), re.MULTILINE)
    entries: dict[str, int] = json.loads(found)
    return entries


def status_of(service: Service) -> RunStatus:
    return next(run for run in running() if run.pid == service.process.pid)


def joined(service: Service) -> int:
    """Actors that take part."""
    report = status_of(service).report or {"actors": []}
    return sum(actor["state"] in WORKING for actor in report["actors"])


@pytest.mark.parametrize("max_policy_lag", [0, 1], ids=["lockstep", "streaming"])
def test_batches_grow_with_guests_that_join_and_shrink_when_they_leave_or_die(
    hands: Hands, tmp_path: Path, max_policy_lag: int
) -> None:
    """The run is held back while the test is at work: by then three actors fill 94 rollouts at most, of 150."""
    run_dir, pace = tmp_path / "run", Pace(tmp_path / "pace", STEPS + 4)
    lag = ["--max-policy-lag", str(max_policy_lag)]
    with Service(*words("--max-actors", "3", *lag, actors=1, pace=str(pace.file)), cwd=tmp_path) as service:

        def says(text: str) -> None:
            eventually(lambda: text in service.stderr(), START_S, text)

        def reaches(steps: int, actors: int) -> None:
            """Batches of so many actors, at the latest by that step."""
            pace.allow(steps)
            eventually(lambda: rows_of_a_batch(run_dir) == actors * ROLLOUT, START_S, f"batches of {actors} actors")

        says("up to 2 more may join")
        endpoint = re.findall(r"python -m workers --connect (\S+)", service.stderr())[0]
        guests = [hands.actor(endpoint=endpoint) for _ in range(3)]
        eventually(lambda: not all(guest.running for guest in guests), START_S, "one of them is turned away")
        (refused,) = [guest for guest in guests if not guest.running]
        guests.remove(refused)
        assert (refused.wait(0.0), "no place is free" in refused.stderr()) == (1, True)
        eventually(lambda: joined(service) == 3, START_S, "the others have joined")
        reaches(80, actors=3)
        assert "empty" not in render(status_of(service))

        guests[0].send(signal.SIGTERM)
        pace.allow(90)
        assert guests[0].wait(START_S) == 0
        says("left, its place is free: stopped by SIGTERM")
        reaches(170, actors=2)
        guests[1].popen.kill()
        says("left, its place is free: died, without a goodbye")
        reaches(250, actors=1)
        assert "  actors   1 here   2 places empty, not waited for" in render(status_of(service)).splitlines()
        pace.free()
        assert service.wait(START_S) == 0, service.stderr()
        result, stderr = service.result(), service.stderr()
    assert re.search(r"^[123] of 1\.\.3 actors ready", stderr, re.MULTILINE)
    log, balance = entries(run_dir), account(run_dir)
    steps = [0, *(entry["env_steps"] for entry in log)]
    made = [after - before for before, after in pairwise(steps)]
    assert made == [entry["learner/valid_rows"] for entry in log]
    assert UPDATES * ROLLOUT == result["env_steps"] == steps[-1]
    assert result["updates"] < UPDATES
    assert (balance["missing"], balance["in_hand"], balance["trained"]) == (0, 0, steps[-1])
    assert balance["dropped"] + balance["outdated"] == 0 or max_policy_lag
    assert log[-1].get("count/seed_mismatches", 0) == 0
    assert max(entry.get("learner/self_check_deviation", 0.0) for entry in log) <= 1e-4
    saved = checkpoint.require(run_dir).checkpoint
    assert saved.manifest.env_steps == steps[-1]
    assert saved.arrays["returns/carried"].shape == (3 * ENVS,)


def test_actors_that_fail_are_not_replaced_and_the_run_ends_with_the_last_of_them(tmp_path: Path) -> None:
    run_dir, going_on = tmp_path / "run", ["--on-actor-failure", "continue"]
    command = words(*going_on, actors=2, updates=1_000_000, faults={"0.0": "raise"})
    with Service(*command, cwd=tmp_path) as service:
        eventually(lambda: rows_of_a_batch(run_dir) == ROLLOUT, START_S, "batches without the actor that failed")
        assert entries(run_dir)[0]["learner/valid_rows"] == 2 * ROLLOUT
        eventually(lambda: entries(run_dir)[-1].get("count/actors_given_up") == 1, START_S, "and that is counted")
        report = status_of(service).report
        assert report is not None
        assert report["actors"][0]["state"] == "abandoned"
        last = service.child("--actor", "1")
        assert last is not None
        last.kill()
        assert service.wait(START_S) == 1
        stderr = service.stderr()
    said = r"^actor {} \(incarnation 0, pid \d+\) ended with {}; not replaced, {} actors are left \(on_actor_failure"
    assert re.search(said.format(0, "exit code 1", 1), stderr, re.MULTILINE)
    assert re.search(said.format(1, r"signal 9 \(SIGKILL\)", 0), stderr, re.MULTILINE)
    assert "ValueError: boom-7" in stderr
    assert "env 1 of actor 0" in stderr
    assert stderr.splitlines()[-1].startswith("rollout-service: no actor is left (on_actor_failure continue); the last")
    assert account(run_dir)["missing"] == 0
    assert not (run_dir / "logs" / "actor-0.1.log").exists()
    checkpoint.require(run_dir)
