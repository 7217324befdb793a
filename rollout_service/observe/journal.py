"""`run.log`: what the supervisor said, with the time, kept in the run directory; the same lines go to the terminal.

Writer: the supervisor's main thread. Readers: people, after the fact.
What must never happen: a death of an actor that left no trace on disk.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from rollout_service.observe.progress import Progress


class Journal:
    """Says things to the terminal, and to a file once the run directory exists."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self._progress = progress
        self._file = path.open("a", encoding="utf-8", errors="replace")

    def say(self, text: str) -> None:
        """One message, perhaps of several lines, to both places."""
        self._progress.say(text)
        self.note(text)

    def note(self, text: str) -> None:
        """To the file only."""
        self._file.write(f"{datetime.now().astimezone().isoformat(timespec='milliseconds')} {text}\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
