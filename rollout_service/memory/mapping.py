"""The system's own interfaces below a segment: POSIX shared memory, file locks, names in /dev/shm.

Who uses it: `segment`, nobody else; the only home of `multiprocessing.shared_memory`. What must never happen: a
mapping that registers with a resource tracker, unlinks or prints (see `segment`); anything left behind by a creation
that failed. Left to others: what the bytes are, and whose.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from functools import cache
from mmap import mmap
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from rollout_service.errors import SegmentError, SegmentTooLarge
from rollout_service.memory.room import REMEDY, SHARED_MEMORY, free_shared_memory, mib

if TYPE_CHECKING:
    from multiprocessing.shared_memory import SharedMemory as SharedMemory

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT})
"""What reserving too much looks like."""


def _fcntl() -> ModuleType:
    try:
        import fcntl
    except ImportError as error:
        raise SegmentError(f"shared segments need file locks, which {sys.platform} lacks; run on Linux") from error
    return fcntl


def take_lock(fd: int, *, exclusive: bool) -> bool:
    """Take the lock of an open file, or say that somebody else holds it. Closing the descriptor gives it back."""
    fcntl = _fcntl()
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def _untracked_class() -> Any:
    """SharedMemory that never registers with a resource tracker, unlinks or prints. Built on first use."""
    try:
        import _posixshmem  # type: ignore[import-not-found,unused-ignore]
        from multiprocessing.shared_memory import SharedMemory
    except ImportError as error:
        raise SegmentError(f"POSIX shared memory is missing on {sys.platform} ({error}); run on Linux") from error

    class UntrackedSharedMemory(SharedMemory):
        _fd: int
        _mmap: mmap | None
        _buf: memoryview | None

        def __init__(self, name: str, *, size: int = 0) -> None:
            """Creates the name exclusively if a size is given, else attaches to it."""
            try:
                if sys.version_info >= (3, 13):
                    super().__init__(name, create=size > 0, size=size, track=False)
                else:
                    # The base registers on every path; these are its steps without that one.
                    self._name = f"/{name}"
                    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if size else 0)
                    self._fd = _posixshmem.shm_open(self._name, flags, mode=0o600)
                    if size:
                        os.ftruncate(self._fd, size)
                    self._size = os.fstat(self._fd).st_size
                    self._mmap = mmap(self._fd, self._size)
                    self._buf = memoryview(self._mmap)
            finally:
                if self._fd >= 0:  # a mapping does not need it
                    os.close(self._fd)
                    self._fd = -1

        def close(self) -> None:
            try:
                super().close()
            except BufferError:  # a view lives: from now on the views alone hold the mapping
                self._buf = self._mmap = None

        def unlink(self) -> None:
            """Does nothing: the base unlinks when mapping fails, which would take the segment from its owner."""

        def __del__(self) -> None:
            """Does nothing: the base closes, and prints if a view is alive. The last reference unmaps."""

    return UntrackedSharedMemory


def attach_mapping(name: str) -> SharedMemory:
    """The mapping of a segment that exists. Raises OSError, or ValueError for an empty file."""
    shm: SharedMemory = _untracked_class()(name)
    return shm


def create_mapping(name: str, nbytes: int) -> tuple[SharedMemory, int]:
    """Mapping and owner lock of a new segment with every page reserved. Leaves nothing behind when it fails."""
    untracked = _untracked_class()
    shm: SharedMemory | None = None
    lock = -1
    try:
        shm = untracked(name, size=nbytes)
        lock = os.open(SHARED_MEMORY / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not take_lock(lock, exclusive=True) or os.fstat(lock).st_nlink == 0:
            raise SegmentError(f"another process took the new segment {name} away; was this process stopped meanwhile?")
        os.posix_fallocate(lock, 0, nbytes)
    except FileExistsError:  # somebody else's, untouched
        raise
    except BaseException as error:
        unlink_name(name)
        if lock >= 0:
            os.close(lock)
        if shm is not None:
            shm.close()
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            free = free_shared_memory()
            raise SegmentTooLarge(
                f"the segment needs {nbytes} bytes ({mib(nbytes)}), {SHARED_MEMORY} has {free} bytes ({mib(free)}) "
                f"free and could not reserve them ({error.strerror}); {REMEDY} enlarge it (docker run --shm-size)"
            ) from error
        raise
    return shm, lock


def whole_of(shm: SharedMemory) -> NDArray[np.uint8]:
    """The one root of all views: it holds the mapping."""
    if shm.buf is None:
        raise SegmentError(f"segment {shm.name} is not mapped in this process; attach it again")
    return np.frombuffer(shm.buf, np.uint8)


def unlink_name(name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(SHARED_MEMORY / name)


def let_go(name: str, lock: int, owner_pid: int) -> None:
    """End of an owner: the name goes first, then the proof of life. A forked copy of the owner is not the owner."""
    if os.getpid() == owner_pid:
        unlink_name(name)
    with suppress(OSError):
        os.close(lock)
