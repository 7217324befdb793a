"""Who costs the others how much time, and when a wait is worth a word."""

from __future__ import annotations

import math

import pytest

from rollout_service.control.waits import WINDOW_S, WORTH_A_WORD_S, Slowest, Vigil, WaitShares


def test_a_share_is_of_the_time_between_the_first_batch_and_the_last() -> None:
    waits = WaitShares()
    for now, actor_id, wait_s in ((100.0, 0, 50.0), (102.0, 1, 1.0), (104.0, 1, 1.0), (105.0, 0, 0.5)):
        waits.add(actor_id, wait_s, now)
    assert (waits.share(1), waits.share(0), waits.share(7)) == (2 / 5, 0.5 / 5, 0.0)
    assert waits.slowest() == Slowest(1, 0.4, 5.0)


def test_nobody_is_slowest_before_the_second_batch() -> None:
    waits = WaitShares()
    assert waits.slowest() is None
    waits.add(3, 9.0, 10.0)
    assert waits.slowest() is None
    assert waits.share(3) == 0.0


def test_old_waits_are_forgotten() -> None:
    waits = WaitShares()
    for now in range(10):
        waits.add(0, 0.9, float(now))
    for now in range(10, 100):
        waits.add(1, 0.1, float(now))
    slowest = waits.slowest()
    assert slowest is not None
    assert (slowest.actor_id, slowest.seconds) == (1, pytest.approx(WINDOW_S, abs=1.0))
    assert slowest.share == pytest.approx(0.1)
    assert waits.share(0) == pytest.approx(0.0)


def test_a_wait_is_worth_a_word_when_due_and_then_each_time_it_has_doubled() -> None:
    vigil = Vigil(100.0, 110.0)
    assert [now for now in range(100, 200) if vigil.due(float(now))] == [110, 120, 140, 180]


def test_without_a_deadline_the_wait_begins_with_the_first_that_has_to_wait() -> None:
    vigil = Vigil(0.0)
    assert (vigil.due_at, vigil.due(1e9)) == (math.inf, False)
    vigil.others_wait(50.0)
    vigil.others_wait(60.0)
    assert vigil.due_at == 50.0 + WORTH_A_WORD_S


def test_a_deadline_is_not_put_off_by_the_first_commit() -> None:
    vigil = Vigil(0.0, 5.0)
    vigil.others_wait(1.0)
    assert vigil.due_at == 5.0
