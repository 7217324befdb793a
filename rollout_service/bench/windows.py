"""Rates of a run out of its progress: medians over windows of whole iterations, warm-up left out. Pure.

Ours and every peer are measured with these functions, from marks of one clock (the system's monotonic one).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WARM_UP_ITERATIONS: Final = 2
WARM_UP_S: Final = 1.0
"""Neither is measured: caches fill, pools start, the first episodes are short."""
WINDOW_S: Final = 1.0
"""A window is as many whole iterations as take at least this long."""


@dataclass(frozen=True)
class Mark:
    """So many env steps were done (and trained on) at that time, in seconds."""

    time: float
    env_steps: int


def warmed_up(marks: Sequence[Mark]) -> list[Mark]:
    """The marks behind the warm-up; the first of them is where measuring begins."""
    late = (mark for mark in marks[WARM_UP_ITERATIONS:] if mark.time - marks[0].time >= WARM_UP_S)
    begin = next(late, None)
    return [] if begin is None else [mark for mark in marks if mark.time >= begin.time]


def measured_s(marks: Sequence[Mark]) -> float:
    """Seconds behind the warm-up."""
    kept = warmed_up(marks)
    return kept[-1].time - kept[0].time if kept else 0.0


def window_rates(marks: Sequence[Mark], window_s: float = WINDOW_S) -> list[float]:
    """Env steps per second of each window. What is left over at the end is dropped, unless it is all there is."""
    kept = warmed_up(marks)
    rates = []
    begin = kept[0] if kept else None
    for mark in kept[1:]:
        if begin is not None and mark.time - begin.time >= window_s:
            rates.append(_rate(begin, mark))
            begin = mark
    if not rates and len(kept) > 1:
        rates.append(_rate(kept[0], kept[-1]))
    return rates


def median_rate(marks: Sequence[Mark], window_s: float = WINDOW_S) -> float | None:
    """Median over the windows; None if there is none."""
    rates = window_rates(marks, window_s)
    return statistics.median(rates) if rates else None


def _rate(begin: Mark, end: Mark) -> float:
    return (end.env_steps - begin.env_steps) / (end.time - begin.time)
