"""Services and clients inside a program that has sockets, a context and threads of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from rollout_service.control.client import Client
from rollout_service.control.endpoints import remove_socket_directory, socket_endpoint
from rollout_service.control.messages import Hello, Role, Status, StatusReport
from rollout_service.control.server import Server
from rollout_service.control.transport import Router
from tests.control.world import make_coordinator, make_spec

CYCLES = 25
DEADLINE_S = 10.0
DEADLINE_MS = 10_000


class Host:
    """A program with an echo of its own: a thread that answers on the program's own context."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.bind("inproc://echo")
        self.socket.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
        self.thread = threading.Thread(target=self._echo)
        self.thread.start()

    def _echo(self) -> None:
        with self.context.socket(zmq.PAIR) as socket:
            socket.connect("inproc://echo")
            while (message := socket.recv()) != b"end":
                socket.send(message[::-1])

    def still_works(self, number: int) -> bool:
        self.socket.send(b"%06d" % number)
        return self.socket.recv() == (b"%06d" % number)[::-1]

    def close(self) -> None:
        self.socket.send(b"end")
        self.thread.join(DEADLINE_S)
        self.socket.close()
        self.context.term()


@pytest.fixture
def host() -> Iterator[Host]:
    found = Host()
    yield found
    found.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def umask() -> str:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask"))
    return line


def one_service(number: int) -> None:
    endpoint = socket_endpoint(f"host-{number}")
    server = Server(Router(endpoint), make_coordinator(make_spec()))
    server.start()
    client = Client(endpoint, Hello(role=Role.OBSERVER, pid=os.getpid()), connect_deadline_s=DEADLINE_S)
    try:
        client.connect()
        answer = client.exchange(Status(), StatusReport, deadline_s=DEADLINE_S)
        assert answer is not None
        assert answer.report["run_id"] == "run-1"
    finally:
        client.close()
        server.stop()
        server.join()
        remove_socket_directory(endpoint)


def test_services_come_and_go_and_the_program_goes_on(host: Host):
    one_service(0)
    threads, files = threading.active_count(), open_files()
    for number in range(1, CYCLES):
        one_service(number)
        assert host.still_works(number)
    assert (threading.active_count(), open_files()) == (threads, files)


def test_several_at_once_in_threads_of_the_program(host: Host):
    errors: list[BaseException] = []
    before = umask()

    def serve(number: int) -> None:
        try:
            one_service(number)
        except BaseException as error:
            errors.append(error)

    programs = [threading.Thread(target=serve, args=(number,)) for number in range(100, 106)]
    for each in programs:
        each.start()
    for each in programs:
        each.join(DEADLINE_S)
    assert errors == []
    assert umask() == before
    assert host.still_works(7)
