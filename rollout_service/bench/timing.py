"""Two or more ways to do one thing, timed in turns in one run.

Machines drift: a figure of one minute ago is no yardstick for one of now. So every repetition times each side once,
in alternating order, a ratio is taken within each repetition, and medians are reported. Pure but for the clock.
Left to others: what the sides do (subjects), how figures are shown (report).
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Side = Callable[[], object]
Figures = dict[str, float]

LEAST_S: Final = 0.02
"""A side is called so often that one measurement lasts at least this long, several time slices of the scheduler."""


@dataclass(frozen=True)
class Samples:
    """Seconds per call of each side; equal indices were measured in the same repetition."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, side: str) -> float:
        """Seconds."""
        return statistics.median(self.seconds[side])

    def medians(self, unit: str, *, per: float = 1.0) -> Figures:
        """`<side>_<unit>` of every side: "us", "ms" or "s", divided by `per`."""
        scale = {"us": 1e6, "ms": 1e3, "s": 1.0}[unit] / per
        return {f"{side}_{unit}": self.median(side) * scale for side in self.seconds}

    def ratio(self, side: str, other: str) -> Figures:
        """`<side>_to_<other>`: median of the time ratios of the repetitions; their quartiles as `_low`, `_high`."""
        ratios = [a / b for a, b in zip(self.seconds[side], self.seconds[other], strict=True)]
        low, middle, high = quartiles(ratios)
        name = f"{side}_to_{other}"
        return {name: middle, f"{name}_low": low, f"{name}_high": high}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile; of a lone value thrice that value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def alternate(sides: Mapping[str, Side], *, repetitions: int, least_s: float = LEAST_S) -> Samples:
    """Times the sides in turns: forwards in even repetitions, backwards in odd ones. Each is warmed up first."""
    calls = {name: _calls(side, least_s) for name, side in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for repetition in range(repetitions):
            for name in sides if repetition % 2 == 0 else reversed(list(sides)):
                seconds[name].append(_time(sides[name], calls[name]))
    finally:
        if collecting:
            gc.enable()
    return Samples(seconds)


def _calls(side: Side, least_s: float) -> int:
    side()  # the first call pays for caches and pages that no later one needs
    return max(1, math.ceil(least_s / max(_time(side, 1), 1e-9)))


def _time(side: Side, calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        side()
    return (time.perf_counter() - begun) / calls
