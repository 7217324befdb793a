"""Room for a segment: what /dev/shm and the memory limit have left, asked before anything starts.

Without this question too large a segment is an out-of-memory kill later, and on a small /dev/shm (Docker gives 64 MB)
the first touch of a page is a bare bus error. Reads only; reserving the pages is left to `segment`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from rollout_service.errors import SegmentTooLarge

SHARED_MEMORY: Final = Path("/dev/shm")
REMEDY: Final = "lower num_actors (or max_actors), envs_per_actor or num_steps, or"


def free_shared_memory() -> int:
    """Bytes left in /dev/shm."""
    stat = os.statvfs(SHARED_MEMORY)
    return stat.f_bavail * stat.f_frsize


def available_memory(proc: Path = Path("/proc")) -> int:
    """Bytes this process can still take: the machine's, or fewer where a memory cgroup (v1 or v2) allows fewer."""
    room = [sys.maxsize]
    with suppress(OSError):
        figures = _figures(proc / "meminfo")
        if "MemAvailable:" in figures:
            room.append(figures["MemAvailable:"] * 1024)
    room.extend(_cgroup_room(proc))
    return min(room)


def _cgroup_room(proc: Path) -> Iterator[int]:
    """Limit minus use, droppable page cache not counted as used, of each cgroup from here up to the root."""
    try:
        memberships = dict(_memberships(proc))
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for mount in mounts:
        left, _, right = mount.partition(" - ")
        root, point = left.split()[3:5]
        filesystem, _, options = right.split()[:3]
        if filesystem == "cgroup2" and "" in memberships:
            path, limit, use, cache_key = memberships[""], "memory.max", "memory.current", "inactive_file"
        elif filesystem == "cgroup" and "memory" in options.split(",") and "memory" in memberships:
            path, limit, use = memberships["memory"], "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_key = "total_inactive_file"
        else:
            continue
        below = Path(point, path.removeprefix(root).lstrip("/"))
        for directory in (below, *below.parents):
            if not directory.is_relative_to(point):
                break
            with suppress(OSError, ValueError):  # no such file: no limit here; "max": no limit either
                most, used = (int((directory / name).read_text()) for name in (limit, use))
                yield max(0, most - used + _figures(directory / "memory.stat").get(cache_key, 0))


def _memberships(proc: Path) -> Iterator[tuple[str, str]]:
    """Controller -> cgroup path of this process; cgroup v2 under the empty name."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        yield from ((controller, path) for controller in controllers.split(","))


def _figures(path: Path) -> dict[str, int]:
    """First two columns of a kernel statistics file."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) >= 2}


def check_room(needed: int) -> None:
    """Raises SegmentTooLarge if /dev/shm or the memory limit has fewer than `needed` bytes left."""
    if needed > (free := free_shared_memory()):
        raise SegmentTooLarge(
            f"the segment needs {needed} bytes ({mib(needed)}), {SHARED_MEMORY} has {free} bytes ({mib(free)}) free; "
            f"{REMEDY} enlarge it (docker run --shm-size, compose: shm_size)"
        )
    if needed > (free := available_memory()):
        raise SegmentTooLarge(
            f"the segment needs {needed} bytes ({mib(needed)}), {free} bytes ({mib(free)}) of memory are available; "
            f"{REMEDY} raise the memory limit"
        )


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
