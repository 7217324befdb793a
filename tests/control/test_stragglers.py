"""Slow, late and missing actors: what the others get instead of waiting, and what becomes of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollout_service.control.events import BatchFormed, BatchOverdue, RolloutCommitted, RunFinished
from rollout_service.control.messages import (
    Abort,
    Batch,
    Committed,
    Grant,
    Heartbeat,
    Pong,
    Preempt,
    Ready,
    Role,
    StartFrom,
    Stop,
)
from rollout_service.control.scheduling import Lockstep, Patience
from rollout_service.control.waits import WORTH_A_WORD_S
from tests.control.world import ENVS, STEPS, Peer, World, make_join, started

DEADLINE_S = 30.0
MIN_STEPS = 2


def preempting(num_actors: int = 4, share: float = 0.75) -> tuple[World, Peer, list[Peer], list[Grant]]:
    """A run whose actors hold the first bank and have sent a heartbeat each."""
    scheduler = Lockstep(num_actors, Patience(preempt_share=share, preempt_min_steps=MIN_STEPS))
    world, learner, actors, grants = started(num_actors, scheduler=scheduler)
    for actor in actors:
        actor.beat(0, "env.step")
        assert heard(actor) == [Pong(run_id="run-1")]
    return world, learner, actors, grants


def heard(actor: Peer) -> list[Any]:
    """What came to this actor's heartbeat socket since the last look."""
    return [actor.world.sent[actor.address + b"-heart"].pop(0) for _ in actor.world.sent[actor.address + b"-heart"][:]]


def with_deadline(
    num_actors: int = 3, min_actors: int = 1, **rules: Any
) -> tuple[World, Peer, list[Peer], list[Grant]]:
    scheduler = Lockstep(
        num_actors, Patience(min_actors=min_actors, deadline_s=DEADLINE_S, first_deadline_s=DEADLINE_S)
    )
    return started(num_actors, scheduler=scheduler)


def commit(actors: Sequence[Peer], grants: Sequence[Grant], *who: int, **changes: Any) -> None:
    for actor_id in who:
        actors[actor_id].commit(grants[actor_id], **changes)


# --- preemption


def test_the_last_actor_is_asked_once_three_of_four_have_committed() -> None:
    world, learner, actors, grants = preempting()
    commit(actors, grants, 0, 1)
    assert [heard(actor) for actor in actors] == [[]] * 4
    commit(actors, grants, 3)
    assert [heard(actor) for actor in actors] == [[], [], [Preempt(slot=2, epoch=1, min_steps=MIN_STEPS)], []]
    world.tick(1.0)
    assert heard(actors[2]) == []
    assert not learner.got(Batch)
    commit(actors, grants, 2, valid_steps=3)
    batch = learner.take(Batch)
    assert (batch.valid_steps, batch.env_steps) == ((STEPS, STEPS, 3, STEPS), ENVS * (3 * STEPS + 3))
    assert world.counters == {"preempted_leases": 1, "partial_rollouts": 1}
    assert [event.env_steps for event in world.events_of(RolloutCommitted)][-1] == ENVS * 3


def test_a_request_that_was_lost_comes_again_with_every_heartbeat_until_the_commit() -> None:
    world, _, actors, grants = preempting(2, share=0.5)
    commit(actors, grants, 0)
    asked = Preempt(slot=1, epoch=1, min_steps=MIN_STEPS)
    assert heard(actors[1]) == [asked]
    for progress in (1, 2):
        actors[1].beat(progress, "env.step")
        assert heard(actors[1]) == [Pong(run_id="run-1"), asked]
    commit(actors, grants, 1, valid_steps=2)
    actors[1].beat(3, "waiting")
    assert heard(actors[1]) == [Pong(run_id="run-1")]
    assert world.counters["preempted_leases"] == 1


def test_an_actor_whose_heartbeat_is_not_known_yet_is_asked_at_its_first() -> None:
    _, _, actors, grants = started(2, scheduler=Lockstep(2, Patience(preempt_share=0.5, preempt_min_steps=1)))
    commit(actors, grants, 0)
    actors[1].beat(0, "env.step")
    assert heard(actors[1]) == [Pong(run_id="run-1"), Preempt(slot=1, epoch=1, min_steps=1)]


