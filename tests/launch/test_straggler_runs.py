"""Whole runs with an actor that is slow, and with one that is stopped: both go on, and say who it was."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import psutil

from rollout_service.launch.status import running
from tests.fixtures.machine import Pace, Service, eventually, logged_steps, run_command

STEPS = 8
START_S = 40.0
ROLLOUT = 2 * 2 * STEPS
UPDATES = 60


def words(*more: str, kwargs: dict[str, Any], updates: int) -> list[str]:
    options = ["--num-actors", "2", "--envs-per-actor", "2", "--num-steps", str(STEPS), "--epochs", "1"]
    options += ["--self-check", "1", "--no-tensorboard", "--total-steps", str(updates * ROLLOUT), "--run-dir", "run"]
    options += ["--env", "tests.fixtures.machine:FaultyEnv"]
    return [*options, "--env-kwargs", *(f"{name}={json.dumps(value)}" for name, value in kwargs.items()), *more]


def entries(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_slow_actor_is_preempted_and_named_with_its_share(tmp_path: Path) -> None:
    """Its steps take 40 ms, the others' none: it commits its least two steps of eight, 160 ms, and the others wait."""
    slow = {"slow_actor": 1, "slow_step_s": 0.04}
    command = words("--preempt-share", "0.5", "--json", kwargs=slow, updates=22)
    ran = run_command("train", *command, cwd=tmp_path, timeout=100)
    assert ran.returncode == 0, ran.stderr
    named = re.findall(r"actor (\d) is the slowest: the others waited for it in (\d+)% of the last \d+ s", ran.stderr)
    assert [actor for actor, _ in named] == ["1"]
    assert int(named[0][1]) >= 20
    result, log = json.loads(ran.stdout), entries(tmp_path / "run")
    assert result["updates"] == log[-1]["update"] > 22
    assert 21 * ROLLOUT < result["env_steps"] == logged_steps(tmp_path / "run")[-1] <= 22 * ROLLOUT
    assert log[-1]["count/partial_rollouts"] >= 20
    assert log[-1]["actors/slowest"] == 1
    assert 0.2 <= log[-1]["actors/slowest_waited_share"] <= 1.0
    assert max(entry["learner/self_check_deviation"] for entry in log) <= 1e-4
    assert log[-1].get("count/seed_mismatches", 0) == 0
    assert min(entry["learner/valid_rows"] for entry in log) < ROLLOUT


def test_a_stopped_actor_is_left_behind_and_taken_back(tmp_path: Path) -> None:
    """It is stopped in its second rollout, and the other one is held back in its twelfth until it has come back."""
    run_dir, pace = tmp_path / "run", Pace(tmp_path / "pace", STEPS + 4)
    rules = ["--min-actors", "1", "--batch-deadline", "1.0", "--first-batch-deadline", "60"]
    command = words(*rules, "--json", kwargs={"pace": str(pace.file)}, updates=UPDATES)
    with Service(*command, cwd=tmp_path) as service:

        def report() -> dict[str, Any]:
            found = next(run.report for run in running() if run.pid == service.process.pid)
            assert found is not None
            return found

        eventually(lambda: service.updates(run_dir) == 1, START_S, "an update")
        actor = service.child("--actor", "1")
        assert actor is not None
        actor.send_signal(signal.SIGSTOP)
        eventually(lambda: actor.status() == psutil.STATUS_STOPPED, START_S, "it has stopped")
        pace.allow(11 * STEPS + 4)
        eventually(lambda: service.updates(run_dir) == 11, START_S, "batches go without it")
        assert service.stderr().count("went without actor 1") == 1, "later ones do not wait for it"
        stopped = report()
        assert stopped["actors"][1]["state"] == "late"
        assert stopped["slots"]["quarantined"] == 1
        actor.send_signal(signal.SIGCONT)
        eventually(lambda: report()["actors"][1]["state"] != "late", START_S, "it takes part again")
        back = service.updates(run_dir)
        pace.free()
        assert service.wait(START_S) == 0, service.stderr()
        result = service.result()
    assert (UPDATES - 1) * ROLLOUT < result["env_steps"] <= UPDATES * ROLLOUT
    log = entries(run_dir)
    assert log[-1]["count/late_actors"] >= 1
    assert ROLLOUT in {entry["learner/valid_rows"] for entry in log[back:]}
    assert log[-1].get("count/seed_mismatches", 0) == 0
    assert log[-1]["actors/restarts"] == 0
    assert {entry["learner/valid_rows"] for entry in log} == {ROLLOUT / 2, ROLLOUT}
    assert max(entry["learner/self_check_deviation"] for entry in log) <= 1e-4
