"""One named block of shared memory: made by one owner, attached by others, gone when the owner is.

Who writes: the owner the header, once; the ready marker last. Payload bytes belong to whoever holds the slot or bank.
Who reads: every process of the run, and `status` and `clean`, which find runs by these headers.
What must never happen: an attaching process unlinking or registering a segment (before Python 3.13 the standard class
hands each attached name to a resource tracker that unlinks it at exit, and it unlinks the owner's segment when an
attach fails); a first touch that dies with SIGBUS; a view that outlives its mapping; a sweep that removes a living
run's memory.
Leaves to others: the system's own interfaces (mapping), where the bytes lie (layout), what the payload means (slots,
weights).

Proof of life is a lock, not a pid: the owner holds an exclusive `flock` on the segment's own file for as long as it
lives, in any pid namespace. Whoever can take the lock knows that the owner is gone. A forked child of the owner keeps
the lock with the inherited descriptor, so such a segment counts as alive until that child has left too: when in doubt,
it stays.

Closing: every array is a slice of one root `np.frombuffer` array, so a mapping with living views refuses to go. `close`
then only lets go of it, and the death of the last view unmaps it: an old view reads old data, and never crashes.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import PAGESIZE
from types import TracebackType
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from rollout_service.errors import SegmentError, SegmentMismatch, SegmentNotFound
from rollout_service.memory.layout import HEADER_BYTES, LAYOUT_VERSION, READY, READY_AT, SegmentHeader, align
from rollout_service.memory.mapping import attach_mapping, create_mapping, let_go, take_lock, unlink_name, whole_of
from rollout_service.memory.room import SHARED_MEMORY, check_room

if TYPE_CHECKING:
    from rollout_service.memory.mapping import SharedMemory

PREFIX: Final = "rs"
NAME_LIMIT: Final = 30
"""macOS: PSHMNAMLEN is 31 with the slash. Kept everywhere, so that a name that works here works there."""

TOKEN_BYTES: Final = 8
"""64 random bits per run: pids recycle, and in a container every main process is pid 1."""

CREATE_ATTEMPTS: Final = 8
UNREADY_GRACE_S: Final = 60.0
"""A segment without a ready marker may be in the making; a sweep leaves it alone for this long."""

_NAME: Final = re.compile(rf"{PREFIX}-(?P<token>[0-9a-z]{{8,16}})-(?P<kind>[a-z0-9]{{1,10}})")


# Names


def new_run_token() -> str:
    """A random name part, shared by all segments of one run."""
    return secrets.token_hex(TOKEN_BYTES)


def segment_name(token: str, kind: str) -> str:
    """`rs-<token>-<kind>`, at most NAME_LIMIT characters. Raises SegmentError for a token or kind that does not fit."""
    name = f"{PREFIX}-{token}-{kind}"
    if len(name) > NAME_LIMIT or not _NAME.fullmatch(name):
        raise SegmentError(
            f"segment name {name!r} does not fit: tokens have 8 to 16 and kinds 1 to 10 characters out of a-z and 0-9"
        )
    return name


# The segment


class Segment:
    """A mapped segment. `root` is its payload, uint8 [nbytes]; every other array must be a slice of it.

    Made by `create` (then `mark_ready` once the payload is filled) or `attach`. The owner's `close`, garbage collection
    or exit unlinks the name; processes that have it mapped keep their data.
    """

    def __init__(self, name: str, shm: SharedMemory, header: SegmentHeader, lock: int | None) -> None:
        whole = whole_of(shm)
        self.name = name
        self.nbytes = header.nbytes
        self.layout = whole[header.layout_at].tobytes()
        self.spec = whole[header.spec_at].tobytes()
        self.owner = lock is not None
        self._shm: SharedMemory | None = shm
        self._whole: NDArray[np.uint8] | None = whole
        self._root: NDArray[np.uint8] | None = whole[header.payload_at]
        self._net = weakref.finalize(self, let_go, name, lock, os.getpid()) if lock is not None else None

    def share_with_group(self, group: int) -> None:
        """Lets the members of a group (gid) read and write. Raises SegmentError if this user is not in it."""
        path = SHARED_MEMORY / self.name
        try:
            os.chown(path, -1, group)
            path.chmod(0o660)
        except OSError as error:
            raise SegmentError(f"cannot share {path} with group {group}: {error.strerror}") from None

    @classmethod
    def create(
        cls,
        nbytes: int,
        *,
        kind: str,
        token: str | None = None,
        layout: bytes = b"",
        spec: bytes = b"",
        layout_version: int = LAYOUT_VERSION,
    ) -> Segment:
        """A new segment of `nbytes` zero bytes, reserved and locked, not yet ready.

        `token`: the run's; without one, and for a name that is taken, a new one is drawn. Raises SegmentTooLarge before
        anything exists if there is no room for it.
        """
        if nbytes < 1:
            raise SegmentError(f"a segment of {nbytes} bytes was asked for, the least is 1")
        offset = align(HEADER_BYTES + len(layout) + len(spec), PAGESIZE)
        total = offset + nbytes
        if not SHARED_MEMORY.is_dir():
            raise SegmentError(f"{SHARED_MEMORY} is missing on {sys.platform}; shared segments need Linux")
        name = segment_name(token or new_run_token(), kind)
        check_room(total)
        for _ in range(CREATE_ATTEMPTS):
            try:
                shm, lock = create_mapping(name, total)
                break
            except FileExistsError:
                name = segment_name(new_run_token(), kind)
        else:
            raise SegmentError(f"{CREATE_ATTEMPTS} random names in a row were taken, the last was {name}; see `clean`")
        header = SegmentHeader(layout_version, offset, nbytes, len(layout), len(spec), os.getpid(), _since_boot())
        document = header.pack() + layout + spec
        whole_of(shm)[: len(document)] = np.frombuffer(document, np.uint8)
        return cls(name, shm, header, lock)

    @classmethod
    def attach(
        cls, name: str, *, kind: str | None = None, min_bytes: int = 0, layout_version: int = LAYOUT_VERSION
    ) -> Segment:
        """Map the segment of another process; it stays that process's, whatever happens here.

        Raises SegmentNotFound if it is not visible from here, SegmentMismatch if it is not ready, of another kind or
        layout version, or holds fewer than `min_bytes`. A size that the system rounded up is fine.
        """
        match = _NAME.fullmatch(name)
        if not match:
            raise SegmentMismatch(f"{name!r} is not a segment name; they read {PREFIX}-<token>-<kind>")
        if kind is not None and match["kind"] != kind:
            raise SegmentMismatch(f"segment {name} holds {match['kind']}, wanted was {kind}")
        try:
            shm = attach_mapping(name)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise cannot_open(name, error) from error
        try:
            header = _checked_header(name, whole_of(shm)[:HEADER_BYTES].tobytes(), shm.size, min_bytes, layout_version)
            return cls(name, shm, header, None)
        except BaseException:
            shm.close()
            raise

    @property
    def root(self) -> NDArray[np.uint8]:
        """The payload, uint8 [nbytes]. Raises SegmentError after `close`."""
        if self._root is None:
            raise SegmentError(f"segment {self.name} is closed in this process; attach it again to read it")
        return self._root

    def mark_ready(self) -> None:
        """The owner's last act of creation: from now on others may attach."""
        if self._whole is None or not self.owner:
            raise SegmentError(f"only the owner marks a segment ready, and before closing it: {self.name}")
        self._whole[READY_AT] = np.frombuffer(READY, np.uint8)

    def close(self) -> None:
        """Let go of the mapping, and of the name if this is the owner. Views that are still alive stay readable."""
        if self._net is not None:
            self._net()
        if self._shm is not None:
            self._root = self._whole = None
            self._shm.close()
            self._shm = None

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Segment({self.name!r}, {self.nbytes} bytes, {'owner' if self.owner else 'attached'})"


