"""No room is an ordinary error before anything exists, never a bus error and never an out-of-memory kill."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from rollout_service.errors import SegmentTooLarge
from rollout_service.memory import room as room_module
from rollout_service.memory import segment as segment_module
from rollout_service.memory.room import SHARED_MEMORY, available_memory
from rollout_service.memory.segment import Segment, segment_name
from tests.memory.other_process import can_run, run_python

MIB = 1 << 20
OWN_SHARED_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh")


def test_a_segment_larger_than_shared_memory_names_need_room_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "free_shared_memory", lambda: 8 * MIB)
    with pytest.raises(SegmentTooLarge) as caught:
        Segment.create(200 * MIB, kind="rollout")
    message = str(caught.value)
    assert f"{200 * MIB + 4096} bytes" in message
    assert f"{8 * MIB} bytes (8.0 MiB) free" in message
    assert "lower num_actors" in message
    assert "shm-size" in message


def test_a_segment_larger_than_the_memory_limit_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "available_memory", lambda: 3 * MIB)
    with pytest.raises(
        SegmentTooLarge, match=f"{3 * MIB} bytes .3.0 MiB. of memory are available.*raise the memory limit"
    ):
        Segment.create(4 * MIB, kind="rollout")


def test_room_that_vanishes_between_check_and_reservation_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(segment_module, "new_run_token", lambda: "0" * 16)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SegmentTooLarge, match=r"could not reserve them \(No space left"):
        Segment.create(MIB, kind="rollout")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (SHARED_MEMORY / segment_name("0" * 16, "rollout")).exists()


@pytest.mark.skipif(not can_run(*OWN_SHARED_MEMORY, "true"), reason="no right to mount a small /dev/shm")
def test_a_really_small_shared_memory_gives_errors_and_no_bus_error() -> None:
    script = """
import os
from rollout_service.errors import SegmentTooLarge
from rollout_service.memory import segment
from rollout_service.memory.segment import Segment

def refused(nbytes):
    try:
        Segment.create(nbytes, kind="rollout").close()
    except SegmentTooLarge as error:
        print("refused", str(nbytes) in str(error) or str(nbytes + 4096) in str(error), os.listdir("/dev/shm"))
    else:
        print("made")

refused(200 << 20)
refused(7 << 20)
with open("/dev/shm/filler", "wb") as filler:
    os.posix_fallocate(filler.fileno(), 0, 7 << 20)
refused(2 << 20)
segment.check_room = lambda needed: None  # the room is taken after the check
refused(2 << 20)
os.unlink("/dev/shm/filler")
print(os.listdir("/dev/shm"))
"""
    done = run_python(script, prefix=OWN_SHARED_MEMORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "refused True []",
        "made",
        "refused True ['filler']",
        "refused True ['filler']",
        "[]",
    ]


# Memory limits, on a made-up /proc and cgroup tree


def machine(tmp_path: Path, cgroup: str, mounts: str, available_kib: int = 1000) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 2000 kB\nMemAvailable: {available_kib} kB\nHugePages_Total: 0\n")
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(mounts.replace("@", str(tmp_path)))
    return proc


def group(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)


V2_MOUNT = "30 20 0:26 / @/cg rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "31 20 0:27 /docker/abc @/mem rw shared:9 - cgroup cgroup rw,memory\n32 20 0:28 / /x rw - tmpfs tmpfs rw\n"


def test_without_a_limit_the_machines_available_memory_counts(tmp_path: Path) -> None:
    group(tmp_path / "cg/job", memory__max="max\n", memory__current="5\n")
    assert available_memory(machine(tmp_path, "0::/job\n", V2_MOUNT)) == 1000 * 1024


def test_the_tightest_cgroup_v2_on_the_way_up_counts_with_its_droppable_cache(tmp_path: Path) -> None:
    group(tmp_path / "cg/pod/job", memory__max="900000", memory__current="100000", memory__stat="inactive_file 0\n")
    group(
        tmp_path / "cg/pod",
        memory__max="500000",
        memory__current="300000",
        memory__stat="anon 7\ninactive_file 50000\n",
    )
    assert available_memory(machine(tmp_path, "0::/pod/job\n", V2_MOUNT)) == 250_000


def test_a_cgroup_v1_limit_is_found_at_the_containers_own_root(tmp_path: Path) -> None:
    group(
        tmp_path / "mem",
        memory__limit_in_bytes="400000",
        memory__usage_in_bytes="350000",
        memory__stat="total_inactive_file 10000\n",
    )
    cgroup = "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n"
    assert available_memory(machine(tmp_path, cgroup, V1_MOUNT)) == 60_000


def test_a_cgroup_that_is_over_its_limit_has_no_room(tmp_path: Path) -> None:
    group(tmp_path / "cg", memory__max="100", memory__current="200", memory__stat="")
    assert available_memory(machine(tmp_path, "0::/gone\n", V2_MOUNT)) == 0


def test_without_proc_nothing_is_known_to_be_short(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "nowhere") == sys.maxsize
