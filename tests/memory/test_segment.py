"""A segment lives exactly as long as its owner, whatever the processes around it do. Real processes, real /dev/shm."""

from __future__ import annotations

import gc
import os
import re
import secrets
import stat
import string
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from rollout_service.errors import SegmentError, SegmentMismatch, SegmentNotFound
from rollout_service.memory.segment import (
    NAME_LIMIT,
    SHARED_MEMORY,
    UNREADY_GRACE_S,
    Segment,
    list_segments,
    new_run_token,
    segment_name,
    sweep,
)
from tests.memory.other_process import OtherProcess, can_run, run_python

OWNER = """
import sys
from rollout_service.memory.segment import Segment
segment = Segment.create(5000, kind="rollout", spec=b"run b")
segment.mark_ready()
print(segment.name, flush=True)
sys.stdin.read()
"""

ATTACHER = """
import sys
from rollout_service.memory.segment import Segment
segment = Segment.attach(sys.argv[1])
print("attached", flush=True)
for line in sys.stdin:
    place, value = map(int, line.split())
    segment.root[place] = value
    print(segment.root[place], flush=True)
segment.close()
"""


def ready_segment(nbytes: int = 10_000, *, layout: bytes = b"", spec: bytes = b"") -> Segment:
    segment = Segment.create(nbytes, kind="rollout", layout=layout, spec=spec)
    segment.mark_ready()
    return segment


def swept(*, dry_run: bool = False, in_seconds: float = 0.0) -> set[str]:
    """Names that a sweep takes, now or later. Other runs may leave segments too, so tests ask for their own names."""
    return {segment.name for segment in sweep(dry_run, in_seconds=in_seconds)}


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


# What a segment is


def test_a_new_segment_is_zero_private_and_carries_its_documents() -> None:
    with ready_segment(layout=b"[1]", spec=b"spec \xff") as owner, Segment.attach(owner.name) as other:
        assert owner.owner
        assert not other.owner
        assert owner.root.shape == other.root.shape == (10_000,)
        assert not other.root.any()
        assert (other.layout, other.spec) == (b"[1]", b"spec \xff")
        assert stat.S_IMODE(os.stat(SHARED_MEMORY / owner.name).st_mode) == 0o600
        owner.root[9_999] = 42
        assert other.root[9_999] == 42


def test_payload_starts_on_a_page_however_long_the_documents_are() -> None:
    with ready_segment(layout=b"x" * 5000, spec=b"y" * 9000) as owner, Segment.attach(owner.name) as other:
        assert other.root.ctypes.data % os.sysconf("SC_PAGESIZE") == 0
        assert other.spec == b"y" * 9000


def test_every_page_is_reserved_before_anyone_touches_it() -> None:
    with ready_segment(1_000_000) as owner:
        assert os.stat(SHARED_MEMORY / owner.name).st_blocks * 512 >= 1_000_000


def test_closing_twice_is_closing_once_and_a_closed_segment_says_so() -> None:
    segment = ready_segment()
    segment.close()
    segment.close()
    assert not (SHARED_MEMORY / segment.name).exists()
    with pytest.raises(SegmentError, match="is closed in this process"):
        _ = segment.root


def test_attach_detach_cycles_leave_no_descriptor_and_no_mapping() -> None:
    with ready_segment() as owner:
        before = open_descriptors()
        for _ in range(50):
            Segment.attach(owner.name).close()
        assert open_descriptors() == before
    assert not is_mapped(owner.name)


# A leaving process never takes the segment along


def test_attach_of_a_stranger_leaves_the_segment_alive() -> None:
    with ready_segment() as owner, OtherProcess(ATTACHER, owner.name) as second:
        with OtherProcess(ATTACHER, owner.name) as first:
            assert first.answer() == second.answer() == "attached"
            assert first.leave() == (0, "")
        assert (SHARED_MEMORY / owner.name).exists()
        second.say("17 5")
        assert second.answer() == "5"
        with OtherProcess(ATTACHER, owner.name) as third:
            assert third.answer() == "attached"
            third.say("18 6")
            assert third.answer() == "6"
            assert third.leave() == (0, "")
        assert owner.root[17:19].tolist() == [5, 6]
        assert second.leave() == (0, "")
        assert (SHARED_MEMORY / owner.name).exists()


def test_a_killed_stranger_leaves_the_segment_alive() -> None:
    with ready_segment() as owner:
        with OtherProcess(ATTACHER, owner.name) as actor:
            assert actor.answer() == "attached"
            actor.kill()
        Segment.attach(owner.name).close()


