"""Messages on a byte stream: four bytes of length, most significant first, then so many bytes.

    connection   peer -> service   MAGIC + identity, 16 random bytes      one frame, first
                 both ways         one message per frame

Used by the sockets of one machine (local_router, local_dealer). Why not ZeroMQ there: it hands every message to an I/O
thread and back, in both processes, and on cores that have been idle each of these wake-ups costs as much as all else
together. Here a message wakes one thread per process, the one that acts on it.
What must never happen: a length that is believed before it was held against the limit, so that four bytes of a stranger
reserve memory; a message taken for one that is not all there; a read or a write that blocks.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections import deque
from typing import Final

from rollout_service.control.messages import MAX_MESSAGE_BYTES
from rollout_service.errors import MessageRejected

MAGIC: Final = b"rollout-service/1 "
"""What a connection begins with: anything else that connects is no peer."""
IDENTITY_BYTES: Final = 16
QUEUED_MESSAGES: Final = 1000
"""Per connection, once the kernel takes no more. A peer has one or two in flight; more means that it is gone."""
READ_BYTES: Final = 1 << 16
READABLE: Final = select.POLLIN
WRITABLE: Final = select.POLLOUT

_LENGTH: Final = struct.Struct("!I")
HEAD_BYTES: Final = _LENGTH.size


def framed(data: bytes) -> bytes:
    """One message as it goes on the stream."""
    return _LENGTH.pack(len(data)) + data


class Frames:
    """What has come of one stream and was not taken yet."""

    __slots__ = ("_bytes", "_start")

    def __init__(self) -> None:
        self._bytes = b""
        self._start = 0

    def __len__(self) -> int:
        """Bytes kept."""
        return len(self._bytes) - self._start

    def add(self, more: bytes) -> None:
        left = self._bytes[self._start :] if self._start < len(self._bytes) else b""
        self._bytes, self._start = left + more if left else more, 0

    def take(self) -> bytes | None:
        """The next whole message, or None. Raises MessageRejected for one that is too long: the stream is useless."""
        have = len(self._bytes) - self._start
        if have < HEAD_BYTES:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes, self._start)
        if length > MAX_MESSAGE_BYTES:
            raise MessageRejected(f"a message of {length} bytes, the limit is {MAX_MESSAGE_BYTES}")
        if have < HEAD_BYTES + length:
            return None
        begin = self._start + HEAD_BYTES
        self._start = begin + length
        return self._bytes[begin : self._start]


class Stream:
    """One connected socket, its unread input and its unsent output."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self.socket = own
        self.input = Frames()
        self.output: deque[bytes] = deque()
        self._sent = 0
        """Bytes of the first message in `output` that are out."""

    def send(self, frame: bytes) -> bool:
        """Sends or queues; False if there is no room. Raises OSError once the connection is gone."""
        if self.output:
            if len(self.output) >= QUEUED_MESSAGES:
                return False
            self.output.append(frame)
            return True
        try:
            sent = self.socket.send(frame)
        except BlockingIOError:
            sent = 0
        if sent < len(frame):
            self.output.append(frame)
            self._sent = sent
        return True

    def flush(self) -> None:
        """As much of the output as the kernel takes. Raises OSError once the connection is gone."""
        with contextlib.suppress(BlockingIOError):
            while self.output:
                self._sent += self.socket.send(memoryview(self.output[0])[self._sent :])
                if self._sent == len(self.output[0]):
                    self.output.popleft()
                    self._sent = 0

    def read(self) -> bool:
        """Takes in what has come. False at the end of the stream, or if it broke."""
        try:
            more = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if more:
            self.input.add(more)
        return bool(more)

    def whole_messages(self) -> deque[bytes]:
        """The unsent messages that have not begun to leave."""
        if self._sent:
            self.output.popleft()
        return self.output
