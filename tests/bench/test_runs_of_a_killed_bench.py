"""A run does not outlive the process that measures or watches it, also if that is killed outright."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollout_service.control.endpoints import SOCKET_DIR_VARIABLE
from rollout_service.lifeline import COMMAND_GRACE_S
from rollout_service.offspring import alive
from tests.fixtures.machine import environment, eventually

WORDS = (
    *("--env", "Memory/TMaze-v0", "--num-actors", "1", "--envs-per-actor", "2", "--num-steps", "8", "--epochs", "1"),
    *("--no-tensorboard", "--total-steps", "100000000"),
)
WHOLE_RUN = f"""
from pathlib import Path
from rollout_service.bench.whole_run import WholeRun
with WholeRun(["train", *{WORDS}], Path("run")) as run:
    while run.wait(0.1):
        if run.log:
            print(run.process.pid, flush=True)
"""
WATCHED_RUN = f"""
import os
from pathlib import Path
from bench.watched import WatchedRun, until
with WatchedRun(*{WORDS}, directory=Path.cwd(), sockets=Path(os.environ["{SOCKET_DIR_VARIABLE}"])) as run:
    until(lambda: run.records() or run.over, "an update")
    print(run.pid, flush=True)
    run.service.wait(1e6)
"""


@pytest.mark.parametrize("script", [WHOLE_RUN, WATCHED_RUN], ids=["measured", "watched"])
def test_its_runs_end_with_it_and_take_everything_along(tmp_path: Path, script: str):
    bench = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE)
    assert bench.stdout is not None
    with bench:
        try:
            service = psutil.Process(int(bench.stdout.readline()))
            run = [service, *service.children()]
            assert len(run) == 3
        finally:
            bench.kill()
    eventually(lambda: not any(alive(each.pid) for each in run), COMMAND_GRACE_S + 5.0, "the run is gone")
    assert "SIGTERM: stopping, the learner saves a checkpoint" in (tmp_path / "run" / "run.log").read_text()
