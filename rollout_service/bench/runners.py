"""A peer's run: its runner (bench/peers/run_<peer>.py) in its own environment, heard until it has said enough.

    SIDE {"version": ..., "settings": ...}     MARK {"time": ..., "env_steps": ...} per iteration     on standard output

Reads no peer's code and needs none installed. What must never happen: a process of a peer that outlives its turn, or a
wait without a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from rollout_service.bench.whole_run import ROOT, environment
from rollout_service.bench.windows import Mark
from rollout_service.errors import RunFailed

PEERS: Final = {
    "puf": "PufferLib",
    "sf": "Sample Factory",
    "sb3": "sb3-contrib",
    "torchrl": "TorchRL",
    "rllib": "RLlib",
}
"""Name of its environment -> name."""
RUNNERS: Final = ROOT / "bench" / "peers"
HOME_VARIABLE: Final = "PEERS_HOME"
START_S: Final = 90.0
"""Importing and the warm-up, at most."""
LEAVE_S: Final = 0.5
"""Once it has said enough; then it is killed: some need seconds to end."""
LAST_WORDS: Final = 2000
SHARED_MEMORY: Final = Path("/dev/shm")
"""Where torch keeps tensors that processes share, under the pid of their maker, which a killed one leaves behind."""


@dataclass(frozen=True)
class Heard:
    """What a runner said."""

    version: str
    settings: str
    marks: tuple[Mark, ...]


def interpreter(peer: str) -> Path:
    """Of the peer's environment, whether it is there or not."""
    home = Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".cache" / "rollout-peers")
    return home / peer / "bin" / "python"


def installed(peer: str) -> bool:
    return interpreter(peer).exists()


def run_peer(peer: str, env: str, envs: int, seconds: float) -> Heard:
    """One run from start to end. Raises RunFailed with the runner's last words, or if it is not through in time."""
    version = settings = ""
    marks: list[Mark] = []
    with tempfile.TemporaryFile("w+") as errors:
        words = ["--env", env, "--envs", str(envs), "--seconds", str(seconds)]
        with runner(peer, words, errors=errors.fileno()) as process:
            for line in _lines(process, time.monotonic() + START_S + 2 * seconds):
                kind, _, text = line.partition(" ")
                if kind == "SIDE":
                    side = json.loads(text)
                    version, settings = side["version"], side["settings"]
                elif kind == "MARK":
                    mark = json.loads(text)
                    marks.append(Mark(mark["time"], int(mark["env_steps"])))
            code = process.poll()
        if code or not marks:
            errors.seek(0)
            raise RunFailed(f"its runner ended with exit code {code}\n{errors.read()[-LAST_WORDS:].strip()}".rstrip())
    return Heard(version, settings, tuple(marks))


@contextmanager
def runner(
    peer: str,
    words: Sequence[str],
    *,
    stdout: int = subprocess.PIPE,
    errors: int = subprocess.DEVNULL,
    extra: dict[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """The process of a runner; gone at the end, with all that it started. Raises RunFailed if it is not installed."""
    if not installed(peer):
        raise RunFailed(f"{PEERS[peer]} is not installed; {RUNNERS / 'install.sh'} {peer} does that")
    command = [str(interpreter(peer)), "-W", "ignore", str(RUNNERS / f"run_{peer}.py"), *words]
    clean = environment(extra or {})
    # Our own source tree must not be importable there, whatever a peer calls its modules.
    clean.pop("PYTHONPATH")
    with (
        # Some leave links and folders where they run, and in the system's place for temporary files.
        tempfile.TemporaryDirectory(prefix="rs-peer-", ignore_cleanup_errors=True) as directory,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=errors,
            text=True,
            env={**clean, "TMPDIR": directory},
            cwd=directory,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            _end(process)


def _lines(process: subprocess.Popen[str], deadline: float) -> Iterator[str]:
    """Standard output line by line, until the runner closes it. Raises RunFailed past the deadline."""
    said: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(ValueError):
            for line in process.stdout or ():
                said.put(line)
        said.put(None)

    threading.Thread(target=listen, name="peer-output", daemon=True).start()
    while True:
        try:
            line = said.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise RunFailed("its runner was not through in time") from None
        if line is None:
            return
        yield line


def _end(process: subprocess.Popen[str]) -> None:
    """Waits a moment, then kills it and all that it started, also what went into a session of its own."""
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        started = []
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LEAVE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(psutil.Error):
            child.kill()
    process.wait()
    psutil.wait_procs(started, timeout=LEAVE_S)
    for pid in (process.pid, *(child.pid for child in started)):
        for left in SHARED_MEMORY.glob(f"torch_{pid}_*"):
            left.unlink(missing_ok=True)
