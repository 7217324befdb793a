"""The service's socket on one machine: a Unix stream socket, read and written by the one thread that waits for it.

Who uses it: `transport`, for ipc:// endpoints. What is on the wire: frames.

What must never happen:
  - a vanished, slow or hostile peer raises out of the loop, or makes it wait: nothing blocks, what cannot be delivered
    is dropped (whoever waits for an answer asks again), what breaks the rules of the wire is cut off and counted;
  - memory or descriptors without bound: connections, bytes kept per connection and bytes of all are limited, and of
    those connections that nobody has answered yet the oldest make room for new ones;
  - a socket file removed that another service has put in this one's place.

Left to others: what the bytes mean (messages), who may open the socket (endpoints).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import time
from collections import Counter
from pathlib import Path
from typing import Final

from rollout_service.control.endpoints import IPC, SocketAccess
from rollout_service.control.frames import IDENTITY_BYTES, MAGIC, READABLE, WRITABLE, Stream, framed
from rollout_service.control.wakeup import WakeUp
from rollout_service.errors import ConfigError, MessageRejected

MAX_CONNECTIONS: Final = 768
"""Two per actor; below the usual limit of 1024 descriptors per process."""
MAX_UNREAD_BYTES: Final = 64 << 20
"""Of all connections together: parts of messages that have not come whole."""
BACKLOG: Final = 512


class _Connection(Stream):
    """One peer of a router."""

    def __init__(self, own: socket.socket) -> None:
        super().__init__(own)
        self.peer: bytes | None = None
        """Its identity, once it has said it."""
        self.answered = False
        """It was sent something that is no refusal."""
        self.watched = READABLE


class LocalRouter:
    """Listens on an ipc endpoint. Raises ConfigError if that is taken. One thread, but for `wake`."""

    def __init__(self, endpoint: str, access: SocketAccess) -> None:
        self.endpoint = endpoint
        self.counters: Counter[str] = Counter()
        """Connections that were `cut_off` for breaking the rules, or `turned_away` because there was no room."""
        self._path = Path(endpoint.removeprefix(IPC))
        self._listener = _listen(self._path, endpoint, access)
        self._file = self._path.lstat()
        self._spare = os.open(os.devnull, os.O_RDONLY)
        """Given up for a moment to refuse a connection when descriptors have run out."""
        self._wake = WakeUp()
        self._connections: dict[int, _Connection] = {}
        self._by_peer: dict[bytes, _Connection] = {}
        self._unfinished: dict[int, _Connection] = {}
        """Those whose input may hold more messages than were taken so far."""
        self._unread = 0
        self._poll = _Poll()
        self._poll.register(self._listener.fileno(), READABLE)
        self._poll.register(self._wake.descriptor, READABLE)

    def wake(self) -> None:
        self._wake.set()

    def receive(self, timeout_s: float, most: int) -> list[tuple[bytes, bytes]]:
        """(peer, message) pairs, at most so many, as soon as there is one; [] after timeout_s or a wake-up."""
        deadline = time.monotonic() + timeout_s
        messages: list[tuple[bytes, bytes]] = []
        while True:
            woken = self._turn(0.0 if self._unfinished else timeout_s, messages, most)
            if messages or woken or (timeout_s := deadline - time.monotonic()) <= 0:
                return messages

    def _turn(self, timeout_s: float, messages: list[tuple[bytes, bytes]], most: int) -> bool:
        """Whatever is ready, once. True after a wake-up."""
        woken = False
        for descriptor, events in self._poll.poll(timeout_s):
            connection = self._connections.get(descriptor)
            if connection is not None:
                if events & WRITABLE:
                    self._flush(connection)
                if events & ~WRITABLE and descriptor not in self._unfinished:
                    self._read(connection, messages, most)
            elif descriptor == self._wake.descriptor:
                self._wake.clear()
                woken = True
            elif descriptor == self._listener.fileno():
                self._accept()
        for connection in [*self._unfinished.values()] if self._unfinished else ():
            self._take(connection, messages, most)
        return woken

    def send(self, peer: bytes, data: bytes, *, refusal: bool = False) -> None:
        connection = self._by_peer.get(peer)
        if connection is None:
            return
        connection.answered = connection.answered or not refusal
        try:
            connection.send(framed(data))
        except OSError:
            self._drop(connection)
            return
        if connection.output:
            self._watch(connection)

    def close(self, flush_s: float) -> None:
        deadline = time.monotonic() + flush_s
        while (waiting := [each for each in self._connections.values() if each.output]) and flush_s > 0:
            if (left := deadline - time.monotonic()) <= 0:
                break
            self._poll.poll(left)
            for connection in waiting:
                self._flush(connection)
        for connection in [*self._connections.values()]:
            self._drop(connection)
        with contextlib.suppress(OSError):
            found = self._path.lstat()
            if (found.st_dev, found.st_ino) == (self._file.st_dev, self._file.st_ino):
                self._path.unlink()
        self._listener.close()
        self._poll.close()
        self._wake.close()
        os.close(self._spare)

    # --- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            own, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._refuse_one()
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            strangers = (each for each in self._connections.values() if not each.answered)
            if (oldest := next(strangers, None)) is None:
                self.counters["turned_away"] += 1
                own.close()
                return
            self.counters["turned_away"] += 1
            self._drop(oldest)
        connection = _Connection(own)
        self._connections[own.fileno()] = connection
        self._poll.register(own.fileno(), READABLE)

    def _refuse_one(self) -> None:
        """Without a free descriptor a connection cannot even be refused, and would wake this loop for ever."""
        self.counters["turned_away"] += 1
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def _read(self, connection: _Connection, messages: list[tuple[bytes, bytes]], most: int) -> None:
        before = len(connection.input)
        lives = connection.read()
        self._unread += len(connection.input) - before
        self._take(connection, messages, most)
        if self._unread > MAX_UNREAD_BYTES:
            self._cut_off(connection)
        elif not lives:
            self._drop(connection)

    def _take(self, connection: _Connection, messages: list[tuple[bytes, bytes]], most: int) -> None:
        """Moves whole messages from a connection's input."""
        before = len(connection.input)
        self._unfinished.pop(connection.socket.fileno(), None)
        try:
            while len(messages) < most:
                data = connection.input.take()
                if data is None:
                    break
                if connection.peer is None:
                    self._introduce(connection, data)
                else:
                    messages.append((connection.peer, data))
            else:
                self._unfinished[connection.socket.fileno()] = connection
        except MessageRejected:
            self._cut_off(connection)
            return
        self._unread -= before - len(connection.input)

    def _introduce(self, connection: _Connection, data: bytes) -> None:
        """The first frame. A peer that comes back takes its identity from the connection it had."""
        peer = data.removeprefix(MAGIC)
        if len(peer) != IDENTITY_BYTES or len(data) != len(MAGIC) + IDENTITY_BYTES:
            raise MessageRejected("not the beginning of a peer's connection")
        if (before := self._by_peer.pop(peer, None)) is not None:
            connection.answered = before.answered
            self._drop(before)
        connection.peer, self._by_peer[peer] = peer, connection

    def _flush(self, connection: _Connection) -> None:
        try:
            connection.flush()
        except OSError:
            self._drop(connection)
        else:
            self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        wanted = READABLE | WRITABLE if connection.output else READABLE
        if wanted != connection.watched:
            connection.watched = wanted
            self._poll.modify(connection.socket.fileno(), wanted)

    def _cut_off(self, connection: _Connection) -> None:
        self.counters["cut_off"] += 1
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        descriptor = connection.socket.fileno()
        if self._connections.pop(descriptor, None) is None:
            return
        self._unread -= len(connection.input)
        self._unfinished.pop(descriptor, None)
        if connection.peer is not None and self._by_peer.get(connection.peer) is connection:
            del self._by_peer[connection.peer]
        self._poll.unregister(descriptor)
        connection.socket.close()


class _Poll:
    """epoll where there is one; otherwise poll, which has the same bits but counts time in milliseconds."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        poll = self._epoll or select.poll()
        self.register, self.modify, self.unregister = poll.register, poll.modify, poll.unregister
        self._wait = poll.poll

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        # Rounded up to a millisecond, as the kernel counts: never awake before the time, only to sleep once more.
        milliseconds = -(-timeout_s * 1000 // 1)
        return self._wait(milliseconds if self._epoll is None else milliseconds / 1000)

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()


def _listen(path: Path, endpoint: str, access: SocketAccess) -> socket.socket:
    """A listening socket of the right mode. A file that a dead service left there is removed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not _is_taken(path):
            path.unlink(missing_ok=True)
        listener.bind(str(path))
        # Before `listen` nobody can connect, whatever the mode is; a umask would be one for all threads.
        path.chmod(access.socket_mode)
        access.give_to_group(path)
        listener.setblocking(False)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {endpoint}: {error.strerror or error}; is another service using it?"
        ) from None
    return listener


def _is_taken(path: Path) -> bool:
    """Is there something at `path` that is not the socket of a service that has ended?"""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return True
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:
        return True
    return True
