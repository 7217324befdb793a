"""What is said of bad data, and how often."""

from __future__ import annotations

from rollout_service.observe.remarks import RemarkWatch


def test_the_first_remarks_are_told_and_then_the_number_whenever_it_has_doubled() -> None:
    watch = RemarkWatch()
    one = {"dropped_episodes": 1, "seed_mismatches": 3}
    assert watch.notice((), {}) == []
    assert watch.notice(("a", "b"), {"dropped_episodes": 2}) == ["a", "b"]
    assert watch.notice(("c", "d", "e", "f"), {"dropped_episodes": 4})[:3] == ["c", "d", "e"]
    said = [watch.notice(("g",), one) for _ in range(100)]
    told = [lines[0] for lines in said if lines]
    assert all(line.endswith("were not trained on") for line in told)
    assert [int(line.split()[0]) for line in told] == [10, 20, 40, 80]


def test_where_remarks_end_is_said_once() -> None:
    watch = RemarkWatch()
    lines = [line for _ in range(9) for line in watch.notice(("x",), {"dropped_episodes": 1})]
    assert lines == ["x"] * 5 + ["further bad data are only counted (count/bad_observations, count/bad_rewards)"]
