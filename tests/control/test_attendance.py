"""A role's process around its work: services that are lost, found again, started anew; signals, errors, last words."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_service.control.attendance import Attendance
from rollout_service.control.client import Client
from rollout_service.control.coordinator import Coordinator
from rollout_service.control.endpoints import remove_socket
from rollout_service.control.events import PeerLeft
from rollout_service.control.messages import Hello, Role, Welcome
from rollout_service.control.server import Server
from rollout_service.control.transport import Router
from rollout_service.errors import ConfigError, SegmentNotFound
from tests.control.world import make_join, make_spec

BEAT_S = 0.05
SILENCE_S = 0.8
WAIT_S = 10.0


class Services:
    """Services at one endpoint, one after another."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.running: Server | None = None

    def start(self, run_id: str) -> Server:
        coordinator = Coordinator(
            make_spec(1),
            run_id=run_id,
            config_json="{}",
            rollout_segment="rs-token-rollout",
            weights_segment="rs-token-weights",
            total_updates=9,
            step_timeout=60.0,
            heartbeat_interval=BEAT_S,
            silence_timeout=SILENCE_S,
        )
        self.running = Server(Router(self.endpoint), coordinator)
        self.running.start()
        return self.running

    def die(self) -> None:
        """Ends without a word to anybody."""
        if self.running is not None:
            self.running.stop()
            self.running.join()
            self.running = None

    def say_stop(self) -> None:
        assert self.running is not None
        self.running.submit(lambda coordinator, now: coordinator.stop("the test is over", now)).result(WAIT_S)


@pytest.fixture
def services() -> Iterator[Services]:
    directory = Path(tempfile.mkdtemp(prefix="rs-attend-", dir="/tmp"))
    found = Services(f"ipc://{directory}/s")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield found
    for number, handler in handlers.items():
        signal.signal(number, handler)
    found.die()
    remove_socket(found.endpoint)
    shutil.rmtree(directory)


def attendance(
    services: Services, *, by_hand: bool = True, reconnect_s: float = 0.0, wait_s: float = WAIT_S
) -> Attendance:
    hello = Hello(role=Role.ACTOR, pid=os.getpid())
    return Attendance(services.endpoint, hello, by_hand, wait_s, reconnect_s)


def until_stopping(client: Client) -> None:
    client.send(make_join(make_spec(1)))
    while not client.stopping:
        client.receive(WAIT_S)


def goodbye(server: Server) -> PeerLeft:
    while not isinstance(event := server.events.get(timeout=WAIT_S), PeerLeft):
        pass
    return event


def no_seat(_: Welcome) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def test_who_is_told_to_leave_says_goodbye(services: Services, capsys: pytest.CaptureFixture[str]):
    server = services.start("run-1")
    seats: list[str] = []

    @contextlib.contextmanager
    def seat(welcome: Welcome) -> Iterator[None]:
        seats.append(f"taken in {welcome.run_id}")
        yield
        seats.append(f"given up after {goodbye(server).reason!r}")

    def take_part(client: Client, welcome: Welcome) -> None:
        services.say_stop()
        until_stopping(client)

    assert attendance(services).attend(take_part, seat) == 0
    said = capsys.readouterr().err
    assert said in {f"actor: leaving, {reason}\n" for reason in ("the test is over", "the service is stopping")}
    assert seats == ["taken in run-1", f"given up after {said.strip().partition('leaving, ')[2]!r}"]


def test_who_loses_its_service_leaves(services: Services, capsys: pytest.CaptureFixture[str]):
    services.start("run-1")

    def take_part(client: Client, welcome: Welcome) -> None:
        services.die()
        until_stopping(client)
        assert client.lost

    assert attendance(services).attend(take_part, no_seat) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"actor: leaving, the service at {services.endpoint} has not answered for")
    assert said.count("\n") == 1


@pytest.mark.parametrize("at_once", [True, False], ids=["before it is missed", "after it is missed"])
def test_who_may_reconnect_begins_anew_with_the_next_service(
    services: Services, capsys: pytest.CaptureFixture[str], at_once: bool
):
    services.start("run-1")
    runs: list[str] = []

    def take_part(client: Client, welcome: Welcome) -> None:
        runs.append(welcome.run_id)
        if len(runs) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        services.die()
        if at_once:
            services.start("run-2")
        until_stopping(client)
        if not at_once:
            services.start("run-2")

    assert attendance(services, reconnect_s=WAIT_S).attend(take_part, no_seat) == 0
    assert runs == ["run-1", "run-2"]
    said = capsys.readouterr().err.splitlines()
    assert ("another run's service answers" if at_once else "has not answered for") in said[0]
    assert said[1:] == [
        f"actor: waiting up to {WAIT_S:g} s for a service at {services.endpoint}",
        "actor: leaving, stopped by SIGTERM",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_wait_for_a_service_that_never_comes(
    services: Services, capsys: pytest.CaptureFixture[str], number: signal.Signals
):
    timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
    timer.start()
    assert attendance(services, wait_s=60.0).attend(lambda *_: None, no_seat) == 0
    assert (
        f"left while waiting for WELCOME from {services.endpoint}: stopped by {number.name}" in capsys.readouterr().err
    )
    assert signal.getsignal(number) is signal.SIG_DFL, "the second one ends the process at once"


def test_a_child_leaves_ctrl_c_to_its_parent(services: Services):
    services.start("run-1")

    def take_part(client: Client, welcome: Welcome) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert not client.stopping
        client.stop()

    assert attendance(services, by_hand=False).attend(take_part, no_seat) == 0


def test_a_child_may_be_sent_sigterm_twice(services: Services, capsys: pytest.CaptureFixture[str]):
    """As the kernel does when a parent with several threads is killed: the learner has a checkpoint to write."""
    services.start("run-1")

    def take_part(client: Client, welcome: Welcome) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert client.stopping
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)

    assert attendance(services, by_hand=False).attend(take_part, no_seat) == 0
    assert capsys.readouterr().err == "actor: leaving, stopped by SIGTERM\n"


def test_a_service_that_never_comes_is_one_line(services: Services, capsys: pytest.CaptureFixture[str]):
    assert attendance(services, wait_s=0.3).attend(lambda *_: None, no_seat) == 1
    assert capsys.readouterr().err == (
        f"actor: no WELCOME from {services.endpoint} within 0.3 s of HELLO; is the service running?\n"
    )


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "a child"])
@pytest.mark.parametrize(
    ("error", "code", "lines", "traced"),
    [
        (SegmentNotFound("rs-x is not visible"), 1, 1, False),
        (ConfigError("no"), 1, 1, False),
        (ValueError("boom"), 1, 8, True),
    ],
    ids=["memory", "settings", "a fault"],
)
def test_an_error_is_said_here_and_to_the_service(
    services: Services,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    lines: int,
    traced: bool,
    by_hand: bool,
):
    server = services.start("run-1")

    def fail(*_: object) -> None:
        raise error.with_traceback(None)

    assert attendance(services, by_hand=by_hand).attend(fail, no_seat) == code
    said = capsys.readouterr().err
    assert ("Traceback" in said, said.count("\n") <= lines) == (traced, True), said
    left = goodbye(server)
    assert (str(error) in left.reason, "Traceback" in left.traceback) == (True, traced)
