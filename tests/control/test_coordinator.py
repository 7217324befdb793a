"""The decisions of a run, as sentences. Time is a number; nothing here waits."""

from __future__ import annotations

import json

import pytest

from rollout_service.control.effects import Send
from rollout_service.control.events import (
    ActorJoined,
    ActorStuck,
    BatchFormed,
    PeerLeft,
    PeerRefused,
    RolloutCommitted,
    RunFinished,
    UpdateFinished,
)
from rollout_service.control.messages import (
    Abort,
    Batch,
    Bye,
    Commit,
    Committed,
    Episode,
    Grant,
    Hello,
    Message,
    Pong,
    Publish,
    Ready,
    Refused,
    Role,
    StartFrom,
    Status,
    StatusReport,
    Stop,
    Welcome,
)
from rollout_service.control.scheduling import Lockstep, Patience
from tests.control.world import ENVS, STEP_TIMEOUT_S, STEPS, ZERO, Peer, World, make_join, make_spec, started


def fill(world: World, learner: Peer, actors: list[Peer], grants: list[Grant]) -> Batch:
    """Every actor commits; the learner has the batch."""
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
        actor.take(Committed)
    return learner.take(Batch)


# --- grants and batches ---


def test_nothing_is_granted_before_weights_exist() -> None:
    world = World()
    actors = world.actors()
    learner = world.learner(ready=False)
    assert not any(actor.got(Grant) for actor in actors)
    learner.tell(Ready(version=1))
    assert [actor.take(Grant).version for actor in actors] == [1, 1]


def test_each_actor_is_granted_its_own_slot_of_the_first_bank_fresh() -> None:
    _, _, _, grants = started(3)
    assert [(grant.slot, grant.epoch, grant.start, grant.update) for grant in grants] == [
        (0, 1, StartFrom.FRESH, 1),
        (1, 1, StartFrom.FRESH, 1),
        (2, 1, StartFrom.FRESH, 1),
    ]
    assert not any(grant.reset_envs or grant.barrier_after for grant in grants)


def test_an_actor_that_comes_late_is_granted_the_current_version() -> None:
    world = World(3)
    world.learner(version=5)
    world.actor(0)
    world.now += 1000
    late = world.actor(2)
    assert (late.take(Grant).version, late.welcome and late.welcome.version) == (5, 5)


def test_the_batch_goes_when_the_last_actor_has_committed() -> None:
    world, learner, (first, second), (grant_0, grant_1) = started()
    second.commit(grant_1, valid_steps=3)
    assert not learner.got(Batch)
    world.now += 2.5
    first.commit(grant_0)
    batch = learner.take(Batch)
    assert (batch.update, batch.slots, batch.valid_steps, batch.versions) == (1, (0, 1), (STEPS, 3), (1, 1))
    assert batch.env_steps == ENVS * (STEPS + 3)
    assert not batch.last
    formed = BatchFormed(1, ENVS * (STEPS + 3), waited_for=0, wait_s=2.5, partial=(1,), lags=(0, 0))
    assert world.events_of(BatchFormed) == [formed]


def test_the_next_bank_is_granted_only_after_the_next_weights() -> None:
    world, learner, actors, grants = started()
    batch = fill(world, learner, actors, grants)
    world.tick(100.0)
    assert not any(actor.got(Grant) for actor in actors)
    learner.publish(batch)
    again = [actor.take(Grant) for actor in actors]
    assert [(grant.slot, grant.epoch, grant.version, grant.update) for grant in again] == [(2, 1, 2, 2), (3, 1, 2, 2)]


def test_banks_alternate_and_epochs_grow() -> None:
    world, learner, actors, grants = started()
    seen = [(grant.slot, grant.epoch) for grant in grants]
    for _ in range(3):
        learner.publish(fill(world, learner, actors, grants))
        grants = [actor.take(Grant) for actor in actors]
        seen += [(grant.slot, grant.epoch) for grant in grants]
    assert seen == [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (1, 2), (2, 2), (3, 2)]


