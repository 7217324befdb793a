"""The sockets of the control plane: a Router in the service, a Dealer in every peer. The only home of zmq.

Who uses what: `server.Server` owns the Router, `client.Client` owns Dealers; nobody else sees a socket.

What must never happen:
  - a vanished, slow or hostile peer raises out of a loop: the Router drops what it cannot deliver (every message of the
    protocol is resent by whoever waits for its answer), and oversized messages are cut off by zmq itself;
  - a process hangs at exit with unsent messages: linger is 0 from each socket's creation, `close` may flush briefly;
  - a context crosses a fork: it is made inside the process that uses it, and a socket used in another process says so;
  - a wait that cannot be ended: `wake` ends one from another thread or from a signal handler.

Left to others: where sockets live and who may connect (endpoints), what the bytes mean (messages), who answers what
(coordinator), resending (client).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import uuid
from collections.abc import Callable
from enum import Enum
from typing import Final

import zmq

from rollout_service.control.endpoints import check_endpoint
from rollout_service.control.messages import MAX_MESSAGE_BYTES
from rollout_service.errors import ConfigError, ProtocolError

HIGH_WATER_MARK: Final = 1000
"""Messages queued per peer and direction. A peer has one or two in flight; more means that it is gone."""
POLL_SLICE_S: Final = 0.2
"""Longest sleep of a Dealer before it looks at its stop flag again, should a wake-up get lost."""
MESSAGES_PER_RECEIVE: Final = 256
"""Bound of one Router.receive, so that a flood cannot keep the loop from its deadlines."""
RECONNECT_MS: Final = 50
RECONNECT_MAX_MS: Final = 1000
BACKLOG: Final = 512
"""Pending connections: two per actor may arrive at once."""


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


class _WakeUp:
    """A file descriptor that becomes readable on `set`; safe from threads and signal handlers."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    @property
    def descriptor(self) -> int:
        return self._read

    def set(self) -> None:
        with contextlib.suppress(OSError):  # full pipe: already set; closed: nobody waits any more
            os.write(self._write, b"w")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(self._read, 512):
                pass

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


class _Woken(Enum):
    """What ended a wait."""

    BY_MESSAGE = "message"
    BY_CALL = "call"
    BY_TIME = "time"


class _Endpoint:
    """What Router and Dealer share: creation in this process, a poller with a wake-up, one bounded close."""

    def __init__(self, kind: int, identity: bytes | None) -> None:
        self._pid = os.getpid()
        self._socket = _contexts.acquire().socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if identity is not None:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self._wake = _WakeUp()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake.descriptor, zmq.POLLIN)
        self._closed = False

    def wake(self) -> None:
        """Ends a `receive` that is waiting, or the next one. Safe from other threads and from signal handlers."""
        if not self._closed:
            self._wake.set()

    def close(self, flush_s: float = 0.0) -> None:
        """Closes the socket; messages not yet handed to the kernel get up to flush_s seconds. Idempotent."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._socket.close(linger=int(flush_s * 1000))
        _contexts.release()
        self._wake.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ProtocolError(
                f"this socket belongs to process {self._pid}, not to its forked child {os.getpid()}; "
                "make a new one in the process that uses it"
            )
        if self._closed:
            raise ProtocolError("this socket is closed")

    def _wait(self, timeout_s: float) -> _Woken:
        """Sleeps until the socket is readable, `wake` was called, or timeout_s have passed."""
        ready = dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))
        if self._wake.descriptor in ready:
            self._wake.clear()
        if self._socket in ready:
            return _Woken.BY_MESSAGE
        return _Woken.BY_CALL if ready else _Woken.BY_TIME


class Router(_Endpoint):
    """The service's socket: many peers, addressed by their identity.

    Raises ConfigError for an endpoint that is taken, too long, or would listen beyond this machine.
    """

    def __init__(self, endpoint: str, *, allow_tcp: bool = False) -> None:
        check_endpoint(endpoint, allow_tcp=allow_tcp)
        super().__init__(zmq.ROUTER, None)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects keeps its identity and its place
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        before = os.umask(0o177)  # an ipc socket of mode 0600
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}; is another service using it?") from None
        finally:
            os.umask(before)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, timeout_s: float) -> list[tuple[bytes, bytes]]:
        """(peer, message) pairs, as soon as there is one; [] after timeout_s or a wake-up.

        A message of the wrong number of frames arrives as empty bytes, which decode to nothing.
        """
        self._check_process()
        if self._wait(timeout_s) is not _Woken.BY_MESSAGE:
            return []
        messages: list[tuple[bytes, bytes]] = []
        while len(messages) < MESSAGES_PER_RECEIVE:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            messages.append((frames[0], frames[1] if len(frames) == 2 else b""))
        return messages

    def send(self, peer: bytes, data: bytes) -> None:
        """Hands a message to a peer; one that is gone, or too slow to read, loses it."""
        self._check_process()
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart((peer, data), zmq.NOBLOCK)


class Dealer(_Endpoint):
    """A peer's socket. Connecting never fails here: zmq keeps trying, and the caller's deadline decides."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(zmq.DEALER, uuid.uuid4().bytes.replace(b"\0", b"\1"))
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot connect to {endpoint!r}: {error.strerror}; use ipc://... or tcp://...") from None

    def send(self, data: bytes) -> None:
        """Queues a message. With the queue full (nobody reads) it is dropped: who waits for an answer sends again."""
        self._check_process()
        with contextlib.suppress(zmq.Again):
            self._socket.send(data, zmq.NOBLOCK)

    def receive(self, timeout_s: float, interrupted: Callable[[], bool] = lambda: False) -> bytes | None:
        """The next message, or None after timeout_s, on a wake-up, or once `interrupted` says so.

        Sleeps in slices of POLL_SLICE_S: a signal handler that only sets a flag is noticed within one slice, and one
        that calls `wake` at once (the interpreter restarts an interrupted poll after the handler has run, PEP 475).
        """
        self._check_process()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                pass
            left = deadline - time.monotonic()
            if left <= 0 or interrupted():
                return None
            if self._wait(min(left, POLL_SLICE_S)) is _Woken.BY_CALL:
                return None
