"""A run that goes on from a checkpoint starts every actor's random streams anew; a run that began here never does."""

from __future__ import annotations

from rollout_service.control.messages import Batch, Grant, StartFrom
from tests.control.world import Peer, World


def first_grants(world: World) -> tuple[Peer, list[Peer], list[Grant]]:
    learner = world.learner(updates_done=world.coordinator.updates_done)
    actors = world.actors()
    return learner, actors, [actor.take(Grant) for actor in actors]


def resumed(updates: int) -> World:
    return World(2, updates_done=updates)


def test_the_first_lease_of_every_place_reseeds_and_the_next_does_not() -> None:
    world = resumed(3)
    learner, actors, grants = first_grants(world)
    assert [(grant.start, grant.reset_envs, grant.update) for grant in grants] == [(StartFrom.FRESH, True, 4)] * 2
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    learner.publish(learner.take(Batch))
    assert [actor.take(Grant).reset_envs for actor in actors] == [False, False]


def test_a_replacement_in_a_resumed_run_reseeds_by_the_update_it_comes_for() -> None:
    world = resumed(3)
    learner, actors, grants = first_grants(world)
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    learner.publish(learner.take(Batch))
    world.carry_out(world.coordinator.actor_lost(0, 0, "killed", world.now))
    grant = world.actor(0, incarnation=1).take(Grant)
    assert (grant.start, grant.reset_envs, grant.update) == (StartFrom.FRESH, True, 5)


def test_a_learner_that_is_restarted_within_a_run_reseeds_nobody() -> None:
    world = resumed(0)
    learner, actors, grants = first_grants(world)
    assert [grant.reset_envs for grant in grants] == [False, False]
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    learner.publish(learner.take(Batch))
    world.carry_out(world.coordinator.learner_lost(world.now, learner.pid))
    held = [actor.take(Grant) for actor in actors]
    world.learner(updates_done=1, env_steps_done=1)
    for actor, grant in zip(actors, held, strict=True):
        actor.commit(grant)
    again = [actor.take(Grant) for actor in actors]
    assert [(grant.start, grant.reset_envs) for grant in again] == [(StartFrom.CARRY, False)] * 2
