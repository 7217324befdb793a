"""Sockets: where they live, that nothing a peer does gets out of the loop, that every wait can be ended."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_service.control import endpoints
from rollout_service.control.endpoints import (
    MAX_ENDPOINT_BYTES,
    SOCKET_PREFIX,
    remove_socket_directory,
    socket_endpoint,
    socket_root,
    sweep_socket_directories,
)
from rollout_service.control.messages import MAX_MESSAGE_BYTES
from rollout_service.control.transport import Dealer, Router
from rollout_service.errors import ConfigError

DEADLINE_S = 10.0
FEW_S = 2.0


@pytest.fixture
def endpoint() -> Iterator[str]:
    found = socket_endpoint(f"test-{os.getpid()}")
    yield found
    remove_socket_directory(found)


@pytest.fixture
def pair(endpoint: str) -> Iterator[tuple[Router, Dealer]]:
    router, dealer = Router(endpoint), Dealer(endpoint)
    yield router, dealer
    dealer.close()
    router.close()


# --- where sockets live ---


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing but what the test sets."""
    for name in (endpoints.SOCKET_DIR_VARIABLE, "TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def long_directory(root: Path) -> Path:
    path = root / ("x" * 150)
    path.mkdir()
    return path


def test_a_long_tmpdir_is_passed_over(roots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(long_directory(roots)))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(roots / "gone"))
    assert socket_root() == Path("/tmp")
    endpoint = socket_endpoint("run-with-a-very-long-token-" + "y" * 200)
    try:
        assert len(endpoint) <= MAX_ENDPOINT_BYTES
        Router(endpoint).close()
    finally:
        remove_socket_directory(endpoint)