def cannot_open(name: str, error: OSError | ValueError) -> SegmentError:
    """Why a segment of another process cannot be used from here, as the error to raise."""
    match error:
        case FileNotFoundError():
            return SegmentNotFound(
                f"segment {name} is not visible from this process: its run has ended, or this container has a "
                f"{SHARED_MEMORY} of its own (share it: docker run --ipc, compose: ipc)"
            )
        case PermissionError():
            found = os.stat(SHARED_MEMORY / name)
            return SegmentMismatch(
                f"segment {name} belongs to uid {found.st_uid}, mode {found.st_mode & 0o777:04o}; this process is uid "
                f"{os.geteuid()}: run all processes of a run under one uid"
            )
        case _:
            return SegmentMismatch(f"segment {name} cannot be mapped ({error}); its creation was cut short")


def _checked_header(name: str, raw: bytes, size: int, min_bytes: int, layout_version: int) -> SegmentHeader:
    """The header of a segment that may be used. Raises SegmentMismatch, saying why, if it may not."""
    header = SegmentHeader.unpack(raw)
    if header is None:
        raise SegmentMismatch(f"segment {name} has no header of ours; it is foreign, or its creation was cut short")
    if header.layout_version != layout_version:
        raise SegmentMismatch(
            f"segment {name} has layout version {header.layout_version}, this process speaks {layout_version}; "
            f"run the same release everywhere"
        )
    if not header.ready:
        raise SegmentMismatch(f"segment {name} is not ready: its owner (pid {header.pid}) is still filling it, or died")
    if size < header.offset + header.nbytes:
        raise SegmentMismatch(f"segment {name} has {size} bytes, its header asks for {header.offset + header.nbytes}")
    if header.nbytes < min_bytes:
        raise SegmentMismatch(f"segment {name} holds {header.nbytes} bytes, at least {min_bytes} are needed")
    return header


