"""A run that may use one core, with more actors than that: it stays there, and listens to nobody but this user."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import psutil

from rollout_service.launch.cpu import children_on
from tests.fixtures.machine import Service, eventually

START_S = 60.0
ACTORS = 2


def test_all_of_it_stays_within_the_mask_and_listens_on_no_network(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    words = ["--env", "tests.fixtures.machine:FaultyEnv", "--num-actors", str(ACTORS), "--envs-per-actor", "2",
             "--num-steps", "8", "--epochs", "1", "--no-tensorboard", "--pin-actors", "--total-steps", "1000000",
             "--run-dir", "run"]  # fmt: skip
    with children_on(core):
        service = Service(*words, cwd=tmp_path)
    with service:
        eventually(lambda: service.updates(tmp_path / "run") >= 2, START_S, "two updates")
        processes = [service.tree, *service.children()]
        assert len(processes) == 2 + ACTORS
        threads = [psutil.Process(thread.id) for process in processes for thread in process.threads()]
        assert {tuple(thread.cpu_affinity()) for thread in threads} == {(core,)}
        assert [process.net_connections("inet") for process in processes] == [[]] * len(processes)
        (path,) = {Path(found.laddr) for found in service.tree.net_connections("unix") if found.laddr}
        assert [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path)] == [0o700, 0o600]
        service.signal_group(signal.SIGINT)
        assert service.wait(START_S) == 130
    said = (tmp_path / "run" / "run.log").read_text()
    assert f"actors keep to cores {', '.join([str(core)] * ACTORS)}, one each" in said
