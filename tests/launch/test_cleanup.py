"""`clean` finds orphans by proof of their supervisor's death, and leaves everything else alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_service.launch.cleanup import clean_up, live_endpoints
from rollout_service.lifeline import PARENT_VARIABLE
from rollout_service.memory.segment import Segment, new_run_token
from tests.fixtures.machine import dead_pid, environment, eventually, stand_ins

ENDPOINT = "ipc:///tmp/rs-sock-nobody/c"


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    """Starts `python -m workers --connect ENDPOINT` as a stand-in that only waits."""
    (tmp_path / "workers.py").write_text("import sys\nprint('up', flush=True)\nsys.stdin.read()\nprint('left')\n")
    with stand_ins() as start_one:

        def one(endpoint: str = ENDPOINT, **extra: str) -> subprocess.Popen:
            clean = {name: value for name, value in environment().items() if name != PARENT_VARIABLE}
            command = [sys.executable, "-m", "workers", "--connect", endpoint]
            return start_one(command, cwd=tmp_path, env={**clean, **extra}, stdin=subprocess.PIPE)

        yield one


def found(dry_run: bool) -> set[int]:
    return {each.process.pid for each in clean_up(dry_run=dry_run).processes}


def test_only_the_child_of_a_dead_supervisor_is_ended(start):
    orphan = start(**{PARENT_VARIABLE: str(dead_pid())})
    supervised = start(**{PARENT_VARIABLE: str(os.getpid())})
    by_hand = start()
    mine = {orphan.pid, supervised.pid, by_hand.pid}
    assert found(dry_run=True) & mine == {orphan.pid}
    assert orphan.poll() is None
    assert found(dry_run=False) & mine == {orphan.pid}
    eventually(lambda: orphan.poll() is not None, 5, "the orphan is gone")
    assert (supervised.poll(), by_hand.poll()) == (None, None)


def test_who_leaves_by_itself_is_not_killed(start):
    """A learner that saves its last checkpoint."""
    orphan, said = start(**{PARENT_VARIABLE: str(dead_pid())}), []
    soon = threading.Timer(0.5, lambda: said.append(orphan.communicate()[0]))
    soon.start()
    assert orphan.pid in found(dry_run=False)
    soon.join()
    assert said == [b"left\n"]


def test_children_of_a_run_whose_segment_is_locked_are_left_alone(start):
    endpoint = "ipc:///tmp/rs-sock-alive/c"
    spec = f'{{"endpoint": "{endpoint}"}}'.encode()
    with Segment.create(64, kind="rollout", token=new_run_token(), spec=spec) as segment:
        segment.mark_ready()
        assert endpoint in live_endpoints()
        child = start(endpoint, **{PARENT_VARIABLE: str(dead_pid())})
        assert child.pid not in found(dry_run=True)
        assert segment.name not in {each.name for each in clean_up(dry_run=True).segments}
    assert child.pid in found(dry_run=True)
