"""A run in which collection goes on while the learner works: ages, drops, and what becomes of released slots."""

from __future__ import annotations

import pytest

from rollout_service.control.coordinator import FINISHED
from rollout_service.control.events import BatchFormed, RolloutCommitted, RolloutTooOld
from rollout_service.control.messages import Batch, Committed, Grant, Release, StartFrom
from tests.control.world import ENVS, STEPS, Peer, started

ROLLOUT = ENVS * STEPS


def commit_all(actors: list[Peer]) -> None:
    """Everyone who holds a grant commits it."""
    for actor in actors:
        if actor.got(Grant):
            actor.commit(actor.take(Grant))


@pytest.mark.parametrize("max_policy_lag", [1, 2])
def test_with_a_slow_learner_the_lag_stays_within_its_bound_and_actors_idle(max_policy_lag: int) -> None:
    world, learner, actors, grants = started(4, max_policy_lag=max_policy_lag)
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    for _ in range(12):
        while any(actor.got(Grant) for actor in actors):
            commit_all(actors)
        batch = learner.take(Batch)
        learner.tell(Release(update=batch.update))
        world.tick(2.0)
        while any(actor.got(Grant) for actor in actors):
            commit_all(actors)
        idle = world.coordinator.report(world.now)["slots"]
        assert (idle["leased"], idle["ready"]) == (0, 4 * max_policy_lag), "as much as may be used, and no more"
        learner.publish(batch)
    lags = [lag for formed in world.events_of(BatchFormed) for lag in formed.lags]
    assert max(lags) == max_policy_lag
    assert world.coordinator.report(world.now)["policy_lags"][str(max_policy_lag)] > 0
    assert "dropped_over_lag" not in world.counters, "nothing was collected in vain"


def test_a_rollout_that_comes_too_late_is_refused_counted_and_named() -> None:
    world, learner, actors, grants = started(3, max_policy_lag=1)
    late, others = grants[2], actors[:2]
    for actor, grant in zip(others, grants[:2], strict=True):
        actor.commit(grant)
    for _ in range(2):
        while not learner.got(Batch):
            commit_all(others)
        learner.publish(learner.take(Batch))
    actors[2].commit(late)
    assert not actors[2].take(Committed).accepted
    assert world.events_of(RolloutTooOld) == [RolloutTooOld(actor_id=2, lag=2, env_steps=ROLLOUT)]
    assert (world.counters["dropped_over_lag"], world.counters["dropped_over_lag_env_steps"]) == (1, ROLLOUT)
    assert actors[2].take(Grant).start is StartFrom.CARRY, "its envs go on"


def test_the_oldest_rollouts_go_first() -> None:
    _, learner, actors, grants = started(2, max_policy_lag=1)
    actors[0].commit(grants[0])
    actors[0].commit(actors[0].take(Grant))
    batch = learner.take(Batch)
    assert batch.slots == (0, 2)
    actors[1].commit(grants[1])
    learner.publish(batch)
    grant = actors[0].take(Grant)
    actors[0].commit(grant)
    assert learner.take(Batch).slots == (1, grant.slot)


def test_a_committed_rollout_that_the_next_weights_leave_behind_is_dropped() -> None:
    """An actor is gone for good, so batches get smaller, and what was collected for larger ones has to wait."""
    world, learner, actors, grants = started(2, max_policy_lag=1)
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    first = learner.take(Batch)
    learner.tell(Release(update=first.update))
    commit_all(actors)
    world.carry_out(world.coordinator.actor_lost(1, 0, "killed", world.now))
    world.carry_out(world.coordinator.abandon_actor(1, world.now))
    learner.publish(first)
    learner.publish(learner.take(Batch))
    assert world.events_of(RolloutTooOld) == [RolloutTooOld(actor_id=1, lag=2, env_steps=ROLLOUT)]
    assert world.coordinator.report(world.now)["policy_lags"] == {"0": 2, "1": 1}


def test_released_slots_are_filled_while_the_learner_works() -> None:
    _, learner, actors, grants = started(2, max_policy_lag=1)
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    batch = learner.take(Batch)
    for actor in actors:
        actor.commit(actor.take(Grant))
        assert not actor.got(Grant), "enough for the next batch"
    learner.tell(Release(update=batch.update))
    learner.tell(Release(update=batch.update))
    learner.publish(batch)
    second = learner.take(Batch)
    assert set(second.slots).isdisjoint(batch.slots)
    assert {actor.take(Grant).slot for actor in actors} == set(batch.slots)


def test_a_batch_that_is_lost_after_its_slots_were_released_is_counted() -> None:
    world, learner, actors, grants = started(2, max_policy_lag=1)
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    learner.tell(Release(update=learner.take(Batch).update))
    actors[0].commit(actors[0].take(Grant))
    world.carry_out(world.coordinator.learner_lost(world.now))
    assert (world.counters["dropped_rollouts"], world.counters["dropped_env_steps"]) == (3, 3 * ROLLOUT)
    assert world.learner().welcome is not None
    grant = actors[0].take(Grant)
    assert grant.start is StartFrom.CARRY


def test_what_was_collected_with_weights_that_were_rolled_back_is_not_taken() -> None:
    """By its number the version is two behind; by what it has learned it is five updates ahead."""
    world, learner, actors, grants = started(2, max_policy_lag=2)
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    for _ in range(5):
        learner.publish(learner.take(Batch))
        commit_all(actors)
    learner.publish(learner.take(Batch))
    before = [actor.take(Grant) for actor in actors]
    assert [8 - grant.version for grant in before] == [2, 2], "within the bound, by its number"
    world.carry_out(world.coordinator.learner_lost(world.now))
    assert world.learner(version=8, updates_done=0).got(Batch) is False
    dropped = world.counters.get("dropped_rollouts", 0)
    for actor, grant in zip(actors, before, strict=True):
        actor.inbox.clear()
        actor.commit(grant)
        assert not actor.take(Committed).accepted
        assert actor.take(Grant).version == 8
    assert world.counters["dropped_stale_commits"] == 2
    assert world.counters.get("dropped_rollouts", 0) == dropped


def test_behind_the_last_batch_nothing_is_collected_and_what_was_is_counted() -> None:
    world, learner, actors, grants = started(2, max_policy_lag=2, total_updates=3)
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    for _ in range(2):
        while any(actor.got(Grant) for actor in actors):
            commit_all(actors)
        learner.publish(learner.take(Batch))
    last = learner.take(Batch)
    assert last.last
    commit_all(actors)
    assert not any(actor.got(Grant) for actor in actors)
    learner.publish(last)
    assert world.coordinator.stopped == FINISHED
    trained = sum(len(formed.lags) for formed in world.events_of(BatchFormed))
    collected = len(world.events_of(RolloutCommitted))
    assert (trained, collected - trained) == (6, world.counters["dropped_rollouts"])
    assert world.counters["dropped_env_steps"] == world.counters["dropped_rollouts"] * ROLLOUT
    account = world.coordinator.report(world.now)["account"]
    assert (account["trained"], account["in_hand"], account["missing"]) == (6 * ROLLOUT, 0, 0)
