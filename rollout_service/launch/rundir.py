"""The run directory: who may use it, what is in it, what is kept when a new run takes it over.

    <run dir>/
        config.toml     the settings as used, numbers resolved; `--resume` reads them again
        run.log         what the supervisor said
        metrics.jsonl   one line per update
        tensorboard/    the same as events
        logs/           output of each child: learner.log, actor-<id>.<incarnation>.log
        checkpoints/    written by the learner
        earlier-<n>/    what a previous run had left here
        lock            held by the living supervisor

Writer: the supervisor of the run (checkpoints: its learner). Readers: `eval`, plots, people.
What must never happen: two living runs in one directory, a new run whose newest checkpoint is an old run's, or a
directory made, or changed, for a run that never began.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rollout_service.config import TrainConfig
from rollout_service.errors import CheckpointError, ConfigError
from rollout_service.runspec import RunSpec

CONFIG_FILE: Final = "config.toml"
LOCK: Final = "lock"
OWN_ENTRIES: Final = (CONFIG_FILE, "run.log", "metrics.jsonl", "tensorboard", "logs", "checkpoints")
"""What a run writes here, and so what a new run may move aside; anything else is the user's."""
MARKS_OF_A_RUN: Final = ("metrics.jsonl", "checkpoints")
NOT_SAVED: Final = frozenset({"run_dir", "resume", "serial", "json_output", "dump_batch", "dump_batch_update"})
"""Settings that say how one command was run, not what the run is."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on: counters of the newest usable checkpoint, zeros for a new run."""

    updates: int = 0
    env_steps: int = 0
    checkpoint: Path | None = None
    run_spec: RunSpec | None = None
    """Of the run that the checkpoint is of."""
    warnings: tuple[str, ...] = ()
    """One line per newer checkpoint that is damaged."""


@dataclass(frozen=True)
class BestCheckpoint:
    """A checkpoint and its score."""

    path: Path
    return_mean: float


def default_run_directory(env: str, token: str, now: datetime) -> Path:
    """`runs/<env>-<date>-<token>`."""
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", env).strip("-.") or "run"
    return Path("runs") / f"{name}-{now:%Y%m%d-%H%M%S}-{token[:8]}"


class RunDirectory:
    """A run directory: locked for this process until `close`, and this run's once it has begun."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Raises ConfigError if it cannot be made or a living run uses it, CheckpointError if there is nothing to
        resume.
        """
        self.path = path
        self.moved_aside: Path | None = None
        self._resume = resume
        self._made: list[Path] = []
        """Directories that are taken back if the run does not begin, the innermost first."""
        if resume and not path.is_dir():
            raise CheckpointError(f"nothing to resume: {path} is not a directory; give the run_dir of an earlier run")
        try:
            self._made = [each for each in (path, *path.parents) if not each.exists()]
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._take_back()
            raise ConfigError(f"run_dir {path} cannot be used: {error.strerror}; choose another one") from error
        try:
            self._take()
            self.resume_point = _resume_point(path) if resume else ResumePoint()
        except BaseException:
            os.close(self._lock)
            raise

    def _take(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"run_dir {self.path} is used by a run that is alive; choose another one") from None
        if os.fstat(self._lock).st_nlink == 0:
            raise ConfigError(f"run_dir {self.path} was just taken back by a start that was refused; start again")

    def begin(self, config: TrainConfig, spec: RunSpec) -> None:
        """From here on it is this run's: its settings are written, and what an earlier one left is moved aside.

        Raises CheckpointError if the run cannot go on from what is to be resumed, ConfigError if the disk refuses; an
        earlier run's files are then still there.
        """
        from rollout_service.checkpoint import require_fits

        point, logs = self.resume_point, self.path / "logs"
        if point.checkpoint is not None and point.run_spec is not None:
            require_fits(point.checkpoint, point.run_spec, spec)
        if logs.exists() and not logs.is_dir():
            raise ConfigError(f"{logs} is a file, and a run has a directory of that name; choose another run_dir")
        beside = self.path / f"{CONFIG_FILE}.writing"
        try:
            beside.write_text(to_toml(config), encoding="utf-8")
            if not self._resume:
                self.moved_aside = _move_aside(self.path)
            logs.mkdir(exist_ok=True)
            beside.replace(self.path / CONFIG_FILE)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()
            raise ConfigError(
                f"run_dir {self.path} cannot be written: {error.strerror}; make room, or choose another"
            ) from error
        self._made = []

    def close(self) -> None:
        if self._made:
            # While it is locked: nobody else can have begun in it.
            with suppress(OSError):
                (self.path / LOCK).unlink()
            self._take_back()
        os.close(self._lock)

    def _take_back(self) -> None:
        """What was made here, as far as it is empty."""
        with suppress(OSError):
            for directory in self._made:
                directory.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def to_toml(config: TrainConfig) -> str:
    """The settings as a TOML file that `--config` reads back to the same settings. Unset ones are left out."""
    fields = config.model_dump(mode="json")
    env_kwargs = fields.pop("env_kwargs")
    lines = [
        f"{name} = {_toml_value(value)}"
        for name, value in fields.items()
        if value is not None and name not in NOT_SAVED
    ]
    if env_kwargs:
        lines += ["", "[env_kwargs]"]
        lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in env_kwargs.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    match value:
        case bool() | str():
            # JSON's strings are TOML basic strings, but for one character that TOML wants escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_toml_value(item) for item in value)}]"
        case dict():
            entries = (f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items() if item is not None)
            return f"{{ {', '.join(entries)} }}"
        case _:
            raise ConfigError(
                f"{value!r} ({type(value).__name__}) cannot be written to {CONFIG_FILE}; use plain values"
            )


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def newest_point(path: Path) -> ResumePoint:
    """Where a learner that is started now goes on; zeros and no checkpoint if there is no usable one."""
    from rollout_service import checkpoint as checkpoints

    found = checkpoints.newest(path)
    warnings = tuple(found.warnings())
    if found.checkpoint is None:
        return ResumePoint(warnings=warnings)
    manifest = found.checkpoint.manifest
    return ResumePoint(manifest.update, manifest.env_steps, found.checkpoint.path, manifest.run_spec, warnings)


def best_checkpoint(path: Path) -> BestCheckpoint | None:
    """The one with the highest return_mean, of those that are there and usable."""
    from rollout_service import checkpoint as checkpoints

    found = checkpoints.best(path).checkpoint
    if found is None or found.manifest.return_mean is None:
        return None
    return BestCheckpoint(found.path, found.manifest.return_mean)


def unsaved(path: Path, updates: int) -> str:
    """In words, how many of a run's updates are in no checkpoint."""
    point = newest_point(path)
    origin = "the start" if point.checkpoint is None else point.checkpoint.name
    return f"{max(0, updates - point.updates)} updates are to be made again: the run goes on from {origin}"


def _resume_point(path: Path) -> ResumePoint:
    from rollout_service import checkpoint as checkpoints

    usable = checkpoints.require(path)
    manifest = usable.checkpoint.manifest
    return ResumePoint(manifest.update, manifest.env_steps, usable.checkpoint.path, manifest.run_spec, usable.warnings)


def _move_aside(path: Path) -> Path | None:
    """Puts what an earlier run left into `earlier-<n>`; nothing is deleted."""
    if not any((path / mark).exists() for mark in MARKS_OF_A_RUN):
        return None
    number = 1
    while (aside := path / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for name in OWN_ENTRIES:
        if (path / name).exists():
            (path / name).rename(aside / name)
    return aside
