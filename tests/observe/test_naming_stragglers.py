"""What is said about actors that hold the others up, and how often."""

from __future__ import annotations

from rollout_service.control.events import BatchFormed, BatchOverdue
from rollout_service.control.waits import Slowest
from rollout_service.observe.stragglers import StragglerWatch, gone_without, overdue


def test_the_slowest_actor_is_named_with_its_share_and_a_remedy() -> None:
    text = StragglerWatch(preempts=False).notice(Slowest(3, share=0.48, seconds=12.4))
    assert text is not None
    assert text.startswith("actor 3 is the slowest: the others waited for it in 48% of the last 12 s; preempt_share")


def test_with_preemption_on_another_remedy_is_named() -> None:
    text = StragglerWatch(preempts=True).notice(Slowest(3, share=0.48, seconds=12.4))
    assert text is not None
    assert "preempt_min_steps_fraction" in text


def test_a_small_share_or_a_short_time_is_not_worth_a_line() -> None:
    watch = StragglerWatch(preempts=False)
    assert watch.notice(None) is None
    assert watch.notice(Slowest(0, share=0.9, seconds=4.9)) is None
    assert watch.notice(Slowest(0, share=0.19, seconds=60.0)) is None


def test_an_actor_is_named_once_and_again_after_it_had_caught_up_or_another_was_named() -> None:
    watch = StragglerWatch(preempts=False)
    shares = [(1, 0.3), (1, 0.5), (1, 0.15), (1, 0.3), (1, 0.05), (1, 0.3), (2, 0.3), (1, 0.4)]
    said = [watch.notice(Slowest(actor, share, 60.0)) is not None for actor, share in shares]
    assert said == [True, False, False, False, False, True, True, True]


def test_an_overdue_batch_says_for_whom_it_waits() -> None:
    awaited = ("actor 1 (pid 12, env.step)", "actor 2 (no process)")
    event = BatchOverdue(7, 31.24, committed=1, needed=3, awaited=awaited)
    assert overdue(event) == (
        "update 7 has waited for 31.2 s: 1 actors have committed, 3 are needed (min_actors); waiting for "
        "actor 1 (pid 12, env.step), actor 2 (no process)"
    )


def test_a_batch_that_went_without_somebody_says_so() -> None:
    assert gone_without(BatchFormed(1, 64, waited_for=0, wait_s=1.0, partial=(1,))) is None
    assert gone_without(BatchFormed(4, 64, 1, 2.04, late=(1, 2), unclaimed=(3,))) == (
        "update 4 went without actors 1, 2 (still at work: what comes late is dropped) and actor 3 (not there: "
        "waited for again once joined), after a wait of 2.0 s"
    )
