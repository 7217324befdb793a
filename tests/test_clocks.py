"""The wall clock may jump: it stamps logs and names runs, and neither measures nor decides anything."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.machine import logged_steps, run_command
from tests.test_floors import ROOT, source_files

WALL_CLOCK = {
    "time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.asctime", "time.strftime",
    "time.CLOCK_REALTIME", "datetime.now", "datetime.utcnow", "datetime.today", "date.today",
}  # fmt: skip
ALLOWED = {
    "rollout_service/observe/journal.py": "stamps of run.log",
    "rollout_service/observe/logs.py": "stamps of metrics.jsonl and of TensorBoard events",
    "rollout_service/launch/run.py": "name of a run directory",
    "rollout_service/launch/train.py": "name of a run directory",
    "rollout_service/control/endpoints.py": "age of a directory that another run left: files have no other stamp",
    "rollout_service/memory/segment.py": "age of a file that has no header yet: files have no other stamp",
    "rollout_service/bench/report.py": "date of a result",
    "rollout_service/bench/whole_run.py": "the stamps of a log, on the clock of the bench",
}

JUMPING_CLOCK = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Ten times a second the wall clock jumps: on by ten years, back by twenty, to an hour ago, to now. */
static time_t jump(void) {
    struct timespec steady;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &steady);
    static const time_t jumps[] = {0, 315360000, -315360000, -3600};
    return jumps[(steady.tv_sec * 10 + steady.tv_nsec / 100000000) % 4];
}
int clock_gettime(clockid_t which, struct timespec *found) {
    int failed = (int) syscall(SYS_clock_gettime, which, found);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) found->tv_sec += jump();
    return failed;
}
int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    (void) zone;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""


def wall_clock_uses(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if f"{module}.{name}" in WALL_CLOCK:
                yield f"{module}.{name}"
            case ast.ImportFrom(module="time", names=names):
                yield from (f"time.{alias.name}" for alias in names if f"time.{alias.name}" in WALL_CLOCK)


def test_the_wall_clock_stands_in_the_listed_places_only() -> None:
    found = {str(path.relative_to(ROOT)) for path in source_files() if any(wall_clock_uses(path))}
    assert found == set(ALLOWED)


@pytest.fixture(scope="module")
def jumping_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library for LD_PRELOAD."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler")
    directory = tmp_path_factory.mktemp("clock")
    (directory / "clock.c").write_text(JUMPING_CLOCK)
    library = directory / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(directory / "clock.c")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"the clock cannot be built: {built.stderr[:200]}")
    return library


def test_a_run_does_not_care_for_a_wall_clock_that_jumps_by_decades(tmp_path: Path, jumping_clock: Path) -> None:
    words = ["--env", "tests.fixtures.machine:FaultyEnv", "--env-kwargs", "step_s=0.005", "--run-dir", "run"]
    size = ["--num-actors", "2", "--envs-per-actor", "2", "--num-steps", "8", "--epochs", "1", "--total-steps", "640"]
    timeouts = ["--silence-timeout", "5", "--step-timeout", "20"]
    ran = run_command("train", *words, *size, *timeouts, "--json", cwd=tmp_path, LD_PRELOAD=str(jumping_clock))
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    stamps = [line["wall_time"] for line in lines]
    assert max(stamps) - min(stamps) > 3e8, "the clock did not jump: the test shows nothing"
    assert logged_steps(tmp_path / "run") == [32 * update for update in range(1, 21)]
    elapsed = [line["time/elapsed_s"] for line in lines]
    assert elapsed == sorted(elapsed)
    assert elapsed[-1] < 60.0
    assert all(0.0 <= share <= 1.0 for line in lines for name, share in line.items() if name.startswith("split_"))
    assert lines[-1]["actors/restarts"] == lines[-1]["learner/restarts"] == 0
    assert json.loads(ran.stdout)["steps_per_second"] > 0
