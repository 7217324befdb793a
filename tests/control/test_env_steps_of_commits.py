"""Env steps are real transitions: what a commit says of its filler rows reaches every count."""

from __future__ import annotations

from rollout_service.control.events import BatchFormed, RolloutCommitted, UpdateFinished
from rollout_service.control.messages import Batch, Committed, Grant, Refused
from tests.control.world import ENVS, STEPS, started


def test_env_steps_without_fillers_are_what_everyone_counts() -> None:
    world, learner, actors, grants = started()
    actors[0].commit(grants[0], env_steps=ENVS * STEPS - 3)
    actors[1].commit(grants[1], valid_steps=4, env_steps=5)
    batch = learner.take(Batch)
    assert batch.valid_steps == (STEPS, 4)
    assert batch.env_steps == ENVS * STEPS - 3 + 5
    assert [event.env_steps for event in world.events_of(RolloutCommitted)] == [ENVS * STEPS - 3, 5]
    learner.publish(batch)
    assert world.events_of(UpdateFinished)[-1].env_steps == batch.env_steps
    assert world.coordinator.report(world.now)["env_steps"] == batch.env_steps
    for actor in actors:
        actor.commit(actor.take(Grant))
    assert learner.take(Batch).env_steps == batch.env_steps + 2 * ENVS * STEPS
    assert [event.env_steps for event in world.events_of(BatchFormed)][-1] == batch.env_steps + 2 * ENVS * STEPS


def test_a_rollout_of_fillers_alone_counts_nothing() -> None:
    _, learner, actors, grants = started()
    actors[0].commit(grants[0], valid_steps=1, env_steps=0)
    actors[1].commit(grants[1])
    assert learner.take(Batch).env_steps == ENVS * STEPS


def test_more_env_steps_than_rows_are_refused_naming_both() -> None:
    _, _, actors, grants = started()
    actors[0].commit(grants[0], valid_steps=3, env_steps=3 * ENVS + 1)
    assert actors[0].take(Refused).reason == f"commit.env_steps is {3 * ENVS + 1}, its valid_steps have {3 * ENVS} rows"
    assert not actors[0].got(Committed)