def test_the_last_update_ends_the_run_and_everyone_is_told() -> None:
    world, learner, actors, grants = started(total_updates=2)
    learner.publish(fill(world, learner, actors, grants))
    last = fill(world, learner, actors, [actor.take(Grant) for actor in actors])
    assert last.last
    learner.publish(last, metrics={"loss": 0.5}, seconds={"update": 0.1}, checkpoint="runs/x/2")
    assert [peer.take(Stop).reason for peer in (*actors, learner)] == ["finished"] * 3
    assert world.events[-2:] == [
        UpdateFinished(2, 3, 2 * 2 * ENVS * STEPS, {"loss": 0.5}, {"update": 0.1}, "runs/x/2"),
        RunFinished("finished"),
    ]


def test_a_resumed_run_goes_on_counting() -> None:
    world = World(1, total_updates=8)
    learner = world.learner(version=1, updates_done=6, env_steps_done=6 * ENVS * STEPS)
    actor = world.actor()
    batch = fill(world, learner, [actor], [actor.take(Grant)])
    assert (batch.update, batch.env_steps, batch.last) == (7, 7 * ENVS * STEPS, False)


def test_a_run_resumed_at_its_end_finishes_at_once() -> None:
    world = World(1, total_updates=6)
    learner = world.learner(version=1, updates_done=6, env_steps_done=6 * ENVS * STEPS)
    assert learner.take(Stop).reason == "finished"


def test_what_a_commit_says_reaches_the_metrics() -> None:
    world, _, (actor, _), (grant, _) = started()
    episode = Episode(env=1, total_reward=2.5, length=7, success=True)
    actor.commit(grant, episodes=(episode,), seconds={"env": 0.25}, counters={"seed_mismatches": 2})
    (event,) = world.events_of(RolloutCommitted)
    assert (event.actor_id, event.slot, event.env_steps, event.version) == (0, 0, ENVS * STEPS, 1)
    assert (event.episodes, event.seconds, event.counters) == ((episode,), {"env": 0.25}, {"seed_mismatches": 2})
    assert world.counters == {"seed_mismatches": 2}


def test_what_the_learner_waits_for_is_out_before_anything_else_of_a_commit_is_worked_out() -> None:
    world, learner, actors, grants = started()
    actors[0].commit(grants[0], counters={"odd": 1})
    last = Commit(slot=grants[1].slot, epoch=grants[1].epoch, valid_steps=STEPS, version=1, counters={"odd": 2})
    effects = iter(world.coordinator.handle(actors[1].address, last, world.now))
    first = next(effects)
    assert isinstance(first, Send)
    assert (first.peer, type(first.message)) == (learner.address, Batch)
    assert world.coordinator.counters["odd"] == 1
    said = [type(effect.message if isinstance(effect, Send) else effect.event) for effect in effects]
    assert said == [Committed, RolloutCommitted, BatchFormed]
    assert world.coordinator.counters["odd"] == 3


# --- repeats and stale commits ---


def test_a_commit_sent_again_gets_the_same_answer_and_counts_once() -> None:
    world, learner, actors, grants = started()
    for _ in range(3):
        actors[0].commit(grants[0])
        assert actors[0].take(Committed) == Committed(slot=0, epoch=1, accepted=True)
    actors[1].commit(grants[1])
    assert learner.take(Batch).env_steps == 2 * ENVS * STEPS
    assert len(world.events_of(RolloutCommitted)) == 2
    assert "dropped_stale_commits" not in world.counters


def test_a_commit_sent_again_brings_the_grant_that_got_lost() -> None:
    world, learner, actors, grants = started()
    learner.publish(fill(world, learner, actors, grants))
    lost = actors[0].take(Grant)
    actors[0].commit(grants[0])
    assert actors[0].take(Committed).accepted
    assert actors[0].take(Grant) == lost


def test_a_join_sent_again_brings_the_first_grant_that_got_lost() -> None:
    world, _, actors, grants = started()
    actors[1].tell(make_join(world.spec))
    assert actors[1].take(Grant) == grants[1]
    assert len(world.events_of(ActorJoined)) == 2


def test_ready_and_publish_sent_again_bring_the_batch_that_got_lost() -> None:
    world, learner, actors, grants = started()
    batch = fill(world, learner, actors, grants)
    learner.tell(Ready(version=1))
    assert learner.take(Batch) == batch
    learner.publish(batch)
    next_batch = fill(world, learner, actors, [actor.take(Grant) for actor in actors])
    learner.tell(Publish(update=batch.update, version=2))
    assert learner.take(Batch) == next_batch
    assert len(world.events_of(UpdateFinished)) == 1


