"""Server and Client over real sockets: handshake, a whole run, lost messages, late actors, ends."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGINT, SIGTERM, Signals
from typing import TypeVar

import pytest

from rollout_service.control.client import Client
from rollout_service.control.coordinator import Coordinator, Effect
from rollout_service.control.endpoints import remove_socket_directory, socket_endpoint
from rollout_service.control.events import (
    ActorStuck,
    Event,
    PeerLeft,
    RolloutCommitted,
    RunFinished,
    ServerFailed,
    UpdateFinished,
)
from rollout_service.control.messages import (
    Batch,
    Bye,
    Commit,
    Grant,
    Heartbeat,
    Hello,
    Publish,
    Ready,
    Refused,
    Role,
    Status,
    StatusReport,
    Stop,
    decode,
    encode,
)
from rollout_service.control.server import Server
from rollout_service.control.transport import Dealer, Router
from rollout_service.errors import HandshakeRefused, ProtocolError, WaitTimedOut
from rollout_service.runspec import PROTOCOL_VERSION, RunSpec
from tests.control.world import ENVS, STEPS, make_coordinator, make_join, make_spec
from tests.fixtures.machine import eventually

DEADLINE_S = 20.0
E = TypeVar("E")


class LossyRouter(Router):
    """Loses every 5th message in each direction."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.lost = 0
        self._sent = self._received = 0

    def receive(self, timeout_s: float) -> Iterator[tuple[bytes, bytes]]:
        for message in super().receive(timeout_s):
            self._received += 1
            if self._received % 5:
                yield message
            else:
                self.lost += 1

    def send(self, peer: bytes, data: bytes) -> None:
        self._sent += 1
        if self._sent % 5:
            super().send(peer, data)
        else:
            self.lost += 1


class Service:
    """A server with its run, and roles as threads."""

    def __init__(self, endpoint: str, spec: RunSpec, coordinator: Coordinator, router: Router) -> None:
        self.endpoint, self.spec, self.coordinator = endpoint, spec, coordinator
        self.server = Server(router, coordinator)
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def client(self, role: Role = Role.OBSERVER, actor_id: int | None = None, resend_every_s: float = 1.0) -> Client:
        hello = Hello(role=role, pid=os.getpid(), requested_actor=actor_id)
        return Client(self.endpoint, hello, connect_deadline_s=DEADLINE_S, resend_every_s=resend_every_s)

    def thread(self, role: Callable[[], None]) -> None:
        def run() -> None:
            try:
                role()
            except BaseException as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def play_actor(self, actor_id: int, resend_every_s: float = 1.0, seen: list[Grant] | None = None) -> None:
        client = self.client(Role.ACTOR, actor_id, resend_every_s)
        client.connect()
        client.send(make_join(self.spec))
        while not client.stopping:
            match client.receive(DEADLINE_S):
                case Grant() as grant:
                    if seen is not None:
                        seen.append(grant)
                    client.pulse.progress += STEPS
                    client.send(Commit(slot=grant.slot, epoch=grant.epoch, valid_steps=STEPS, version=grant.version))
        client.bye("finished")
        client.close()

    def play_learner(self, resend_every_s: float = 1.0) -> None:
        client = self.client(Role.LEARNER, resend_every_s=resend_every_s)
        version = client.connect().version + 1
        client.send(Ready(version=version))
        while not client.stopping:
            match client.receive(DEADLINE_S):
                case Batch() as batch:
                    version += 1
                    client.send(Publish(update=batch.update, version=version))
        client.bye("finished")
        client.close()

    def events_until(self, kind: type[Event], count: int = 1) -> list[Event]:
        """All events up to the count-th of this kind."""
        found: list[Event] = []
        while sum(isinstance(event, kind) for event in found) < count:
            found.append(self.server.events.get(timeout=DEADLINE_S))
        return found

    def wait_for(self, kind: type[E]) -> E:
        """The next event of this kind; others on the way are dropped."""
        while True:
            event: Event = self.server.events.get(timeout=DEADLINE_S)
            if isinstance(event, kind):
                return event

    def join_roles(self) -> None:
        for thread in self.threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in self.threads)
        assert self.errors == []


@contextmanager
def serving(
    num_actors: int = 2, total_updates: int = 100, router: type[Router] = Router, heartbeat_interval: float = 1.0
) -> Iterator[Service]:
    endpoint = socket_endpoint(f"service-{os.getpid()}")
    spec = make_spec(num_actors)
    coordinator = make_coordinator(spec, total_updates, heartbeat_interval=heartbeat_interval)
    service = Service(endpoint, spec, coordinator, router(endpoint))
    service.server.start()
    try:
        yield service
    finally:
        service.server.submit(lambda coordinator, now: coordinator.stop("test over", now))
        for thread in service.threads:
            thread.join(DEADLINE_S)
        service.server.stop()
        service.server.join(DEADLINE_S)
        remove_socket_directory(endpoint)


