"""ZeroMQ's Router and Dealer, on one machine (ipc) or beyond (tcp, encrypted and authenticated where there are keys).

Who uses it: `transport`; the only home of zmq. With keys (CURVE) a service admits only clients whose public key it was
given, and a client talks only to the service whose public key it has; without keys there is no authentication at all,
which is why endpoints beyond this machine need them (endpoints).

What must never happen:
  - a vanished, slow or hostile peer raises out of a loop: what cannot be delivered is dropped (every message of the
    protocol is resent by whoever waits for its answer), and oversized messages are cut off by zmq itself;
  - a process without a file descriptor left, because strangers took them all: ZeroMQ would end it. Before it comes to
    that every connection is cut; peers of the run come back by themselves, and resend;
  - a process hangs at exit with unsent messages: linger is 0 from each socket's creation, `close` may flush briefly;
  - a context crosses a fork: it is made inside the process that uses it.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import zmq
import zmq.utils.monitor
import zmq.utils.z85

from rollout_service.control.descriptors import make_room, running_short
from rollout_service.control.endpoints import IPC, SocketAccess
from rollout_service.control.keys import Keys
from rollout_service.control.messages import MAX_MESSAGE_BYTES
from rollout_service.control.wakeup import WakeUp, Woken
from rollout_service.errors import ConfigError

HIGH_WATER_MARK: Final = 1000
"""Messages queued per peer to be sent. A peer has one or two in flight; more means that it is gone."""
UNREAD: Final = 64
"""Messages received per peer and not yet read: so many MiB of memory at most. Then the peer has to wait."""
RECONNECT_MS: Final = 50
RECONNECT_MAX_MS: Final = 1000
BACKLOG: Final = 64
"""Pending connections. More that arrive at once try again after RECONNECT_MS; a crowd of strangers waits here."""
HANDSHAKE_MS: Final = 10_000
"""A connection that has not said by then who it is, is closed."""
UNBIND_S: Final = 5.0
"""Until ZeroMQ has closed a listening socket, in a thread of its own; it takes about a millisecond."""
ZAP_DOMAIN: Final = b"rollout-service"
_umask: Final = threading.Lock()
"""Held while the umask is another one: it is the whole process's, and two who change it would not put it back."""
_FAILURES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


# --- one context per process -----------------------------------------------------------------------------------------


class _Contexts:
    """The zmq context of this process, made with its first socket and terminated with its last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._users = 0
        self._inherited: list[object] = []

    def acquire(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if self._context is None:
                self._context = zmq.Context()
            self._users += 1
            return self._context

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._context is not None:
                self._context.term()
                self._context = None

    def forget_after_fork(self) -> None:
        """In a forked child: the parent's context is unusable here; keep it referenced, never touch it."""
        self._inherited.append(self._context)
        self._lock, self._context, self._users = threading.Lock(), None, 0


_contexts = _Contexts()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_contexts.forget_after_fork)


