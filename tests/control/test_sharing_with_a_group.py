"""Group mode: socket, directory and memory for one group besides the user; without it for the user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rollout_service.control import endpoints
from rollout_service.control.endpoints import (
    SocketAccess,
    check_reachable,
    group_id,
    remove_socket_directory,
    socket_endpoint,
)
from rollout_service.control.transport import Dealer, Router
from rollout_service.errors import ConfigError
from rollout_service.memory.segment import Segment

OURS = os.getegid()
DEADLINE_S = 10.0


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("access", "directory_mode", "socket_mode"), [(SocketAccess(), 0o700, 0o600), (SocketAccess(OURS), 0o750, 0o660)]
)
def test_modes_say_who_may_connect(access: SocketAccess, directory_mode: int, socket_mode: int) -> None:
    endpoint = socket_endpoint(f"group-{os.getpid()}", access)
    path = Path(endpoint.removeprefix("ipc://"))
    router = Router(endpoint, access=access)
    try:
        assert (mode(path.parent), mode(path)) == (directory_mode, socket_mode)
        assert path.stat().st_gid == OURS
        dealer = Dealer(endpoint)
        dealer.send(b"x")
        assert [data for _, data in router.receive(DEADLINE_S)] == [b"x"]
        dealer.close()
    finally:
        router.close()
        remove_socket_directory(endpoint)


def test_a_run_for_this_user_alone_does_not_take_a_shared_directory() -> None:
    endpoint = socket_endpoint(f"group-{os.getpid()}", SocketAccess(OURS))
    try:
        with pytest.raises(ConfigError, match="mode 0700"):
            socket_endpoint(f"group-{os.getpid()}")
    finally:
        remove_socket_directory(endpoint)


def test_another_users_socket_is_trusted_only_with_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"ipc://{tmp_path}/c"
    router = Router(endpoint, access=SocketAccess(OURS))
    try:
        monkeypatch.setattr(endpoints, "_user_id", lambda: os.getuid() + 1)
        with pytest.raises(ConfigError, match="run all processes of a run under one uid"):
            check_reachable(endpoint)
        with pytest.raises(ConfigError, match="run all processes of a run under one uid"):
            check_reachable(endpoint, OURS + 1)
        check_reachable(endpoint, OURS)
        (tmp_path / "c").chmod(0o666)
        with pytest.raises(ConfigError, match="mode 0666"):
            check_reachable(endpoint, OURS)
    finally:
        router.close()


def test_memory_is_this_users_alone_until_it_is_shared() -> None:
    with Segment.create(4096, kind="test") as segment:
        path = Path("/dev/shm") / segment.name
        assert mode(path) == 0o600
        segment.share_with_group(OURS)
        assert (mode(path), path.stat().st_gid) == (0o660, OURS)


def test_a_group_is_given_by_name_or_number_and_has_to_be_ours() -> None:
    import grp

    ours = grp.getgrgid(OURS)
    assert group_id(ours.gr_name) == group_id(str(OURS)) == OURS
    with pytest.raises(ConfigError, match="there is no group 'no-such-group'"):
        group_id("no-such-group")
    others = [each for each in grp.getgrall() if each.gr_gid not in (OURS, *os.getgroups())]
    if others:
        with pytest.raises(ConfigError, match="is not in group"):
            group_id(others[0].gr_name)
