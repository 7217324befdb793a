"""Whole runs as a user starts them: actors that die, hang or fail are replaced, and every end leaves nothing behind.

Each run costs seconds of process starts, so each test looks at everything its run can show.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from rollout_service import checkpoint
from tests.fixtures.machine import Pace, Service, eventually, logged_steps, run_command

STEPS_PER_UPDATE = 2 * 2 * 8
TINY = ["--num-actors", "2", "--envs-per-actor", "2", "--num-steps", "8", "--epochs", "1", "--no-tensorboard"]
ENV = ["--env", "tests.fixtures.machine:FaultyEnv"]
FAST = ["--env", "Memory/TMaze-v0", "--env-kwargs", "corridor=3"]
START_S = 40.0
"""Until the first update, on a machine that is busy with other things."""
IN_UPDATE_3, IN_UPDATE_4 = 2 * 8 + 4, 3 * 8 + 4
"""Steps of an env that is in the middle of the rollout for that update."""


def words(*more: str, updates: int = 20) -> list[str]:
    return [*TINY, "--total-steps", str(updates * STEPS_PER_UPDATE), "--run-dir", "run", *more]


def faults(**settings: object) -> list[str]:
    return [*ENV, "--env-kwargs", *(f"{name}={json.dumps(value)}" for name, value in settings.items())]


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_a_run_survives_the_death_of_an_actor_and_is_seen_by_status_and_spared_by_clean(tmp_path: Path):
    run_dir, pace = tmp_path / "run", Pace(tmp_path / "pace", IN_UPDATE_4)
    with Service(*words(*faults(pace=str(pace.file)), "--json", updates=40), cwd=tmp_path) as service:
        eventually(lambda: service.updates(run_dir) == 3, START_S, "three updates")
        status = json.loads(run_command("status", "--json", cwd=tmp_path).stdout)
        mine = [run for run in status["runs"] if run["pid"] == service.process.pid]
        assert [run["run_dir"] for run in mine] == [str(run_dir)]
        report = mine[0]["report"]
        assert [actor["actor_id"] for actor in report["actors"]] == [0, 1]
        assert sum(report["slots"].values()) == 4
        assert report["env_steps"] == 3 * STEPS_PER_UPDATE
        assert f"pid {service.process.pid}" in run_command("status", cwd=tmp_path).stdout
        cleaned = run_command("clean", cwd=tmp_path)
        assert cleaned.returncode == 0
        assert mine[0]["run_id"] not in cleaned.stdout

        victim = service.child("-m", "workers", "--connect", mine[0]["endpoint"], "--actor", "1")
        assert victim is not None
        victim.kill()
        eventually(lambda: "signal 9 (SIGKILL)" in service.stderr(), START_S, "the death is reported")
        assert f"actor 1 (incarnation 0, pid {victim.pid}) ended with signal 9 (SIGKILL)" in service.stderr()
        again = run_command("train", *words(*FAST), cwd=tmp_path)
        assert (again.returncode, "used by a run that is alive" in again.stderr) == (2, True)
        pace.free()
        assert service.wait(START_S) == 0
        result = service.result()
    assert (result["updates"], result["env_steps"]) == (40, 40 * STEPS_PER_UPDATE)
    assert (result["return_mean"], result["success_rate"], result["run_dir"]) == (5.0, None, "run")
    assert logged_steps(run_dir) == [update * STEPS_PER_UPDATE for update in range(1, 41)]
    assert (run_dir / "logs" / "actor-1.1.log").exists()
    assert "num_actors = 2" in (run_dir / "config.toml").read_text()
    assert checkpoint.require(run_dir).checkpoint.manifest.update == 40
    played = json.loads(run_command("eval", "run", "--episodes", "3", "--argmax", "--json", cwd=tmp_path).stdout)
    expected = {"episodes": 3, "return_mean": 5.0, "return_std": 0.0, "success_rate": None, "length_mean": 5.0}
    assert played == expected


def test_every_way_an_actor_can_fail_is_named_and_repaired(tmp_path: Path):
    how = {"0.0": "raise", "0.1": "exit", "1.0": "segv", "1.1": "hang"}
    ran = run_command("train", *words(*faults(faults=how), "--step-timeout", "1.5"), cwd=tmp_path, timeout=110)
    assert ran.returncode == 0, ran.stderr
    for needle in (
        r"actor 0 \(incarnation 0, pid \d+\) ended with exit code 1; replaced now \(restart . of 10",
        r"actor 0 \(incarnation 1, pid \d+\) ended with exit code 3; replaced in 0\.5 s",
        r"actor 1 \(incarnation 0, pid \d+\) ended with signal 11 \(SIGSEGV\); replaced now",
        r"actor 1 \(incarnation 1, pid \d+\) was stuck in env\.step for .* s \(step_timeout 1\.5 s\) and was killed",
    ):
        assert len(re.findall(f"^{needle}", ran.stderr, re.MULTILINE)) == 1, needle
    assert "ValueError: boom-7" in ran.stderr
    assert "env 1 of actor 0" in ran.stderr
    assert "step 5 of its episode" in ran.stderr
    assert "in fail" in ran.stderr.partition("stuck in env.step")[2], "no stack of the stuck actor"
    assert "boom-7" in (tmp_path / "run" / "run.log").read_text()
    assert logged_steps(tmp_path / "run")[-1] == 20 * STEPS_PER_UPDATE
    assert "env steps" in ran.stdout


def test_an_env_that_always_fails_ends_the_run_with_its_traceback(tmp_path: Path):
    always = {f"1.{incarnation}": "reset" for incarnation in range(5)}
    ran = run_command("train", *words(*faults(faults=always), "--max-restarts", "1"), cwd=tmp_path)
    assert ran.returncode == 1
    assert "all 1 restarts within 300 s are used up" in ran.stderr
    assert "RuntimeError: no reset today" in ran.stderr.partition("used up")[2]


def test_fail_fast_stops_at_the_first_failure_of_an_env_found_in_the_current_directory(tmp_path: Path):
    (tmp_path / "mine.py").write_text("from tests.fixtures.machine import FaultyEnv as Mine\n")
    (tmp_path / "workers.py").write_text("raise SystemExit('this is not the package that was meant')\n")
    faulty = faults(faults={"0.0": "raise"})[2:]
    ran = run_command(
        "train", *words("--env", "mine:Mine", *faulty, "--on-actor-failure", "stop", "--json"), cwd=tmp_path
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.count("Traceback (most recent call last)") == 2, "the env's, and the actor's because of it"
    assert "env 1 of actor 0 (mine:Mine" in ran.stderr
    assert "on_actor_failure stop" in ran.stderr
    assert "actor-0.1.log" not in {path.name for path in (tmp_path / "run" / "logs").iterdir()}


@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 130), ([signal.SIGINT, signal.SIGINT], 130), ([signal.SIGTERM], 143)],
    ids=["ctrl-c", "ctrl-c twice", "sigterm"],
)
def test_a_stop_signal_to_the_group_ends_the_run_quickly_and_quietly(tmp_path: Path, signals: list[int], code: int):
    run_dir = tmp_path / "run"
    with Service(*words(*FAST, "--checkpoint-interval", "1000000", updates=1_000_000), cwd=tmp_path) as service:
        eventually(lambda: service.updates(run_dir) >= 2, START_S, "two updates")
        children = service.children()
        for signum in signals:
            service.signal_group(signum)
        assert service.wait(5.0) == code
        assert gone(children)
        stderr = service.stderr()
    assert stderr.count("\n") <= 20
    assert "Traceback" not in stderr
    found = checkpoint.require(run_dir).checkpoint.manifest
    if len(signals) == 1:
        assert found.update > 0
        assert found.env_steps == found.update * STEPS_PER_UPDATE


@pytest.mark.parametrize("moment", [0.2, 1.0, 1.8, 2.7])
def test_a_stop_at_any_moment_kills_nobody_by_another_signal(tmp_path: Path, moment: float):
    with Service(*words(*FAST, updates=1_000_000), cwd=tmp_path) as service:
        with pytest.raises(subprocess.TimeoutExpired):
            service.wait(moment)
        service.signal_group(signal.SIGTERM)
        assert service.wait(5.0) in (143, -signal.SIGTERM)
        said = service.stderr()
    assert not any(word in said for word in ("Traceback", "SIGSEGV", "SIGBUS", "SIGABRT", "leaked"))


def test_a_tiny_run_always_leaves_by_itself(tmp_path: Path):
    for _ in range(2):
        ran = run_command("train", *words(*FAST, updates=4), cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr


BREAK_THE_LEARNER = """
import sys
if "learner" in sys.orig_argv:
    from rollout_service.memory.weights import WeightsMemory
    publish = WeightsMemory.publish
    def fail(self, version, arrays):
        if version == 4:
            raise RuntimeError("publish-13")
        publish(self, version, arrays)
    WeightsMemory.publish = fail
