"""Rates out of marks: the warm-up is left out, windows hold whole iterations."""

from __future__ import annotations

from rollout_service.bench.windows import Mark, measured_s, median_rate, warmed_up, window_rates


def marks(seconds: list[float], per_iteration: int = 100) -> list[Mark]:
    """One iteration of so many steps at each of these times."""
    return [Mark(time, per_iteration * (number + 1)) for number, time in enumerate(seconds)]


def test_the_warm_up_is_two_iterations_and_a_second() -> None:
    assert [mark.time for mark in warmed_up(marks([0.0, 0.3, 0.6, 0.9, 1.2, 1.5]))] == [1.2, 1.5]
    assert [mark.time for mark in warmed_up(marks([0.0, 5.0, 10.0, 15.0]))] == [10.0, 15.0]
    assert warmed_up(marks([0.0, 5.0])) == []


def test_windows_hold_whole_iterations_and_the_rest_is_dropped() -> None:
    found = marks([0.0, 1.0, 2.0, 2.6, 3.2, 3.4, 4.2, 4.5])
    assert window_rates(found, 1.0) == [200 / (3.2 - 2.0), 200 / (4.2 - 3.2)]
    assert median_rate(found, 1.0) == (200 / (3.2 - 2.0) + 200 / (4.2 - 3.2)) / 2
    assert measured_s(found) == 2.5


def test_too_short_a_run_gives_its_one_rate_or_none() -> None:
    assert window_rates(marks([0.0, 1.0, 2.0, 2.5]), 1.0) == [200.0]
    assert median_rate(marks([0.0, 1.0, 2.0]), 1.0) is None
    assert (window_rates([]), measured_s([])) == ([], 0.0)
