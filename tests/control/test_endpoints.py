"""Endpoints chosen by hand: what a service may open, what a peer may connect to, and what is never removed."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_service.control.endpoints import check_reachable, prepare_endpoint, remove_socket
from rollout_service.control.transport import Router
from rollout_service.errors import ConfigError
from tests.fixtures.machine import environment

AS_NOBODY = """
import os, sys
from rollout_service.control.endpoints import check_reachable
os.setuid(65534)
for endpoint in sys.argv[1:]:
    try:
        check_reachable(endpoint)
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rs-ends-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def refusal(endpoint: str, *, allow_tcp: bool = False) -> str:
    with pytest.raises(ConfigError) as refused:
        prepare_endpoint(endpoint, allow_tcp=allow_tcp)
    return str(refused.value)


def test_a_service_listens_with_mode_0600_and_takes_its_socket_along(directory: Path):
    endpoint = f"ipc://{directory}/run.sock"
    prepare_endpoint(endpoint, allow_tcp=False)
    router = Router(endpoint)
    assert stat.S_IMODE((directory / "run.sock").stat().st_mode) == 0o600
    assert f"cannot listen on {endpoint}: another service does" in refusal(endpoint)
    check_reachable(endpoint)
    router.close()
    remove_socket(endpoint)
    remove_socket(endpoint)
    assert list(directory.iterdir()) == []


def test_the_socket_of_a_dead_service_is_replaced(directory: Path):
    path = directory / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    prepare_endpoint(f"ipc://{path}", allow_tcp=False)
    assert not path.exists()


def test_a_file_in_the_way_is_kept(directory: Path):
    path = directory / "notes.txt"
    path.write_text("mine")
    assert refusal(f"ipc://{path}") == f"{path} is there, and no socket; choose another name"
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="is no socket"):
        check_reachable(f"ipc://{path}")


def test_the_directory_has_to_be_there_and_closed_to_others(directory: Path):
    assert f"{directory}/gone is not a directory; create it with mode 0700" in refusal(f"ipc://{directory}/gone/s")
    directory.chmod(0o770)
    assert f"{directory} (uid {os.getuid()}, mode 0770)" in refusal(f"ipc://{directory}/s")
    assert "nobody else may write; use one of mode 0700" in refusal("ipc:///tmp/s")
    assert "has no absolute path" in refusal("ipc://relative/s")


def test_tcp_has_to_be_allowed_and_stays_on_this_machine():
    assert "use ipc://, or allow tcp" in refusal("tcp://127.0.0.1:5555")
    for endpoint in ("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:5555"):
        assert "beyond this machine without authentication" in refusal(endpoint, allow_tcp=True)
    prepare_endpoint("tcp://127.0.0.1:5555", allow_tcp=True)
    assert "is not an endpoint" in refusal("pgm://127.0.0.1:5555", allow_tcp=True)


def test_a_peer_may_look_for_a_socket_that_is_not_there_yet(directory: Path):
    check_reachable(f"ipc://{directory}/later")
    check_reachable(f"ipc://{directory}/gone/later")
    check_reachable("tcp://127.0.0.1:5555")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_uid_and_mode(directory: Path):
    outer = f"ipc://{directory}/s"
    with tempfile.TemporaryDirectory(prefix="rs-open-", dir="/tmp") as text:
        Path(text).chmod(0o755)
        inner = f"ipc://{text}/s"
        routers = [Router(outer), Router(inner)]
        ran = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, outer, inner],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        for router in routers:
            router.close()
        remove_socket(inner)
    advice = "this process is uid 65534: run all processes of a run under one uid"
    assert ran.stdout.splitlines() == [
        f"ConfigError {directory} belongs to uid 0, mode 0700; {advice}",
        f"ConfigError {text}/s belongs to uid 0, mode 0600; {advice}",
    ], ran.stderr