def test_an_actor_that_comes_after_the_share_is_asked_with_its_grant() -> None:
    world, _, actors, grants = preempting(2, share=0.5)
    world.carry_out(world.coordinator.actor_lost(1, 0, "killed", world.now))
    commit(actors, grants, 0)
    replacement = world.hello(1, 1)
    replacement.beat(0, "building envs")
    assert heard(replacement) == [Pong(run_id="run-1")]
    world.tell(replacement.address, make_join(world.spec))
    assert replacement.take(Grant).epoch == 2
    assert heard(replacement) == [Preempt(slot=1, epoch=2, min_steps=MIN_STEPS)]


def test_a_heartbeat_in_a_strange_name_learns_nothing() -> None:
    world, _, actors, grants = preempting(2, share=0.5)
    commit(actors, grants, 0)
    for actor_id, incarnation in ((1, 5), (99, 0), (None, 0)):
        beat = Heartbeat(role=Role.ACTOR, pid=1, actor_id=actor_id, incarnation=incarnation)
        world.tell(b"stranger", beat)
    assert [type(message) for message in world.sent[b"stranger"]] == [Pong] * 3


def test_the_next_lease_of_a_preempted_actor_goes_on_from_its_seed_and_is_not_preempted() -> None:
    _, learner, actors, grants = preempting(2, share=0.5)
    commit(actors, grants, 0)
    commit(actors, grants, 1, valid_steps=2)
    heard(actors[1])
    learner.publish(learner.take(Batch))
    again = [actor.take(Grant) for actor in actors]
    assert [(grant.slot, grant.start) for grant in again] == [(2, StartFrom.SEEDED), (3, StartFrom.SEEDED)]
    actors[1].beat(9, "env.step")
    assert heard(actors[1]) == [Pong(run_id="run-1")]


def test_partial_rollouts_make_more_updates_out_of_the_same_steps() -> None:
    """Ten full rollouts' worth of steps; each update brings one full slot and a quarter of another: 16 of them."""
    scheduler = Lockstep(2, Patience(preempt_share=0.5, preempt_min_steps=2))
    world, learner, actors, grants = started(2, scheduler=scheduler, total_updates=10)
    full, steps, lasts = world.spec.steps_per_rollout, 0, []
    while world.coordinator.stopped is None:
        commit(actors, grants, 0)
        commit(actors, grants, 1, valid_steps=2)
        batch = learner.take(Batch)
        lasts.append(batch.last)
        steps += ENVS * (STEPS + 2)
        assert batch.env_steps == steps
        learner.publish(batch)
        grants = [actor.take(Grant) for actor in actors] if world.coordinator.stopped is None else []
    assert lasts == [False] * 14 + [True]
    assert 10 * full - full < steps <= 10 * full
    assert world.coordinator.report(world.now)["total_updates"] == 15
    assert world.coordinator.stopped == "finished"


# --- deadlines


def test_a_bank_goes_at_its_deadline_with_those_who_have_committed() -> None:
    world, learner, actors, grants = with_deadline(3, min_actors=2)
    world.now += 4.0
    commit(actors, grants, 0)
    world.now += 2.0
    commit(actors, grants, 1)
    world.tick(DEADLINE_S - 6.1)
    assert not learner.got(Batch)
    world.tick(0.1)
    assert learner.take(Batch).valid_steps == (STEPS, STEPS, 0)
    (formed,) = world.events_of(BatchFormed)
    assert (formed.late, formed.unclaimed, formed.waited_for) == ((2,), (), 2)
    assert formed.wait_s == pytest.approx(DEADLINE_S - 4.0)
    assert world.counters["late_actors"] == 1


