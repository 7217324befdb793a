"""Figures of one subject, and the ways to show them: JSON, plain text, a terminal table, Markdown.

A figure's name says its unit: `_us`, `_ms`, `_s`, `_per_s`, `_share` (of 1), `_mib`, and `a_to_b` for the time of a
over the time of b, whose quartiles are `a_to_b_low` and `a_to_b_high`; `a_over_b_times`: a is so many times as fast as
b. Tables have a column per case and a line per figure.
What must never happen: a figure in a table that the JSON lacks, or control characters where there is no terminal.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TextIO

from rollout_service.bench.timing import Figures

PACKAGES: Final = ("rollout-service", "torch", "numpy", "gymnasium", "pyzmq")
RATE, RATIO, LOW, HIGH, TIMES = "_per_s", "_to_", "_low", "_high", "_times"
SMALL_SHARE: Final = 0.05
"""Below it a share is shown with a decimal."""


@dataclass(frozen=True)
class Report:
    """What one subject measured."""

    subject: str
    title: str
    cases: Mapping[str, Figures]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """{"subject", "title", "notes", "cases": [{"case": name, figure: number, ...}]}"""
        cases = [{"case": case, **figures} for case, figures in self.cases.items()]
        return {"subject": self.subject, "title": self.title, "notes": list(self.notes), "cases": cases}

    def grid(self) -> list[list[str]]:
        """Header and lines of the table: figure, then its text in every case."""
        names = dict.fromkeys(name for figures in self.cases.values() for name in figures)
        lines = [[label(name), *(text(figures, name) for figures in self.cases.values())] for name in names if
                 not (RATIO in name and name.endswith((LOW, HIGH)))]  # fmt: skip
        return [["", *self.cases], *lines]


def label(name: str) -> str:
    """`ours_us` -> `ours us`, `ours_to_plain` -> `ours / plain`, `steps_per_s` -> `steps / s`."""
    if name.endswith(RATE):
        return name.removesuffix(RATE).replace("_", " ") + " / s"
    if name.endswith(TIMES):
        return name.removesuffix(TIMES).replace("_", " ")
    return " / ".join(part.replace("_", " ") for part in name.split(RATIO))


def text(figures: Figures, name: str) -> str:
    """One figure with as many digits as mean something; a ratio with its quartiles."""
    value = figures.get(name, math.nan)
    if math.isnan(value):
        return "-"
    if name.endswith("_share"):
        return f"{value:.1%}" if 0 < value < SMALL_SHARE else f"{value:.0%}"
    if name.endswith(TIMES):
        return f"{value:.2f}x"
    if RATIO in name:
        return f"{digits(value)} ({digits(figures[name + LOW])} to {digits(figures[name + HIGH])})"
    return digits(value)


def digits(value: float) -> str:
    """Three significant digits, thousands in full."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def plain(report: Report) -> str:
    """Aligned text, fit for a log file."""
    grid = report.grid()
    widths = [max(len(line[column]) for line in grid) for column in range(len(grid[0]))]
    lines = [f"{report.subject}: {report.title}"]
    for first, *rest in grid:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join([*lines, *(f"  {note}" for note in report.notes)])


def markdown(report: Report) -> str:
    """A section with a table."""
    head, *lines = [f"| {' | '.join(line)} |" for line in report.grid()]
    rule = "|---" + "|---:" * len(report.cases) + "|"
    notes = [f"- {note}" for note in report.notes]
    return "\n".join([f"## {report.subject}", "", f"{report.title}.", "", head, rule, *lines, "", *notes, ""])


def show(report: Report, stream: TextIO) -> None:
    """A table on a terminal, plain text elsewhere."""
    if not stream.isatty():
        print(plain(report), end="\n\n", file=stream, flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    head, *lines = report.grid()
    table = Table(title=f"{report.subject}: {report.title}", title_justify="left", caption="\n".join(report.notes),
                  caption_justify="left")  # fmt: skip
    table.add_column(head[0])
    for case in head[1:]:
        table.add_column(case, justify="right")
    for line in lines:
        table.add_row(*line)
    Console(file=stream, highlight=False).print(table, "")


def surroundings() -> dict[str, str]:
    """Date, machine and versions: without them a figure says nothing."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{processor()}, {usable_cores()} usable cores, {platform.system()} {platform.machine()}",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)]
        ),
    }


def record(path: Path, command: str, figures: Mapping[str, Any]) -> None:
    """Figures with command and surroundings as JSON, into a file and on standard output."""
    text = json.dumps({"command": command, **surroundings(), **figures}, indent=1, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    print(text)


def usable_cores() -> int:
    """Cores this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def processor(listing: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name where the system tells it."""
    try:
        lines = listing.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")
