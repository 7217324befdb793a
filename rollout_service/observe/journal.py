"""`run.log`: what the supervisor said, with the time, kept in the run directory; the same lines go to the terminal.

Writer: the supervisor's main thread. Readers: people, after the fact.
What must never happen: a death of an actor that left no trace on disk, as long as the disk takes anything.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from rollout_service.observe.appending import AppendedFile
from rollout_service.observe.losses import LostWrites
from rollout_service.observe.progress import Progress


class Journal:
    """Says things to the terminal, and to a file once the run directory exists."""

    def __init__(self, path: Path, progress: Progress, lost: LostWrites) -> None:
        self.lost = lost
        """What this and the other logs of the run could not write."""
        self._progress = progress
        self._file = AppendedFile(path, lost)

    def say(self, text: str) -> None:
        """One message, perhaps of several lines, to both places."""
        self._progress.say(text)
        self.note(text)

    def note(self, text: str) -> None:
        """To the file only."""
        stamp = datetime.now().astimezone().isoformat(timespec="milliseconds")
        self._file.append(f"{stamp} {text}\n".encode(errors="replace"))

    def tell_losses(self) -> None:
        """Says what has been lost since, if that is worth a word."""
        for text in self.lost.news():
            self.say(text)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