def test_attach_cycles_of_many_processes_never_meet_the_resource_tracker() -> None:
    cycles = """
import sys
from multiprocessing import resource_tracker
from rollout_service.memory.segment import Segment
for _ in range(10):
    Segment.attach(sys.argv[1]).close()
kept = Segment.attach(sys.argv[1])  # left open: exit must be silent too
print(resource_tracker._resource_tracker._fd)
"""
    with ready_segment() as owner:
        actors = [OtherProcess(cycles, owner.name) for _ in range(4)]
        for actor in actors:
            with actor:
                assert actor.answer() == "None"
                assert actor.leave() == (0, "")
        assert (SHARED_MEMORY / owner.name).exists()
    assert not (SHARED_MEMORY / owner.name).exists()


def test_a_failed_attach_leaves_the_segment_alive() -> None:
    cramped = """
import resource, sys
from rollout_service.errors import SegmentMismatch
from rollout_service.memory.segment import Segment
import multiprocessing.shared_memory
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (16 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    Segment.attach(sys.argv[1])
except SegmentMismatch as error:
    print(error)
"""
    with ready_segment(64 << 20) as owner:
        done = run_python(cramped, owner.name)
        assert "cannot be mapped" in done.stdout, done.stderr
        assert (done.returncode, done.stderr) == (0, "")
        Segment.attach(owner.name).close()


def test_the_owners_own_end_takes_the_name_along_without_a_word() -> None:
    code = OWNER.replace("sys.stdin.read()", "sys.exit(3)")
    done = run_python(code)
    assert (done.returncode, done.stderr) == (3, "")
    assert not (SHARED_MEMORY / done.stdout.strip()).exists()


def test_an_owner_that_is_garbage_takes_the_name_along_and_its_views_live_on() -> None:
    segment = ready_segment()
    view = segment.root[100:200]
    name = segment.name
    view[:] = 9
    del segment
    gc.collect()
    assert not (SHARED_MEMORY / name).exists()
    assert view.sum() == 900


def test_a_forked_copy_of_the_owner_is_not_the_owner() -> None:
    forks = """
import os, sys
from rollout_service.memory.segment import Segment
segment = Segment.create(5000, kind="rollout")
if os.fork() == 0:
    segment.close()
    sys.exit(0)
os.wait()
print(os.path.exists("/dev/shm/" + segment.name))
segment.close()
print(os.path.exists("/dev/shm/" + segment.name))
"""
    done = run_python(forks)
    assert (done.stdout.split(), done.stderr) == (["True", "False"], "")


# After a crash


def test_a_killed_owners_segment_is_swept_and_the_next_run_starts_at_once() -> None:
    with OtherProcess(OWNER) as first:
        name = first.answer()
        first.kill()
    with OtherProcess(OWNER) as second:
        assert second.answer() != name
        assert name in swept(dry_run=True)
        assert (SHARED_MEMORY / name).exists()
        assert name in swept()
        assert not (SHARED_MEMORY / name).exists()
        assert second.leave() == (0, "")
    assert name not in swept()


def test_a_sweep_never_takes_a_living_runs_memory() -> None:
    with ready_segment(spec=b"run a") as mine, OtherProcess(OWNER) as living:
        names = {mine.name, living.answer()}
        with OtherProcess(OWNER) as killed:
            dead = killed.answer()
            killed.kill()
        taken = swept(in_seconds=1e6)
        assert dead in taken
        assert not taken & names
        found = {segment.name: segment for segment in list_segments()}
        assert found.keys() >= names
        assert all(found[name].owner_alive for name in names)
        assert living.leave() == (0, "")


@pytest.mark.skipif(not can_run("unshare", "--pid", "--fork", "true"), reason="no right to make a pid namespace")
def test_a_sweep_from_another_pid_namespace_sees_that_the_owner_lives() -> None:
    code = "from rollout_service.memory.segment import sweep; print('swept', [s.name for s in sweep()])"
    with ready_segment() as owner:
        done = run_python(code, prefix=("unshare", "--pid", "--fork", "--mount-proc"))
        assert done.stdout.startswith("swept"), done.stderr
        assert owner.name not in done.stdout
        assert (SHARED_MEMORY / owner.name).exists()


def test_a_forked_child_that_outlives_its_owner_keeps_the_segment() -> None:
    forks = """
import os, sys
from rollout_service.memory.segment import Segment
segment = Segment.create(5000, kind="rollout")
segment.mark_ready()
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(segment.name, flush=True)
os.kill(os.getpid(), 9)
"""
    with OtherProcess(forks) as owner:
        name = owner.answer()
        owner.process.wait(30)
        assert name not in swept()
        assert (SHARED_MEMORY / name).exists()
        owner.leave()  # ends the child's stdin, and waits until it has closed its end of stdout
    assert name in swept()