# Finding and sweeping


@dataclass(frozen=True)
class SegmentInfo:
    """What a segment's file says about it, without mapping it."""

    name: str
    token: str
    kind: str
    nbytes: int
    """Of the file, header included: what removing it gives back."""
    ready: bool
    age_s: float
    owner_alive: bool
    """Its lock is held, or it is too young to tell."""
    owner_pid: int
    """As the owner saw it: in another pid namespace it means nothing. 0 if the header was never written."""
    spec: bytes


def list_segments() -> list[SegmentInfo]:
    """Every segment of this project that this user may open, by name."""
    return list(_examine_all(0.0, remove=False))


def sweep(dry_run: bool = False, *, in_seconds: float = 0.0) -> list[SegmentInfo]:
    """Remove (or only list) the segments whose owner is gone. Living runs and foreign files are never touched.

    in_seconds: judges them as old as they will be then.
    """
    found = _examine_all(in_seconds, remove=not dry_run)
    return [segment for segment in found if not segment.owner_alive]


def _since_boot() -> float:
    """Seconds on a clock that all processes share and nobody can set; a segment does not outlive it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _examine_all(in_seconds: float, *, remove: bool) -> Iterator[SegmentInfo]:
    if not SHARED_MEMORY.is_dir():
        return
    for name in sorted(os.listdir(SHARED_MEMORY)):
        match = _NAME.fullmatch(name)
        if not match:
            continue
        try:
            fd = os.open(SHARED_MEMORY / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, another user's, or a link
            continue
        try:
            raw = os.pread(fd, HEADER_BYTES, 0)
            header = SegmentHeader.unpack(raw)
            if header is None and any(raw):  # a name like ours over other bytes: not ours to judge
                continue
            stat = os.fstat(fd)
            ready = header is not None and header.ready
            # Without a header there is only the file system's stamp; if the clock jumps just then, its creator sees it.
            age = _since_boot() - header.created if header is not None else time.time() - stat.st_ctime
            age = max(0.0, age) + in_seconds
            # The owner locks before it marks ready; a young unready one is not probed, the probe could be in its way.
            alive = (not ready and age < UNREADY_GRACE_S) or not take_lock(fd, exclusive=False)
            if remove and not alive:
                unlink_name(name)
            yield SegmentInfo(
                name=name,
                token=match["token"],
                kind=match["kind"],
                nbytes=stat.st_size,
                ready=ready,
                age_s=age,
                owner_alive=alive,
                owner_pid=header.pid if header is not None else 0,
                spec=os.pread(fd, header.spec_length, header.spec_at.start) if header is not None else b"",
            )
        finally:
            os.close(fd)
