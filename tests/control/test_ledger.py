"""Slot states and epochs: legal changes, illegal ones with their story, commits that count once."""

from __future__ import annotations

import pytest

from rollout_service.control.ledger import Identity, Ledger, SlotState, Verdict
from rollout_service.errors import ProtocolError

A0, A1 = Identity(0, 0), Identity(1, 0)
V1 = range(1, 2)


def commit(ledger: Ledger, holder: Identity, slot: int = 0, epoch: int = 1, version: int = 1) -> Verdict:
    return ledger.commit(slot, epoch, holder, valid_steps=4, version=version, versions=V1)


def states(ledger: Ledger) -> list[str]:
    ledger.check()
    return [ledger.state(slot).value for slot in range(len(ledger))]


def test_a_slot_goes_round_once_per_rollout_and_its_epoch_grows() -> None:
    ledger = Ledger(1)
    for epoch in (1, 2, 3):
        assert ledger.grant(0, A0, version=1).epoch == epoch
        assert states(ledger) == ["leased"]
        assert commit(ledger, A0, epoch=epoch) is Verdict.ACCEPTED
        assert states(ledger) == ["ready"]
        ledger.read([0])
        assert states(ledger) == ["reading"]
        ledger.release([0])
        assert states(ledger) == ["free"]


def test_a_slot_has_one_lease_and_the_refusal_tells_its_story() -> None:
    ledger = Ledger(2)
    ledger.grant(0, A0, version=1)
    with pytest.raises(ProtocolError, match=r"slot 0 cannot go from leased to leased.*granted to actor 0\.0"):
        ledger.grant(0, A1, version=1)


def test_an_actor_has_one_lease() -> None:
    ledger = Ledger(2)
    ledger.grant(0, A0, version=1)
    with pytest.raises(ProtocolError, match="already holds slot 0"):
        ledger.grant(1, A0, version=1)


@pytest.mark.parametrize("operation", ["read", "release"])
def test_a_free_slot_can_be_neither_read_nor_released(operation: str) -> None:
    with pytest.raises(ProtocolError, match="slot 0 cannot go from free"):
        getattr(Ledger(1), operation)([0])


def test_a_commit_counts_once_however_often_it_comes() -> None:
    ledger = Ledger(1)
    ledger.grant(0, A0, version=1)
    assert [commit(ledger, A0) for _ in range(3)] == [Verdict.ACCEPTED, Verdict.REPEATED, Verdict.REPEATED]
    ledger.read([0])
    ledger.release([0])
    ledger.grant(0, A0, version=1)
    assert commit(ledger, A0) is Verdict.REPEATED
    assert ledger.accepted_before(0, 1)
    assert states(ledger) == ["leased"]


def test_a_commit_of_a_lease_that_ended_is_stale_once_and_then_repeated() -> None:
    ledger = Ledger(1)
    ledger.grant(0, A0, version=1)
    ledger.holder_gone(A0, "killed")
    assert [commit(ledger, A0) for _ in range(2)] == [Verdict.STALE, Verdict.REPEATED]
    assert not ledger.accepted_before(0, 1)
    assert states(ledger) == ["free"]


def test_somebody_elses_lease_cannot_be_committed() -> None:
    ledger = Ledger(1)
    ledger.grant(0, A0, version=1)
    assert commit(ledger, A1) is Verdict.UNKNOWN
    assert commit(ledger, A0) is Verdict.ACCEPTED
    assert commit(ledger, A1) is Verdict.UNKNOWN


def test_another_version_is_dropped_when_it_comes() -> None:
    ledger = Ledger(1)
    ledger.grant(0, A0, version=1)
    assert commit(ledger, A0, version=0) is Verdict.STALE
    assert states(ledger) == ["free"]


def test_a_quarantined_slot_is_freed_by_its_own_late_commit() -> None:
    ledger = Ledger(1)
    ledger.grant(0, A0, version=1)
    ledger.quarantine(0, "late")
    assert states(ledger) == ["quarantined"]
    assert commit(ledger, A0) is Verdict.STALE
    assert states(ledger) == ["free"]


@pytest.mark.parametrize("quarantined", [False, True])
def test_a_lease_ends_by_abort_or_by_proof_of_death(quarantined: bool) -> None:
    for end in (lambda ledger: ledger.abort(0, 1, A0), lambda ledger: ledger.holder_gone(A0, "killed")):
        ledger = Ledger(1)
        ledger.grant(0, A0, version=1)
        if quarantined:
            ledger.quarantine(0, "late")
        assert end(ledger)
        assert states(ledger) == ["free"]
        assert ledger.lease_of(A0) is None
        assert not ledger.abort(0, 1, A0)


def test_what_a_lost_learner_held_is_free_and_named() -> None:
    ledger = Ledger(3)
    for slot in range(3):
        ledger.grant(slot, Identity(slot, 0), version=1)
    commit(ledger, A0)
    commit(ledger, A1, slot=1)
    ledger.read([0])
    assert [filled.holder for filled in ledger.drop_filled("lost")] == [A0, A1]
    assert states(ledger) == ["free", "free", "leased"]
    assert ledger.count()[SlotState.FREE] == 2


def test_a_slot_that_contradicts_itself_is_found() -> None:
    ledger = Ledger(1)
    ledger.grant(0, A0, version=1)
    ledger._slots[0].state = SlotState.READY
    with pytest.raises(ProtocolError, match="slot 0 contradicts itself"):
        ledger.check()
