"""Signs of life: held by whoever lives, free after any death, and nothing but a death or a goodbye frees them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rollout_service.errors import SegmentError, SegmentNotFound
from rollout_service.memory.presence import LEARNER, Presence, actor_seat, is_present
from rollout_service.memory.segment import Segment
from tests.memory.other_process import OtherProcess, can_run, run_python

OWN_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
OWN_PIDS = ("unshare", "--pid", "--fork", "--mount-proc")
SITS_DOWN = """
import sys
from rollout_service.memory.presence import Presence, actor_seat
from rollout_service.memory.segment import Segment
here = Presence(sys.argv[1], actor_seat(int(sys.argv[2])))
Segment.attach(sys.argv[1]).close()
print("here", flush=True)
sys.stdin.readline()
here.close()
print("left", flush=True)
sys.stdin.readline()
"""
ASKS = """
import sys
from rollout_service.memory.presence import Presence, actor_seat
try:
    Presence(sys.argv[1], actor_seat(0))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def name() -> Iterator[str]:
    with Segment.create(64, kind="test") as segment:
        segment.mark_ready()
        yield segment.name


def seats(name: str) -> list[bool]:
    return [is_present(name, seat) for seat in (LEARNER, actor_seat(0), actor_seat(1))]


def test_a_seat_is_held_until_its_process_leaves_it(name: str):
    assert seats(name) == [False, False, False]
    with OtherProcess(SITS_DOWN, name, "1") as actor:
        assert actor.answer() == "here"
        assert seats(name) == [False, False, True]
        actor.say("leave")
        assert actor.answer() == "left"
        assert seats(name) == [False, False, False]


def test_a_killed_process_holds_nothing(name: str):
    with OtherProcess(SITS_DOWN, name, "0") as actor, OtherProcess(SITS_DOWN, name, "0") as successor:
        assert (actor.answer(), successor.answer()) == ("here", "here")
        actor.kill()
        assert seats(name) == [False, True, False]
        successor.kill()
        assert seats(name) == [False, False, False]


@pytest.mark.skipif(not can_run(*OWN_PIDS, "true"), reason="this user may not make a pid namespace")
def test_a_process_of_another_pid_namespace_counts(name: str):
    process = subprocess.Popen(
        [*OWN_PIDS, sys.executable, "-c", SITS_DOWN, name, "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    assert is_present(name, actor_seat(0))
    process.communicate(b"leave\nend\n", timeout=20)
    assert not is_present(name, actor_seat(0))


def test_a_forked_child_keeps_the_seat_of_its_process(name: str):
    with Presence(name, LEARNER):
        stays = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # exec: the descriptor does not come along
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    assert is_present(name, LEARNER)
    os.close(write)
    os.waitpid(child, 0)
    os.close(read)
    assert not is_present(name, LEARNER)
    stays.communicate(timeout=10)


def test_a_segment_that_is_not_there_is_named(name: str):
    with pytest.raises(SegmentNotFound, match="rs-00000000-test is not visible from this process"):
        Presence("rs-00000000-test", LEARNER)
    with pytest.raises(SegmentError, match="rs-00000000-test cannot be asked"):
        is_present("rs-00000000-test", LEARNER)


@pytest.mark.skipif(not can_run(*OWN_SHM, "true"), reason="this user may not make a mount namespace")
def test_a_shared_memory_of_ones_own_is_named_as_the_reason(name: str):
    said = run_python(ASKS, name, prefix=OWN_SHM).stdout
    assert said.startswith(f"SegmentNotFound segment {name} is not visible from this process: its run has ended, or")
    assert "this container has a /dev/shm of its own (share it: docker run --ipc, compose: ipc)" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_uid_and_mode(name: str):
    said = run_python(ASKS.replace("try:", "import fcntl, os; os.setuid(65534)\ntry:", 1), name).stdout
    assert said == (
        f"SegmentMismatch segment {name} belongs to uid 0, mode 0600; this process is uid 65534: "
        "run all processes of a run under one uid\n"
    )
