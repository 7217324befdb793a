"""Checkpoints as the service hears of them: the score that goes into them, and what follows if one is not written."""

from __future__ import annotations

from rollout_service.control.events import RunFinished, UpdateFinished
from rollout_service.control.messages import Batch, Episode, Grant
from tests.control.world import ENVS, STEPS, Peer, World, started

ROLLOUT = 2 * ENVS * STEPS


def episodes(*returns: float) -> tuple[Episode, ...]:
    return tuple(Episode(env=0, total_reward=value, length=3) for value in returns)


def collect(actors: list[Peer], *returns: float) -> None:
    """Each actor commits a rollout, the first with one finished episode per return."""
    actors[0].commit(actors[0].take(Grant), episodes=episodes(*returns))
    for actor in actors[1:]:
        actor.commit(actor.take(Grant))


def missing(world: World) -> int | None:
    found: int | None = world.coordinator.report(world.now)["checkpoint_missing_since"]
    return found


def test_a_batch_says_the_mean_return_of_the_newest_episodes_its_own_included() -> None:
    world = World(2)
    learner, actors = world.learner(), world.actors()
    means = []
    for returns in ((), (4.0, 2.0), tuple([1.0] * 98), (8.0,)):
        collect(actors, *returns)
        batch = learner.take(Batch)
        means.append(batch.tally.score)
        learner.publish(batch)
    assert means == [None, 3.0, (6.0 + 98) / 100, (2.0 + 98 + 8) / 100]


def test_episodes_of_updates_that_were_rolled_back_do_not_count() -> None:
    world = World(2)
    learner, actors = world.learner(), world.actors()
    tallies = []
    for value in (1.0, 3.0, 50.0):
        collect(actors, value)
        batch = learner.take(Batch)
        tallies.append(batch.tally)
        learner.publish(batch)
    collect(actors, 60.0)
    world.carry_out(world.coordinator.learner_lost(world.now, learner.pid))
    restored = world.learner(updates_done=2, env_steps_done=2 * ROLLOUT, tally=tallies[1])
    collect(actors, 5.0)
    assert restored.take(Batch).tally.score == 3.0


def test_a_mean_that_is_not_finite_is_no_score() -> None:
    _, learner, actors, grants = started()
    actors[0].commit(grants[0], episodes=episodes(float("inf"), 1.0))
    actors[1].commit(grants[1])
    assert learner.take(Batch).tally.score is None


def test_failures_are_counted_and_shown_until_a_checkpoint_is_written() -> None:
    world = World(2)
    learner, actors = world.learner(), world.actors()
    seen = []
    for outcome in ({}, {"checkpoint_failure": "no room"}, {"checkpoint_failure": "no room"}, {}, {"checkpoint": "c"}):
        collect(actors)
        learner.publish(learner.take(Batch), **outcome)
        seen.append(missing(world))
    assert seen == [None, 2, 2, 2, None]
    assert world.counters["checkpoint_failures"] == 2
    assert [event.checkpoint_failure for event in world.events_of(UpdateFinished)] == [
        None, "no room", "no room", None, None,
    ]  # fmt: skip


def test_a_learner_that_goes_on_from_a_checkpoint_misses_none() -> None:
    world = World(2)
    learner, actors = world.learner(), world.actors()
    collect(actors)
    learner.publish(learner.take(Batch), checkpoint_failure="no room")
    world.carry_out(world.coordinator.learner_lost(world.now, learner.pid))
    world.learner()
    assert missing(world) is None


def test_a_run_whose_last_update_is_not_saved_has_not_finished() -> None:
    world = World(2, total_updates=1)
    learner, actors = world.learner(), world.actors()
    collect(actors)
    learner.publish(learner.take(Batch), checkpoint_failure="no room")
    [end] = world.events_of(RunFinished)
    assert end.reason == "all 1 updates were made, but the last is not saved: no room"
