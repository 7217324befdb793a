"""`metrics.jsonl`: one line per update, appended; x is the real env steps over all actors.

Writer: the supervisor's main thread, the only one. Readers: plots, tests, people.
What must never happen: two curves in one file. A resumed run, or a run whose learner was restored, goes on from a
checkpoint: lines beyond that step, written by the part of the run that was lost, are dropped before the first new one.
Left to others: a disk that takes no line (appending).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rollout_service.observe.appending import AppendedFile
from rollout_service.observe.losses import LostWrites


class JsonLog:
    """Appends one JSON object per line. Nothing is buffered: what a killed run wrote is there."""

    def __init__(self, path: Path, lost: LostWrites, *, resume_at: int = 0) -> None:
        """resume_at: env steps of the checkpoint the run goes on from; 0 starts the file anew."""
        self.reaches = 0
        """Env steps of the last line."""
        self._path = path
        self._lost = lost
        self._file = AppendedFile(path, lost)
        self.cut_back(resume_at)

    def write(self, env_steps: int, update: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        entry = {"env_steps": env_steps, "update": update, "wall_time": round(wall_time, 3), **scalars}
        self._file.append(json.dumps(entry).encode() + b"\n")
        self.reaches = env_steps

    def cut_back(self, env_steps: int) -> None:
        """Drops the lines beyond `env_steps`, and one that a crash cut short; the next one follows what is left."""
        try:
            length, self.reaches = part_up_to(self._path, env_steps)
            self._file.cut(length)
        except OSError as error:
            self._lost.failed(self._path.name, error.strerror)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def part_up_to(path: Path, env_steps: int) -> tuple[int, int]:
    """The log before its first line that is beyond `env_steps`, or not whole: its bytes, and how far it reaches."""
    length = reaches = 0
    if env_steps and path.exists():
        with path.open("rb") as file:
            for line in file:
                steps = _steps_of(line)
                if not line.endswith(b"\n") or not 0 < steps <= env_steps:
                    break
                length, reaches = length + len(line), steps
    return length, reaches


def _steps_of(line: bytes) -> int:
    try:
        return int(json.loads(line)["env_steps"])
    except (ValueError, KeyError, TypeError):
        return -1
