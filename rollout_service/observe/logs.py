"""The log files of a run, written together: `metrics.jsonl`, and TensorBoard events if wanted.

Writer: the supervisor's main thread (or the serial run's only one). x is the real env steps over all actors; the steps
of a resumed run, or after a restart of the learner, go on where the checkpoint was. What must never happen: a start
delayed by the import of TensorBoard, which is why files are opened by `open`, after the children were started; a run
that ends because a log cannot be written: that is counted (losses).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rollout_service.observe.jsonl import JsonLog
from rollout_service.observe.losses import LostWrites

if TYPE_CHECKING:
    from rollout_service.observe.tensorboard import TensorBoardLog


class RunLogs:
    """Both files of one run; nothing is written before `open`."""

    def __init__(self, run_dir: Path, *, tensorboard: bool, resume_at: int = 0, lost: LostWrites | None = None) -> None:
        self._run_dir = run_dir
        self._lost = lost if lost is not None else LostWrites()
        self._tensorboard = tensorboard
        self._resume_at = resume_at
        self._stack = ExitStack()
        self._json: JsonLog | None = None
        self._events: TensorBoardLog | None = None

    def open(self) -> None:
        """Opens the files; lines that the lost part of a resumed run had written are dropped."""
        path = self._run_dir / "metrics.jsonl"
        self._json = self._stack.enter_context(JsonLog(path, self._lost, resume_at=self._resume_at))
        if self._tensorboard:
            from rollout_service.observe.tensorboard import TensorBoardLog

            directory = self._run_dir / "tensorboard"
            log = TensorBoardLog(directory, self._lost, resume_at=self._resume_at, wall_time=time.time())
            self._events = self._stack.enter_context(log)

    @property
    def reaches(self) -> int:
        """Env steps of the last entry of `metrics.jsonl`."""
        return 0 if self._json is None else self._json.reaches

    def write(self, env_steps: int, update: int, scalars: Mapping[str, float]) -> None:
        now = time.time()
        if self._json is not None:
            self._json.write(env_steps, update, now, scalars)
        if self._events is not None:
            self._events.write(env_steps, now, scalars)

    def cut_back(self, env_steps: int) -> None:
        """Takes back everything beyond `env_steps`: the part of the run that wrote it was lost."""
        if self._json is not None:
            self._json.cut_back(env_steps)
        if self._events is not None:
            self._events.cut_back(env_steps, time.time())

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
