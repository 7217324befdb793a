"""A sign of life that no death can fake: a byte of the run's segment, locked for as long as a process lives.

    learner   byte LOCKS_AT         actor a   byte LOCKS_AT + 1 + a          far behind the end of the segment's data

Who locks: every actor and the learner, right after WELCOME, before anything else of the run is touched. Who asks: the
service, about processes that it did not start itself. A pid says little (it is another process's in the next container,
and is used again), but the kernel gives a lock back when the last process that has it is gone, in any pid namespace;
and whoever shares the segment shares its locks.
What must never happen: a lock that ends early because another descriptor of the same file is closed, which is the way
of plain POSIX locks; these belong to the open file. A forked child of the process keeps the lock too: when in doubt,
the process lives.
"""

from __future__ import annotations

import os
import struct
from types import TracebackType
from typing import Final, Self

from rollout_service.errors import SegmentError
from rollout_service.memory.room import SHARED_MEMORY
from rollout_service.memory.segment import cannot_open

LOCKS_AT: Final = 1 << 40
"""Locks may lie behind the end of a file; no segment is as large as this."""
LEARNER: Final = 0
"""The learner's seat."""
_FLOCK: Final = "hhqqi4x"
"""struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid."""


def actor_seat(actor_id: int) -> int:
    """The seat of an actor's place."""
    return 1 + actor_id


class Presence:
    """This process's lock on a seat, until `close` or its death. A context manager.

    Processes may share a seat: one that says goodbye does not keep its successor waiting.
    """

    def __init__(self, segment: str, seat: int) -> None:
        """Raises SegmentNotFound or SegmentMismatch, with the reason, if the segment cannot be opened from here."""
        import fcntl

        try:
            self._descriptor = os.open(SHARED_MEMORY / segment, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise cannot_open(segment, error) from error
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_RDLCK, seat))

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_present(segment: str, seat: int) -> bool:
    """Does a process hold this seat? Raises SegmentError if the segment cannot be opened."""
    import fcntl

    try:
        descriptor = os.open(SHARED_MEMORY / segment, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise SegmentError(f"segment {segment} cannot be asked who is there: {error.strerror}") from error
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, seat))
    finally:
        os.close(descriptor)
    kind: int = struct.unpack(_FLOCK, answer)[0]
    return kind != fcntl.F_UNLCK


def _request(kind: int, seat: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, LOCKS_AT + seat, 1, 0)
