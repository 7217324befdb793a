"""What every test leaves behind is checked: segments, processes, socket directories.

Writers: none. The check compares this machine before and after each test, so a leak names the test that made it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollout_service.control.transport import SOCKET_PREFIX, socket_root

SHARED_MEMORY = Path("/dev/shm")
DEATH_DEADLINE_S = 5.0
"""A child that was told to leave may need a moment to be reaped."""


def segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def socket_directories() -> set[str]:
    return {str(path) for path in socket_root().glob(f"{SOCKET_PREFIX}*")}


def living_children() -> list[psutil.Process]:
    return [child for child in psutil.Process(os.getpid()).children(recursive=True) if child.is_running()]


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    before = (segments(), socket_directories(), {child.pid for child in living_children()})
    yield
    started = [child for child in living_children() if child.pid not in before[2]]
    _, alive = psutil.wait_procs(started, timeout=DEATH_DEADLINE_S)
    leaked = {
        "segments": sorted(segments() - before[0]),
        "sockets": sorted(socket_directories() - before[1]),
        "processes": [" ".join(child.cmdline()) for child in alive if child.status() != psutil.STATUS_ZOMBIE],
    }
    assert not any(leaked.values()), f"left behind: {leaked}"
