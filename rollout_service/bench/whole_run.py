"""One run of the real command, watched from outside: its log, the CPU time and the memory of its processes.

    with WholeRun(["train", ...], directory) as run:
        while run.wait(POLL_S): ... run.log, run.usage()

Progress comes from the run's own `metrics.jsonl`, CPU time and memory from the system. What must never happen: a run
that outlives the `with`, or this process, however it ends; a wait without a deadline. Left to others: what is run, and
what the figures mean.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

from rollout_service.bench.report import usable_cores
from rollout_service.bench.windows import Mark
from rollout_service.errors import RunFailed
from rollout_service.lifeline import owned

ROOT: Final = Path(__file__).resolve().parents[2]
POLL_S: Final = 0.1
STOP_S: Final = 8.0
"""A run that was told to stop leaves within about 4 s; then it is killed."""
DEADLINE_S: Final = 300.0
ROLES: Final = {"workers": "actors", "learner": "learner"}
"""Module of a child's command line -> how its role is called here. The rest is the service."""
LAST_WORDS: Final = 4000


@dataclass(frozen=True)
class Usage:
    """CPU seconds and memory of a run's living processes at one moment."""

    time: float
    cpu_s: Mapping[int, float]
    """Process id -> CPU seconds so far."""
    resident: Mapping[int, int]
    """Process id -> bytes of resident memory, shared segments included."""
    roles: Mapping[int, str]
    """Process id -> actors, learner or service."""

    def pids(self, role: str) -> list[int]:
        return [pid for pid, found in self.roles.items() if found == role]

    def resident_mib(self, role: str) -> list[float]:
        """Of each process of that role."""
        return [self.resident[pid] / 2**20 for pid in self.pids(role)]

    def cpu_shares(self, before: Usage) -> dict[str, float]:
        """`cpu_<role>_share` of all usable cores since `before`; `cpu_idle_share` is what none of them used."""
        whole = (self.time - before.time) * usable_cores()
        spent = dict.fromkeys(("actors", "learner", "service"), 0.0)
        for pid, seconds in self.cpu_s.items():
            spent[self.roles[pid]] += max(0.0, seconds - before.cpu_s.get(pid, seconds))
        shares = {f"cpu_{role}_share": min(1.0, seconds / whole) for role, seconds in spent.items()}
        return {**shares, "cpu_idle_share": max(0.0, 1.0 - sum(shares.values()))}


@dataclass
class WholeRun:
    """`rollout-service <words>` in a session of its own."""

    words: Sequence[str]
    run_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float = DEADLINE_S
    log: list[dict[str, Any]] = field(default_factory=list)
    """Lines of `metrics.jsonl` so far, one per update."""

    def __enter__(self) -> Self:
        self.output = (self.run_dir.parent / f"{self.run_dir.name}.out").open("w+")
        self.begun = time.perf_counter()
        self.clock_offset = time.time() - self.begun
        command = [sys.executable, "-m", "rollout_service", *self.words, "--run-dir", str(self.run_dir)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=owned(environment(self.environment)),
            start_new_session=True,
        )
        self.tree = psutil.Process(self.process.pid)
        self._read = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self.output.close()

    def wait(self, seconds: float = POLL_S) -> bool:
        """Reads on in the log after at most so many seconds. False once the run has ended.

        Raises RunFailed with its last words if it broke, or if it runs for longer than its deadline.
        """
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._read_on()
            if time.perf_counter() - self.begun > self.deadline_s:
                raise RunFailed(
                    f"the run {' '.join(self.words)} did not end within {self.deadline_s:g} s\n{self.said()}"
                ) from None
            return True
        self._read_on()
        if code:
            raise RunFailed(f"the run {' '.join(self.words)} ended with exit code {code}\n{self.said()}")
        return False

    def stop(self) -> None:
        """Ends it, if it still runs: asked first, then by force, children included."""
        if self.process.poll() is not None:
            return
        children = self.children()
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        psutil.wait_procs(children, timeout=STOP_S)

    def said(self) -> str:
        """The last of what it printed."""
        self.output.flush()
        self.output.seek(0)
        return self.output.read()[-LAST_WORDS:].strip()

    def children(self) -> list[psutil.Process]:
        try:
            return list(self.tree.children(recursive=True))
        except psutil.Error:
            return []

    def usage(self) -> Usage:
        """Now. A process that is just leaving is not in it."""
        cpu_s, resident, roles = {}, {}, {}
        now = time.perf_counter()
        for process in (self.tree, *self.children()):
            try:
                with process.oneshot():
                    times, command = process.cpu_times(), process.cmdline()
                    resident[process.pid] = process.memory_info().rss
            except psutil.Error:
                continue
            cpu_s[process.pid] = times.user + times.system
            roles[process.pid] = next((role for module, role in ROLES.items() if module in command), "service")
        return Usage(now, cpu_s, resident, roles)

    def marks(self) -> list[Mark]:
        """Progress so far, in seconds of the monotonic clock."""
        return [Mark(line["wall_time"] - self.clock_offset, int(line["env_steps"])) for line in self.log]

    def _read_on(self) -> None:
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            # A line that is just being written is left for the next time.
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        self.log += [json.loads(line) for line in whole.splitlines()]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Of a child: this source tree first on its path, and no tuning of a BLAS for this very machine."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    path = os.pathsep.join(filter(None, (extra.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**inherited, **extra, "PYTHONPATH": path}