# --- a run ---


def test_a_whole_run_over_sockets() -> None:
    with serving(3, total_updates=20) as service:
        for actor_id in range(3):
            service.thread(lambda actor_id=actor_id: service.play_actor(actor_id))
        service.thread(service.play_learner)
        service.join_roles()
        report = service.server.report()
        assert (report["updates"], report["env_steps"], report["stop_reason"]) == (
            20,
            20 * 3 * ENVS * STEPS,
            "finished",
        )
        assert report["counters"] == {}
        events = service.events_until(PeerLeft, count=4)
        assert [event.update for event in events if isinstance(event, UpdateFinished)] == list(range(1, 21))
        assert sum(isinstance(event, RolloutCommitted) for event in events) == 60
        assert [event.reason for event in events if isinstance(event, RunFinished)] == ["finished"]
        assert [event.reason for event in events if isinstance(event, PeerLeft)] == ["finished"] * 4


def test_every_5th_message_lost_in_each_direction_costs_time_and_nothing_else() -> None:
    with serving(3, total_updates=40, router=LossyRouter) as service:
        for actor_id in range(3):
            service.thread(lambda actor_id=actor_id: service.play_actor(actor_id, resend_every_s=0.02))
        service.thread(lambda: service.play_learner(resend_every_s=0.02))
        service.join_roles()
        report = service.server.report()
        assert (report["updates"], report["env_steps"]) == (40, 40 * 3 * ENVS * STEPS)
        assert service.server._router.lost > 100  # type: ignore[attr-defined]
        assert {name: count for name, count in report["counters"].items() if "dropped" in name} == {}
        committed = [event for event in service.events_until(RunFinished) if isinstance(event, RolloutCommitted)]
        assert len(committed) == 120


def test_actors_that_come_after_the_weights_are_granted_at_once() -> None:
    """No sleeps anywhere: an actor asks once, and is answered with the version that is there."""
    with serving(12) as service:
        learner = service.client(Role.LEARNER)
        learner.connect()
        learner.send(Ready(version=7))
        answers: queue.SimpleQueue[int] = queue.SimpleQueue()

        def late(actor_id: int) -> None:
            client = service.client(Role.ACTOR, actor_id, resend_every_s=2 * DEADLINE_S)
            client.connect()
            grant = client.exchange(make_join(service.spec), Grant, deadline_s=DEADLINE_S)
            answers.put(-1 if grant is None else grant.version)
            client.close()

        for actor_id in range(12):
            service.thread(lambda actor_id=actor_id: late(actor_id))
        service.join_roles()
        assert [answers.get_nowait() for _ in range(12)] == [7] * 12
        learner.close()


# --- handshake ---


def test_a_refusal_reaches_the_caller_with_both_values() -> None:
    with serving() as service:
        client = Client(
            service.endpoint,
            Hello(role=Role.ACTOR, pid=1, state_strategy="zero"),
            connect_deadline_s=DEADLINE_S,
        )
        with pytest.raises(HandshakeRefused, match="state_strategy: the run has stored, this peer has zero"):
            client.connect()
        client.close()


def test_no_service_is_a_timeout_that_says_what_was_waited_for(tmp_path: object) -> None:
    client = Client("ipc:///tmp/rs-nobody", Hello(role=Role.ACTOR, pid=1), connect_deadline_s=0.2)
    with pytest.raises(WaitTimedOut, match=r"no WELCOME from ipc:///tmp/rs-nobody within 0\.2 s of HELLO"):
        client.connect()
    client.close()


@contextmanager
def answering(data: bytes) -> Iterator[str]:
    """An endpoint at which every message gets `data` for an answer."""
    endpoint = socket_endpoint(f"answers-{os.getpid()}")
    router = Router(endpoint)
    leaving = threading.Event()

    def answer() -> None:
        while not leaving.is_set():
            for peer, _ in router.receive(DEADLINE_S):
                router.send(peer, data)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        leaving.set()
        router.wake()
        thread.join(DEADLINE_S)
        router.close()
        remove_socket_directory(endpoint)


def test_a_refusal_in_another_protocol_version_is_a_refusal_at_once_that_names_both_versions() -> None:
    of_this_release = encode(Refused(reason="whatever the other release says"))
    of_another = of_this_release.replace(b"\xa1v%c" % PROTOCOL_VERSION, b"\xa1v\x01", 1)
    assert of_another != of_this_release
    with answering(of_another) as endpoint:
        client = Client(endpoint, Hello(role=Role.ACTOR, pid=1), connect_deadline_s=DEADLINE_S)
        both = f"protocol version 1, this side speaks {PROTOCOL_VERSION}; install the same release"
        with pytest.raises(HandshakeRefused, match=both):
            client.connect()
        client.close()