def test_with_too_few_the_run_waits_on_and_says_for_whom() -> None:
    world, learner, actors, grants = with_deadline(3, min_actors=2)
    commit(actors, grants, 0)
    actors[1].beat(5, "env.reset")
    world.tick(DEADLINE_S)
    assert not learner.got(Batch)
    (overdue,) = world.events_of(BatchOverdue)
    assert (overdue.update, overdue.seconds, overdue.committed, overdue.needed) == (1, DEADLINE_S, 1, 2)
    assert overdue.awaited == (f"actor 1 (pid {actors[1].pid}, env.reset)", f"actor 2 (pid {actors[2].pid}, joined)")
    world.now += 1.0
    commit(actors, grants, 2)
    assert learner.take(Batch).valid_steps == (STEPS, 0, STEPS)


def test_the_word_about_a_long_wait_comes_again_only_when_it_has_doubled() -> None:
    world, _, actors, grants = with_deadline(2, min_actors=2)
    commit(actors, grants, 0)
    for _ in range(130):
        actors[0].beat(1, "waiting")
        world.tick(1.0)
    assert [event.seconds for event in world.events_of(BatchOverdue)] == [30.0, 60.0, 120.0]


def test_without_deadlines_a_long_wait_is_told_and_shown_too() -> None:
    world, _, actors, grants = started(2)
    commit(actors, grants, 0)
    world.tick(WORTH_A_WORD_S)
    (overdue,) = world.events_of(BatchOverdue)
    waiting = [f"actor 1 (pid {actors[1].pid}, joined)"]
    assert overdue.awaited == tuple(waiting)
    report = world.coordinator.report(world.now)
    assert (report["waiting_for"], report["waiting_seconds"]) == (waiting, WORTH_A_WORD_S)


def test_while_everyone_collects_nobody_waits() -> None:
    world, _, actors, grants = started(2)
    commit(actors, grants, 0, 1)
    world.tick(1000.0)
    assert world.events_of(BatchOverdue) == []
    assert world.coordinator.report(world.now)["waiting_seconds"] is None


def test_a_late_actor_is_neither_granted_nor_waited_for_until_it_lets_go() -> None:
    """Banks come round while the actor is stopped: nobody touches its slot, and no batch waits for it again."""
    world, learner, actors, grants = with_deadline(3)
    commit(actors, grants, 0, 1)
    world.tick(DEADLINE_S)
    withheld = []
    for _ in range(4):
        batch = learner.take(Batch)
        assert batch.valid_steps == (STEPS, STEPS, 0)
        withheld.append(batch.seed_into)
        learner.publish(batch, seeded=batch.seed_into[:2])
        assert not actors[2].got(Grant)
        world.now += 1.0
        for actor in actors[:2]:
            actor.commit(actor.take(Grant))
    assert withheld == [(3, 4, 5), (0, 1, None), (3, 4, 5), (0, 1, None)]
    assert world.coordinator.report(world.now)["slots"]["quarantined"] == 1
    assert world.coordinator.report(world.now)["actors"][2]["state"] == "late"

    actors[2].commit(grants[2])
    assert not actors[2].take(Committed).accepted
    assert world.counters["dropped_stale_commits"] == 1
    learner.publish(learner.take(Batch))
    again = actors[2].take(Grant)
    assert (again.slot, again.start) == (5, StartFrom.CARRY)
    for actor in actors[:2]:
        actor.commit(actor.take(Grant))
    assert not learner.got(Batch), "it is waited for again"
    actors[2].commit(again)
    assert learner.take(Batch).valid_steps == (STEPS, STEPS, STEPS)


def test_proof_of_death_frees_the_slot_of_a_late_actor() -> None:
    world, learner, actors, grants = with_deadline(2)
    commit(actors, grants, 0)
    world.tick(DEADLINE_S)
    world.carry_out(world.coordinator.actor_lost(1, 0, "killed", world.now))
    assert world.coordinator.report(world.now)["slots"]["quarantined"] == 0
    replacement = world.actor(1, 1)
    learner.publish(learner.take(Batch))
    assert replacement.take(Grant).start is StartFrom.FRESH


def test_a_late_actor_that_gives_its_lease_back_is_granted_again() -> None:
    world, learner, actors, grants = with_deadline(2)
    commit(actors, grants, 0)
    world.tick(DEADLINE_S)
    learner.publish(learner.take(Batch))
    actors[1].tell(Abort(slot=grants[1].slot, epoch=grants[1].epoch, reason="too slow"))
    assert actors[1].take(Grant).slot == 3