def test_a_hello_sent_again_gets_the_same_place() -> None:
    world = World(2)
    actor = world.hello()
    actor.tell(Hello(role=Role.ACTOR, pid=actor.pid))
    assert actor.take(Welcome) == actor.welcome


def test_a_commit_with_an_old_epoch_is_counted_and_never_trained_on() -> None:
    world, learner, (actor, other), (grant, other_grant) = started()
    world.carry_out(world.coordinator.actor_lost(0, 0, "killed", world.now))
    replacement = world.actor(0, 1)
    assert replacement.take(Grant).epoch == 2
    actor.commit(grant)
    assert not actor.take(Committed).accepted
    other.commit(other_grant)
    assert not learner.got(Batch)
    assert world.counters == {"dropped_stale_commits": 1, "lost_actors": 1}
    actor.commit(grant)
    assert world.counters["dropped_stale_commits"] == 1


def test_rows_of_another_version_than_the_newest_are_dropped_and_the_actor_goes_on() -> None:
    world, _, (actor, _), (grant, _) = started()
    actor.commit(grant, version=0)
    assert not actor.take(Committed).accepted
    again = actor.take(Grant)
    assert (again.slot, again.epoch, again.start) == (grant.slot, 2, StartFrom.CARRY)
    assert world.counters == {"dropped_stale_commits": 1}


@pytest.mark.parametrize(("slot", "epoch"), [(1, 1), (0, 2), (0, 0), (99, 1)])
def test_a_commit_of_a_lease_that_never_was_is_refused(slot: int, epoch: int) -> None:
    world, _, (actor, _), _ = started()
    actor.tell(Commit(slot=slot, epoch=epoch, valid_steps=1, version=1))
    assert f"slot {slot} epoch {epoch}" in actor.take(Refused).reason
    assert world.counters == {"rejected_messages": 1}


def test_a_commit_of_more_steps_than_a_slot_has_names_both() -> None:
    _, _, (actor, _), (grant, _) = started()
    actor.commit(grant, valid_steps=STEPS + 1)
    assert actor.take(Refused).reason == "commit.valid_steps is 9, a slot has 8"


def test_an_aborted_lease_is_granted_again() -> None:
    world, _, (actor, _), (grant, _) = started()
    actor.tell(Abort(slot=grant.slot, epoch=grant.epoch, reason="env went away"))
    again = actor.take(Grant)
    assert (again.slot, again.epoch) == (grant.slot, 2)
    actor.tell(Abort(slot=grant.slot, epoch=grant.epoch, reason="env went away"))
    assert actor.take(Grant) == again
    assert world.counters == {"aborted_leases": 1}


# --- where the state comes from ---


def test_a_slot_is_seeded_only_from_the_actors_own_last_commit() -> None:
    _, learner, actors, grants = started(3)
    actors[0].commit(grants[0], valid_steps=0)
    actors[1].commit(grants[1])
    actors[2].commit(grants[2])
    learner.publish(learner.take(Batch), seeded=(3, 4))
    starts = [actor.take(Grant).start for actor in actors]
    assert starts == [StartFrom.CARRY, StartFrom.SEEDED, StartFrom.CARRY]


def test_a_new_incarnation_starts_fresh_in_a_slot_seeded_for_its_predecessor() -> None:
    world, learner, actors, grants = started()
    batch = fill(world, learner, actors, grants)
    world.carry_out(world.coordinator.actor_lost(0, 0, "killed", world.now))
    replacement = world.actor(0, 1)
    learner.publish(batch)
    assert (replacement.take(Grant).start, actors[1].take(Grant).start) == (StartFrom.FRESH, StartFrom.SEEDED)


def test_a_seed_serves_one_grant() -> None:
    world, learner, actors, grants = started()
    learner.publish(fill(world, learner, actors, grants))
    seeded = actors[0].take(Grant)
    assert seeded.start is StartFrom.SEEDED
    actors[0].commit(seeded, version=1)
    assert actors[0].take(Grant).start is StartFrom.CARRY


def test_the_zero_strategy_starts_every_rollout_fresh() -> None:
    world, learner, actors, grants = started(state_strategy=ZERO)
    learner.publish(fill(world, learner, actors, grants))
    assert [actor.take(Grant).start for actor in actors] == [StartFrom.FRESH] * 2