"""


def test_an_exception_in_the_learner_ends_everything_with_one_traceback(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(BREAK_THE_LEARNER)
    ran = run_command("train", *words(*FAST), cwd=tmp_path, PYTHONPATH=f"{tmp_path}")
    assert ran.returncode == 1
    assert (ran.stderr.count("RuntimeError: publish-13"), ran.stderr.count("Traceback")) == (1, 1)
    assert "the learner ended with exit code 1" in ran.stderr
    assert logged_steps(tmp_path / "run") == [update * STEPS_PER_UPDATE for update in (1, 2)]


def test_after_kill_9_children_leave_the_same_command_starts_again_and_clean_removes_the_rest(tmp_path: Path):
    run_dir, pace = tmp_path / "run", Pace(tmp_path / "pace", IN_UPDATE_3)
    command = words(*faults(pace=str(pace.file)), updates=25)
    with Service(*command, cwd=tmp_path) as service:
        eventually(lambda: service.updates(run_dir) == 2, START_S, "two updates")
        orphans = service.children()
        assert len(orphans) == 3
        service.process.kill()
        service.wait(5.0)
        eventually(lambda: gone(orphans), 10.0, "the children follow their parent")
    with Service(*command, cwd=tmp_path) as service:
        removed = "removed, left by a run that is dead: segment rs-"
        eventually(lambda: removed in service.stderr(), START_S, "the earlier run is moved aside, and its memory gone")
        eventually(lambda: service.updates(run_dir) == 2, START_S, "two updates")
        assert (run_dir / "earlier-1" / "checkpoints").is_dir()
        service.signal_group(signal.SIGKILL)
        service.wait(5.0)
    listed = run_command("clean", "--dry-run", cwd=tmp_path).stdout
    cleaned = run_command("clean", cwd=tmp_path).stdout
    for text, verb in ((listed, "would remove"), (cleaned, "removed")):
        assert f"{verb} segment rs-" in text
    pace.free()
    resumed = run_command("train", "--resume", "--run-dir", "run", "--json", cwd=tmp_path)
    assert json.loads(resumed.stdout)["updates"] == 25, resumed.stderr
    assert logged_steps(run_dir) == [update * STEPS_PER_UPDATE for update in range(1, 26)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_device_and_a_missing_env_are_one_line_each(tmp_path: Path):
    for wrong, needle in ((["--device", "cuda"], "cuda"), (["--env", "Nowhere/Nothing-v3"], "Nowhere/Nothing-v3")):
        ran = run_command("train", *words(*FAST), *wrong, cwd=tmp_path)
        assert (ran.returncode, ran.stderr.count("\n"), needle in ran.stderr) == (2, 1, True), ran.stderr
        assert not (tmp_path / "run").exists()
