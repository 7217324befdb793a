"""The processes a run consists of: how they are started, watched, shown their end, and described when dead.

    supervisor --Popen--> probe | learner | actors           stdout and stderr: one log file each in <run dir>/logs
               <--ChildEnded in the supervisor's inbox--      one sleeping thread per child, no polling

Who calls: the supervisor's main thread, the only one that starts, signals or reaps. The watching thread waits without
reaping, so a pid cannot be reused between a child's death and a signal meant for it.
What must never happen: a fork of this process that goes on as a child (children are fresh interpreters), a child that
hears Ctrl-C, a pipe that blocks a child because nobody reads it.
Left to others: when to start and stop (supervisor), leaving when the parent dies (lifeline, in the child), what a
child that is gone had started (offspring).
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from rollout_service.control.messages import Role
from rollout_service.launch.cpu import children_on
from rollout_service.lifeline import PARENT_VARIABLE
from rollout_service.offspring import MARK_VARIABLE, new_family

ONE_THREAD: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
"""Actors compute on one thread each; pools sized to the machine in every process would fight for its cores."""
TAIL_LINES: Final = 40
"""Lines of a dead child's log that are worth showing: a traceback with its cause."""
TAIL_BYTES: Final = 32 * 1024


@dataclass(frozen=True)
class Child:
    """One process of the run."""

    role: Role
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    """Where this child's own output begins in the log."""
    actor_id: int = -1
    incarnation: int = 0

    @property
    def name(self) -> str:
        """E.g. `actor 2 (incarnation 0, pid 4711)`."""
        if self.role is Role.ACTOR:
            return f"actor {self.actor_id} (incarnation {self.incarnation}, pid {self.process.pid})"
        return f"{self.role.value} (pid {self.process.pid})"

    def log_tail(self) -> str:
        """The last lines this child wrote."""
        return tail(self.log, self.log_start)


@dataclass(frozen=True)
class ChildEnded:
    """A child's process has ended and waits to be reaped."""

    process: subprocess.Popen[bytes]


@dataclass(frozen=True)
class ChildGone:
    """A child has ended with this exit code, and what the service had heard of it by then has been said."""

    child: Child
    code: int


@dataclass(frozen=True)
class Launcher:
    """Starts the children of one run."""

    inbox: queue.SimpleQueue[object]
    """Where ChildEnded goes."""
    endpoint: str
    run_dir: Path
    resume: bool
    cores: Sequence[int] = ()
    """What actors are pinned to, in turns; empty: they are not."""
    family: str = field(default_factory=new_family)
    """Begins the marks of all its children."""

    def core_of(self, actor_id: int) -> int | None:
        """The core that an actor keeps to, whichever incarnation."""
        return self.cores[actor_id % len(self.cores)] if self.cores else None

    def mark(self, log: Path) -> str:
        """What the child with this log, and all that comes of it, is found by."""
        return f"{self.family}{log.stem}/"

    def learner(self, *, restored: bool = False) -> Child:
        """restored: it follows one that was lost, and goes on from the newest checkpoint in any case."""
        arguments = ["learner", "--connect", self.endpoint, "--run-dir", str(self.run_dir)]
        if self.resume or restored:
            arguments.append("--resume")
        return self._start(Role.LEARNER, arguments, {}, "learner.log")

    def actor(self, actor_id: int, incarnation: int) -> Child:
        arguments = ["workers", "--connect", self.endpoint]
        arguments += ["--actor", str(actor_id), "--incarnation", str(incarnation)]
        environment = {**ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""}
        return self._start(
            Role.ACTOR, arguments, environment, f"actor-{actor_id}.{incarnation}.log", actor_id, incarnation,
            core=self.core_of(actor_id),
        )  # fmt: skip

    def _start(
        self,
        role: Role,
        arguments: list[str],
        environment: Mapping[str, str],
        log_name: str,
        actor_id: int = -1,
        incarnation: int = 0,
        core: int | None = None,
    ) -> Child:
        """Raises OSError if the system has no process, descriptor or memory left for it."""
        log = self.run_dir / "logs" / log_name
        environment = {**environment, MARK_VARIABLE: self.mark(log)}
        with _opened(log) as output, children_on(core):
            begin = output.tell()
            process = start_interpreter(arguments, environment, stdout=output, stderr=subprocess.STDOUT)
        watch(process, self.inbox)
        return Child(role, process, log, begin, actor_id, incarnation)


def _opened(log: Path) -> IO[bytes]:
    """A child's log; on a disk that has no room for another file its output goes nowhere."""
    try:
        return log.open("ab")
    except OSError:
        return open(os.devnull, "ab")


def start_interpreter(
    arguments: list[str],
    environment: Mapping[str, str],
    *,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    stdin: int | IO[bytes] = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """`python -m <arguments>` as a child that is born deaf to Ctrl-C and knows whose child it is."""
    command = [sys.executable, *_safe_path(), "-m", *arguments]
    inherited = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", PARENT_VARIABLE: str(os.getpid())}
    # The mask of this thread is inherited: between the fork and the child's own SIG_IGN no Ctrl-C can reach it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, env={**inherited, **environment}, close_fds=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def watch(process: subprocess.Popen[bytes], inbox: queue.SimpleQueue[object]) -> None:
    """Puts ChildEnded into the inbox once the process has ended. It stays a zombie until the main thread reaps it.

    Raises OSError, and the process is gone, if there is no thread to be had.
    """

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        inbox.put(ChildEnded(process))

    try:
        threading.Thread(target=wait, name=f"watch-{process.pid}", daemon=True).start()
    except RuntimeError as error:
        process.kill()
        process.wait()
        raise OSError(errno.EAGAIN, str(error)) from error


def kill_with_descendants(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a child and for what it started itself, e.g. the processes of its envs."""
    # Imported here: it needs Unix modules, and `--help` has to work without them.
    import psutil

    with contextlib.suppress(psutil.Error, OSError):  # also for want of a descriptor to look with
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                descendant.kill()
    process.kill()


def describe_exit(code: int) -> str:
    """`exit code 3`, or `signal 11 (SIGSEGV)` for the negative codes of subprocess."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def tail(path: Path, begin: int = 0, lines: int = TAIL_LINES) -> str:
    """The last lines of a log from byte `begin` on."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _safe_path() -> list[str]:
    """-P keeps a `workers.py` or `learner.py` of the user's directory from being run instead of ours.

    Not in a source checkout that is run in place: there the current directory is where our packages are.
    """
    return [] if Path(__file__).resolve().parents[2] == Path.cwd() else ["-P"]
