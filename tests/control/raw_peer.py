"""A peer that speaks ZeroMQ's protocol by hand (ZMTP 3.0, rfc.zeromq.org/spec/23) and keeps to none of its manners.

It sends as much as the kernel takes, announces what it does not send, and reads only when it is told to.
"""

from __future__ import annotations

import socket
import time
from types import TracebackType
from typing import Final, Self

from rollout_service.control.endpoints import IPC

GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY: Final = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
LONG_FRAME: Final = b"\x02"
COMMAND: Final = b"\x04"
DEADLINE_S: Final = 10.0
FULL_S: Final = 0.2
"""A connection that takes no byte for so long is full: whoever reads at the other end does so within microseconds."""


class RawPeer:
    """Connected to an ipc endpoint; a member of the protocol after `shake_hands`. A context manager."""

    def __init__(self, endpoint: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(DEADLINE_S)
        self._socket.connect(endpoint.removeprefix(IPC))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def greet(self) -> None:
        """The other side's greeting back: it has accepted."""
        self._socket.sendall(GREETING)
        self._read(len(GREETING))

    def shake_hands(self) -> Self:
        self.greet()
        self._socket.sendall(COMMAND + bytes([len(READY)]) + READY)
        self._read(self._read(2)[1])
        return self

    def send(self, data: bytes) -> None:
        self._socket.sendall(LONG_FRAME + len(data).to_bytes(8, "big") + data)

    def announce(self, length: int) -> None:
        """The head of a message of so many bytes, and nothing of it."""
        self._socket.sendall(LONG_FRAME + length.to_bytes(8, "big"))

    def send_until_full(self, data: bytes, most: int) -> int:
        """How many such messages go out before nothing moves any more, `most` at most."""
        self._socket.settimeout(FULL_S)
        for number in range(most):
            try:
                self.send(data)
            except TimeoutError:
                return number
        return most

    def hung_up_on(self) -> bool:
        """Whether the other side ends the connection within DEADLINE_S, whatever it says before."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            try:
                if not self._socket.recv(1 << 16):
                    return True
            except ConnectionError:
                return True
            except TimeoutError:
                break
        return False

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            if not more:
                raise ConnectionError("the other side has hung up")
            data += more
        return data