# --- actors come and go ---


def test_the_slot_of_a_lost_actor_is_granted_to_its_replacement() -> None:
    world, learner, (_, second), (grant, other) = started()
    world.carry_out(world.coordinator.actor_lost(0, 0, "killed", world.now))
    second.commit(other)
    replacement = world.actor(0, 1)
    again = replacement.take(Grant)
    assert (again.slot, again.epoch, again.start) == (grant.slot, 2, StartFrom.FRESH)
    replacement.commit(again)
    assert learner.take(Batch).valid_steps == (STEPS, STEPS)


def test_rows_committed_before_an_actor_died_are_trained_on() -> None:
    world, learner, (first, second), (grant_0, grant_1) = started()
    first.commit(grant_0)
    world.carry_out(world.coordinator.actor_lost(0, 0, "killed", world.now))
    second.commit(grant_1)
    assert learner.take(Batch).valid_steps == (STEPS, STEPS)


def test_proof_of_an_earlier_incarnations_death_leaves_the_present_one_alone() -> None:
    world, _, _, _ = started()
    world.carry_out(world.coordinator.actor_lost(0, 0, "killed", world.now))
    replacement = world.actor(0, 1)
    world.carry_out(world.coordinator.actor_lost(0, 0, "killed", world.now))
    replacement.commit(replacement.take(Grant))
    assert replacement.take(Committed).accepted


def test_a_place_that_is_given_up_counts_as_empty() -> None:
    world, learner, (_, second), (_, grant) = started()
    second.commit(grant)
    world.carry_out(world.coordinator.actor_lost(0, 0, "killed", world.now))
    assert not learner.got(Batch)
    world.carry_out(world.coordinator.abandon_actor(0, world.now))
    batch = learner.take(Batch)
    assert (batch.valid_steps, batch.versions, batch.env_steps) == ((0, STEPS), (0, 1), ENVS * STEPS)


def test_giving_up_a_place_does_nothing_while_somebody_is_there() -> None:
    world, learner, actors, grants = started()
    world.carry_out(world.coordinator.abandon_actor(0, world.now))
    actors[1].commit(grants[1])
    assert not learner.got(Batch)
    actors[0].commit(grants[0])
    learner.publish(learner.take(Batch))
    assert actors[0].take(Grant).slot == 2


def test_an_actor_may_come_back_to_a_place_that_was_given_up() -> None:
    world, learner, (_, second), (_, grant) = started()
    world.carry_out(world.coordinator.actor_lost(0, 0, "killed", world.now))
    world.carry_out(world.coordinator.abandon_actor(0, world.now))
    second.commit(grant)
    learner.publish(learner.take(Batch))
    revived = world.actor(0, 7)
    assert revived.welcome is not None
    assert revived.welcome.incarnation == 7
    assert revived.take(Grant).slot == 2
    second.commit(second.take(Grant))
    assert not learner.got(Batch)


def test_an_empty_bank_never_goes_to_the_learner() -> None:
    world, learner, _, _ = started()
    for actor_id in (0, 1):
        world.carry_out(world.coordinator.actor_lost(actor_id, 0, "killed", world.now))
        world.carry_out(world.coordinator.abandon_actor(actor_id, world.now))
    world.tick(1000.0)
    assert not learner.got(Batch)


def test_goodbye_frees_the_place_and_tells_why() -> None:
    world, _, (actor, _), (grant, _) = started()
    actor.tell(Bye(reason="EnvFault: boom", traceback="Traceback ..."))
    assert world.events_of(PeerLeft) == [PeerLeft(Role.ACTOR, 0, 0, actor.pid, "EnvFault: boom", "Traceback ...")]
    replacement = world.actor(0, 1)
    assert replacement.take(Grant).slot == grant.slot


def test_an_actor_that_was_replaced_is_told_to_leave_by_its_own_heartbeat() -> None:
    world, _, (actor, _), _ = started()
    actor.beat(1, "env.step")
    world.carry_out(world.coordinator.actor_lost(0, 0, "stuck", world.now))
    world.actor(0, 1)
    actor.beat(2, "env.step")
    assert world.sent[actor.address + b"-heart"] == [Pong(stopping=leave, run_id="run-1") for leave in (False, True)]