def test_a_short_tmpdir_comes_first_then_the_runtime_directory(monkeypatch: pytest.MonkeyPatch, roots: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/dev/shm")
    assert socket_root() == Path("/dev/shm")
    monkeypatch.setenv("TMPDIR", "/tmp")
    assert socket_root() == Path("/tmp")


def test_an_override_that_is_too_long_names_the_path_and_the_limit(
    roots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = long_directory(roots)
    monkeypatch.setenv(endpoints.SOCKET_DIR_VARIABLE, str(path))
    with pytest.raises(ConfigError) as error:
        socket_endpoint("run")
    assert str(path) in str(error.value)
    assert "the limit is 100" in str(error.value)


def test_an_override_that_is_no_directory_says_so(roots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(endpoints.SOCKET_DIR_VARIABLE, str(roots / "gone"))
    with pytest.raises(ConfigError, match="not a writable directory"):
        socket_root()


def test_an_endpoint_that_is_too_long_is_refused_before_it_is_bound() -> None:
    with pytest.raises(ConfigError, match=r"is 1\d\d bytes long, the limit is 100"):
        Router("ipc:///tmp/" + "x" * 120)


def test_the_directory_is_this_users_alone(endpoint: str) -> None:
    directory = Path(endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert directory.name.startswith(SOCKET_PREFIX)


def test_a_directory_that_others_may_enter_is_refused(endpoint: str) -> None:
    directory = Path(endpoint.removeprefix("ipc://")).parent
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 755"):
        socket_endpoint(f"test-{os.getpid()}")


def test_what_a_killed_run_left_is_removed_and_what_lives_stays(endpoint: str) -> None:
    alive = Router(endpoint)
    left = socket_root() / f"{SOCKET_PREFIX}killed-run"
    left.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(left / "c"))
    long_ago = time.time() - 10.0
    for directory in (left, Path(endpoint.removeprefix("ipc://")).parent):
        os.utime(directory, (long_ago, long_ago))
    try:
        assert sweep_socket_directories(dry_run=True) == [left]
        assert left.exists()
        assert sweep_socket_directories() == [left]
        assert not left.exists()
        dealer = Dealer(endpoint)
        dealer.send(b"still there?")
        assert [data for _, data in alive.receive(DEADLINE_S)] == [b"still there?"]
        dealer.close()
    finally:
        alive.close()


def test_a_run_about_to_bind_keeps_its_directory(endpoint: str) -> None:
    assert sweep_socket_directories() == []
    assert Path(endpoint.removeprefix("ipc://")).parent.is_dir()


def test_nothing_but_a_socket_directory_is_ever_removed(tmp_path: Path) -> None:
    remove_socket_directory(f"ipc://{tmp_path}/c")
    remove_socket_directory("tcp://127.0.0.1:5555")
    assert tmp_path.is_dir()


def test_an_endpoint_in_use_says_so(endpoint: str) -> None:
    first = Router("tcp://127.0.0.1:*", allow_tcp=True)
    try:
        with pytest.raises(ConfigError, match="cannot listen on tcp://127"):
            Router(first.endpoint, allow_tcp=True)
    finally:
        first.close()


@pytest.mark.parametrize(
    ("address", "allow_tcp", "says"),
    [
        ("tcp://127.0.0.1:5555", False, "use ipc://"),
        ("tcp://0.0.0.0:5555", True, "beyond this machine"),
        ("tcp://*:5555", True, "beyond this machine"),
        ("tcp://[::]:5555", True, "beyond this machine"),
        ("tcp://eth0:5555", True, "beyond this machine"),
        ("http://127.0.0.1", True, "not an endpoint"),
    ],
)
def test_only_this_machine_can_reach_a_service(address: str, allow_tcp: bool, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Router(address, allow_tcp=allow_tcp)


# --- messages ---


def test_a_message_and_its_answer(pair: tuple[Router, Dealer]) -> None:
    router, dealer = pair
    dealer.send(b"hello")
    ((peer, data),) = router.receive(DEADLINE_S)
    assert data == b"hello"
    router.send(peer, b"welcome")
    assert dealer.receive(DEADLINE_S) == b"welcome"


def test_a_waiting_router_wakes_for_every_message_at_once(pair: tuple[Router, Dealer]) -> None:
    """500 round trips against a loop that sleeps for a minute: any missed wake-up would show as that minute."""
    router, dealer = pair
    stopping = threading.Event()

    def echo() -> None:
        while not stopping.is_set():
            for peer, data in router.receive(60.0):
                router.send(peer, data)

    loop = threading.Thread(target=echo)
    loop.start()
    for number in range(500):
        dealer.send(b"%d" % number)
        assert dealer.receive(DEADLINE_S) == b"%d" % number
    stopping.set()
    router.wake()
    loop.join(DEADLINE_S)
    assert not loop.is_alive()


def test_a_message_that_nobody_has_asked_for_stays_in_the_socket(pair: tuple[Router, Dealer]) -> None:
    router, dealer = pair
    for word in (b"first", b"second"):
        dealer.send(word)
    _, heard = next(router.receive(DEADLINE_S))
    assert heard == b"first"
    assert [data for _, data in router.receive(DEADLINE_S)] == [b"second"]


def test_a_peer_that_vanished_or_never_was_raises_nothing(endpoint: str) -> None:
    router = Router(endpoint)
    gone = Dealer(endpoint)
    gone.send(b"x")
    ((peer, _),) = router.receive(DEADLINE_S)
    gone.close()
    for _ in range(2000):
        router.send(peer, b"answer")
        router.send(b"nobody", b"answer")
    assert list(router.receive(0.0)) == []
    router.close()


def test_an_oversized_message_cuts_off_its_sender_alone(pair: tuple[Router, Dealer], endpoint: str) -> None:
    router, dealer = pair
    hostile = Dealer(endpoint)
    hostile.send(b"x" * (MAX_MESSAGE_BYTES + 1))
    dealer.send(b"fine")
    assert [data for _, data in router.receive(DEADLINE_S)] == [b"fine"]
    assert list(router.receive(0.1)) == []
    hostile.close()


def test_a_peer_connects_before_there_is_a_service(endpoint: str) -> None:
    dealer = Dealer(endpoint)
    dealer.send(b"early")
    router = Router(endpoint)
    assert dealer.receive(0.1) is None
    assert [data for _, data in router.receive(DEADLINE_S)] == [b"early"]
    dealer.close()
    router.close()


def test_a_peer_finds_the_service_again_after_it_was_started_anew(endpoint: str) -> None:
    dealer = Dealer(endpoint)
    identities = []
    for word in (b"before", b"after"):
        router = Router(endpoint)
        peer, data = said(dealer, router, word)
        identities.append(peer)
        assert data == word
        router.close()
    assert identities[0] == identities[1]
    dealer.close()


def said(dealer: Dealer, router: Router, word: bytes) -> tuple[bytes, bytes]:
    """What the router hears of a peer that repeats itself."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        dealer.send(word)
        dealer.receive(0.02)
        for heard in router.receive(0.0):
            return heard
    raise AssertionError("nothing was heard")


def test_long_messages_go_through_whole_and_in_order(pair: tuple[Router, Dealer]) -> None:
    router, dealer = pair
    sent = [bytes([number]) * (MAX_MESSAGE_BYTES - number) for number in range(4)]
    for data in sent:
        dealer.send(data)
    heard: list[bytes] = []
    peer = b""
    while len(heard) < len(sent):
        dealer.receive(0.0)
        for sender, data in router.receive(0.05):
            peer = sender
            heard.append(data)
    assert heard == sent
    router.send(peer, sent[0])
    answer = None
    while answer is None:
        router.receive(0.0)
        answer = dealer.receive(0.05)
    assert answer == sent[0]


@pytest.mark.parametrize("words", [b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x04ping", b""])
def test_whoever_is_no_peer_disturbs_nobody(pair: tuple[Router, Dealer], endpoint: str, words: bytes) -> None:
    router, dealer = pair
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(endpoint.removeprefix("ipc://"))
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        dealer.send(b"fine")
        assert [data for _, data in router.receive(DEADLINE_S)] == [b"fine"]
        assert list(router.receive(0.05)) == []