def test_an_unready_segment_is_left_alone_for_a_minute() -> None:
    dying = OWNER.replace("segment.mark_ready()\n", "")
    with OtherProcess(dying) as owner:
        name = owner.answer()
        owner.kill()
    [found] = [segment for segment in list_segments() if segment.name == name]
    assert not found.ready
    assert found.owner_alive
    assert name not in swept()
    assert name in swept(in_seconds=UNREADY_GRACE_S + 1)
    assert not (SHARED_MEMORY / name).exists()


def test_an_owner_that_died_before_its_header_is_swept_after_the_minute() -> None:
    name = segment_name(new_run_token(), "rollout")
    (SHARED_MEMORY / name).write_bytes(b"")
    assert name not in swept()
    assert name in swept(in_seconds=UNREADY_GRACE_S + 1)
    assert not (SHARED_MEMORY / name).exists()


def test_a_foreign_file_with_a_name_like_ours_is_never_touched() -> None:
    path = SHARED_MEMORY / segment_name(new_run_token(), "rollout")
    path.write_bytes(b"somebody else's")
    try:
        assert path.name not in swept(in_seconds=1e6)
        assert path.name not in {segment.name for segment in list_segments()}
        assert path.read_bytes() == b"somebody else's"
        with pytest.raises(SegmentMismatch, match="cut short"):
            Segment.attach(path.name)
    finally:
        path.unlink()


def test_a_listing_tells_what_status_and_clean_need() -> None:
    token = new_run_token()
    with Segment.create(10_000, kind="weights", token=token, spec=b'{"run_id":"r1"}') as owner:
        owner.mark_ready()
        [found] = [segment for segment in list_segments() if segment.token == token]
        assert found.name == f"rs-{token}-weights"
        assert found.kind == "weights"
        assert found.spec == b'{"run_id":"r1"}'
        assert found.nbytes >= 10_000
        assert found.ready
        assert found.owner_alive
        assert found.owner_pid == os.getpid()
        assert 0 <= found.age_s < 60


# Names


def test_names_fit_every_system_and_never_repeat() -> None:
    names = {segment_name(new_run_token(), kind) for kind in ("rollout", "weights", "k" * 10) for _ in range(300)}
    assert len(names) == 900
    assert max(map(len, names)) <= NAME_LIMIT == 30
    assert all(set(name) <= set(string.ascii_lowercase + string.digits + "-") for name in names)


def test_a_run_token_has_at_least_32_random_bits() -> None:
    assert len(bytes.fromhex(new_run_token())) * 8 >= 32


@pytest.mark.parametrize(("token", "kind"), [("r" * 120, "rollout"), ("a1b2c3d4", "actor-9999"), ("../../etc", "x")])
def test_a_name_that_does_not_fit_is_refused(token: str, kind: str) -> None:
    with pytest.raises(SegmentError, match="does not fit"):
        segment_name(token, kind)


def test_a_taken_name_is_left_alone_and_another_one_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(["00000000aaaaaaaa", "00000000bbbbbbbb"])
    monkeypatch.setattr(secrets, "token_hex", lambda size: next(tokens))
    taken = SHARED_MEMORY / "rs-00000000aaaaaaaa-rollout"
    taken.write_bytes(b"theirs")
    try:
        with ready_segment() as owner:
            assert owner.name == "rs-00000000bbbbbbbb-rollout"
        assert taken.read_bytes() == b"theirs"
    finally:
        taken.unlink()


# Attaching to something else


