"""A learner is lost, another one goes on: what is counted, what is told, and who is not taken for whom."""

from __future__ import annotations

from rollout_service.control.events import LearnerReady, LearnerSilent, LearnerStuck, RunFinished, UpdateFinished
from rollout_service.control.messages import Batch, Grant, Hello, Refused, Role, StartFrom, Stop, Welcome
from rollout_service.control.scheduling import Patience, Streaming
from tests.control.world import ENVS, STEPS, Peer, World, started

ROLLOUT = 2 * ENVS * STEPS
"""Env steps of one batch of two actors."""


def collect(actors: list[Peer]) -> None:
    for actor in actors:
        actor.commit(actor.take(Grant))


def learn(learner: Peer, actors: list[Peer], updates: int) -> None:
    for _ in range(updates):
        collect(actors)
        learner.publish(learner.take(Batch))


def run(updates: int, **changes: int) -> tuple[World, Peer, list[Peer]]:
    """A run of two actors after so many updates, the next bank granted."""
    world = World(2, **changes)
    learner = world.learner()
    actors = world.actors()
    learn(learner, actors, updates)
    return world, learner, actors


def lose(world: World, learner: Peer) -> None:
    world.carry_out(world.coordinator.learner_lost(world.now, learner.pid))


def test_the_first_learner_is_told_as_one_that_restores_nothing() -> None:
    world, learner, _, _ = started()
    assert world.events_of(LearnerReady) == [LearnerReady(learner.pid, version=1, updates=0, env_steps=0)]


def test_counters_go_back_to_the_checkpoint_and_what_that_costs_is_counted_and_told() -> None:
    world, learner, actors = run(updates=5)
    collect(actors)
    assert learner.got(Batch)
    lose(world, learner)
    restored = world.learner(updates_done=3, env_steps_done=3 * ROLLOUT)
    assert world.events_of(LearnerReady)[-1] == LearnerReady(
        restored.pid,
        version=7,
        updates=3,
        env_steps=3 * ROLLOUT,
        restored=True,
        dropped_rollouts=2,
        dropped_env_steps=ROLLOUT,
        rolled_back_updates=2,
        rolled_back_env_steps=2 * ROLLOUT,
    )
    assert world.counters == {
        "lost_learners": 1,
        "dropped_rollouts": 2,
        "dropped_env_steps": ROLLOUT,
        "rolled_back_updates": 2,
        "rolled_back_env_steps": 2 * ROLLOUT,
    }
    report = world.coordinator.report(world.now)
    assert (report["updates"], report["env_steps"], report["version"]) == (3, 3 * ROLLOUT, 7)
    collect(actors)
    batch = restored.take(Batch)
    assert (batch.update, batch.env_steps) == (4, 4 * ROLLOUT)


def test_the_run_still_has_exactly_its_updates() -> None:
    world, learner, actors = run(updates=3, total_updates=5)
    lose(world, learner)
    restored = world.learner(updates_done=2, env_steps_done=2 * ROLLOUT)
    collect(actors)  # of leases from before: dropped, and granted again
    learn(restored, actors, updates=1)
    collect(actors)
    assert not restored.take(Batch).last
    lose(world, restored)
    third = world.learner(updates_done=2, env_steps_done=2 * ROLLOUT)
    learn(third, actors, updates=3)
    assert world.events[-1] == RunFinished("finished")
    finished = world.events_of(UpdateFinished)
    assert [event.update for event in finished] == [1, 2, 3, 3, 3, 4, 5]
    versions = [event.version for event in finished]
    assert versions == sorted(versions)
    assert (finished[-1].env_steps, len(set(versions))) == (5 * ROLLOUT, 7)


def test_an_update_that_was_saved_but_not_announced_is_finished_and_its_batch_not_dropped() -> None:
    world, learner, actors = run(updates=2)
    collect(actors)
    lose(world, learner)
    assert world.counters["dropped_rollouts"] == 2
    world.learner(version=5, updates_done=3, env_steps_done=3 * ROLLOUT)
    assert world.events_of(UpdateFinished)[-1] == UpdateFinished(3, 5, 3 * ROLLOUT, {}, {}, None)
    (ready,) = [event for event in world.events_of(LearnerReady) if event.restored]
    assert ready.unannounced_update
    assert (ready.dropped_rollouts, ready.rolled_back_updates) == (0, 0)
    assert world.counters == {"lost_learners": 1}
    assert [actor.take(Grant).update for actor in actors] == [4, 4]


def test_a_last_update_that_was_saved_but_not_announced_ends_the_run() -> None:
    world, learner, actors = run(updates=2, total_updates=3)
    collect(actors)
    assert learner.take(Batch).last
    lose(world, learner)
    restored = world.learner(updates_done=3, env_steps_done=3 * ROLLOUT)
    assert restored.take(Stop).reason == "finished"
    assert [type(event) for event in world.events[-3:]] == [UpdateFinished, LearnerReady, RunFinished]
    assert world.events_of(UpdateFinished)[-1].update == 3