def test_a_timeout_says_why_what_came_instead_was_no_answer() -> None:
    with answering(b"garbage" * 100) as endpoint:
        client = Client(endpoint, Hello(role=Role.ACTOR, pid=1), connect_deadline_s=1.0)
        with pytest.raises(WaitTimedOut, match="of HELLO; what came instead could not be read: not msgpack"):
            client.connect()
        assert client.rejected_messages >= 1
        client.close()


def test_a_peer_may_come_before_the_service() -> None:
    endpoint = socket_endpoint(f"early-{os.getpid()}")
    client = Client(endpoint, Hello(role=Role.OBSERVER, pid=1), connect_deadline_s=DEADLINE_S)
    welcomed: list[str] = []
    early = threading.Thread(target=lambda: welcomed.append(client.connect().run_id))
    early.start()
    server = Server(Router(endpoint), make_coordinator(make_spec()))
    server.start()
    early.join(DEADLINE_S)
    client.close()
    server.stop()
    server.join()
    remove_socket_directory(endpoint)
    assert welcomed == ["run-1"]


def test_a_status_is_asked_and_answered() -> None:
    with serving() as service:
        client = service.client()
        client.connect()
        answer = client.exchange(Status(), StatusReport, deadline_s=DEADLINE_S)
        client.close()
        assert answer is not None
        assert answer.report["state"] == "waiting for the learner"


# --- the loop lives ---


def test_bad_messages_are_counted_their_sender_told_and_the_loop_lives() -> None:
    with serving() as service:
        stranger = Dealer(service.endpoint)
        for data in (b"", b"\xc1", b"garbage" * 100, encode(Stop(reason="you stop"))):
            stranger.send(data)
            answer = stranger.receive(DEADLINE_S)
            assert answer is not None
            assert isinstance(decode(answer), Refused)
        stranger.close()
        assert service.server.report()["counters"] == {"rejected_messages": 4}


def test_an_error_in_the_loop_is_told_and_peers_are_stopped() -> None:
    with serving() as service:
        actor = service.client(Role.ACTOR)
        actor.connect()

        def broken(coordinator: Coordinator, now: float) -> list[Effect]:
            raise ZeroDivisionError("in the loop")

        with pytest.raises(ZeroDivisionError):
            service.server.submit(broken).result(DEADLINE_S)
        failed = service.wait_for(ServerFailed)
        assert failed.error == "ZeroDivisionError: in the loop"
        assert "def broken" not in failed.error
        assert "broken" in failed.traceback
        stop = actor.receive(DEADLINE_S)
        assert stop == Stop(reason="the service failed: ZeroDivisionError: in the loop")
        assert actor.stopping
        service.server.join(DEADLINE_S)
        with pytest.raises(ProtocolError, match="has ended"):
            service.server.submit(broken).result(DEADLINE_S)
        actor.close()


# --- ends ---


def test_stop_ends_every_wait_of_every_peer() -> None:
    with serving() as service:
        actor = service.client(Role.ACTOR, 0)
        actor.connect()
        service.server.submit(lambda coordinator, now: coordinator.stop("Ctrl-C", now))
        assert actor.exchange(make_join(service.spec), Grant) is None
        assert actor.stop_reason == "Ctrl-C"
        actor.close()


def test_heartbeats_tell_of_a_stop_whose_message_was_lost() -> None:
    with serving(heartbeat_interval=0.05) as service:
        observer = service.client()
        observer.connect()
        service.server.submit(lambda coordinator, now: coordinator.stop("Ctrl-C", now))
        assert observer.receive(DEADLINE_S) is None
        assert observer.stop_reason == "the service is stopping"
        observer.close()


def test_a_peer_leaves_when_the_service_has_gone() -> None:
    endpoint = socket_endpoint(f"gone-{os.getpid()}")
    server = Server(Router(endpoint), make_coordinator(make_spec(), heartbeat_interval=0.05))
    server.start()
    client = Client(endpoint, Hello(role=Role.OBSERVER, pid=1), connect_deadline_s=DEADLINE_S, service_timeout_s=0.3)
    client.connect()
    server.stop()
    server.join()
    assert client.receive(DEADLINE_S) is None
    assert "has not answered for" in str(client.stop_reason)
    client.close()
    remove_socket_directory(endpoint)


