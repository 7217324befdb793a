"""TensorBoard events without torch: scalars with x = real env steps over all actors.

Writer: the supervisor's main thread, the only one. Readers: TensorBoard, which reads the files of a directory in the
order of their names, and each from its beginning on.
What must never happen: torch imported into the parent, or curves that run backwards. A resumed run, or a run whose
learner was restored, says from which step it goes on, and TensorBoard drops what a lost part had written beyond it.
The library has a writer of its own, whose thread ends for good at the first full disk. Left to others: a disk that
takes no record (appending).
"""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from rollout_service.observe.appending import AppendedFile
from rollout_service.observe.losses import LostWrites

FILE_VERSION: Final = "brain.Event:2"
"""What the first record of an event file says."""
NAME: Final = "events.out.tfevents."
"""What TensorBoard knows event files by; a time and whose file it is follow."""


class TensorBoardLog:
    """Scalars of one run, in `directory`."""

    def __init__(self, directory: Path, lost: LostWrites, *, resume_at: int = 0, wall_time: float) -> None:
        """resume_at: env steps of the checkpoint the run goes on from; 0 for a new run."""
        self._start = b""
        """A START event that is still to be written."""
        self._file = AppendedFile(
            directory / _file_name(directory, wall_time),
            lost,
            name="the TensorBoard log",
            header=_record(Event(wall_time=wall_time, file_version=FILE_VERSION)),
        )
        if resume_at:
            self.cut_back(resume_at, wall_time)

    def write(self, env_steps: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._append(_record(Event(wall_time=wall_time, step=env_steps, summary=Summary(value=values))))

    def cut_back(self, env_steps: int, wall_time: float) -> None:
        """Takes back what was written beyond `env_steps`: TensorBoard drops the steps at and beyond a START event."""
        start = SessionLog(status=SessionLog.START)
        self._start = _record(Event(wall_time=wall_time, step=env_steps + 1, session_log=start))
        self._append(b"")

    def _append(self, record: bytes) -> None:
        if self._file.append(self._start + record):
            self._start = b""

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _record(event: Event) -> bytes:
    """One event as it stands in a file: length, data and checksums."""
    record = io.BytesIO()
    RecordWriter(record).write(event.SerializeToString())
    return record.getvalue()


def _file_name(directory: Path, wall_time: float) -> str:
    """The name of a new event file, behind those that are there whatever the clock says."""
    stamps = [path.name.removeprefix(NAME).partition(".")[0] for path in directory.glob(f"{NAME}*")]
    newest = max((int(stamp) for stamp in stamps if stamp.isdigit()), default=-1)
    return f"{NAME}{max(int(wall_time), newest + 1):010d}.{socket.gethostname()}.{os.getpid()}.0"
