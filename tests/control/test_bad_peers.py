"""Peers that say what they should not: no table grows with them, no log fills, no loop ends."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.control.admission import TOLD_REFUSALS
from rollout_service.control.coordinator import Coordinator, Notify, Send
from rollout_service.control.messages import (
    MESSAGES,
    Abort,
    Batch,
    Bye,
    Commit,
    Committed,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Publish,
    Ready,
    Refused,
    Release,
    Role,
    Status,
    StatusReport,
    decode,
    encode,
)
from rollout_service.control.roster import REMEMBERED_PEERS
from rollout_service.errors import MessageRejected
from rollout_service.runspec import PROTOCOL_VERSION
from rollout_service.tally import COUNTERS_KEPT, LARGEST_COUNT, add_counts
from tests.control.world import STEPS, make_coordinator, make_join, make_spec, started

SPEC = make_spec(num_actors=2)

wire_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def sent(effects: list[Send | Notify], peer: bytes) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send) and effect.peer == peer]


def joined(coordinator: Coordinator, peer: bytes = b"a") -> Grant:
    """The peer's first grant."""
    coordinator.handle(b"l", Hello(role=Role.LEARNER, pid=1), 0.0)
    coordinator.handle(b"l", Ready(version=1), 0.0)
    coordinator.handle(peer, Hello(role=Role.ACTOR, pid=2), 0.0)
    (grant,) = sent(coordinator.handle(peer, make_join(SPEC), 0.0), peer)
    assert isinstance(grant, Grant)
    return grant


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_are_rejected(data: bytes) -> None:
    with contextlib.suppress(MessageRejected):
        assert isinstance(decode(data), Message)


@settings(max_examples=200)
@given(st.sampled_from(sorted(MESSAGES)), st.data())
def test_any_fields_under_a_right_name_end_in_an_answer_or_a_rejection(name: str, data: st.DataObject) -> None:
    coordinator = make_coordinator(SPEC)
    joined(coordinator)
    chosen = data.draw(st.dictionaries(st.sampled_from([*MESSAGES[name].model_fields, "other"]), wire_values))
    try:
        message = decode(msgpack.packb({"v": PROTOCOL_VERSION, "type": name, **chosen}))
    except MessageRejected:
        return
    answers = [effect.message for effect in coordinator.handle(b"a", message, 1.0) if isinstance(effect, Send)]
    assert [decode(encode(answer)) for answer in answers] == answers
    assert coordinator.report(1.0)["account"]["missing"] == 0


@pytest.mark.parametrize(
    "commit",
    [
        {"slot": 10**9},
        {"slot": 2**63 - 1},
        {"epoch": 0},
        {"epoch": 2**63 - 1},
        {"valid_steps": STEPS + 1},
        {"env_steps": 10**6},
    ],
)
def test_numbers_out_of_range_are_refused_and_change_nothing(commit: dict[str, int]) -> None:
    coordinator = make_coordinator(SPEC)
    grant = joined(coordinator)
    right = {"slot": grant.slot, "epoch": grant.epoch, "valid_steps": STEPS, "version": 1}
    (answer,) = sent(coordinator.handle(b"a", Commit(**{**right, **commit}), 1.0), b"a")
    assert isinstance(answer, Refused)
    assert coordinator.counters["rejected_messages"] == 1
    answers = sent(coordinator.handle(b"a", Commit(**right), 2.0), b"a")
    assert Committed(slot=grant.slot, epoch=grant.epoch, accepted=True) in answers


HUGE = 2**63 - 1


@pytest.mark.parametrize(
    "message",
    [
        Commit(slot=0, epoch=1, valid_steps=STEPS, version=HUGE),
        Abort(slot=HUGE, epoch=1, reason="x"),
        Abort(slot=0, epoch=HUGE, reason="x"),
        Heartbeat(role=Role.ACTOR, pid=HUGE, actor_id=HUGE, incarnation=HUGE, progress=HUGE),
        Heartbeat(role=Role.LEARNER, pid=HUGE, progress=HUGE),
        Release(update=HUGE),
        Publish(update=HUGE, version=2),
        Publish(update=1, version=HUGE, seeded=(HUGE,)),
        Ready(version=HUGE, updates_done=HUGE, env_steps_done=HUGE),
        Hello(role=Role.ACTOR, pid=HUGE, requested_actor=HUGE, incarnation=HUGE),
        Hello(role=Role.LEARNER, pid=HUGE, incarnation=HUGE),
    ],
    ids=lambda message: type(message).__name__.lower(),
)
def test_a_member_that_says_something_out_of_range_changes_nothing(message: Message) -> None:
    """Said by an actor and by the learner, before the batch is formed and while it is out."""
    world, learner, actors, grants = started(3)

    def lie() -> None:
        for peer in (learner, actors[2]):
            peer.tell(message)
            peer.inbox.clear()

    for update in (1, 2):
        lie()
        for actor, grant in zip(actors, grants, strict=True):
            actor.commit(grant)
        batch = learner.take(Batch)
        assert (batch.update, batch.valid_steps) == (update, (STEPS,) * 3)
        lie()
        learner.publish(batch)
        grants = [actor.take(Grant) for actor in actors]
    assert world.coordinator.stopped is None
    world.coordinator._leases.ledger.check()


def test_an_actor_that_counts_nonsense_fills_no_table_and_breaks_no_report() -> None:
    coordinator = make_coordinator(SPEC)
    grant = joined(coordinator)
    for round_number in range(20):
        counters = {f"name {round_number} {number}": 2**63 - 1 for number in range(60)}
        add_counts(coordinator.counters, counters)
        add_counts(coordinator.counters, counters)
    assert len(coordinator.counters) <= COUNTERS_KEPT
    assert max(coordinator.counters.values()) == LARGEST_COUNT
    (report,) = sent(coordinator.handle(b"o", Status(), 1.0), b"o")
    assert isinstance(decode(encode(report)), StatusReport)
    with pytest.raises(MessageRejected, match=r"commit\.counters"):
        decode(
            msgpack.packb(
                {
                    "v": PROTOCOL_VERSION,
                    "type": "commit",
                    "slot": grant.slot,
                    "epoch": grant.epoch,
                    "valid_steps": 1,
                    "version": 1,
                    "counters": {f"{number}": 1 for number in range(65)},
                }
            )
        )


def test_thousands_of_actors_that_come_and_go_are_not_remembered_for_ever() -> None:
    coordinator = make_coordinator(SPEC)
    joined(coordinator, b"stays")
    for number in range(5000):
        peer = b"%d" % number
        coordinator.handle(peer, Hello(role=Role.ACTOR, pid=3), 1.0)
        coordinator.handle(peer, Bye(), 1.0)
    roster = coordinator._roster
    assert len(roster._by_peer) <= REMEMBERED_PEERS + 2
    assert roster.present(b"stays") is not None
    assert roster.once_was(b"4999") is not None


def test_a_flood_of_refused_handshakes_is_counted_but_not_told_one_by_one() -> None:
    coordinator = make_coordinator(SPEC)
    told = 0
    for number in range(5000):
        effects = coordinator.handle(b"%d" % number, Hello(role=Role.ACTOR, pid=1, run_digest="another"), 1.0)
        told += sum(isinstance(effect, Notify) for effect in effects)
        assert isinstance(effects[0], Send)
    assert coordinator.counters["refused_handshakes"] == 5000
    assert TOLD_REFUSALS < told < TOLD_REFUSALS + 10
