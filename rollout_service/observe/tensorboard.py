"""TensorBoard events without torch: scalars with x = real env steps over all actors.

Writer: the supervisor's main thread, the only one (the library's own thread does the file IO). Readers: TensorBoard.
What must never happen: torch imported into the parent, or curves that run backwards. A resumed run, or a run whose
learner was restored, says from which step it goes on, and TensorBoard drops what a lost part had written beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardLog:
    """Scalars of one run, in `directory`."""

    def __init__(self, directory: Path, *, resume_at: int = 0, wall_time: float) -> None:
        """resume_at: env steps of the checkpoint the run goes on from; 0 for a new run."""
        self._writer = EventFileWriter(str(directory))
        if resume_at:
            self.cut_back(resume_at, wall_time)

    def write(self, env_steps: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(Event(wall_time=wall_time, step=env_steps, summary=Summary(value=values)))

    def cut_back(self, env_steps: int, wall_time: float) -> None:
        """Takes back what was written beyond `env_steps`: TensorBoard drops the steps at and beyond a START event."""
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=wall_time, step=env_steps + 1, session_log=start))

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
