"""A file to which whole records are appended, or nothing: on a full disk a record is lost, never a part of one left.

    append      header, if the file is empty, and record  ->  written whole                         True
                                                          ->  taken back, counted, the run goes on  False

Writer: the supervisor's main thread, for every log of a run. Readers: whoever follows the file, at any moment.
What must never happen: half a record in the middle of a file; an exception because a log could not be written. A file
that cannot even be opened is tried again with the next record.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rollout_service.observe.losses import LostWrites


class AppendedFile:
    """One log file. `lost` hears of every record that could not be written."""

    def __init__(self, path: Path, lost: LostWrites, *, name: str = "", header: bytes = b"") -> None:
        """name: what it is called where a loss is told; by default as on the disk. header: how an empty file begins.

        Its directory is made if it is not there.
        """
        self._path = path
        self._name = name or path.name
        self._lost = lost
        self._header = header
        self._descriptor: int | None = None
        self._end = 0
        """Bytes that are to stay."""
        self._torn = False
        """The file may have bytes beyond them."""

    def append(self, record: bytes) -> bool:
        """Whether the record is in the file."""
        try:
            descriptor = self._opened()
            self._take_back(descriptor)
            data = record if self._end else self._header + record
            self._write(descriptor, data)
        except OSError as error:
            self._lost.failed(self._name, error.strerror)
            return False
        self._end += len(data)
        self._lost.written(self._name)
        return True

    def cut(self, nbytes: int) -> None:
        """Keeps the first `nbytes`, from the next record on at the latest."""
        self._end, self._torn = nbytes, True
        with suppress(OSError):
            self._take_back(self._opened())

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def _opened(self) -> int:
        if self._descriptor is None:
            self._path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
            if not self._torn:
                self._end = os.fstat(self._descriptor).st_size
        return self._descriptor

    def _write(self, descriptor: int, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            self._torn = True
            with suppress(OSError):
                self._take_back(descriptor)
            raise

    def _take_back(self, descriptor: int) -> None:
        if self._torn:
            os.ftruncate(descriptor, self._end)
            self._torn = False
