"""`make bench`, or `python -m bench.throughput`: measures every subject of `rollout-service bench`, keeps the results.

Results: bench/results/bench.json (every figure) and bench/results/bench.md (the tables), rewritten after each subject
and only with what this run has measured: figures of different runs are no comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rollout_service.bench.command import SUBJECTS, document, measure
from rollout_service.bench.report import Report, markdown, show, surroundings

RESULTS = Path(__file__).parent / "results"
COMMAND = "python -m bench.throughput"
READING = (
    "Medians over repetitions in which all sides take turns; `a / b` is the median of the time ratios within each "
    "repetition, with its quartiles. Only ratios carry over to another machine, or to another day on this one."
)


def page(reports: Sequence[Report], command: str) -> str:
    """The Markdown report."""
    facts = [f"- {key}: {value}" for key, value in {**surroundings(), "command": f"`{command}`"}.items()]
    return "\n".join(["# Timings", "", *facts, "", READING, "", *(markdown(report) for report in reports)])


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure all subjects and keep the results.")
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"default: {' '.join(SUBJECTS)}")
    parser.add_argument("--repetitions", type=int, metavar="N", help="measurements per case")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where bench.json and bench.md go")
    chosen = parser.parse_args()
    command = " ".join([COMMAND, *sys.argv[1:]])
    chosen.results.mkdir(parents=True, exist_ok=True)
    reports: list[Report] = []
    for report in measure(chosen.subjects or list(SUBJECTS), chosen.repetitions):
        reports.append(report)
        show(report, sys.stdout)
        figures = json.dumps(document(reports, command), indent=1, allow_nan=False)
        (chosen.results / "bench.json").write_text(figures + "\n")
        (chosen.results / "bench.md").write_text(page(reports, command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
