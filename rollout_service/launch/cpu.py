"""How many cores this process may use, and why: affinity and cgroup quota, not the machine's core count; and which
of them an actor gets that is to keep to one (`pin_actors`).

Readers: the supervisor (`num_actors auto`, its actors' cores) and the learner's thread count. Pure apart from reading,
but for `children_on` and `one_thread`; roots of what is read are arguments, so tests bring their own.
What must never happen: one actor per core of the host in a container that owns two of them; a process on a core that
its parent may not use.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollout_service.errors import ConfigError

CPU_ROOT: Final = Path("/sys/devices/system/cpu")
CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP: Final = Path("/proc/self/cgroup")


@contextmanager
def one_thread() -> Iterator[None]:
    """Numpy and torch of this process compute on one thread, as in an actor's own process."""
    import torch
    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class UsableCores:
    """The decision and its reason."""

    count: int
    reason: str


def usable_cores(
    *, root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP, affinity: int | None = None
) -> UsableCores:
    """min(cores in the affinity mask, cgroup quota rounded up), at least 1.

    A quota of 1.5 cores counts as 2: the second actor uses the half core, and time slices even out over a rollout.
    """
    allowed = affinity if affinity is not None else _affinity()
    quota, source = cgroup_quota(root=root, membership=membership)
    if quota is None:
        return UsableCores(allowed, f"{allowed} in the affinity mask, no cgroup quota")
    rounded = max(1, math.ceil(quota))
    count = min(allowed, rounded)
    return UsableCores(
        count, f"min of {allowed} in the affinity mask and {rounded} from the {source} quota of {quota:g}"
    )


def cores_in_turn(*, allowed: Collection[int] | None = None, root: Path = CPU_ROOT) -> tuple[int, ...]:
    """The cores this process may use, in the order in which actors get them, over and over.

    First one hardware thread of every physical core, then the others.

    Raises ConfigError where this process cannot choose cores, for itself or for its children.
    """
    if allowed is None:
        if not hasattr(os, "sched_setaffinity"):
            raise ConfigError("pin_actors: this system has no way to choose the cores of a process; leave it out")
        allowed = os.sched_getaffinity(0)
        with children_on(min(allowed)):
            pass
    return tuple(sorted(allowed, key=lambda core: (_place_among_siblings(core, root), core)))


@contextmanager
def children_on(core: int | None) -> Iterator[None]:
    """Children that this thread starts inside live on that core, all their threads too. None: wherever it may itself.

    Raises ConfigError if the kernel refuses.
    """
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        raise ConfigError(
            f"pin_actors: core {core} cannot be chosen ({error.strerror}), this process may use {sorted(before)}; "
            "leave pin_actors out, or allow it to choose (taskset, the container's cpuset and seccomp profile)"
        ) from None
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cgroup_quota(*, root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> tuple[float | None, str]:
    """Cores that the strictest cgroup from this process up to `root` grants, or None; and which cgroup version said
    so.
    """
    found: list[tuple[float, str]] = []
    for hierarchy, group in _groups(membership):
        if hierarchy == "v2":
            quotas = (_quota_v2(directory) for directory in _ancestors(root, group))
        else:
            quotas = (_quota_v1(directory) for directory in _ancestors(root / hierarchy, group))
        found += [(quota, "cgroup v2" if hierarchy == "v2" else "cgroup v1") for quota in quotas if quota is not None]
    return min(found) if found else (None, "")


def _place_among_siblings(core: int, root: Path) -> int:
    """0 for the first hardware thread of a physical core, 1 for the second. 0 where nothing is known."""
    words = _words(root / f"cpu{core}" / "topology" / "thread_siblings_list")
    numbers: list[int] = []
    for part in "".join(words).split(","):
        first, _, last = part.partition("-")
        if not first.isdigit():
            return 0
        numbers += range(int(first), int(last or first) + 1)
    return numbers.index(core) if core in numbers else 0


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _groups(membership: Path) -> list[tuple[str, str]]:
    """(hierarchy, path of the group) pairs that can limit CPU time. The roots are always looked at as well."""
    groups = {("v2", "/"), ("cpu", "/"), ("cpu,cpuacct", "/")}
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            groups.add(("v2", group))
        elif "cpu" in controllers.split(","):
            groups |= {(controllers, group), ("cpu", group)}
    return sorted(groups)


def _ancestors(base: Path, group: str) -> list[Path]:
    """Directories from the group up to the hierarchy's root. In a container the group's own path is often not
    mounted.
    """
    parts = [part for part in group.split("/") if part not in ("", ".", "..")]
    return [base.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def _quota_v2(directory: Path) -> float | None:
    words = _words(directory / "cpu.max")
    if len(words) != 2 or words[0] == "max":
        return None
    return _ratio(words[0], words[1])


def _quota_v1(directory: Path) -> float | None:
    quota, period = _words(directory / "cpu.cfs_quota_us"), _words(directory / "cpu.cfs_period_us")
    if len(quota) != 1 or len(period) != 1:
        return None
    return _ratio(quota[0], period[0])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _ratio(quota: str, period: str) -> float | None:
    try:
        numerator, denominator = int(quota), int(period)
    except ValueError:
        return None
    return numerator / denominator if numerator > 0 and denominator > 0 else None