def test_a_place_that_nobody_took_is_waited_for_again_once_somebody_has_joined() -> None:
    scheduler = Lockstep(2, Patience(min_actors=1, first_deadline_s=DEADLINE_S))
    world = World(2, scheduler=scheduler)
    learner, first = world.learner(), world.actor(0)
    first.commit(first.take(Grant))
    world.tick(DEADLINE_S)
    batch = learner.take(Batch)
    assert batch.valid_steps == (STEPS, 0)
    assert world.events_of(BatchFormed)[0].unclaimed == (1,)
    learner.publish(batch)
    first.commit(first.take(Grant))
    batch = learner.take(Batch)
    second = world.hello(1)
    learner.publish(batch)
    first.commit(first.take(Grant))
    batch = learner.take(Batch)
    assert batch.valid_steps == (STEPS, 0), "still making its envs"
    second.tell(make_join(world.spec))
    learner.publish(batch)
    first.commit(first.take(Grant))
    assert not learner.got(Batch)
    second.commit(second.take(Grant))
    assert learner.take(Batch).valid_steps == (STEPS, STEPS)


# --- the first batch


def first_deadline(num_actors: int = 2) -> World:
    world = World(num_actors, scheduler=Lockstep(num_actors, Patience(min_actors=1, first_deadline_s=DEADLINE_S)))
    world.tick()
    return world


def test_the_run_stops_if_no_actor_came_in_time() -> None:
    world = first_deadline(3)
    learner = world.learner()
    assert world.coordinator.next_deadline(world.now) <= world.now + DEADLINE_S
    world.tick(DEADLINE_S - 0.1)
    assert world.coordinator.stopped is None
    world.tick(0.1)
    reason = "no actor came within 30 s of the start (first_batch_deadline); 3 were waited for"
    assert world.events_of(RunFinished) == [RunFinished(reason)]
    assert learner.take(Stop).reason == reason


def test_the_run_stops_if_no_learner_came_in_time() -> None:
    world = first_deadline()
    world.actors()
    world.tick(DEADLINE_S)
    assert world.coordinator.stopped == "no learner came within 30 s of the start (first_batch_deadline)"


def test_an_actor_that_still_makes_its_envs_has_come() -> None:
    world = first_deadline()
    world.learner()
    world.hello()
    world.tick(DEADLINE_S)
    assert world.coordinator.stopped is None
    assert world.events_of(BatchOverdue)[0].awaited[1] == "actor 1 (no process)"


def test_the_first_deadline_counts_from_the_weights_on_for_those_who_are_there() -> None:
    world = first_deadline()
    actors = world.actors()
    learner = world.learner(ready=False)
    world.tick(DEADLINE_S + 1.0)
    assert world.coordinator.stopped is None
    learner.tell(Ready(version=1))
    actors[0].commit(actors[0].take(Grant))
    assert not learner.got(Batch)
    world.tick(DEADLINE_S)
    assert learner.take(Batch).valid_steps == (STEPS, 0)


# --- who is slowest


def test_the_report_has_the_share_of_time_in_which_the_others_waited() -> None:
    world, learner, actors, grants = started(2)
    for _ in range(4):
        commit(actors, grants, 0)
        world.now += 1.0
        commit(actors, grants, 1)
        world.now += 1.0
        learner.publish(learner.take(Batch))
        grants = [actor.take(Grant) for actor in actors]
    shares = [actor["waited_share"] for actor in world.coordinator.report(world.now)["actors"]]
    assert shares == [0.0, 0.5]
    assert {(event.waited_for, event.wait_s) for event in world.events_of(BatchFormed)} == {(1, 1.0)}


def test_a_coordinator_without_rules_waits_for_everyone() -> None:
    world, learner, actors, grants = started(2)
    actors[1].beat(0, "env.step")
    commit(actors, grants, 0)
    world.tick(1e6)
    assert not learner.got(Batch)
    assert heard(actors[1]) == [Pong(run_id="run-1")]
