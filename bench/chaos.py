"""Faults of every kind at random moments, and the account of what became of every env step.

`python -m bench.chaos --seconds 600 --min-kills 200`, or `make chaos`. Time and kills are shared out equally between
runs in streaming and in lockstep, unless --schedule says otherwise, each without and with guests; then a deterministic
run that has to come out the same, and many short runs, some of them stopped at a random moment. Results:
bench/results/chaos.json, and the same on standard output; how far it is, on standard error. The exit code is 1 if
anything that must hold did not.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.faults import run_with_faults
from bench.repeats import run_twice
from bench.short_runs import STOPS, run_and_stop, run_to_the_end
from bench.watched import say, take_signals
from rollout_service.bench.report import record

RESULTS = Path(__file__).parent / "results" / "chaos.json"
COMMAND = "python -m bench.chaos"
SCHEDULES: Final = ("streaming", "lockstep")
SECONDS_PER_KILL: Final = 3.0
"""A learner that is killed far more often never gets to learn."""
MORE_KILLS: Final = 1.1
"""So many times those that are asked for are planned."""
GUESTS: Final = 2


def chaos(chosen: argparse.Namespace, directory: Path) -> dict[str, Any]:
    schedules = SCHEDULES if chosen.schedule == "both" else (chosen.schedule,)
    asked = chosen.min_kills if chosen.min_kills is not None else round(chosen.seconds / SECONDS_PER_KILL)
    runs = [(schedule, guests) for schedule in schedules for guests in (0, GUESTS)]
    found: dict[str, Any] = {}

    def add(name: str, figures: dict[str, Any]) -> None:
        found[name] = figures
        wrong = [what for what, holds in figures.get("checks", {}).items() if not holds] + figures.get("problems", [])
        say(f"{name}: right" if figures["right"] else f"{name}: WRONG: {'; '.join(wrong)}")

    for number, (schedule, guests) in enumerate(runs):
        name = f"{schedule}_with_guests" if guests else schedule
        place = directory / name
        place.mkdir()
        say(f"{name}: faults for {chosen.seconds / len(runs):g} s")
        figures = run_with_faults(
            place,
            schedule=schedule,
            actors=chosen.actors,
            guests=guests,
            seconds=chosen.seconds / len(runs),
            kills=math.ceil(MORE_KILLS * asked / len(runs)),
            measured=chosen.measured,
            seed=chosen.seed + number,
            resume=True,
        )
        add(name, figures)
    kills = sum(figures["kills"] for figures in found.values())
    add("deterministic", run_twice(directory / "deterministic", kills=chosen.repeat_kills, seed=chosen.seed))
    short = directory / "short-runs"
    add("runs_in_a_row", ended := run_to_the_end(short, chosen.tiny))
    # As many of each kind of end; those that are killed are no stopped runs, and come on top.
    count = math.ceil(chosen.stopped * len(STOPS) / (len(STOPS) - 1))
    add("stopped_runs", run_and_stop(short, count, chosen.seed, 1.2 * (ended["longest_s"] or 5.0)))
    right = kills >= asked and all(each["right"] for each in found.values())
    return {"kills": kills, "kills_asked_for": asked, **found, "right": right}


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults at random moments in runs that have to come out right.")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="of faults (default: 600)")
    parser.add_argument("--min-kills", type=int, metavar="N", help="in that time (default: one in 3 s)")
    parser.add_argument("--schedule", choices=("both", *SCHEDULES), default="both", help="default: both, in turn")
    parser.add_argument("--actors", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--measured", type=int, default=5, metavar="N", help="kills in quiet, per run (default: 5)")
    parser.add_argument(
        "--repeat-kills", type=int, default=6, metavar="N", help="in the deterministic run (default: 6)"
    )
    parser.add_argument("--tiny", type=int, default=50, metavar="N", help="short runs in a row (default: 50)")
    parser.add_argument(
        "--stopped",
        type=int,
        default=100,
        metavar="N",
        help="short runs that are stopped (default: 100); a fourth more are killed",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the moments and of the runs (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="where the figures go")
    chosen = parser.parse_args()
    take_signals()
    with tempfile.TemporaryDirectory(prefix="rs-chaos-") as directory:
        figures = chaos(chosen, Path(directory))
    record(chosen.results, " ".join([COMMAND, *sys.argv[1:]]), figures)
    return 0 if figures["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
