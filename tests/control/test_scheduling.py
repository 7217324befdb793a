"""When Lockstep lets a bank go."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rollout_service.config import TrainConfig
from rollout_service.control.ledger import Identity, Ledger
from rollout_service.control.scheduling import FormBatch, Lockstep


def leased(slots: range, scheduler: Lockstep, bank: int = 0) -> Ledger:
    ledger = Ledger(2 * scheduler.num_actors)
    scheduler.open(bank, now=10.0)
    for actor_id, slot in enumerate(slots):
        ledger.grant(slot, Identity(actor_id, 0), version=1)
    return ledger


def commit(ledger: Ledger, slot: int, actor_id: int) -> None:
    ledger.commit(slot, 1, Identity(actor_id, 0), valid_steps=1, version=1, versions=range(1, 2))


def test_slot_b_a_plus_a_is_actor_as() -> None:
    scheduler = Lockstep(3)
    assert scheduler.slot_for(2) is None
    scheduler.open(1, now=0.0)
    assert [scheduler.slot_for(actor_id) for actor_id in range(3)] == [3, 4, 5]
    assert (scheduler.after(0), scheduler.after(1)) == (1, 0)


def test_a_bank_goes_when_every_place_has_committed() -> None:
    scheduler = Lockstep(2)
    ledger = leased(range(2, 4), scheduler, bank=1)
    commit(ledger, 2, 0)
    assert scheduler.decide(ledger, set(), now=1e9) is None
    commit(ledger, 3, 1)
    assert scheduler.decide(ledger, set(), now=10.0) == FormBatch(1)


def test_a_place_that_is_given_up_is_not_waited_for() -> None:
    scheduler = Lockstep(2)
    ledger = leased(range(1), scheduler)
    assert scheduler.decide(ledger, {1}, now=10.0) is None
    commit(ledger, 0, 0)
    assert scheduler.decide(ledger, {1}, now=10.0) == FormBatch(0)


def test_an_empty_bank_never_goes() -> None:
    scheduler = Lockstep(2, min_actors=1, deadline_s=1.0)
    scheduler.open(0, now=0.0)
    assert scheduler.decide(Ledger(4), {0, 1}, now=1e9) is None


def test_after_the_deadline_late_leases_are_named() -> None:
    scheduler = Lockstep(3, min_actors=2, deadline_s=5.0)
    ledger = leased(range(3), scheduler)
    assert scheduler.next_deadline() == 15.0
    commit(ledger, 0, 0)
    assert scheduler.decide(ledger, set(), now=15.0) is None
    commit(ledger, 1, 1)
    assert scheduler.decide(ledger, set(), now=14.9) is None
    assert scheduler.decide(ledger, set(), now=15.0) == FormBatch(0, late=(2,))


def test_a_closed_scheduler_decides_nothing() -> None:
    scheduler = Lockstep(1, deadline_s=5.0)
    ledger = leased(range(1), scheduler)
    commit(ledger, 0, 0)
    scheduler.close()
    assert scheduler.decide(ledger, set(), now=1e9) is None
    assert scheduler.next_deadline() == math.inf


def test_the_first_bank_has_a_deadline_of_its_own() -> None:
    scheduler = Lockstep(2, deadline_s=5.0, first_deadline_s=60.0)
    scheduler.open(0, now=10.0, first=True)
    assert scheduler.next_deadline() == 70.0
    scheduler.open(1, now=10.0)
    assert scheduler.next_deadline() == 15.0


def test_without_min_actors_a_deadline_changes_nothing() -> None:
    scheduler = Lockstep(2, deadline_s=5.0)
    ledger = leased(range(2), scheduler)
    commit(ledger, 0, 0)
    assert scheduler.decide(ledger, set(), now=1e9) is None


def test_slots_that_nobody_took_are_told_apart_from_late_ones() -> None:
    scheduler = Lockstep(3, min_actors=1, deadline_s=5.0)
    ledger = leased(range(2), scheduler)
    commit(ledger, 0, 0)
    assert scheduler.decide(ledger, set(), now=15.0) == FormBatch(0, late=(1,), unclaimed=(2,))


def test_min_actors_is_asked_for_even_if_nobody_else_can_come() -> None:
    scheduler = Lockstep(2, min_actors=2, deadline_s=5.0)
    ledger = leased(range(1), scheduler)
    commit(ledger, 0, 0)
    assert scheduler.decide(ledger, {1}, now=1e9) is None
    assert scheduler.missing(ledger, {1}) == []
    assert scheduler.missing(ledger, ()) == [1]


@pytest.mark.parametrize(
    ("share", "actors", "committed"),
    [(0.75, 4, 3), (0.5, 4, 2), (0.7, 10, 7), (0.01, 4, 1), (0.99, 4, 4), (0.34, 3, 2)],
)
def test_the_others_are_preempted_once_a_share_of_the_actors_has_committed(
    share: float, actors: int, committed: int
) -> None:
    scheduler = Lockstep(actors, preempt_share=share)
    ledger = leased(range(actors), scheduler)
    asked_at = []
    for actor_id in range(actors):
        commit(ledger, actor_id, actor_id)
        if scheduler.to_preempt(ledger, set()) == list(range(actor_id + 1, actors)) != []:
            asked_at.append(actor_id + 1)
    assert asked_at == list(range(committed, actors))


def test_a_share_of_one_preempts_nobody() -> None:
    scheduler = Lockstep(3)
    ledger = leased(range(3), scheduler)
    for actor_id in (0, 1):
        commit(ledger, actor_id, actor_id)
    assert scheduler.to_preempt(ledger, set()) == []


def test_who_cannot_come_is_not_counted_in_the_share() -> None:
    scheduler = Lockstep(4, preempt_share=0.5)
    ledger = leased(range(3), scheduler)
    commit(ledger, 0, 0)
    assert scheduler.to_preempt(ledger, {3}) == []
    commit(ledger, 1, 1)
    assert scheduler.to_preempt(ledger, {3}) == [2]


def test_settings_become_rules() -> None:
    config = TrainConfig(
        num_actors=4, num_steps=10, min_actors=2, batch_deadline=3.0, preempt_share=0.75, total_steps=10_000
    )
    scheduler = Lockstep.of(config, 4)
    assert (scheduler.needed, scheduler.deadline_s, scheduler.first_deadline_s) == (2, 3.0, math.inf)
    assert (scheduler.preempt_share, scheduler.preempt_min_steps) == (0.75, 3)
    off = Lockstep.of(TrainConfig(), 4)
    assert (off.needed, off.deadline_s, off.first_deadline_s, off.preempt_share) == (4, math.inf, math.inf, 1.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_actors": 2}, "min_actors 2 has no effect without a deadline"),
        ({"min_actors": 5, "num_actors": 4, "batch_deadline": 1.0}, "min_actors 5 is more than num_actors 4"),
        ({"preempt_share": 0.0}, "preempt_share"),
        ({"batch_deadline": 0.0}, "batch_deadline"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainConfig(**settings)
