"""What comes before the first process of a run: settings made definite, and the probe child that finds out the RunSpec.

Who calls: the supervisor. Imports neither torch nor gymnasium: the probe does, and lives only for that.
What must never happen: a segment, a run directory or an actor that exists although the settings cannot be run.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from rollout_service.config import TrainConfig
from rollout_service.errors import ConfigError, RunFailed, SpaceNotSupported
from rollout_service.launch.children import (
    TAIL_LINES,
    ChildEnded,
    describe_exit,
    kill_with_descendants,
    start_interpreter,
    watch,
)
from rollout_service.launch.cpu import UsableCores, usable_cores
from rollout_service.launch.signals import Interrupted, Interruption
from rollout_service.lifeline import role_of_this_process
from rollout_service.offspring import MARK_VARIABLE, end, new_family
from rollout_service.runspec import RunSpec

PROBE_DEADLINE_S: Final = 300.0
"""An env that loads assets may take its time; one that never comes back is an error."""
EXIT_REFUSED: Final = 2
NEEDED_MODULES: Final = ("fcntl", "resource", "_posixshmem")
"""Standard modules of a system this runs on."""


def require_platform() -> None:
    """Raises ConfigError where runs are not supported; importing and `--help` work everywhere."""
    missing = [name for name in NEEDED_MODULES if not importable(name)]
    if not sys.platform.startswith("linux") or missing:
        why = f"missing here: {', '.join(missing)}" if missing else f"this is {sys.platform}"
        raise ConfigError(
            f"runs need Linux with POSIX shared memory and file locks; {why}; use a Linux container or virtual machine "
            "(on Windows: WSL 2)"
        )


@contextmanager
def outside_of_other_runs() -> Iterator[None]:
    """Inside, a run is under way. Raises ConfigError in a role of another run, or in the middle of one in this process.

    That is what becomes of a script that trains as it is imported, when its env stands in it too: whoever makes the env
    imports the script, and would train again, and again.
    """
    role = "process" if _under_way.get() else role_of_this_process()
    if role is not None:
        raise ConfigError(
            f"a training was started inside the {role} of another one, where the module of its env was imported; let "
            'the script train under its main guard only: `if __name__ == "__main__":`'
        )
    before = _under_way.set(True)
    try:
        yield
    finally:
        _under_way.reset(before)


_under_way: ContextVar[bool] = ContextVar("under_way", default=False)


def importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def resolve(config: TrainConfig, cores: UsableCores | None = None) -> tuple[TrainConfig, str]:
    """The settings with `num_actors` as a number, and a line that says how it was chosen.

    Raises ConfigError for a file that could not be written in the end.
    """
    if isinstance(config.num_actors, int):
        chosen = "as set"
    else:
        cores = cores if cores is not None else usable_cores()
        chosen = f"auto: {cores.count} usable cores, {cores.reason}"
        config = validated(config.model_dump() | {"num_actors": cores.count})
    if (dump := config.dump_batch) is not None:
        if dump.is_dir() or not dump.absolute().parent.is_dir():
            raise ConfigError(f"dump_batch {dump} has to be a file in a directory that exists")
        # The learner may run in another directory than this process.
        config = config.model_copy(update={"dump_batch": dump.absolute()})
    count = f"{config.num_actors}" if config.max_actors is None else f"{config.num_actors} to {config.max_actors}"
    return config, f"{count} actors x {config.envs_per_actor} envs ({chosen})"


def validated(settings: dict[str, object]) -> TrainConfig:
    """Settings as a TrainConfig. Raises ConfigError in one line that names each setting that is wrong."""
    try:
        return TrainConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(one_line(error)) from None


def one_line(error: ValidationError) -> str:
    """What pydantic found, as `setting value: reason`, joined into one line."""
    parts = []
    for entry in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in entry["loc"] if isinstance(part, str) and part.islower())
        reason = entry["msg"].removeprefix("Value error, ")
        text = reason[:1].lower() + reason[1:]
        part = f"{where} is {entry['input']!r}: {text}" if where else text
        if part not in parts:
            parts.append(part)
    return "; ".join(parts)


@dataclass(frozen=True)
class Probed:
    """What the probe found. warnings: what can be run but looks wrong, a line each."""

    spec: RunSpec
    warnings: tuple[str, ...] = ()


def probe(config: TrainConfig, inbox: queue.SimpleQueue[object]) -> Probed:
    """The RunSpec of a run with these settings, from a child process.

    Raises ConfigError or SpaceNotSupported with the child's one line, RunFailed with its last words if it broke,
    Interrupted if a stop signal arrives in the inbox meanwhile.
    """
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as words:
        mark = new_family()
        process = start_interpreter(
            ["rollout_service.launch.probe"], {MARK_VARIABLE: mark}, stdin=subprocess.PIPE, stdout=answer, stderr=words
        )
        watch(process, inbox)
        try:
            _feed(process, config.to_json().encode())
            _await_end(process, inbox)
        finally:
            if process.poll() is None:
                kill_with_descendants(process)
                process.wait()
            end(mark)
        answer.seek(0)
        words.seek(0)
        return _read_answer(process.returncode, answer.read(), words.read().decode("utf-8", "replace"))


def _feed(process: subprocess.Popen[bytes], text: bytes) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(text)


def _await_end(process: subprocess.Popen[bytes], inbox: queue.SimpleQueue[object]) -> None:
    deadline = time.monotonic() + PROBE_DEADLINE_S
    while True:
        try:
            message = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise RunFailed(
                f"the env was not ready within {PROBE_DEADLINE_S:.0f} s; does its constructor or reset hang?"
            ) from None
        match message:
            case ChildEnded(process=ended) if ended is process:
                process.wait()
                return
            case Interruption() as interruption:
                raise Interrupted(interruption)
            case _:
                pass


def _read_answer(code: int, answer: bytes, words: str) -> Probed:
    lines = answer.decode("utf-8", "replace").strip().splitlines()
    last = lines[-1] if lines else ""
    if code == 0 and lines:
        return Probed(RunSpec.from_json(last), tuple(json.loads(line)["warning"] for line in lines[:-1]))
    if code == EXIT_REFUSED:
        try:
            refusal = json.loads(last)
            kind, message = refusal["error"], refusal["message"]
        except (ValueError, KeyError, TypeError):
            pass
        else:
            raise (SpaceNotSupported if kind == SpaceNotSupported.__name__ else ConfigError)(message)
    shown = "\n".join(words.rstrip().splitlines()[-TAIL_LINES:])
    raise RunFailed(f"the env could not be tried out: the probe ended with {describe_exit(code)}\n{shown}".rstrip())
