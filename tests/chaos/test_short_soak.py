"""A short version of `make soak`."""

from __future__ import annotations

from pathlib import Path

from bench import soak
from bench.soak import Taken


def test_a_run_takes_no_more_of_anything_as_it_goes_on(tmp_path: Path) -> None:
    found = soak.soak(tmp_path, schedule="streaming", seconds=2.0)
    assert [what for what, holds in found["checks"].items() if not holds] == []
    assert [name.split()[0] for name in found["processes"]] == ["service", "learner", "actor", "actor"]
    assert found["segments"] == 2


def test_growth_is_counted_from_the_end_of_the_warm_up() -> None:
    """A process that takes 50 MiB at first, then 1 MiB per sample, and opens a file for an instant."""
    samples = [Taken(50.0 if number < 10 else 90.0 + number, 20 + (number == 48), 5) for number in range(50)]
    found = soak._figures(samples, warm_up=0.2)
    assert found["rss_mib"] == [101.5, 137.5], "the medians of four samples at either end of forty"
    assert found["growth_mib"] == 36.0
    assert found["descriptors"] == [20, 20]
    assert found["most_mib"] == 139.0
