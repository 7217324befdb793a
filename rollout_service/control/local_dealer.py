"""A peer's socket on one machine: a Unix stream socket, read and written by the thread that waits for it.

Who uses it: `transport`, for ipc:// endpoints. What is on the wire: frames. Connects now or once there is a service,
and again whenever the connection is lost; its identity stays the same.
What must never happen: a call that blocks, but for `wait` until its time; a wait that `wake` does not end; messages
kept without bound while there is no service.
"""

from __future__ import annotations

import select
import socket
import time
import uuid
from collections import deque
from typing import Final

from rollout_service.control.endpoints import IPC
from rollout_service.control.frames import MAGIC, QUEUED_MESSAGES, READABLE, WRITABLE, Stream, framed
from rollout_service.control.wakeup import WakeUp, Woken
from rollout_service.errors import ConfigError, MessageRejected

RECONNECT_S: Final = 0.05
RECONNECT_MAX_S: Final = 1.0


class LocalDealer:
    """Connects to an ipc endpoint, now or once there is a service, and again whenever the connection is lost."""

    def __init__(self, endpoint: str) -> None:
        self._path = endpoint.removeprefix(IPC)
        self._hello = framed(MAGIC + uuid.uuid4().bytes)
        self._wake = WakeUp()
        self._poll = select.poll()
        self._poll.register(self._wake.descriptor, READABLE)
        self._stream: Stream | None = None
        self._waiting: deque[bytes] = deque()
        """For a connection; the oldest are kept, they are sent again by whoever waits."""
        self._next_try = 0.0
        self._pause = RECONNECT_S
        self._connect()

    def wake(self) -> None:
        self._wake.set()

    def send(self, data: bytes) -> None:
        frame = framed(data)
        stream = self._connected()
        if stream is None:
            if len(self._waiting) < QUEUED_MESSAGES:
                self._waiting.append(frame)
            return
        try:
            stream.send(frame)
        except OSError:
            self._lose(stream)
            self._waiting.append(frame)

    def take(self) -> bytes | None:
        """The next message that is here."""
        stream = self._connected()
        if stream is None:
            return None
        try:
            if stream.output:
                stream.flush()
            if (data := stream.input.take()) is not None:
                return data
            if not stream.read():
                data = stream.input.take()
                self._lose(stream)
                return data
            return stream.input.take()
        except (MessageRejected, OSError):
            self._lose(stream)
            return None

    def wait(self, timeout_s: float) -> Woken:
        """Sleeps until something can be read, `wake` was called, or timeout_s have passed, or for less."""
        stream = self._connected()
        if stream is None:
            timeout_s = min(timeout_s, max(0.0, self._next_try - time.monotonic()))
        elif stream.output:
            self._poll.modify(stream.socket.fileno(), READABLE | WRITABLE)
        found = dict(self._poll.poll(-(-timeout_s * 1000 // 1)))
        if stream is not None and stream.output:
            self._poll.modify(stream.socket.fileno(), READABLE)
            try:
                stream.flush()
            except OSError:
                self._lose(stream)
        if self._wake.descriptor in found:
            self._wake.clear()
            if len(found) == 1:
                return Woken.BY_CALL
        return Woken.BY_MESSAGE if found else Woken.BY_TIME

    def refusal(self) -> str:
        """Who may connect is up to the file's mode, which `check_reachable` explains."""
        return ""

    def close(self, flush_s: float) -> None:
        deadline = time.monotonic() + flush_s
        while self._stream is not None and self._stream.output and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
        if self._stream is not None:
            self._stream.socket.close()
        self._wake.close()

    def _connected(self) -> Stream | None:
        if self._stream is None and time.monotonic() >= self._next_try:
            self._connect()
        return self._stream

    def _connect(self) -> None:
        own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own.setblocking(False)
        try:
            own.connect(self._path)
            own.send(self._hello)
        except OSError as error:
            own.close()
            if error.errno is None:
                raise ConfigError(f"cannot connect to {IPC}{self._path}: {error}; use a shorter path") from None
            self._next_try = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, RECONNECT_MAX_S)
            return
        stream = self._stream = Stream(own)
        self._poll.register(own.fileno(), READABLE)
        self._pause = RECONNECT_S
        waiting, self._waiting = self._waiting, deque()
        try:
            for frame in waiting:
                stream.send(frame)
        except OSError:
            self._lose(stream)

    def _lose(self, stream: Stream) -> None:
        """The connection is gone; what has not begun to leave goes with the next one."""
        self._poll.unregister(stream.socket.fileno())
        stream.socket.close()
        self._waiting.extend(stream.whole_messages())
        self._stream = None
        self._next_try = time.monotonic() + self._pause