def test_rows_collected_between_two_learners_are_dropped_and_counted() -> None:
    world, learner, actors = run(updates=1)
    lose(world, learner)
    collect(actors)
    world.learner(updates_done=1, env_steps_done=ROLLOUT)
    assert world.counters == {"lost_learners": 1, "dropped_rollouts": 2, "dropped_env_steps": ROLLOUT}
    assert [actor.take(Grant).start for actor in actors] == [StartFrom.CARRY] * 2


def test_nobody_is_hurried_while_there_is_no_learner() -> None:
    """Rows that are committed now are dropped once the next one is there."""
    patience = Patience(preempt_share=0.5)
    world, learner, (first, second, slow), grants = started(3, scheduler=Streaming(3, 1, patience), max_policy_lag=1)
    first.commit(grants[0])
    second.commit(grants[1])
    first.commit(first.take(Grant))
    learner.publish(learner.take(Batch))
    assert "preempted_leases" not in world.counters
    lose(world, learner)
    for actor in (first, second):
        actor.commit(actor.take(Grant))
    world.tick(1.0)
    assert "preempted_leases" not in world.counters
    assert not slow.got(Grant)


def test_a_learner_lost_before_it_was_ready_adds_to_what_the_next_one_tells() -> None:
    world, learner, actors = run(updates=2)
    collect(actors)
    lose(world, learner)
    lose(world, world.learner(ready=False))
    world.learner(updates_done=1, env_steps_done=ROLLOUT)
    (ready,) = [event for event in world.events_of(LearnerReady) if event.restored]
    assert (ready.dropped_rollouts, ready.rolled_back_updates) == (2, 1)
    assert world.counters["lost_learners"] == 2


def test_proof_of_an_earlier_learners_death_leaves_the_present_one_alone() -> None:
    world, first, actors = run(updates=1)
    lose(world, first)
    second = world.learner(updates_done=1, env_steps_done=ROLLOUT)
    lose(world, first)
    collect(actors)
    learn(second, actors, updates=1)
    assert world.counters == {"lost_learners": 1, "dropped_stale_commits": 2}


def test_a_dead_learners_hello_that_arrives_late_does_not_take_the_place_of_the_next() -> None:
    world = World()
    dead = world.peer("learner")
    lose(world, dead)
    dead.tell(Hello(role=Role.LEARNER, pid=dead.pid))
    assert f"pid {dead.pid} is dead" in dead.take(Refused).reason
    assert world.learner().welcome is not None


def test_a_pid_that_comes_back_is_let_in() -> None:
    world = World()
    peer = world.peer("learner")
    lose(world, peer)
    for answer in (Refused, Welcome):
        peer.tell(Hello(role=Role.LEARNER, pid=peer.pid))
        assert peer.got(answer)


def test_a_stop_is_no_loss() -> None:
    world, learner, _ = run(updates=1)
    world.carry_out(world.coordinator.stop("Ctrl-C", world.now))
    lose(world, learner)
    assert world.counters == {}


def hanging(phase: str, seconds: float, beats: bool = True) -> World:
    """A learner that has been in one phase for so long, with a heartbeat each second or none."""
    world, learner, _, _ = started()
    world.coordinator.learner_timeout = 20.0
    learner.beat(7, phase)
    for _ in range(int(seconds)):
        world.now += 1.0
        if beats:
            learner.beat(7, phase)
        world.tick()
    return world


def test_a_learner_that_makes_no_progress_at_work_is_told_once() -> None:
    world = hanging("updating", 30.0)
    (stuck,) = world.events_of(LearnerStuck)
    assert (stuck.phase, stuck.seconds) == ("updating", 21.0)
    assert world.counters["stuck_learners"] == 1


def test_a_learner_that_waits_for_a_batch_may_wait() -> None:
    assert hanging("waiting", 60.0).events_of(LearnerStuck) == []


def test_a_learner_without_heartbeats_is_silent() -> None:
    world = hanging("waiting", 12.0, beats=False)
    (silent,) = world.events_of(LearnerSilent)
    assert silent.seconds == 11.0


def test_a_learner_that_prepares_may_be_silent_for_as_long_as_a_step_may_take() -> None:
    world = World()
    world.coordinator.step_timeout = 60.0
    world.learner(ready=False).beat(0, "preparing")
    world.tick(60.0)
    assert world.events_of(LearnerSilent) == []
    world.tick(1.0)
    assert [silent.seconds for silent in world.events_of(LearnerSilent)] == [61.0]


def test_the_next_deadline_is_when_the_learner_could_be_stuck() -> None:
    world = World()
    world.coordinator.learner_timeout = 4.0
    learner = world.learner(ready=False)
    assert world.coordinator.next_deadline(world.now) == world.now + 10.0
    learner.beat(0, "preparing")
    assert world.coordinator.next_deadline(world.now) == world.now + 4.0
