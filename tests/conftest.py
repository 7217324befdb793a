"""What every test leaves behind is checked: segments, processes, socket directories.

The check compares this machine before and after each test, so a leak names the test that made it. Runs of other people
on the same machine do not count: sockets of the tests have a root of their own, and a segment whose living owner is
neither this process nor its child is somebody else's.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from rollout_service.control.endpoints import SOCKET_DIR_VARIABLE, SOCKET_PREFIX, socket_root
from rollout_service.memory.segment import SegmentInfo, list_segments
from tests.fixtures.machine import hear_stop_signals

DEATH_DEADLINE_S = 5.0
"""A child that was told to leave may need a moment to be reaped."""


def pytest_configure() -> None:
    hear_stop_signals()
    # How long an example takes says more about the machine than about the code.
    settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy machine")


def descendants() -> list[psutil.Process]:
    return psutil.Process(os.getpid()).children(recursive=True)


def segments(root: Path) -> set[str]:
    """Names of the segments that belong to these tests: owned by a process of theirs, or left by one that is dead."""
    ours = {os.getpid(), *(child.pid for child in descendants())}
    return {
        segment.name
        for segment in list_segments()
        if (segment.owner_pid in ours if segment.owner_alive else not of_another_run(segment, root))
    }


def of_another_run(segment: SegmentInfo, root: Path) -> bool:
    """Left by a run whose directory is not below the temporary one of these tests."""
    try:
        run_dir = json.loads(segment.spec)["run_dir"]
    except (ValueError, KeyError, TypeError):
        return False
    return not Path(run_dir).is_relative_to(root)


def socket_directories() -> set[str]:
    return {str(path) for path in socket_root().glob(f"{SOCKET_PREFIX}*")}


@pytest.fixture(scope="session", autouse=True)
def own_socket_root() -> Iterator[None]:
    root = tempfile.mkdtemp(prefix="rs-test-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOCKET_DIR_VARIABLE, root)
        yield
    shutil.rmtree(root)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(own_socket_root: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    root = tmp_path_factory.getbasetemp()
    before = (segments(root), socket_directories(), {child.pid for child in descendants()})
    yield
    started = [child for child in descendants() if child.pid not in before[2]]
    _, alive = psutil.wait_procs(started, timeout=DEATH_DEADLINE_S)
    leaked = {
        "segments": sorted(segments(root) - before[0]),
        "sockets": sorted(socket_directories() - before[1]),
        "processes": [f"{child.pid} {child.name()}" for child in alive],
    }
    assert not any(leaked.values()), f"left behind: {leaked}"
