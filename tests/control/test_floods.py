"""More than a service can take: of connections, of messages that nobody reads, of bytes. Each has a bound."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest

from rollout_service.control import zeromq
from rollout_service.control.client import Client
from rollout_service.control.endpoints import remove_socket_directory, socket_endpoint
from rollout_service.control.messages import MAX_MESSAGE_BYTES, Hello, Role, Status, StatusReport
from rollout_service.control.transport import MESSAGES_PER_RECEIVE, Dealer, Router
from tests.control.raw_peer import RawPeer
from tests.fixtures.machine import environment

DEADLINE_S = 10.0
KILOBYTE = bytes(1024)
IN_THE_KERNEL = 2000
"""Messages of a kilobyte that its buffers may hold between two sockets; they hold some hundreds."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    found = socket_endpoint(f"flood-{os.getpid()}")
    yield found
    remove_socket_directory(found)


@pytest.fixture
def router(endpoint: str) -> Iterator[Router]:
    with closing(Router(endpoint)) as found:
        yield found


def all_of(router: Router, least: int) -> list[bytes]:
    """What there is to read, until nothing comes any more; at least so many are on their way."""
    found: list[bytes] = []
    while messages := list(router.receive(DEADLINE_S if len(found) < least else 0.1)):
        found += [data for _, data in messages]
    return found


# Connections

SERVICE = """
import json, os, resource, sys
allowed = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (allowed // 2, allowed))
from rollout_service.control.endpoints import socket_endpoint
from rollout_service.control.server import Server
from rollout_service.control.transport import Router
from tests.control.world import make_coordinator, make_spec
server = Server(Router(socket_endpoint(f"flood-{os.getpid()}")), make_coordinator(make_spec()))
server.start()
print(server._router.endpoint, flush=True)
sys.stdin.read()
print(json.dumps({"alive": server.alive, **server.report()["counters"]}))
server.stop()
server.join()
"""


def test_more_strangers_than_a_process_may_have_descriptors_end_neither_the_service_nor_its_peers() -> None:
    allowed, strangers, at_once = 512, 700, 32
    service = subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(allowed)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert service.stdout is not None
    endpoint = service.stdout.readline().strip()
    try:
        most = 0
        with closing(Client(endpoint, Hello(role=Role.OBSERVER, pid=1), connect_deadline_s=DEADLINE_S)) as honest:
            honest.connect()
            with ExitStack() as crowd:
                for number in range(strangers):
                    with suppress(OSError):  # the door is closed for a moment when all are cut off
                        crowd.enter_context(RawPeer(endpoint)).greet()
                    if number % at_once == 0:
                        answer = honest.exchange(Status(), StatusReport, resend_every_s=0.1, deadline_s=DEADLINE_S)
                        assert answer is not None
                        most = max(most, psutil.Process(service.pid).num_fds())
                assert allowed // 2 < most <= 0.75 * allowed + at_once, "and its own limit was raised"
            told = honest.exchange(Status(), StatusReport, resend_every_s=0.1, deadline_s=DEADLINE_S)
            assert told is not None
            assert told.report["counters"]["connection_floods"] >= 1
        out, _ = service.communicate(timeout=DEADLINE_S)
        assert json.loads(out)["alive"]
    finally:
        service.kill()
        service.wait()
        remove_socket_directory(endpoint)


