"""When Lockstep lets a bank go."""

from __future__ import annotations

import math

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
