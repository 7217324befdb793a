"""`metrics.jsonl`: one line per update, appended; x is the real env steps over all actors.

Writer: the supervisor's main thread, the only one. Readers: plots, tests, people.
What must never happen: two curves in one file. A resumed run, or a run whose learner was restored, goes on from a
checkpoint: lines beyond that step, written by the part of the run that was lost, are dropped before the first new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self


class JsonLog:
    """Appends one JSON object per line. Flushed per line: what a killed run wrote is there."""

    def __init__(self, path: Path, *, resume_at: int = 0) -> None:
        """resume_at: env steps of the checkpoint the run goes on from; 0 starts the file anew."""
        self._path = path
        keep_lines_up_to(path, resume_at)
        self._file = path.open("a", encoding="utf-8")

    def write(self, env_steps: int, update: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        entry = {"env_steps": env_steps, "update": update, "wall_time": round(wall_time, 3), **scalars}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def cut_back(self, env_steps: int) -> None:
        """Drops the lines beyond `env_steps`; the next one follows what is left. Readers find a new file."""
        self._file.close()
        keep_lines_up_to(self._path, env_steps)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def keep_lines_up_to(path: Path, env_steps: int) -> None:
    """Rewrites the log without entries beyond `env_steps` and without a line that a crash cut short."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if 0 < _steps_of(line) <= env_steps]
    replacement = path.with_suffix(".rewriting")
    replacement.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(replacement, path)


def _steps_of(line: str) -> int:
    try:
        return int(json.loads(line)["env_steps"])
    except (ValueError, KeyError, TypeError):
        return -1