def test_unsupervised_actors_get_the_next_free_place_and_incarnations_grow() -> None:
    world = World(2)
    first, second = world.hello(), world.hello()
    world.carry_out(world.coordinator.actor_lost(0, 0, "killed", world.now))
    third = world.hello()
    places = [(peer.welcome.actor_id, peer.welcome.incarnation) for peer in (first, second, third) if peer.welcome]
    assert places == [(0, 0), (1, 0), (0, 1)]


# --- late actors under a deadline ---


def late_world() -> tuple[World, Peer, list[Peer], list[Grant]]:
    return started(scheduler=Lockstep(2, Patience(min_actors=1, deadline_s=30.0, first_deadline_s=30.0)))


def test_after_the_deadline_the_bank_goes_without_the_late_actor() -> None:
    world, learner, (first, _), (grant, _) = late_world()
    first.commit(grant)
    world.tick(29.0)
    assert not learner.got(Batch)
    assert world.coordinator.next_deadline(world.now) <= 130.0
    world.tick(1.0)
    assert learner.take(Batch).valid_steps == (STEPS, 0)
    assert world.coordinator.report(world.now)["slots"]["quarantined"] == 1
    assert world.counters["late_actors"] == 1


def test_a_late_commit_is_dropped_and_the_actor_goes_on_with_its_own_state() -> None:
    world, learner, (first, late), (grant, late_grant) = late_world()
    first.commit(grant)
    world.tick(30.0)
    learner.publish(learner.take(Batch))
    assert first.take(Grant).start is StartFrom.SEEDED
    assert not late.got(Grant)
    late.commit(late_grant)
    assert not late.take(Committed).accepted
    again = late.take(Grant)
    assert (again.slot, again.version, again.start) == (3, 2, StartFrom.CARRY)
    assert world.counters["dropped_stale_commits"] == 1
    assert world.coordinator.report(world.now)["slots"]["quarantined"] == 0


def test_a_bank_waits_for_at_least_min_actors() -> None:
    world, learner, _, _ = late_world()
    world.tick(1000.0)
    assert not learner.got(Batch)


# --- the learner comes and goes ---


def test_a_lost_learners_batch_is_dropped_counted_and_collected_again() -> None:
    world, learner, actors, grants = started()
    fill(world, learner, actors, grants)
    world.carry_out(world.coordinator.learner_lost(world.now))
    assert not any(actor.got(Grant) for actor in actors)
    restored = world.learner(updates_done=0)
    again = [actor.take(Grant) for actor in actors]
    assert [(grant.version, grant.start, grant.update) for grant in again] == [(2, StartFrom.CARRY, 1)] * 2
    assert world.counters == {"lost_learners": 1, "dropped_rollouts": 2, "dropped_env_steps": 2 * ENVS * STEPS}
    assert fill(world, restored, actors, again).env_steps == 2 * ENVS * STEPS


def test_a_restored_learner_must_publish_above_what_actors_may_have() -> None:
    world, learner, actors, grants = started()
    learner.publish(fill(world, learner, actors, grants))
    world.carry_out(world.coordinator.learner_lost(world.now))
    restored = world.learner(version=2)
    assert "ready.version 2 is not above 2" in restored.take(Refused).reason
    restored.tell(Ready(version=3))
    assert world.coordinator.version == 3


def test_a_lease_from_before_the_learners_death_is_dropped_and_granted_again() -> None:
    world, _, (first, second), (grant_0, grant_1) = started()
    second.commit(grant_1)
    world.carry_out(world.coordinator.learner_lost(world.now))
    world.learner()
    first.commit(grant_0)
    assert not first.take(Committed).accepted
    again = first.take(Grant)
    assert (again.slot, again.epoch, again.version, again.start) == (0, 2, 2, StartFrom.CARRY)
    assert second.take(Grant).slot == 1
    assert world.counters == {
        "lost_learners": 1,
        "dropped_rollouts": 1,
        "dropped_env_steps": ENVS * STEPS,
        "dropped_stale_commits": 1,
    }


def test_nothing_is_granted_to_a_restored_learner_that_is_not_ready() -> None:
    world, _, (first, second), (grant_0, grant_1) = started()
    world.carry_out(world.coordinator.learner_lost(world.now))
    restored = world.learner(ready=False)
    first.commit(grant_0, version=0)
    second.commit(grant_1)
    world.tick(1.0)
    assert not first.got(Grant)
    assert not restored.got(Batch)


