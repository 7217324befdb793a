"""The sockets of the control plane: a Router in the service, a Dealer in every peer, whatever the endpoint.

    ipc://PATH          one machine, one user (or group): file modes say who
    tcp://HOST:PORT     keys say who

Who uses what: `server.Server` owns the Router, `client.Client` owns Dealers; nobody else sees a socket.

What must never happen:
  - a socket used across a fork: one used in another process says so;
  - a wait that cannot be ended: `wake` ends one from another thread or from a signal handler.
What the sockets below keep besides (zeromq): nothing a peer does raises out of a loop, memory is bounded.

Left to others: where sockets live and who may connect (endpoints), what the bytes mean (messages), who answers what
(coordinator), resending (client).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from rollout_service.control.endpoints import IPC, TCP, SocketAccess, check_endpoint
from rollout_service.control.keys import Keys
from rollout_service.control.wakeup import Woken
from rollout_service.control.zeromq import ZmqDealer, ZmqRouter
from rollout_service.errors import ConfigError, ProtocolError

POLL_SLICE_S: Final = 0.2
"""Longest sleep of a Dealer before it looks at its stop flag again, should a wake-up get lost."""
MESSAGES_PER_RECEIVE: Final = 256
"""Bound of one Router.receive, so that a flood cannot keep the loop from its deadlines."""


class _Endpoint:
    """What Router and Dealer share: use by one process, and one close."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False

    def _may_close(self) -> bool:
        if self._closed or self._pid != os.getpid():
            return False
        self._closed = True
        return True

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ProtocolError(
                f"this socket belongs to process {self._pid}, not to its forked child {os.getpid()}; "
                "make a new one in the process that uses it"
            )
        if self._closed:
            raise ProtocolError("this socket is closed")


class Router(_Endpoint):
    """The service's socket: many peers, addressed by their identity.

    keys: of the service, for tcp. Raises ConfigError for an endpoint that is taken, too long, or would listen beyond
    this machine without keys.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        allow_tcp: bool = False,
        keys: Keys | None = None,
        access: SocketAccess | None = None,
    ) -> None:
        check_endpoint(endpoint, allow_tcp=allow_tcp, authenticated=keys is not None)
        super().__init__()
        self._socket = ZmqRouter(endpoint, keys, access or SocketAccess())
        self.endpoint: str = self._socket.endpoint

    @property
    def counters(self) -> Counter[str]:
        """Connections that never came to say a word: what was refused below the protocol."""
        return self._socket.counters

    def wake(self) -> None:
        """Ends a `receive` that is waiting, or the next one. Safe from other threads and from signal handlers."""
        if not self._closed:
            self._socket.wake()

    def receive(self, timeout_s: float) -> Iterator[tuple[bytes, bytes]]:
        """Waits for at most timeout_s, then gives the (peer, message) pairs that are there; perhaps none.

        Each is taken when it is asked for, so that the first is acted on before anybody looks for a second.
        """
        self._check_process()
        return self._socket.receive(timeout_s, MESSAGES_PER_RECEIVE)

    def send(self, peer: bytes, data: bytes) -> None:
        """Hands a message to a peer; one that is gone, or too slow to read, loses it."""
        self._check_process()
        self._socket.send(peer, data)

    def close(self, flush_s: float = 0.0) -> None:
        """Closes the socket; messages not yet handed to the kernel get up to flush_s seconds. Idempotent."""
        if self._may_close():
            self._socket.close(flush_s)


class Dealer(_Endpoint):
    """A peer's socket. Connecting never fails here: it is tried again, and the caller's deadline decides.

    keys: of this peer and of its service, for tcp. Raises ConfigError for what is no endpoint.
    """

    def __init__(self, endpoint: str, *, keys: Keys | None = None) -> None:
        super().__init__()
        if not endpoint.startswith((IPC, TCP)):
            raise ConfigError(f"cannot connect to {endpoint!r}: no endpoint; use ipc://PATH or tcp://HOST:PORT")
        self._socket = ZmqDealer(endpoint, keys)

    def wake(self) -> None:
        """Ends a `receive` that is waiting, or the next one. Safe from other threads and from signal handlers."""
        if not self._closed:
            self._socket.wake()

    def send(self, data: bytes) -> None:
        """Queues a message. With the queue full (nobody reads) it is dropped: who waits for an answer sends again."""
        self._check_process()
        self._socket.send(data)

    def receive(self, timeout_s: float, interrupted: Callable[[], bool] = lambda: False) -> bytes | None:
        """The next message, or None after timeout_s, on a wake-up, or once `interrupted` says so.

        Sleeps in slices of POLL_SLICE_S: a signal handler that only sets a flag is noticed within one slice, and one
        that calls `wake` at once (the interpreter restarts an interrupted poll after the handler has run, PEP 475).
        """
        self._check_process()
        deadline = time.monotonic() + timeout_s
        while (data := self._socket.take()) is None:
            left = deadline - time.monotonic()
            if left <= 0 or interrupted():
                return None
            if self._socket.wait(min(left, POLL_SLICE_S)) is Woken.BY_CALL:
                return None
        return data

    def refusal(self) -> str:
        """Why the other side does not even listen to this one, if that is known."""
        return self._socket.refusal()

    def close(self, flush_s: float = 0.0) -> None:
        """Closes the socket; messages not yet handed to the kernel get up to flush_s seconds. Idempotent."""
        if self._may_close():
            self._socket.close(flush_s)
