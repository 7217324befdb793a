"""What docker-compose.yml starts, as processes: the same words, with the socket's volume in another place."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_service import checkpoint
from rollout_service.control.endpoints import SOCKET_DIR_VARIABLE
from tests.fixtures.by_hand import START_S, Hands, Process, ended
from tests.fixtures.machine import environment, eventually
from tests.test_compose import OWNER, SERVICES, mounts, words_of

STOP_S = 5.0
PROGRAM = "rollout-service"


@pytest.fixture
def hands(tmp_path: Path) -> Iterator[Hands]:
    with Hands(tmp_path) as found:
        yield found


def start(hands: Hands, name: str) -> Process:
    words = [word.replace(mounts(SERVICES[name])["socket"], str(hands.sockets)) for word in words_of(SERVICES[name])]
    programs = {PROGRAM: [sys.executable, "-m", "rollout_service"], "python": [sys.executable]}
    return hands.start([*programs[words[0]], *words[1:]], **{SOCKET_DIR_VARIABLE: str(hands.sockets)})


def healthy(hands: Hands) -> bool:
    """The health check of the service's container. Here other runs of this machine count too."""
    test = SERVICES[OWNER]["healthcheck"]["test"][1].replace(PROGRAM, f"{sys.executable} -m rollout_service")
    there = environment(**{SOCKET_DIR_VARIABLE: str(hands.sockets)})
    return subprocess.run(["sh", "-c", test], env=there, timeout=20, check=False).returncode == 0


@pytest.mark.parametrize("order", ["dependents first, as compose does", "the service first"])
def test_its_commands_train_are_healthy_and_stop_in_time_with_a_checkpoint(hands: Hands, order: str):
    service = start(hands, OWNER)
    hands.run_dir = service.err.parent / "runs" / "compose"
    hands.listening(service)
    eventually(lambda: healthy(hands), START_S, "the service is healthy")
    roles = [start(hands, name) for name in ("learner", "actor", "actor")]
    hands.reaches(2)
    if order == "the service first":
        service.send(signal.SIGTERM)
    else:
        for role in roles:
            role.send(signal.SIGTERM)
    assert ended(roles, STOP_S) == [0, 0, 0]
    if order != "the service first":
        service.send(signal.SIGTERM)
    assert service.wait(STOP_S) == 128 + signal.SIGTERM
    assert "Traceback" not in service.stderr() + "".join(role.stderr() for role in roles)
    assert checkpoint.require(hands.run_dir).checkpoint.manifest.update >= 2