def test_rows_committed_while_there_is_no_learner_are_dropped_with_the_rest() -> None:
    world, _, (first, second), (grant_0, grant_1) = started()
    world.carry_out(world.coordinator.learner_lost(world.now))
    first.commit(grant_0)
    second.commit(grant_1)
    restored = world.learner()
    assert not restored.got(Batch)
    assert [peer.take(Grant).start for peer in (first, second)] == [StartFrom.CARRY] * 2


def test_a_learners_goodbye_is_told_and_its_batch_dropped() -> None:
    world, learner, actors, grants = started()
    fill(world, learner, actors, grants)
    learner.tell(Bye(reason="RatioLawBroken: 1.2", traceback="Traceback ..."))
    assert world.events[-1] == PeerLeft(Role.LEARNER, None, 0, learner.pid, "RatioLawBroken: 1.2", "Traceback ...")
    assert world.counters == {"lost_learners": 1, "dropped_rollouts": 2, "dropped_env_steps": 2 * ENVS * STEPS}


def test_a_publish_of_another_update_or_version_or_with_seeds_elsewhere_is_refused() -> None:
    world, learner, actors, grants = started()
    batch = fill(world, learner, actors, grants)
    for wrong in ({"update": 2}, {"seeded": (0,)}, {"version": 1}):
        fields = {"update": batch.update, "version": 2, **wrong}
        learner.tell(Publish(**fields))
        assert "publish" in learner.take(Refused).reason
    assert world.coordinator.updates_done == 0


def test_an_update_in_flight_when_the_run_is_stopped_still_counts() -> None:
    world, learner, actors, grants = started()
    batch = fill(world, learner, actors, grants)
    world.carry_out(world.coordinator.stop("Ctrl-C", world.now))
    learner.take(Stop)
    learner.publish(batch)
    assert learner.take(Stop).reason == "Ctrl-C"
    assert world.events_of(UpdateFinished)[0].update == 1
    assert not any(actor.got(Grant) for actor in actors)


# --- the end ---


def test_stop_tells_everyone_once_and_heartbeats_tell_it_again() -> None:
    world, learner, actors, grants = started()
    for _ in range(2):
        world.carry_out(world.coordinator.stop("Ctrl-C", world.now))
    assert [peer.take(Stop).reason for peer in (learner, *actors)] == ["Ctrl-C"] * 3
    assert world.events_of(RunFinished) == [RunFinished("Ctrl-C")]
    actors[0].beat(1, "env.step")
    assert world.sent[actors[0].address + b"-heart"] == [Pong(stopping=True, run_id="run-1")]
    actors[0].commit(grants[0])
    assert actors[0].take(Stop).reason == "Ctrl-C"


def test_who_comes_after_the_end_is_told_to_stop() -> None:
    world = World()
    world.carry_out(world.coordinator.stop("Ctrl-C", world.now))
    assert world.hello().take(Stop).reason == "Ctrl-C"


# --- stuck actors ---


def test_an_actor_whose_step_does_not_return_is_told_once() -> None:
    world, _, (actor, _), _ = started()
    actor.beat(7, "env.step")
    for _ in range(3):
        world.now += STEP_TIMEOUT_S / 2
        actor.beat(7, "env.step")
        world.tick()
    (stuck,) = [event for event in world.events_of(ActorStuck) if event.actor_id == 0]
    assert stuck == ActorStuck(0, 0, actor.pid, "env.step", 1.5 * STEP_TIMEOUT_S)
    assert world.counters["stuck_actors"] >= 1


def test_an_actor_that_moves_or_waits_is_not_stuck() -> None:
    world, _, (moving, waiting), _ = started()
    for step in range(5):
        moving.beat(step, "env.step")
        waiting.beat(0, "waiting")
        world.tick(STEP_TIMEOUT_S * 0.9)
    assert world.events_of(ActorStuck) == []


def test_an_actor_that_sends_nothing_is_silent() -> None:
    world, _, (quiet, alive), _ = started()
    for _ in range(21):
        alive.beat(0, "waiting")
        world.tick(0.5)
    assert world.events_of(ActorStuck) == [ActorStuck(0, 0, quiet.pid, "silent", 10.5)]


PATIENT_S = 60.0


