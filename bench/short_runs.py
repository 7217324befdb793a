"""Many short runs: some left to themselves, some stopped at a random moment. None may leave anything behind.

A moment is drawn from the one on at which the command can hear a signal, some hundredths of a second after its start,
to a little beyond the end of such a run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from bench.watched import PATIENCE_S, WatchedRun, elapse, say, short_directory, until
from rollout_service import checkpoint
from tests.fixtures.machine import run_command

WORDS: Final = (
    *("--env", "Memory/TMaze-v0", "--env-kwargs", "corridor=3", "--num-actors", "2", "--envs-per-actor", "2"),
    *("--num-steps", "16", "--hidden-dim", "8", "--epochs", "1", "--envs-per-minibatch", "2", "--learner-threads", "1"),
    *("--checkpoint-interval", "2", "--no-tensorboard", "--json"),
)
UPDATES: Final = 10
BAR_S: Final = 15.0
STOPS: Final = {
    "SIGINT": (signal.SIGINT, {130}),
    "SIGTERM": (signal.SIGTERM, {143}),
    "SIGINT twice": (signal.SIGINT, {130}),
    "SIGTERM twice": (signal.SIGTERM, {143}),
    "SIGKILL": (signal.SIGKILL, {-signal.SIGKILL}),
}
"""Name -> signal, and the exit codes it may lead to; a run that has ended by then may have 0 as well."""
END_S: Final = 30.0
SWEPT_S: Final = 120.0
SAID_EVERY: Final = 10


def words(seed: int) -> tuple[str, ...]:
    return (*WORDS, "--total-steps", str(UPDATES * 2 * 2 * 16), "--seed", str(seed))


def run_to_the_end(directory: Path, count: int, bar_s: float = BAR_S) -> dict[str, Any]:
    """So many runs in a row, each in a directory of its own below this one, none longer than `bar_s`."""
    took, problems = [], []
    for number in range(count):
        place = _fresh(directory)
        begin = time.monotonic()
        with WatchedRun(*words(number), directory=place) as run:
            code = run.service.wait(PATIENCE_S)
            took.append(time.monotonic() - begin)
            problems += [f"run {number}: {what} is left" for what in run.leftovers()]
            if code != 0 or took[-1] >= bar_s:
                problems.append(
                    f"run {number}: exit code {code} after {took[-1]:.1f} s\n{run.service.stderr()[-2000:]}"
                )
        if number % SAID_EVERY == SAID_EVERY - 1:
            say(f"{number + 1} of {count} runs in a row, the longest took {max(took):.1f} s")
    return {"runs": count, "longest_s": round(max(took, default=0.0), 2), "problems": problems, "right": not problems}


def run_and_stop(directory: Path, count: int, seed: int, longest_s: float) -> dict[str, Any]:
    """So many runs, each stopped at a random moment before `longest_s`."""
    rng = random.Random(seed)
    codes: Counter[str] = Counter()
    problems: list[str] = []
    ends: list[float] = []
    killed: list[WatchedRun] = []
    sockets = short_directory()
    for number in range(count):
        name = list(STOPS)[number % len(STOPS)]
        moment = rng.uniform(0.0, longest_s)
        with WatchedRun(
            *words(number), directory=_fresh(directory), sockets=sockets if name == "SIGKILL" else None
        ) as run:
            found = _stop(run, name, moment, rng)
        killed += [run] * (name == "SIGKILL")
        codes[f"{name}: {found['code']}"] += 1
        ends.append(found["end_s"])
        problems += [f"run {number}, {name} after {moment:.2f} s: {problem}" for problem in found["problems"]]
        if number % SAID_EVERY == SAID_EVERY - 1:
            say(f"{number + 1} of {count} runs stopped, the longest end took {max(ends):.1f} s")
    swept_s = _sweep(directory, killed, sockets)
    if swept_s is None:
        problems += [f"{what} is left for good" for run in killed for what in run.leftovers(0.0)]
    else:
        sockets.rmdir()
    return {
        "runs": count,
        "swept_s": swept_s,
        "exit_codes": dict(sorted(codes.items())),
        "longest_end_s": round(max(ends, default=0.0), 2),
        "problems": problems,
        "right": not problems,
    }


def _stop(run: WatchedRun, name: str, moment: float, rng: random.Random) -> dict[str, Any]:
    signum, expected = STOPS[name]
    until(lambda: run.over or hears(run.pid, signal.SIGTERM), "a command that hears signals")
    elapse(moment)
    at = time.monotonic()
    _send(run, name, signum)
    if name.endswith("twice"):
        elapse(rng.uniform(0.0, 0.5))
        _send(run, name, signum)
    code = run.service.wait(END_S)
    end_s = time.monotonic() - at
    problems = []
    if code not in {*expected, 0}:
        problems.append(f"exit code {code}\n{run.service.stderr()[-2000:]}")
    if "Traceback" in (said := run.service.stderr()):
        problems.append(f"a traceback\n{said[-2000:]}")
    left = run.leftovers()
    if signum == signal.SIGKILL:
        # Nobody could take its memory down; the next start does, or `clean`.
        left = [what for what in left if what.startswith("process")]
    problems += [f"{what} is left" for what in left]
    problems += _checkpoint_problems(run, whole=name in ("SIGINT", "SIGTERM"))
    return {"code": code, "end_s": end_s, "problems": problems}


def _checkpoint_problems(run: WatchedRun, *, whole: bool) -> list[str]:
    """whole: the learner had time to save, so the newest checkpoint is of the last update that was logged."""
    if not run.run_dir.is_dir():
        return []
    found, logged = checkpoint.newest(run.run_dir), len(run.records())
    saved = found.checkpoint.manifest.update if found.checkpoint is not None else 0
    problems = [f"damaged: {each}" for each in found.damaged]
    return problems + [f"update {logged} was logged, {saved} was saved"] * (whole and saved != logged)


def _sweep(directory: Path, killed: list[WatchedRun], sockets: Path) -> float | None:
    """`clean` until nothing of the killed runs is left. Seconds, or None if it does not come to that.

    It takes its time: what is young may belong to a run that is just starting.
    """
    begin, pause = time.monotonic(), threading.Event()
    while any(run.leftovers(0.0) for run in killed):
        if time.monotonic() - begin > SWEPT_S:
            return None
        run_command("clean", cwd=directory, ROLLOUT_SERVICE_SOCKET_DIR=str(sockets))
        pause.wait(1.0)
    return round(time.monotonic() - begin, 1)


def _send(run: WatchedRun, name: str, signum: int) -> None:
    """Ctrl-C reaches the whole group, as from a terminal; the others the service alone."""
    if run.over:
        return
    if name.startswith("SIGINT"):
        run.service.signal_group(signum)
    else:
        run.service.process.send_signal(signum)


def hears(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (signum - 1) & 1)


def _fresh(directory: Path) -> Path:
    place = directory / "short"
    if place.exists():
        shutil.rmtree(place)
    os.makedirs(place)
    return place
