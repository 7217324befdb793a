"""One long run that is left alone, and what its processes take meanwhile: memory, descriptors, threads, segments.

`python -m bench.soak --seconds 1200`, or `make soak`. Results: bench/results/soak.json, and the same on standard
output. The exit code is 1 if a process grew by more than GROWTH_LIMIT_MIB after its warm-up, or if the number of
descriptors, threads or segments did not stay what it was.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from bench.faults import EXIT_CTRL_C, settings
from bench.watched import Watch, WatchedRun, elapse, say, take_signals, until
from rollout_service.bench.report import record

RESULTS = Path(__file__).parent / "results" / "soak.json"
COMMAND = "python -m bench.soak"
ACTORS: Final = 2
GROWTH_LIMIT_MIB: Final = 19.0
"""20 MB."""
WARM_UP_S: Final = 90.0
WARM_UP_SHARE: Final = 0.5
"""At most so much of a short run. Caches, pools and windows of a minute fill, pages are touched first."""
END_SHARE: Final = 0.1
"""Growth is between the medians of so many of the remaining samples at either end."""
SAMPLES: Final = 240
SAID_EVERY: Final = 12


@dataclass(frozen=True)
class Taken:
    """What one process has taken."""

    rss_mib: float
    descriptors: int
    threads: int


def soak(directory: Path, *, schedule: str, seconds: float, seed: int = 1) -> dict[str, Any]:
    """One run of so many seconds. Figures, and `checks`: what must hold."""
    words = (*settings(schedule, ACTORS), "--seed", str(seed), "--total-steps", str(10**9))
    with WatchedRun(*words, directory=directory) as run:
        with Watch(run.endpoint(), ACTORS) as watch:
            until(lambda: watch.last and watch.last.all_there and watch.last.updates >= 2, "a run that runs")
        # From here on without the watch: the service would serve it, and it is not what a run has.
        names = _names(run)
        taken: dict[str, list[Taken]] = {name: [] for name in names}
        segments: list[tuple[int, int]] = []
        begin = time.monotonic()
        for number in range(SAMPLES):
            elapse(begin + number * seconds / SAMPLES - time.monotonic())
            found = run.segments()
            segments.append((len(found), sum(segment.nbytes for segment in found)))
            for name, process in names.items():
                taken[name].append(_take(process))
            if number % SAID_EVERY == 0:
                sizes = ", ".join(f"{name} {each[-1].rss_mib:.1f} MiB" for name, each in taken.items())
                say(f"{number * seconds / SAMPLES:.0f} of {seconds:g} s: {sizes}")
        same = _names(run) == names
        run.service.signal_group(signal.SIGINT)
        code = run.service.wait(60.0)
        left, updates, account = run.leftovers(), run.service.updates(run.run_dir), run.accounts()[-1]
    warm_up = min(WARM_UP_SHARE, WARM_UP_S / seconds)
    processes = {name: _figures(samples, warm_up) for name, samples in taken.items()}
    checks = {
        "no process was replaced": same,
        f"no process grew by {GROWTH_LIMIT_MIB:g} MiB": all(
            each["growth_mib"] < GROWTH_LIMIT_MIB for each in processes.values()
        ),
        "descriptors are constant": all(
            each["descriptors"][0] == each["descriptors"][1] for each in processes.values()
        ),
        "threads are constant": all(each["threads"][0] == each["threads"][1] for each in processes.values()),
        "segments are constant": len(set(segments)) == 1,
        "Ctrl-C ends the run with its exit code": code == EXIT_CTRL_C,
        "the account closes": account["missing"] == 0,
        "nothing is left": not left,
    }
    return {
        "schedule": schedule,
        "seconds": seconds,
        "warm_up_seconds": round(warm_up * seconds, 1),
        "updates": updates,
        "env_steps": account["trained"],
        "segments": segments[0][0],
        "segments_mib": round(segments[0][1] / 2**20, 2),
        "processes": processes,
        "checks": checks,
        "right": all(checks.values()),
    }


def _names(run: WatchedRun) -> dict[str, psutil.Process]:
    actors = {f"actor {each.pid}": each for each in run.roles("workers")}
    learner = {f"learner {each.pid}": each for each in run.roles("learner")}
    return {f"service {run.pid}": psutil.Process(run.pid), **learner, **actors}


def _take(process: psutil.Process) -> Taken:
    with process.oneshot():
        return Taken(process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())


def _figures(samples: Sequence[Taken], warm_up: float) -> dict[str, Any]:
    """Of one process, once it is warm. warm_up: share of the samples that do not count."""
    warm = samples[round(warm_up * len(samples)) :]
    some = max(1, round(END_SHARE * len(warm)))
    first, last = warm[:some], warm[-some:]
    sizes = [statistics.median(each.rss_mib for each in part) for part in (first, last)]
    return {
        "rss_mib": [round(size, 2) for size in sizes],
        "growth_mib": round(sizes[1] - sizes[0], 2),
        "most_mib": round(max(each.rss_mib for each in samples), 2),
        "descriptors": [steady(each.descriptors for each in part) for part in (first, last)],
        "threads": [steady(each.threads for each in part) for part in (first, last)],
    }


def steady(counts: Iterable[int]) -> int:
    """The fewest seen: files that are open for the instant of a write are in some samples and not in others."""
    return min(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description="What a long run takes: memory, descriptors, threads, segments.")
    parser.add_argument("--seconds", type=float, default=1200.0, metavar="S", help="default: 1200")
    parser.add_argument("--schedule", choices=("streaming", "lockstep"), default="streaming", help="default: streaming")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="where the figures go")
    chosen = parser.parse_args()
    take_signals()
    with tempfile.TemporaryDirectory(prefix="rs-soak-") as directory:
        figures = soak(Path(directory), schedule=chosen.schedule, seconds=chosen.seconds)
    record(chosen.results, " ".join([COMMAND, *sys.argv[1:]]), figures)
    return 0 if figures["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