@pytest.mark.parametrize("phase", ["env.step", "env.reset", "policy"])
def test_an_actor_that_is_silent_at_work_has_as_long_as_a_step_may_take(phase: str) -> None:
    """Native code that holds the interpreter holds back heartbeats, too."""
    world, _, (quiet, alive), _ = started()
    world.coordinator.step_timeout = PATIENT_S
    quiet.beat(3, phase)
    for step in range(60):
        alive.beat(step, "env.step")
        world.tick(1.0)
    assert world.events_of(ActorStuck) == []
    assert world.coordinator.next_deadline(world.now - 0.5) == world.now
    world.tick(1.0)
    assert world.events_of(ActorStuck) == [ActorStuck(0, 0, quiet.pid, "silent", 61.0)]


def test_an_actor_with_a_lease_may_have_begun_its_work_since_it_was_heard_last() -> None:
    world, _, (quiet, alive), _ = started()
    world.coordinator.step_timeout = PATIENT_S
    quiet.beat(0, "waiting")
    for step in range(61):
        assert world.events_of(ActorStuck) == []
        alive.beat(step, "env.step")
        world.tick(1.0)
    assert world.events_of(ActorStuck) == [ActorStuck(0, 0, quiet.pid, "silent", 61.0)]


@pytest.mark.parametrize("phase", ["", "building envs"])
def test_an_actor_that_makes_its_envs_may_be_silent_for_as_long_as_a_step_may_take(phase: str) -> None:
    world = World(1)
    world.coordinator.step_timeout = PATIENT_S
    world.hello().beat(0, phase)
    world.tick(60.0)
    assert world.events_of(ActorStuck) == []
    assert world.coordinator.next_deadline(world.now - 0.5) == world.now
    world.tick(1.0)
    assert [(stuck.phase, stuck.seconds) for stuck in world.events_of(ActorStuck)] == [("silent", 61.0)]


def test_an_actor_without_work_that_sends_nothing_is_silent_however_long_a_step_may_take() -> None:
    world = World(1)
    world.coordinator.step_timeout = PATIENT_S
    world.actor().beat(0, "waiting")
    world.tick(11.0)
    assert [(stuck.phase, stuck.seconds) for stuck in world.events_of(ActorStuck)] == [("silent", 11.0)]


def test_the_next_deadline_is_when_the_first_actor_could_be_stuck() -> None:
    world, _, (first, _), _ = started()
    assert world.coordinator.next_deadline(world.now) == world.now + 10.0
    first.beat(1, "env.step")
    assert world.coordinator.next_deadline(world.now) == world.now + STEP_TIMEOUT_S
    assert World().coordinator.next_deadline(0.0) == float("inf")


# --- who is let in ---


OTHER = make_spec(
    2,
    spaces={
        "observation": [{"kind": "box", "shape": (6,), "dtype": "float32"}],
        "action": {"kind": "discrete", "shape": (), "dtype": "int64", "size": 5},
    },
)


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"spaces": OTHER.spaces}, ("observation space", "(2,)", "(6,)")),
        (
            {"spaces": make_spec().spaces.model_copy(update={"action": OTHER.spaces.action})},
            ("action space", "n=2", "n=5"),
        ),
        ({"autoreset": "next_step"}, ("autoreset", "actor", "next_step")),
        ({"state_strategy": "zero"}, ("state_strategy", "stored", "zero")),
        ({"run_digest": "0" * 32}, ("run digest", make_spec().digest(), "0" * 32)),
    ],
)
def test_a_join_that_differs_is_refused_naming_both_values(changes: dict[str, object], values: tuple[str, ...]) -> None:
    world = World(2)
    actor = world.hello(0)
    actor.tell(make_join(world.spec, **changes))
    reason = actor.take(Refused).reason
    assert [value for value in values if value not in reason] == []
    assert world.events_of(PeerRefused) == [PeerRefused(Role.ACTOR, actor.pid, reason)]
    assert world.counters == {"refused_handshakes": 1}
    assert world.hello(0).welcome is not None


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"run_digest": "0" * 32}, (make_spec().digest(), "0" * 32)),
        ({"state_strategy": "zero"}, ("stored", "zero")),
    ],
)
def test_a_hello_that_differs_is_refused_naming_both_values(changes: dict[str, str], values: tuple[str, ...]) -> None:
    reason = World(2).hello(0, **changes).take(Refused).reason
    assert [value for value in values if value not in reason] == []


