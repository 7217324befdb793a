"""A run under test: started like any other, watched from outside all along, and looked at once it is over.

`Watch` asks the service for its report, as `rollout-service status` does, many times a second: what it says of itself
has to be right at every moment, not just in the end. `leftovers` says what of a run is still there. Guests are actors
that are started by hand. Whoever uses this may kill and stop what belongs to its own run; runs of other people on the
same machine are never looked at.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

from rollout_service.control.client import Client
from rollout_service.control.endpoints import SOCKET_DIR_VARIABLE, SOCKET_PREFIX
from rollout_service.control.messages import Hello, Role, Status, StatusReport
from rollout_service.errors import RolloutServiceError
from rollout_service.launch.cleanup import run_header
from rollout_service.launch.train import ACCOUNT_NOTE
from rollout_service.lifeline import PARENT_VARIABLE, owned
from rollout_service.memory.segment import SegmentInfo, list_segments
from tests.fixtures.machine import Service, environment, hear_stop_signals

POLL_S: Final = 0.005
PATIENCE_S: Final = 120.0
"""For anything that is waited for here."""
SAMPLE_EVERY_S: Final = 0.05
ANSWER_S: Final = 10.0
WORKING: Final = ("waiting", "collecting", "late")
"""States of an actor that has joined."""
STEADY_S: Final = 1.0
BEGAN: Final = time.monotonic()


def say(text: str) -> None:
    """A line for whoever is watching, with the seconds since the start of this program."""
    print(f"{time.monotonic() - BEGAN:7.1f} s  {text}", file=sys.stderr, flush=True)


def take_signals() -> None:
    """From now on SIGTERM ends this program by an exception, so that what it has started goes with it.

    Runs that it starts hear all stop signals, also if this program runs in the background.
    """
    hear_stop_signals()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def until(holds: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> Any:
    """The first true value of `holds()`."""
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while not (value := holds()):
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {within_s:g} s: {what}")
        pause.wait(POLL_S)
    return value


def short_directory() -> Path:
    """A new one with a short path: that of a socket has 100 bytes, and the directory of a run may be deep."""
    return Path(tempfile.mkdtemp(prefix="rs-chaos-", dir="/tmp"))


def elapse(seconds: float) -> None:
    """A random moment is a moment of the clock: nothing that can be waited for marks it."""
    threading.Event().wait(max(0.0, seconds))


class WatchedRun:
    """`rollout-service train <words>` in `directory`, with a socket directory of its own. A context manager."""

    def __init__(self, *words: str, directory: Path, sockets: Path | None = None) -> None:
        """sockets: where its socket directory goes; by default into a directory that is removed with this."""
        self.directory = directory
        self.run_dir = directory / "run"
        self._own_sockets = sockets is None
        self.sockets = sockets or short_directory()
        extra = owned({SOCKET_DIR_VARIABLE: str(self.sockets)})
        self.service = Service("--run-dir", "run", *words, cwd=directory, **extra)
        self._guests: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.__exit__(kind, error, trace)
        for guest in self._guests:
            guest.kill()
            guest.wait()
        if self._own_sockets:
            shutil.rmtree(self.sockets, ignore_errors=True)

    @property
    def pid(self) -> int:
        return self.service.process.pid

    @property
    def over(self) -> bool:
        return self.service.process.poll() is not None

    def segments(self) -> list[SegmentInfo]:
        """Those that this run's service owns, or has left behind."""
        run_dir = str(self.run_dir)
        return [
            found
            for found in list_segments()
            if found.owner_pid == self.pid or run_header(found).get("run_dir") == run_dir
        ]

    def endpoint(self) -> str:
        """Where the service listens, once it does."""

        def found() -> str | None:
            return next((each for s in self.segments() if s.ready and (each := run_header(s).get("endpoint"))), None)

        endpoint: str = until(lambda: found() or (self.over and "none"), "the run's segment")
        if self.over:
            raise SystemExit(f"the run has ended at its start:\n{self.service.stderr()}")
        return endpoint

    def processes(self) -> list[psutil.Process]:
        """All that live of the run: it has a session of its own, and children stay in it."""
        found = []
        for pid in psutil.pids():
            try:
                if os.getsid(pid) == self.pid and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def roles(self, module: str) -> list[psutil.Process]:
        """Its processes `python -m <module>`."""
        found = []
        for process in self.processes():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if f" -m {module} " in f" {' '.join(words)} ":
                found.append(process)
        return found

    def invite(self, endpoint: str) -> None:
        """Starts a guest."""
        words = [sys.executable, "-m", "workers", "--connect", endpoint]
        inherited = {name: value for name, value in environment().items() if name != PARENT_VARIABLE}
        with self._log_of(len(self._guests)).open("w") as log:
            self._guests.append(
                subprocess.Popen(
                    words, cwd=self.directory, env=inherited, stdout=log, stderr=log, start_new_session=True
                )
            )

    def guests(self) -> list[psutil.Process]:
        """Those that live."""
        found = []
        for guest in self._guests:
            if guest.poll() is None:
                found.append(psutil.Process(guest.pid))
        return found

    def dismiss_guests(self) -> None:
        """Asks them to leave, and waits until they have."""
        for guest in self._guests:
            guest.send_signal(signal.SIGTERM)
        until(lambda: not self.guests(), "all guests have left")

    def ends_of_guests(self) -> list[tuple[int, str]]:
        """Exit code and words of each that is gone."""
        ended = [(guest.poll(), self._log_of(number)) for number, guest in enumerate(self._guests)]
        return [(code, log.read_text()) for code, log in ended if code is not None]

    def _log_of(self, guest: int) -> Path:
        return self.directory / f"guest-{guest}.txt"

    def holdings(self) -> dict[str, int]:
        """What the service has open: the fewest descriptors and threads within a second, and segments."""
        process, until_then, pause = psutil.Process(self.pid), time.monotonic() + STEADY_S, threading.Event()
        descriptors: list[int] = []
        threads: list[int] = []
        while not descriptors or time.monotonic() < until_then:
            descriptors.append(process.num_fds())
            threads.append(process.num_threads())
            pause.wait(SAMPLE_EVERY_S)
        return {"descriptors": min(descriptors), "threads": min(threads), "segments": len(self.segments())}

    def leftovers(self, processes_within_s: float = 10.0) -> list[str]:
        """What of the run is still there, although its service is gone."""
        deadline, pause = time.monotonic() + processes_within_s, threading.Event()
        while (alive := [*self.processes(), *self.guests()]) and time.monotonic() < deadline:
            pause.wait(POLL_S)
        return [
            *(f"process {process.pid}" for process in alive),
            *(f"segment {segment.name}" for segment in self.segments()),
            *(f"socket directory {path.name}" for path in self.sockets.glob(f"{SOCKET_PREFIX}*")),
        ]

    def records(self) -> list[dict[str, float]]:
        """The run's log. A line that is just being written is left out."""
        log = self.run_dir / "metrics.jsonl"
        text = log.read_text() if log.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def accounts(self) -> list[dict[str, int]]:
        """What the service wrote about where every env step went; one for each of its lives."""
        text = (self.run_dir / "run.log").read_text()
        return [json.loads(found) for found in re.findall(f"{re.escape(ACCOUNT_NOTE)}(.*)$", text, re.M)]


