"""What ends a wait from outside: a file descriptor that other threads and signal handlers make readable.

Who uses it: every socket of the control plane, next to its own descriptor in one poll.
What must never happen: a `set` that blocks or raises, whoever calls it and whenever.
"""

from __future__ import annotations

import contextlib
import os
from enum import Enum


class Woken(Enum):
    """What ended a wait."""

    BY_MESSAGE = "message"
    BY_CALL = "call"
    BY_TIME = "time"


class WakeUp:
    """A file descriptor that becomes readable on `set`; safe from threads and signal handlers."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    @property
    def descriptor(self) -> int:
        return self._read

    def set(self) -> None:
        with contextlib.suppress(OSError):  # full pipe: already set; closed: nobody waits any more
            os.write(self._write, b"w")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(self._read, 512):
                pass

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)
