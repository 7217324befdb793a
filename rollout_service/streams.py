"""Output that ends nobody: a text stream that drops what its file does not take, and counts it.

Who uses it: the service for its progress, and every role for its standard output and error, which are log files. A
`print` on a full disk would otherwise end whatever printed, an env's step included. What was dropped is said in the
stream itself once it takes something again, and to whoever asked to be told. Left to others: files of records
(observe/appending).
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO


@dataclass
class Dropped:
    """Counts what was dropped."""

    writes: int = 0

    def note(self, _error: OSError) -> None:
        self.writes += 1


class _Raw(io.FileIO):
    """A file descriptor, left open at the end, whose `write` never fails and is never short."""

    def __init__(self, descriptor: int, failed: Callable[[OSError], None]) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._failed = failed
        self._dropped = 0
        self._why: OSError | None = None

    def write(self, data: object) -> int:
        whole = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            if self._dropped:
                self._write_all(memoryview(f"\n[{self._dropped} writes were lost here: {self._why}]\n".encode()))
                self._dropped = 0
            self._write_all(whole)
        except OSError as error:
            self._dropped, self._why = self._dropped + 1, error
            self._failed(error)
        return whole.nbytes

    def _write_all(self, left: memoryview) -> None:
        while left:
            written = super().write(left)
            if written is None:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            left = left[written:]


def lenient(stream: TextIO, failed: Callable[[OSError], None]) -> TextIO:
    """The same output as `stream`, unbuffered; `failed` is told of each write that was dropped.

    A stream without a file descriptor is returned as it is.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return stream
    return io.TextIOWrapper(
        _Raw(descriptor, failed),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
        write_through=True,
    )