@pytest.mark.parametrize("granularity", [4096, 16384])
def test_a_size_rounded_up_by_the_system_is_fine(granularity: int) -> None:
    with ready_segment(10_000) as owner:
        owner.root[:] = np.arange(10_000) % 251
        size = os.stat(SHARED_MEMORY / owner.name).st_size
        os.truncate(SHARED_MEMORY / owner.name, -(-size // granularity) * granularity)
        with Segment.attach(owner.name, min_bytes=10_000) as other:
            assert other.root.shape == (10_000,)
            assert np.array_equal(other.root, owner.root)


def test_a_segment_that_is_too_small_is_refused() -> None:
    with ready_segment(10_000) as owner:
        with pytest.raises(SegmentMismatch, match="holds 10000 bytes, at least 10001"):
            Segment.attach(owner.name, min_bytes=10_001)
        os.truncate(SHARED_MEMORY / owner.name, 8192)
        with pytest.raises(SegmentMismatch, match="has 8192 bytes, its header asks for 14096"):
            Segment.attach(owner.name)


def test_another_layout_version_is_refused_naming_both() -> None:
    with ready_segment() as owner, pytest.raises(SegmentMismatch, match="layout version 1, this process speaks 2"):
        Segment.attach(owner.name, layout_version=2)


def test_another_kind_is_refused_naming_both() -> None:
    with ready_segment() as owner, pytest.raises(SegmentMismatch, match="holds rollout, wanted was weights"):
        Segment.attach(owner.name, kind="weights")


def test_an_unready_segment_cannot_be_attached() -> None:
    with Segment.create(10_000, kind="rollout") as owner:
        with pytest.raises(SegmentMismatch, match=f"not ready: its owner .pid {os.getpid()}."):
            Segment.attach(owner.name)
        owner.mark_ready()
        Segment.attach(owner.name).close()


def test_a_missing_segment_says_where_to_look() -> None:
    with pytest.raises(SegmentNotFound, match=r"not visible from this process.*docker run --ipc"):
        Segment.attach(segment_name(new_run_token(), "rollout"))


@pytest.mark.parametrize("name", ["", "psm_12345678", "../rs-aaaaaaaa-rollout"])
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(SegmentMismatch, match="is not a segment name"):
        Segment.attach(name)


@pytest.mark.parametrize("content", [b"", b"x" * 20, b"x" * 8192])
def test_refused_attaches_leave_no_descriptor(content: bytes) -> None:
    path = SHARED_MEMORY / segment_name(new_run_token(), "rollout")
    path.write_bytes(content)
    try:
        before = open_descriptors()
        with pytest.raises(SegmentMismatch):
            Segment.attach(path.name)
        assert open_descriptors() == before
        assert path.read_bytes() == content
    finally:
        path.unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_told_so() -> None:
    stranger = """
import os, sys
from rollout_service.errors import SegmentMismatch
from rollout_service.memory.segment import Segment, list_segments
import multiprocessing.shared_memory
os.setuid(65534)
assert list_segments() == []
try:
    Segment.attach(sys.argv[1])
except SegmentMismatch as error:
    print(error)
"""
    with ready_segment() as owner:
        done = run_python(stranger, owner.name)
        assert "belongs to uid" in done.stdout, done.stderr


# Views and their mapping


def test_a_view_outlives_close_and_the_last_one_unmaps() -> None:
    with ready_segment() as owner:
        other = Segment.attach(owner.name)
        view = other.root[:4].view(np.float32)
        view[0] = 2.5
        other.close()
        assert view[0] == 2.5
        view[0] = 3.5  # still shared memory
        assert owner.root[:4].view(np.float32)[0] == 3.5
    assert is_mapped(owner.name)
    del view
    assert not is_mapped(owner.name)


def test_views_that_outlive_their_segment_neither_crash_nor_print() -> None:
    script = """
import gc
import numpy as np
from rollout_service.memory.segment import Segment

def array_of_a_dropped_segment():
    array = Segment.create(4096, kind="rollout").root.view(np.float32)
    array[:] = 7
    return array

array = array_of_a_dropped_segment()
gc.collect()
assert array.sum() == 7 * 1024

segment = Segment.create(4096, kind="rollout")
view = segment.root[10:20]
segment.close()
view[:] = 1
assert view.sum() == 10

leftover = Segment.create(4096, kind="rollout")
leftover_view = leftover.root[5:]
print("here")
"""
    done = run_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "here\n", "")


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_tensor_that_outlives_its_segment_neither_crashes_nor_prints() -> None:
    script = """
import gc
import numpy as np
import torch
from rollout_service.memory.segment import Segment

def tensor_of(segment, close):
    tensor = torch.from_numpy(segment.root.view(np.float32))
    tensor.fill_(7)
    if close:
        segment.close()
    return tensor

tensors = [tensor_of(Segment.create(4096, kind="rollout"), close) for close in (False, True)]
gc.collect()
print([float(tensor.sum()) for tensor in tensors])
"""
    done = run_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[7168.0, 7168.0]\n", "")


# Systems without POSIX shared memory


def test_import_works_without_unix_modules_and_use_says_what_is_missing() -> None:
    script = """
import sys
for name in ("fcntl", "_posixshmem", "pwd", "resource"):
    sys.modules[name] = None
import rollout_service.memory.slots, rollout_service.memory.weights
from rollout_service.errors import SegmentError
from rollout_service.memory.segment import Segment
try:
    Segment.create(100, kind="rollout")
except SegmentError as error:
    print(error)
"""
    done = run_python(script)
    assert re.search("POSIX shared memory is missing .* run on Linux", done.stdout), done.stderr


def test_a_missing_file_lock_is_named_and_leaves_nothing_behind() -> None:
    script = """
import sys
sys.modules["fcntl"] = None
from rollout_service.errors import SegmentError
from rollout_service.memory.segment import Segment
try:
    Segment.create(100, kind="rollout")
except SegmentError as error:
    print(error)
"""
    done = run_python(script)
    assert "need file locks" in done.stdout, done.stderr
