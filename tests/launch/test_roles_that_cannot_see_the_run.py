"""Roles that reach a service but not its memory, or not even its socket: one line each that says why, and an end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_service.cli import main
from tests.fixtures.by_hand import Hands, ended
from tests.memory.other_process import can_run

OWN_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
AS_NOBODY = """
import os, runpy, sys
import fcntl, psutil, signal, threading, workers.session, rollout_service.lifeline, rollout_service.control.attendance
import rollout_service.control.zeromq
os.setuid(65534)
sys.argv = ["workers", *sys.argv[1:]]
runpy.run_module("workers", run_name="__main__", alter_sys=True)
"""
SAID_WITHIN_S = 20.0
"""From the start of the process, imports included."""
RUN = ["--num-actors", "2", "--envs-per-actor", "2", "--num-steps", "8", "--env-kwargs", "corridor=3"]


@pytest.fixture
def hands(tmp_path: Path) -> Iterator[Hands]:
    with Hands(tmp_path) as found:
        yield found


@pytest.mark.skipif(
    os.geteuid() != 0 or not can_run(*OWN_SHM, "true"), reason="only root can become another user and mount"
)
def test_a_shared_memory_of_ones_own_and_another_user_are_one_line_each(hands: Hands):
    service = hands.serve(*RUN)
    hands.listening(service)
    blind = [hands.actor(within=OWN_SHM), hands.start([*OWN_SHM, sys.executable, *learner(hands)])]
    stranger = hands.start([sys.executable, "-c", AS_NOBODY, "--connect", hands.endpoint])
    assert ended([*blind, stranger], SAID_WITHIN_S) == [1, 1, 1]
    for role, name in zip(blind, ("actor", "learner"), strict=True):
        said = role.stderr()
        assert said.startswith(f"{name}: segment rs-")
        assert (
            "is not visible from this process: its run has ended, or this container has a /dev/shm of its own" in said
        )
        assert said.count("\n") == 1
    assert stranger.stderr() == (
        f"actor: {hands.sockets} belongs to uid 0, mode 0700; this process is uid 65534: "
        "run all processes of a run under one uid\n"
    )
    service.says("left, its place is free: segment rs-", 5.0)
    service.send(signal.SIGINT)
    assert service.wait(5.0) == 130
    assert "Traceback" not in service.stderr()


def learner(hands: Hands) -> list[str]:
    return ["-m", "learner", "--connect", hands.endpoint]


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["--endpoint", "tcp://0.0.0.0:5555", "--allow-tcp"], "beyond this machine without authentication"),
        (["--endpoint", "tcp://127.0.0.1:5555"], "use ipc://, or allow tcp"),
        (["--endpoint", "ipc:///not/there/s"], "/not/there is not a directory; create it with mode 0700"),
        (["--endpoint", "ipc:///tmp/s"], "nobody else may write"),
        (["--serial"], "serve has no roles in its own process"),
        (["--endpont", "ipc:///tmp/s"], "see rollout-service serve --help"),
        (["--num-steps", "0"], "num_steps is 0"),
    ],
)
def test_a_service_that_may_not_listen_there_is_one_line(
    words: list[str], needle: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["serve", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), needle in err) == ("", 1, True), err
