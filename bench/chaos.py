"""Faults of every kind at random moments, and the account of what became of every env step.

`python -m bench.chaos --seconds 600 --min-kills 200`, or `make chaos`. Half of the time and of the kills goes to a
streaming run, half to one in lockstep, unless --schedule says otherwise; then many short runs, some of them stopped at
a random moment. Results: bench/results/chaos.json, and the same on standard output. The exit code is 1 if anything that
must hold did not.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.faults import run_with_faults
from bench.short_runs import run_and_stop, run_to_the_end
from rollout_service.bench.report import record

RESULTS = Path(__file__).parent / "results" / "chaos.json"
COMMAND = "python -m bench.chaos"
SCHEDULES: Final = ("streaming", "lockstep")
SECONDS_PER_KILL: Final = 3.0
"""A learner that is killed far more often never gets to learn."""


def chaos(chosen: argparse.Namespace, directory: Path) -> dict[str, Any]:
    schedules = SCHEDULES if chosen.schedule == "both" else (chosen.schedule,)
    kills = chosen.min_kills if chosen.min_kills is not None else round(chosen.seconds / SECONDS_PER_KILL)
    found: dict[str, Any] = {}
    for number, schedule in enumerate(schedules):
        place = directory / schedule
        place.mkdir()
        found[schedule] = run_with_faults(
            place,
            schedule=schedule,
            actors=chosen.actors,
            seconds=chosen.seconds / len(schedules),
            kills=math.ceil(kills / len(schedules)),
            measured=chosen.measured,
            seed=chosen.seed + number,
            resume=True,
        )
        print(f"{schedule}: {'right' if found[schedule]['right'] else 'WRONG'}", file=sys.stderr, flush=True)
    short = directory / "short-runs"
    found["runs_in_a_row"] = ended = run_to_the_end(short, chosen.tiny)
    found["stopped_runs"] = run_and_stop(short, chosen.stopped, chosen.seed, 1.2 * (ended["longest_s"] or 5.0))
    return {
        "kills": sum(found[s]["kills"] for s in schedules),
        **found,
        "right": all(r["right"] for r in found.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults at random moments in runs that have to come out right.")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="of faults (default: 600)")
    parser.add_argument("--min-kills", type=int, metavar="N", help="in that time (default: one in 3 s)")
    parser.add_argument("--schedule", choices=("both", *SCHEDULES), default="both", help="default: both, in turn")
    parser.add_argument("--actors", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--measured", type=int, default=5, metavar="N", help="kills in quiet, per run (default: 5)")
    parser.add_argument("--tiny", type=int, default=50, metavar="N", help="short runs in a row (default: 50)")
    parser.add_argument(
        "--stopped", type=int, default=100, metavar="N", help="short runs that are stopped (default: 100)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the moments and of the runs (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="where the figures go")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rs-chaos-") as directory:
        figures = chaos(chosen, Path(directory))
    record(chosen.results, " ".join([COMMAND, *sys.argv[1:]]), figures)
    return 0 if figures["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