HOLDS_THE_INTERPRETER = """
import ctypes, os, sys, threading
from rollout_service.control.client import Client
from rollout_service.control.messages import Hello, Role
client = Client({endpoint!r}, Hello(role=Role.ACTOR, pid=os.getpid()), connect_deadline_s=20.0, service_timeout_s=0.6)
client.pulse.phase = "before"
client.connect()
sys.stdin.readline()
ctypes.PyDLL(None).usleep(1_200_000)
client.pulse.phase = "after"
client.wait_until_stopping()
print(client.stop_reason)
client.close()
"""


def test_a_peer_whose_interpreter_was_held_does_not_take_its_own_absence_for_the_services() -> None:
    with serving(1, heartbeat_interval=0.05) as service:
        code = HOLDS_THE_INTERPRETER.format(endpoint=service.endpoint)
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        for phase in ("before", "after"):
            eventually(lambda phase=phase: service.server.report()["actors"][0]["phase"] == phase, DEADLINE_S, phase)
            process.stdin.write("go on\n")
            process.stdin.flush()
        service.server.submit(lambda coordinator, now: coordinator.stop("Ctrl-C", now))
        assert process.communicate(timeout=DEADLINE_S)[0] == "the service is stopping\n"


def test_a_goodbye_leaves_before_the_socket_closes() -> None:
    with serving() as service:
        for number in range(10):
            actor = service.client(Role.ACTOR, 0)
            actor.connect()
            actor.bye("EnvFault: boom", "t" * 200_000)
            actor.close()
            left = service.wait_for(PeerLeft)
            assert (left.incarnation, left.reason, len(left.traceback)) == (number, "EnvFault: boom", 64 * 1024)


def test_an_actor_that_hangs_in_a_step_is_told_from_its_heartbeats() -> None:
    with serving(heartbeat_interval=0.02) as service:
        service.coordinator.step_timeout = 0.2
        actor = service.client(Role.ACTOR, 1)
        actor.pulse.progress, actor.pulse.phase = 3, "env.step"
        actor.connect()
        stuck = service.wait_for(ActorStuck)
        assert (stuck.actor_id, stuck.incarnation, stuck.phase) == (1, 0, "env.step")
        assert service.server.report()["actors"][1]["phase"] == "env.step"
        actor.close()


def test_a_grant_already_delivered_is_not_delivered_again() -> None:
    with serving(1) as service:
        learner = service.client(Role.LEARNER)
        learner.connect()
        learner.send(Ready(version=1))
        actor = service.client(Role.ACTOR)
        actor.connect()
        join = make_join(service.spec)
        grant = actor.exchange(join, Grant, deadline_s=DEADLINE_S)
        assert grant is not None
        actor.send(join)
        with pytest.raises(WaitTimedOut):
            actor.exchange(join, Grant, resend_every_s=0.02, deadline_s=0.2)
        learner.close()
        actor.close()


WAITING_ACTOR = """
import os, signal, sys
from rollout_service.control.client import Client
from rollout_service.control.messages import Hello, Role
client = Client({endpoint!r}, Hello(role=Role.ACTOR, pid=os.getpid()), connect_deadline_s=600.0)
if {handler}:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, {handler})
print("waiting", flush=True)
try:
    client.connect()
finally:
    client.close()
"""
CALLS_STOP = "lambda *_: client.stop()"
SETS_A_FLAG = "lambda *_: setattr(client, 'stop_reason', 'flag')"


@pytest.mark.parametrize("number", [SIGINT, SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("handler", [CALLS_STOP, SETS_A_FLAG], ids=["calls stop", "sets a flag"])
def test_a_signal_ends_a_wait_for_a_service_that_never_comes(number: Signals, handler: str) -> None:
    code = WAITING_ACTOR.format(endpoint="ipc:///tmp/rs-nobody", handler=handler)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert "left while waiting for WELCOME" in errors.splitlines()[-1]


def test_a_killed_service_starts_again_under_the_same_token() -> None:
    code = """
import sys
from rollout_service.control.endpoints import socket_endpoint
from rollout_service.control.transport import Router
router = Router(socket_endpoint("killed-and-started"))
print(router.endpoint, flush=True)
sys.stdin.read()
"""
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        process.kill()
        process.communicate(timeout=DEADLINE_S)
        assert endpoint.startswith("ipc://")
    remove_socket_directory(endpoint)


def test_heartbeats_of_nobody_in_particular_are_answered() -> None:
    with serving() as service:
        dealer = Dealer(service.endpoint)
        dealer.send(encode(Heartbeat(role=Role.ACTOR, pid=1, actor_id=99)))
        assert dealer.receive(DEADLINE_S) is not None
        dealer.send(encode(Bye(reason="stranger")))
        dealer.close(flush_s=1.0)
        assert service.server.alive
