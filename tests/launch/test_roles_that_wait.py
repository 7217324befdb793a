"""Roles and services that wait for somebody who never comes: they leave when told to, at once and with one line."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals

import pytest

from rollout_service.control.messages import Hello, decode
from rollout_service.control.transport import Router
from rollout_service.memory.room import SHARED_MEMORY
from rollout_service.memory.segment import list_segments
from tests.fixtures.by_hand import START_S, Hands, Process

ROLE_LEAVES_S = 2.0
SERVICE_LEAVES_S = 3.0
RUN = ["--num-actors", "2", "--envs-per-actor", "2", "--num-steps", "8", "--env-kwargs", "corridor=3"]


@pytest.fixture
def hands(tmp_path: Path) -> Iterator[Hands]:
    with Hands(tmp_path) as found:
        yield found


def start_waiting(hands: Hands, role: str) -> Process:
    """A role that has asked for a service, was not answered, and whose endpoint nobody listens at any more."""
    router = Router(hands.endpoint)
    try:
        process = hands.actor() if role == "actor" else hands.learner()
        asked = router.receive(START_S)
        assert process.running, process.stderr()
        (hello, *_) = (decode(data) for _, data in asked)
        assert isinstance(hello, Hello)
        assert hello.role.value == role
    finally:
        router.close()
    return process


@pytest.mark.parametrize("number", [SIGINT, SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("role", ["actor", "learner"])
def test_a_role_that_waits_for_a_service_leaves_on_a_signal(hands: Hands, role: str, number: Signals):
    process = start_waiting(hands, role)
    process.send(number)
    assert process.wait(ROLE_LEAVES_S) == 0
    assert process.stderr() == (
        f"{role}: left while waiting for WELCOME from {hands.endpoint}: stopped by {number.name}\n"
    )


@pytest.mark.parametrize("number", [SIGINT, SIGTERM], ids=lambda number: number.name)
def test_a_service_to_which_nobody_came_leaves_on_a_signal(hands: Hands, number: Signals):
    service = hands.serve(*RUN)
    hands.listening(service)
    service.send(number)
    assert service.wait(SERVICE_LEAVES_S) == 128 + number
    assert "Traceback" not in service.stderr()
    assert not Path(hands.endpoint.removeprefix("ipc://")).exists()


def test_a_service_whose_roles_are_all_but_one_here_and_the_roles_leave_on_sigterm(hands: Hands):
    """They share the run with a group, as roles of different users would."""
    group = ("--share-with-group", str(os.getegid()))
    service = hands.serve(*RUN, *group)
    hands.listening(service)
    roles = [hands.learner(*group), hands.actor(*group)]
    for role in roles:
        service.says(f"pid {role.pid}) is here")
    segments = [SHARED_MEMORY / found.name for found in list_segments() if found.owner_pid == service.pid]
    shared = [path.stat() for path in (*segments, Path(hands.endpoint.removeprefix("ipc://")))]
    assert [(stat.S_IMODE(found.st_mode), found.st_gid) for found in shared] == [(0o660, os.getegid())] * 3
    service.send(signal.SIGTERM)
    assert service.wait(SERVICE_LEAVES_S + ROLE_LEAVES_S) == 128 + SIGTERM
    assert [role.wait(ROLE_LEAVES_S) for role in roles] == [0, 0]
    assert not any("Traceback" in process.stderr() for process in (service, *roles))