def tensorboard_steps(run_dir: Path) -> list[int]:
    """x of each update, as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    # It says at each restart that it drops the events beyond; that is what is asked for here.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={SCALARS: 0})
    events.Reload()
    return [event.step for event in events.Scalars("learner/version")]


@dataclass(frozen=True)
class Sample:
    """One report. at: seconds of the monotonic clock."""

    at: float
    committed: int
    missing: int
    updates: int
    version: int
    furthest_lag: int
    actors: tuple[tuple[int, bool], ...]
    """(incarnation, has joined) per place of the run's own actors."""
    guests: int
    """How many have joined."""

    @property
    def all_there(self) -> bool:
        return all(joined for _, joined in self.actors)


class Watch:
    """Asks one run for its report in a thread of its own, until it is told to stop. A context manager."""

    def __init__(self, endpoint: str, actors: int) -> None:
        """actors: how many the run starts itself."""
        self._actors = actors
        self.samples: list[Sample] = []
        self.unanswered = 0
        self._endpoint = endpoint
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._leave.set()
        self._thread.join(2 * ANSWER_S)

    @property
    def last(self) -> Sample | None:
        return self.samples[-1] if self.samples else None

    def since(self, at: float) -> list[Sample]:
        return self.samples[bisect_left(self.samples, at, key=lambda sample: sample.at) :]

    def rate(self, begin: float, end: float) -> float:
        """Committed env steps per second between two moments."""
        inside = [sample for sample in self.since(begin) if sample.at <= end]
        if len(inside) < 2:
            return 0.0
        return (inside[-1].committed - inside[0].committed) / (inside[-1].at - inside[0].at)

    def _run(self) -> None:
        while not self._leave.is_set():
            client = Client(self._endpoint, Hello(role=Role.OBSERVER, pid=os.getpid()), connect_deadline_s=ANSWER_S)
            try:
                client.connect()
                while not self._leave.wait(SAMPLE_EVERY_S):
                    answer = client.exchange(Status(), StatusReport, resend_every_s=1.0, deadline_s=ANSWER_S)
                    if isinstance(answer, StatusReport):
                        self.samples.append(_sample(answer.report, self._actors))
            except RolloutServiceError:
                self.unanswered += not self._leave.is_set()
            finally:
                client.close()


def _sample(report: dict[str, Any], actors: int) -> Sample:
    places = [(actor["incarnation"], actor["state"] in WORKING) for actor in report["actors"]]
    return Sample(
        at=time.monotonic(),
        committed=report["account"]["committed"],
        missing=report["account"]["missing"],
        updates=report["updates"],
        version=report["version"] or 0,
        furthest_lag=max(map(int, report["policy_lags"]), default=0),
        actors=tuple(places[:actors]),
        guests=sum(joined for _, joined in places[actors:]),
    )
