"""When a schedule grants slots and lets a batch go."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rollout_service.config import TrainConfig
from rollout_service.control.ledger import Identity, Ledger
from rollout_service.control.scheduling import FormBatch, Lockstep, Patience, Streaming, scheduler_for


def leased(slots: range, scheduler: Lockstep, bank: int = 0) -> Ledger:
    ledger = Ledger(2 * scheduler.num_places)
    scheduler.bank = bank
    scheduler.open(now=10.0)
    for actor_id, slot in enumerate(slots):
        ledger.grant(slot, Identity(actor_id, 0), version=1)
    return ledger


def commit(ledger: Ledger, slot: int, actor_id: int) -> None:
    ledger.commit(slot, 1, Identity(actor_id, 0), valid_steps=1, version=1, versions=range(1, 2))


def test_slot_b_a_plus_a_is_actor_as() -> None:
    scheduler, ledger = Lockstep(3), Ledger(6)
    for bank in ([0, 1, 2], [3, 4, 5], [0, 1, 2]):
        assert scheduler.slot_for(2, ledger, set()) is None
        scheduler.open(now=0.0)
        assert [scheduler.slot_for(actor_id, ledger, set()) for actor_id in range(3)] == bank
        scheduler.formed()
        scheduler.published()
    assert scheduler.seeds((0, 1, 2)) == (3, 4, 5)
    assert scheduler.seeds((3, 4, 5)) == (0, 1, 2)


def test_the_bank_of_a_batch_that_came_to_nothing_is_filled_again() -> None:
    scheduler, ledger = Lockstep(1), Ledger(2)
    scheduler.open(now=0.0)
    scheduler.formed()
    scheduler.close()
    scheduler.open(now=1.0)
    assert scheduler.slot_for(0, ledger, set()) == 0


def test_a_bank_goes_when_every_place_has_committed() -> None:
    scheduler = Lockstep(2)
    ledger = leased(range(2, 4), scheduler, bank=1)
    commit(ledger, 2, 0)
    assert scheduler.decide(ledger, set(), now=1e9) is None
    commit(ledger, 3, 1)
    assert scheduler.decide(ledger, set(), now=10.0) == FormBatch((2, 3))


def test_a_place_that_is_given_up_is_not_waited_for() -> None:
    scheduler = Lockstep(2)
    ledger = leased(range(1), scheduler)
    assert scheduler.decide(ledger, {1}, now=10.0) is None
    commit(ledger, 0, 0)
    assert scheduler.decide(ledger, {1}, now=10.0) == FormBatch((0, 1))


def test_an_empty_bank_never_goes() -> None:
    scheduler = Lockstep(2, Patience(min_actors=1, deadline_s=1.0))
    scheduler.open(now=0.0)
    assert scheduler.decide(Ledger(4), {0, 1}, now=1e9) is None


def test_after_the_deadline_late_leases_are_named() -> None:
    scheduler = Lockstep(3, Patience(min_actors=2, deadline_s=5.0))
    ledger = leased(range(3), scheduler)
    assert scheduler.next_deadline() == 15.0
    commit(ledger, 0, 0)
    assert scheduler.decide(ledger, set(), now=15.0) is None
    commit(ledger, 1, 1)
    assert scheduler.decide(ledger, set(), now=14.9) is None
    assert scheduler.decide(ledger, set(), now=15.0) == FormBatch((0, 1, 2), late=(2,))


def test_a_closed_scheduler_decides_nothing() -> None:
    scheduler = Lockstep(1, Patience(deadline_s=5.0))
    ledger = leased(range(1), scheduler)
    commit(ledger, 0, 0)
    scheduler.close()
    assert scheduler.decide(ledger, set(), now=1e9) is None
    assert scheduler.next_deadline() == math.inf


def test_the_first_bank_has_a_deadline_of_its_own() -> None:
    scheduler = Lockstep(2, Patience(deadline_s=5.0, first_deadline_s=60.0))
    scheduler.open(now=10.0, first=True)
    assert scheduler.next_deadline() == 70.0
    scheduler.open(now=10.0)
    assert scheduler.next_deadline() == 15.0


def test_without_min_actors_a_deadline_changes_nothing() -> None:
    scheduler = Lockstep(2, Patience(deadline_s=5.0))
    ledger = leased(range(2), scheduler)
    commit(ledger, 0, 0)
    assert scheduler.decide(ledger, set(), now=1e9) is None


def test_slots_that_nobody_took_are_told_apart_from_late_ones() -> None:
    scheduler = Lockstep(3, Patience(min_actors=1, deadline_s=5.0))
    ledger = leased(range(2), scheduler)
    commit(ledger, 0, 0)
    assert scheduler.decide(ledger, set(), now=15.0) == FormBatch((0, 1, 2), late=(1,), unclaimed=(2,))


def test_min_actors_is_asked_for_even_if_nobody_else_can_come() -> None:
    scheduler = Lockstep(2, Patience(min_actors=2, deadline_s=5.0))
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
    scheduler = Lockstep(actors, Patience(preempt_share=share))
    ledger = leased(range(actors), scheduler)
    asked_at = []
    for actor_id in range(actors):
        commit(ledger, actor_id, actor_id)
        if scheduler.to_preempt(ledger, set(), 1) == list(range(actor_id + 1, actors)) != []:
            asked_at.append(actor_id + 1)
    assert asked_at == list(range(committed, actors))


def test_a_share_of_one_preempts_nobody() -> None:
    scheduler = Lockstep(3)
    ledger = leased(range(3), scheduler)
    for actor_id in (0, 1):
        commit(ledger, actor_id, actor_id)
    assert scheduler.to_preempt(ledger, set(), 1) == []


def test_who_cannot_come_is_not_counted_in_the_share() -> None:
    scheduler = Lockstep(4, Patience(preempt_share=0.5))
    ledger = leased(range(3), scheduler)
    commit(ledger, 0, 0)
    assert scheduler.to_preempt(ledger, {3}, 1) == []
    commit(ledger, 1, 1)
    assert scheduler.to_preempt(ledger, {3}, 1) == [2]


def test_settings_become_rules() -> None:
    config = TrainConfig(
        num_actors=4, num_steps=10, min_actors=2, batch_deadline=3.0, preempt_share=0.75, total_steps=10_000
    )
    assert Patience.of(config) == Patience(2, 3.0, math.inf, 0.75, 3)
    assert scheduler_for(config, 4).needed == 2
    assert Patience.of(TrainConfig()) == Patience(None, math.inf, math.inf, 1.0, 32)
    assert scheduler_for(TrainConfig(), 4).needed == 4


def test_the_policy_lag_chooses_the_schedule() -> None:
    assert isinstance(scheduler_for(TrainConfig(), 4), Lockstep)
    streaming = scheduler_for(TrainConfig(max_policy_lag=2), 4)
    assert isinstance(streaming, Streaming)
    assert streaming.max_policy_lag == 2


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


# --- streaming


def streaming(
    num_actors: int = 2, max_policy_lag: int = 1, patience: Patience | None = None
) -> tuple[Streaming, Ledger]:
    """The learner waits for its first batch; every slot is free."""
    scheduler = Streaming(num_actors, max_policy_lag, patience)
    scheduler.open(now=0.0)
    return scheduler, Ledger((1 + max_policy_lag) * num_actors)


def fill(scheduler: Streaming, ledger: Ledger, actor_id: int, version: int = 1) -> int | None:
    """The actor takes a slot, if there is one for it, and commits it. Returns the slot."""
    slot = scheduler.slot_for(actor_id, ledger, set())
    if slot is not None:
        holder = Identity(actor_id, 0)
        epoch = ledger.grant(slot, holder, version).epoch
        ledger.commit(slot, epoch, holder, valid_steps=1, version=version, versions=range(version, version + 1))
    return slot


def test_an_actor_takes_any_free_slot_also_while_the_learner_works() -> None:
    scheduler, ledger = streaming()
    assert [fill(scheduler, ledger, actor_id) for actor_id in (0, 0)] == [0, 1]
    due = scheduler.decide(ledger, set(), now=0.0)
    assert due == FormBatch((0, 1))
    ledger.read(due.slots)
    scheduler.formed()
    assert [fill(scheduler, ledger, actor_id) for actor_id in (1, 0)] == [2, 3]


@pytest.mark.parametrize("max_policy_lag", [1, 2, 3])
def test_collection_is_ahead_by_as_many_batches_as_the_lag_allows(max_policy_lag: int) -> None:
    """Then actors idle: what they would collect now would be too old once it is used."""
    scheduler, ledger = streaming(2, max_policy_lag)
    ahead = [fill(scheduler, ledger, 0) for _ in range(20)]
    assert sum(slot is not None for slot in ahead) == 2 * (max_policy_lag + 1)
    due = scheduler.decide(ledger, set(), now=0.0)
    assert due is not None
    ledger.read(due.slots)
    scheduler.formed()
    ledger.release(due.slots)
    assert fill(scheduler, ledger, 0) is None, "the learner's update counts as one"
    scheduler.published()
    scheduler.open(now=1.0)
    assert [fill(scheduler, ledger, 0) is not None for _ in range(3)] == [True, True, False]


def test_a_batch_is_the_oldest_slots() -> None:
    scheduler, ledger = streaming()
    for actor_id in (0, 1):
        ledger.grant(actor_id, Identity(actor_id, 0), version=1)
    assert scheduler.slot_for(2, ledger, set()) == 2
    ledger.grant(2, Identity(2, 0), version=1)
    for slot, actor_id in ((2, 2), (1, 1), (0, 0)):
        commit(ledger, slot, actor_id)
    assert scheduler.decide(ledger, set(), now=0.0) == FormBatch((2, 1))


def test_a_batch_is_smaller_by_the_places_that_nobody_holds() -> None:
    scheduler, ledger = streaming(3)
    assert fill(scheduler, ledger, 0) == 0
    assert scheduler.decide(ledger, set(), now=0.0) is None
    assert scheduler.missing(ledger, {2}) == [1]
    assert scheduler.decide(ledger, {1, 2}, now=0.0) == FormBatch((0,))


def test_at_its_deadline_a_batch_goes_with_what_there_is() -> None:
    scheduler, ledger = streaming(3, patience=Patience(min_actors=1, deadline_s=5.0))
    scheduler.open(now=10.0)
    assert fill(scheduler, ledger, 0) == 0
    ledger.grant(1, Identity(1, 0), version=1)
    assert scheduler.decide(ledger, set(), now=14.9) is None
    assert scheduler.decide(ledger, set(), now=15.0) == FormBatch((0,), unclaimed=(2,)), "actor 1 goes on"


def test_who_would_be_too_old_for_the_next_batch_is_asked_for_what_it_has() -> None:
    scheduler, ledger = streaming(2, patience=Patience(preempt_share=0.5))
    ledger.grant(0, Identity(0, 0), version=3)
    ledger.grant(1, Identity(1, 0), version=4)
    assert scheduler.to_preempt(ledger, set(), 4) == [], "nobody has committed"
    ledger.grant(2, Identity(2, 0), version=4)
    commit_version = ledger.commit(2, 1, Identity(2, 0), valid_steps=1, version=4, versions=range(4, 5))
    assert commit_version is not None
    assert scheduler.to_preempt(ledger, set(), 4) == [0]


def test_without_a_learner_nothing_is_granted() -> None:
    scheduler, ledger = streaming()
    scheduler.close()
    assert scheduler.slot_for(0, ledger, set()) is None
    assert scheduler.decide(ledger, set(), now=1e9) is None
    scheduler.open(now=0.0)
    assert scheduler.slot_for(0, ledger, set()) == 0