class ZmqRouter:
    """Listens on an endpoint. Raises ConfigError if that is taken. One thread, but for `wake`."""

    def __init__(self, endpoint: str, keys: Keys | None, access: SocketAccess) -> None:
        self.counters: Counter[str] = Counter()
        """Connections with `refused_keys`, and `failed_handshakes`: other or no encryption, or no ZeroMQ at all. Times
        that all connections were cut: `connection_floods`."""
        make_room()
        self._access = access
        self._context = zmq.Context() if keys is not None else _contexts.acquire()
        self._gate = None if keys is None else _Gate(self._context, keys, self.counters)
        self._socket = _socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects keeps its identity and its place
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._events = _monitor(self._context, self._socket, _FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED)
        self._wake = WakeUp()
        if keys is not None:
            keys.require("service")
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        try:
            self._listen(endpoint)
        except ConfigError:
            self.close(0.0)
            raise
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)
        self._poller.register(self._wake.descriptor, zmq.POLLIN)
        if self._gate is not None:
            self._poller.register(self._gate.socket, zmq.POLLIN)

    def wake(self) -> None:
        self._wake.set()

    def receive(self, timeout_s: float, most: int) -> Iterator[tuple[bytes, bytes]]:
        """Waits, and then gives what is there, taking each message from the socket as it is asked for."""
        ready = self._wait(timeout_s)
        if self._wake.descriptor in ready:
            self._wake.clear()
        if self._gate is not None and self._gate.socket in ready:
            self._gate.judge()
        return self._messages(most if self._socket in ready else 0)

    def _messages(self, most: int) -> Iterator[tuple[bytes, bytes]]:
        """A message of the wrong number of frames arrives as empty bytes, which decode to nothing."""
        for _ in range(most):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield frames[0], frames[1] if len(frames) == 2 else b""

    def send(self, peer: bytes, data: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart((peer, data), zmq.NOBLOCK)

    def _wait(self, timeout_s: float) -> set[object]:
        """What can be read; empty after timeout_s. Connections that come and go meanwhile are seen to here."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_ms = max(0, math.ceil((deadline - time.monotonic()) * 1000))
            ready: set[object] = set(dict(self._poller.poll(left_ms)))
            if self._events in ready:
                ready.discard(self._events)
                if zmq.EVENT_ACCEPTED in self._take_events() and running_short():
                    self._cut_all()
            if ready or not left_ms:
                return ready

    def _listen(self, endpoint: str) -> None:
        """Raises ConfigError."""
        with _umask:
            before = os.umask(0o777 & ~self._access.socket_mode)  # the mode of an ipc socket's file
            try:
                self._socket.bind(endpoint)
                if endpoint.startswith(IPC):
                    self._access.give_to_group(Path(endpoint.removeprefix(IPC)))
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"cannot listen on {endpoint}: {error.strerror}; is another service using it?"
                ) from None
            finally:
                os.umask(before)

    def _take_events(self) -> set[int]:
        """What has happened to connections since; failed handshakes are counted."""
        found = list(_drained(self._events))
        # The gate has counted those that failed for their key.
        self.counters["failed_handshakes"] += sum(
            bool(event & _FAILURES) and event != zmq.EVENT_HANDSHAKE_FAILED_AUTH for event in found
        )
        return set(found)

    def _cut_all(self) -> None:
        """Ends every connection: ZeroMQ ends them with the socket that accepted them. Raises ConfigError."""
        self.counters["connection_floods"] += 1
        self._socket.unbind(self.endpoint)
        deadline, closed = time.monotonic() + UNBIND_S, False
        while not closed and time.monotonic() < deadline:  # an ipc socket's file is removed before that
            self._events.poll(int(UNBIND_S * 1000))
            closed = zmq.EVENT_CLOSED in self._take_events()
        self._listen(self.endpoint)

    def close(self, flush_s: float) -> None:
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close(linger=int(flush_s * 1000))
        if self._gate is not None:
            self._gate.socket.close(linger=0)
            self._context.term()
        else:
            _contexts.release()
        self._wake.close()


class ZmqDealer:
    """Connects to an endpoint, now or once there is a service, and again whenever the connection is lost."""

    def __init__(self, endpoint: str, keys: Keys | None) -> None:
        if keys is not None:
            keys.require("client")
        context = _contexts.acquire()
        self._socket = _socket(context, zmq.DEALER)
        self._failures = _monitor(context, self._socket, _FAILURES)
        self._wake = WakeUp()
        self._refusal = ""
        self._has_keys = keys is not None
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes.replace(b"\0", b"\1"))
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if keys is not None:
            self._socket.curve_serverkey = keys.service
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close(0.0)
            raise ConfigError(
                f"cannot connect to {endpoint!r}: {error.strerror}; use ipc://PATH or tcp://HOST:PORT"
            ) from None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake.descriptor, zmq.POLLIN)

    def wake(self) -> None:
        self._wake.set()

    def send(self, data: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send(data, zmq.NOBLOCK)

    def take(self) -> bytes | None:
        """The next message that is here."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait(self, timeout_s: float) -> Woken:
        """Sleeps until the socket is readable, `wake` was called, or timeout_s have passed."""
        ready = dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))
        if self._wake.descriptor in ready:
            self._wake.clear()
        if self._socket in ready:
            return Woken.BY_MESSAGE
        return Woken.BY_CALL if ready else Woken.BY_TIME

    def refusal(self) -> str:
        """Why the service does not let this peer speak; "" as long as nothing is known."""
        for event in _drained(self._failures):
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refusal = "it does not know this client's key; give it this client's public key (its clients)"
            elif self._has_keys:
                self._refusal = "the encrypted handshake failed: is the service's key in this key file still its own?"
            else:
                self._refusal = "it speaks only to clients with a key; use --key-file"
        return self._refusal

    def close(self, flush_s: float) -> None:
        self._socket.disable_monitor()
        self._failures.close(linger=0)
        self._socket.close(linger=int(flush_s * 1000))
        _contexts.release()
        self._wake.close()


class _Gate:
    """Says which client keys may connect: ZeroMQ asks here, by messages (ZAP, rfc.zeromq.org/spec/27)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, counters: Counter[str]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")
        self._admitted = frozenset(zmq.utils.z85.decode(key) for key in keys.clients)
        self._counters = counters

    def judge(self) -> None:
        """Answers all questions that are there."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            asker, empty, version, request, _domain, _address, _identity, mechanism, *credentials = frames
            admitted = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._admitted
            self._counters["refused_keys"] += not admitted
            verdict = (b"200", b"OK") if admitted else (b"400", b"unknown key")
            self.socket.send_multipart([asker, empty, version, request, *verdict, b"", b""])


def require_curve() -> None:
    """Raises ConfigError where ZeroMQ was built without encryption."""
    if not zmq.has("curve"):
        raise ConfigError(
            f"this pyzmq {zmq.__version__} was built without CURVE (libsodium), which keys need; install pyzmq's own "
            "wheel from PyPI, or use an ipc:// endpoint"
        )


def key_pair() -> tuple[bytes, bytes]:
    """A new pair, public and secret, in Z85."""
    return zmq.curve_keypair()


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, UNREAD)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket


def _monitor(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Where ZeroMQ tells of a socket's connections. Without a limit: at one it would wait, and move no byte meanwhile.

    Close it after `disable_monitor` of the socket.
    """
    address = f"inproc://events-of-{uuid.uuid4().hex}"
    socket.monitor(address, events)
    listener = context.socket(zmq.PAIR)
    listener.setsockopt(zmq.LINGER, 0)
    listener.setsockopt(zmq.RCVHWM, 0)
    listener.connect(address)
    return listener


def _drained(monitor: zmq.Socket[bytes]) -> Iterator[int]:
    """The events that are there."""
    while True:
        try:
            yield zmq.utils.monitor.recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
        except zmq.Again:
            return