def test_a_hello_that_agrees_is_welcomed_with_the_run() -> None:
    world = World(2)
    welcome = world.hello(1, 3, run_digest=world.spec.digest(), state_strategy="stored").welcome
    assert welcome is not None
    assert type(world.spec).from_json(welcome.run_spec) == world.spec
    assert (welcome.actor_id, welcome.incarnation, welcome.rollout_segment) == (1, 3, "rs-token-rollout")


def test_a_place_that_is_taken_is_refused_naming_who_is_there() -> None:
    world = World(2)
    there = world.hello(1)
    reason = world.hello(1, 1).take(Refused).reason
    assert f"pid {there.pid}" in reason
    assert "incarnation 1" in reason


def test_a_place_that_does_not_exist_is_refused() -> None:
    assert "actor 2 does not exist: this run has 2 actors" in World(2).hello(2).take(Refused).reason


def test_one_actor_too_many_is_refused() -> None:
    world = World(2)
    world.hello(), world.hello()
    assert "all 2 actors" in world.hello().take(Refused).reason


def test_a_second_learner_is_refused_naming_the_first() -> None:
    world = World()
    first = world.learner()
    second = world.peer("learner")
    second.tell(Hello(role=Role.LEARNER, pid=second.pid))
    reason = second.take(Refused).reason
    assert f"pid {first.pid}" in reason
    assert f"pid {second.pid}" in reason


@pytest.mark.parametrize(
    "message",
    [
        make_join(make_spec()),
        Commit(slot=0, epoch=1, valid_steps=1, version=1),
        Abort(slot=0, epoch=1, reason="x"),
        Ready(version=1),
        Publish(update=1, version=2),
        Pong(),
        Stop(reason="you stop"),
    ],
    ids=lambda message: type(message).__name__.lower(),
)
def test_messages_of_strangers_are_counted_and_change_nothing(message: Message) -> None:
    world, learner, actors, grants = started()
    stranger = world.peer("stranger")
    stranger.tell(message)
    assert stranger.got(Refused)
    assert world.counters == {"rejected_messages": 1}
    assert fill(world, learner, actors, grants).valid_steps == (STEPS, STEPS)


def test_a_goodbye_of_a_stranger_is_ignored() -> None:
    world, _, _, _ = started()
    world.peer("stranger").tell(Bye(reason="x"))
    assert world.events_of(PeerLeft) == []


# --- status ---


def test_anyone_may_ask_for_the_state_of_the_run_even_after_its_end() -> None:
    world, learner, actors, grants = started()
    actors[0].beat(3, "env.step")
    actors[0].commit(grants[0])
    world.now += 2.0
    observer = world.peer("observer")
    observer.tell(Hello(role=Role.OBSERVER, pid=observer.pid))
    observer.take(Welcome)
    observer.tell(Status())
    report = observer.take(StatusReport).report
    assert json.loads(json.dumps(report)) == report
    assert (report["state"], report["updates"], report["version"]) == ("collecting", 0, 1)
    assert report["slots"] == {"free": 2, "leased": 1, "ready": 1, "reading": 0, "quarantined": 0}
    first, second = report["actors"]
    assert (first["state"], first["pid"], first["phase"], first["lag"]) == ("waiting", actors[0].pid, "env.step", 0)
    assert (second["state"], second["silent_seconds"]) == ("collecting", 2.0)
    assert report["learner"]["pid"] == learner.pid
    world.carry_out(world.coordinator.stop("Ctrl-C", world.now))
    observer.tell(Hello(role=Role.OBSERVER, pid=observer.pid))
    assert observer.got(Welcome)
    observer.tell(Status())
    assert observer.take(StatusReport).report["stop_reason"] == "Ctrl-C"


def test_rates_are_means_over_the_window() -> None:
    world, learner, actors, grants = started()
    for _ in range(4):
        batch = fill(world, learner, actors, grants)
        world.now += 2.0
        learner.publish(batch)
        grants = [actor.take(Grant) for actor in actors]
    report = world.coordinator.report(world.now)
    assert report["rates"]["updates_per_second"] == pytest.approx(3 / 6.0)
    assert report["actors"][0]["steps_per_second"] == pytest.approx(3 * ENVS * STEPS / 8.0)