@pytest.mark.parametrize("network", ["ipc", "tcp"])
def test_peers_that_were_cut_off_with_the_crowd_come_back_as_the_ones_they_were(
    endpoint: str, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = [True]
    monkeypatch.setattr(zeromq, "running_short", lambda: bool(short and short.pop()))
    tcp = network == "tcp"
    with closing(Router("tcp://127.0.0.1:*" if tcp else endpoint, allow_tcp=tcp)) as router:
        with closing(Dealer(router.endpoint)) as first, closing(Dealer(router.endpoint)) as second:
            names = {first: b"first", second: b"second"}
            heard: dict[bytes, set[bytes]] = {name: set() for name in names.values()}
            for _ in range(2):
                wanted = set(names.values())
                deadline = time.monotonic() + DEADLINE_S
                while wanted and time.monotonic() < deadline:
                    for dealer, name in names.items():
                        dealer.send(name)
                    for peer, name in router.receive(0.05):
                        heard[name].add(peer)
                        wanted.discard(name)
                assert not wanted
        assert (short, router.counters["connection_floods"]) == ([], 1)
        assert [len(peers) for peers in heard.values()] == [1, 1]
        if not tcp:
            assert stat.S_IMODE(Path(endpoint.removeprefix("ipc://")).stat().st_mode) == 0o600


def test_who_does_not_say_what_it_is_in_time_is_hung_up_on(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq, "HANDSHAKE_MS", 50)
    with closing(Router(endpoint)) as router, RawPeer(endpoint) as silent, RawPeer(endpoint) as slow:
        slow.greet()
        assert silent.hung_up_on()
        assert slow.hung_up_on()
        assert list(router.receive(0.0)) == []
        assert router.counters["failed_handshakes"] == 2


def test_thousands_of_connections_that_come_and_go_unread_hold_nobody_up(router: Router, endpoint: str) -> None:
    for _ in range(3000):
        with RawPeer(endpoint) as stranger:
            stranger.greet()
    with closing(Dealer(endpoint)) as dealer:
        dealer.send(b"fine")
        assert [data for _, data in router.receive(DEADLINE_S)] == [b"fine"]
    assert router.counters["failed_handshakes"] == 3000


# Messages


def test_a_peer_that_nobody_reads_has_to_wait_and_the_others_do_not(router: Router, endpoint: str) -> None:
    with RawPeer(endpoint) as hostile, closing(Dealer(endpoint)) as dealer:
        gone_out = hostile.shake_hands().send_until_full(KILOBYTE, most=100_000)
        assert zeromq.UNREAD <= gone_out < zeromq.UNREAD + IN_THE_KERNEL
        dealer.send(b"fine")
        heard = all_of(router, gone_out + 1)
    assert heard.count(b"fine") == 1
    assert heard.count(KILOBYTE) == gone_out


def test_what_a_peer_does_not_read_is_dropped_and_holds_nobody_up(router: Router, endpoint: str) -> None:
    sent = 20_000
    with closing(Dealer(endpoint)) as lazy, closing(Dealer(endpoint)) as other:
        peers = {}
        for dealer, name in ((lazy, b"lazy"), (other, b"other")):
            dealer.send(name)
            ((peers[name], data),) = router.receive(DEADLINE_S)
            assert data == name
        for _ in range(sent):
            router.send(peers[b"lazy"], KILOBYTE)
        router.send(peers[b"other"], b"fine")
        assert other.receive(DEADLINE_S) == b"fine"
        there = 0
        while lazy.receive(DEADLINE_S if there < zeromq.HIGH_WATER_MARK else 0.1) is not None:
            there += 1
    assert zeromq.HIGH_WATER_MARK <= there < zeromq.HIGH_WATER_MARK + zeromq.UNREAD + IN_THE_KERNEL


def test_a_message_that_is_too_long_is_refused_by_its_announcement(router: Router, endpoint: str) -> None:
    before = psutil.Process().memory_info().rss
    for length in (MAX_MESSAGE_BYTES + 1, 1 << 40, (1 << 63) - 1):
        with RawPeer(endpoint) as hostile:
            hostile.shake_hands().announce(length)
            assert hostile.hung_up_on()
    assert list(router.receive(0.0)) == []
    assert psutil.Process().memory_info().rss - before < 16 * MAX_MESSAGE_BYTES


def test_one_look_at_the_socket_takes_a_bounded_number_of_messages(router: Router, endpoint: str) -> None:
    """Behind it the loop looks after its deadlines, whoever talks on."""
    sent = 2 * MESSAGES_PER_RECEIVE + 1
    with ExitStack() as peers:
        for number in range(sent):
            if number % zeromq.UNREAD == 0:
                hostile = peers.enter_context(RawPeer(endpoint)).shake_hands()
            hostile.send(b"x")
        looks: list[int] = []
        while sum(looks) < sent:
            looks.append(len(list(router.receive(DEADLINE_S))))
    assert max(looks) <= MESSAGES_PER_RECEIVE
