"""Runs with more places than actors: who is in a batch, who is waited for, and who gets which place."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_service.config import TrainConfig
from rollout_service.control.events import BatchOverdue
from rollout_service.control.messages import Batch, Bye, Grant, Refused, StartFrom
from rollout_service.control.scheduling import Patience, schedule
from tests.control.world import STEPS, Peer, World

ROWS = 2 * STEPS
PLACES = 4


def elastic(num_actors: int = 2, max_policy_lag: int = 0, patience: Patience | None = None, **changes: Any) -> World:
    """A run of num_actors with four places, and a learner."""
    scheduler = schedule(PLACES, max_policy_lag, patience)
    changes = {"max_policy_lag": max_policy_lag, "max_actors": PLACES, "elastic": True, **changes}
    return World(num_actors, scheduler=scheduler, **changes)


def place_of(peer: Peer) -> int | None:
    return None if peer.welcome is None else peer.welcome.actor_id


def test_a_guest_takes_part_from_the_open_bank_on_and_a_batch_shrinks_when_it_leaves() -> None:
    world = elastic()
    learner, actors = world.learner(), world.actors()
    actors[0].commit(actors[0].take(Grant))
    guest = world.actor()
    grant = guest.take(Grant)
    assert (place_of(guest), grant.slot, grant.start) == (2, 2, StartFrom.FRESH)
    actors[1].commit(actors[1].take(Grant))
    assert not learner.got(Batch)
    guest.commit(grant)
    batch = learner.take(Batch)
    assert (batch.slots, batch.valid_steps) == ((0, 1, 2, 3), (STEPS, STEPS, STEPS, 0))
    assert (batch.env_steps, batch.seed_into) == (3 * ROWS, (4, 5, 6, 7))

    learner.publish(batch)
    for actor in (*actors, guest):
        grant = actor.take(Grant)
        assert grant.start is StartFrom.SEEDED
        if actor is not guest:
            actor.commit(grant)
    guest.tell(Bye(reason="stopped by SIGTERM"))
    batch = learner.take(Batch)
    assert (batch.slots, batch.valid_steps) == ((4, 5, 6, 7), (STEPS, STEPS, 0, 0))
    assert batch.env_steps == 5 * ROWS


def test_whoever_comes_while_the_learner_works_begins_with_the_next_bank_and_knows_nothing_of_the_last_one() -> None:
    world = elastic(1)
    learner, (actor,) = world.learner(), world.actors()
    actor.commit(actor.take(Grant))
    batch = learner.take(Batch)
    guest = world.actor()
    assert not guest.got(Grant)
    learner.publish(batch)
    grant = guest.take(Grant)
    assert (grant.slot, grant.start) == (5, StartFrom.FRESH)
    assert actor.take(Grant).start is StartFrom.SEEDED


def test_the_first_batch_waits_for_those_that_a_run_begins_with_and_for_nobody_else() -> None:
    world = elastic()
    learner, first = world.learner(), world.actor()
    first.commit(first.take(Grant))
    assert not learner.got(Batch)
    second = world.hello()  # it is still making its envs
    assert place_of(second) == 1
    world.carry_out(world.coordinator.actor_lost(1, 0, "died", world.now))
    assert not learner.got(Batch), "it has never been there"
    second = world.actor()
    second.commit(second.take(Grant))
    assert learner.take(Batch).valid_steps == (STEPS, STEPS, 0, 0)


def test_a_streaming_batch_is_of_as_many_rollouts_as_there_are_actors() -> None:
    world = elastic(1, max_policy_lag=1)
    learner, (actor,) = world.learner(), world.actors()
    guest = world.actor()
    actor.commit(actor.take(Grant))
    assert not learner.got(Batch)
    guest.commit(guest.take(Grant))
    batch = learner.take(Batch)
    assert batch.env_steps == 2 * ROWS
    actor.commit(actor.take(Grant))
    world.carry_out(world.coordinator.actor_lost(1, 0, "died", world.now))
    learner.publish(batch)
    batch = learner.take(Batch)
    assert (len(batch.slots), batch.env_steps) == (1, 3 * ROWS)
    assert world.coordinator.report(world.now)["account"]["missing"] == 0


def test_more_actors_than_it_began_with_bring_a_run_to_its_end_sooner() -> None:
    world = elastic(1, total_updates=4)
    learner, (actor,) = world.learner(), world.actors()
    guests = [world.actor() for _ in range(2)]
    steps = []
    for update in (1, 2):
        for each in (actor, *guests):
            each.commit(each.take(Grant))
        batch = learner.take(Batch)
        steps.append(batch.env_steps)
        assert batch.last == (update == 2)
        learner.publish(batch)
    assert steps == [3 * ROWS, 6 * ROWS]
    assert world.coordinator.stopped == "finished"
    assert world.coordinator.report(world.now)["account"]["missing"] == 0


def test_places_of_its_own_actors_are_not_given_to_guests_until_they_are_given_up() -> None:
    world = elastic(2, kept_places=2)
    guest = world.hello()
    assert place_of(guest) == 2
    assert place_of(world.hello()) == 3
    reason = world.hello().take(Refused).reason
    assert reason == "no place is free: this run has 4 (max_actors), and fills 2 of them itself"
    world.carry_out(world.coordinator.abandon_actor(0, world.now))
    assert place_of(world.hello()) == 0
    assert world.hello(1).welcome is not None
    assert "all 4 actors" in world.hello().take(Refused).reason
    assert world.counters["abandoned_places"] == 1


def test_a_guest_gets_a_place_that_is_waited_for_first() -> None:
    world = elastic(2)
    first = world.actor(0)
    first.tell(Bye(reason="bye"))
    assert place_of(world.actor()) == 1
    assert place_of(world.actor()) == 0


def test_words_about_a_wait_name_who_is_there_and_count_the_rest() -> None:
    world = elastic(2, patience=Patience(first_deadline_s=30.0))
    world.learner()
    first, second = world.actors()
    first.tell(Bye(reason="bye"))
    second.commit(second.take(Grant))
    world.tick()
    report = world.coordinator.report(world.now)
    assert [actor["awaited"] for actor in report["actors"]] == [False, True, False, False]
    world = elastic(2, patience=Patience(first_deadline_s=30.0))
    world.learner()
    for actor in world.actors():
        actor.tell(Bye(reason="bye"))
    world.hello()
    world.tick(31.0)
    (overdue,) = world.events_of(BatchOverdue)
    assert (overdue.committed, overdue.needed) == (0, 1)
    assert overdue.awaited[-1] == "anybody who takes one of 3 empty places"
    assert len(overdue.awaited) == 2


def test_without_an_elastic_run_a_batch_waits_for_another_actor_in_the_same_place() -> None:
    world = World(2)
    learner, (first, second) = world.learner(), world.actors()
    first.commit(first.take(Grant))
    second.tell(Bye(reason="bye"))
    assert not learner.got(Batch)
    third = world.actor()
    assert place_of(third) == 1
    third.commit(third.take(Grant))
    assert learner.got(Batch)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_actors": 3, "max_actors": 2}, "max_actors 2 is less than num_actors 3"),
        (
            {"num_actors": 2, "max_actors": 4, "min_actors": 5, "batch_deadline": 1.0},
            "min_actors 5 is more than max_actors 4",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainConfig(**settings)


def test_settings_make_a_run_elastic() -> None:
    assert [
        TrainConfig(**settings).elastic
        for settings in ({}, {"max_actors": 4, "num_actors": 4}, {"on_actor_failure": "continue"})
    ] == [False, True, True]
