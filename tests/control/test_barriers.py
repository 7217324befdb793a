"""A deterministic run: where everything begins anew, and what a lost actor or learner sends back to there.

The law, for every order of deaths and lost messages: the rollout of update u that the learner gets from a place was
collected by a process that began anew behind a barrier, and has collected every update since, once.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_service.control.barriers import Barriers
from rollout_service.control.events import LearnerReady
from rollout_service.control.messages import Abort, Batch, Grant, Publish, Ready, Restore, StartFrom, Stop
from tests.control.world import ENVS, STEPS, Peer, World, make_join, started

EVERY = 3
ROLLOUT = 2 * ENVS * STEPS
"""Env steps of one batch."""


def run(updates: int, **changes: int) -> tuple[World, Peer, list[Peer], list[Grant]]:
    """A run of two actors after so many updates; the grants of the next one."""
    world, learner, actors, grants = started(barrier_interval=EVERY, **changes)
    for _ in range(updates):
        grants = update(learner, actors, grants)
    return world, learner, actors, grants


def update(learner: Peer, actors: list[Peer], grants: list[Grant]) -> list[Grant]:
    """Everybody commits, the learner publishes. Returns the next grants."""
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    learner.publish(learner.take(Batch))
    return [actor.take(Grant) for actor in actors]


def lose(world: World, actor_id: int, incarnation: int = 0) -> None:
    world.carry_out(world.coordinator.actor_lost(actor_id, incarnation, "killed", world.now))


def go_back(learner: Peer, updates: int) -> None:
    """What a learner does that is told to."""
    restore = learner.take(Restore)
    learner.tell(Ready(version=restore.version + 1, updates_done=updates, env_steps_done=updates * ROLLOUT))


def anew(grants: list[Grant]) -> set[tuple[int, StartFrom, bool]]:
    return {(grant.update, grant.start, grant.reset_envs) for grant in grants}


def test_a_barrier_lies_behind_every_third_update_and_where_the_learner_began() -> None:
    barriers = Barriers(every=3, began_at=4)
    assert [number for number in range(10) if barriers.behind(number)] == [0, 3, 4, 6, 9]
    assert [number for number in range(1, 10) if barriers.cut(number)] == [3, 6, 9]
    none = Barriers(every=0)
    assert not any(none.behind(number) or none.cut(number) for number in range(10))


def test_grants_cut_before_a_barrier_and_begin_anew_behind_it() -> None:
    _, learner, actors, grants = run(updates=0)
    seen = []
    for number in range(1, 8):
        assert {grant.update for grant in grants} == {number}
        seen.append({(grant.start.value, grant.reset_envs, grant.barrier_after) for grant in grants})
        grants = update(learner, actors, grants)
    begin, middle, end = {("fresh", True, False)}, {("seeded", False, False)}, {("seeded", False, True)}
    assert seen == [begin, middle, end, begin, middle, end, begin]


def test_a_run_without_barriers_grants_as_ever() -> None:
    _, learner, actors, grants = started()
    grants = update(learner, actors, update(learner, actors, grants))
    assert not any(grant.reset_envs or grant.barrier_after for grant in grants)


def test_a_resumed_run_begins_anew_where_its_checkpoint_is_even_off_the_barriers() -> None:
    world = World(2, barrier_interval=EVERY, updates_done=4)
    learner = world.learner(updates_done=4, env_steps_done=4 * ROLLOUT)
    actors = world.actors()
    grants = [actor.take(Grant) for actor in actors]
    assert anew(grants) == {(5, StartFrom.FRESH, True)}
    assert anew(update(learner, actors, grants)) == {(6, StartFrom.SEEDED, False)}
    lose(world, 1)
    go_back(learner, updates=4)
    assert anew([world.actor(1, incarnation=1).take(Grant)]) == {(5, StartFrom.FRESH, True)}


def test_an_actor_lost_between_barriers_sends_the_run_back_and_everybody_begins_anew() -> None:
    world, learner, actors, grants = run(updates=4)
    lose(world, 1)
    assert learner.got(Restore)
    actors[0].commit(grants[0])  # of the update that is not to be
    go_back(learner, updates=3)
    assert world.events_of(LearnerReady)[-1].rolled_back_updates == 1
    successor = world.actor(1, incarnation=1)
    assert anew([actors[0].take(Grant), successor.take(Grant)]) == {(4, StartFrom.FRESH, True)}
    assert world.counters["rolled_back_env_steps"] == ROLLOUT
    assert "lost_learners" not in world.counters
    assert world.coordinator.report(world.now)["account"]["missing"] == 0


def test_an_actor_lost_behind_a_barrier_costs_nothing_but_itself() -> None:
    world, learner, actors, grants = run(updates=3)
    actors[0].commit(grants[0])
    lose(world, 1)
    assert not learner.got(Restore)
    successor = world.actor(1, incarnation=1)
    grant = successor.take(Grant)
    assert anew([grant]) == {(4, StartFrom.FRESH, True)}
    successor.commit(grant)
    learner.publish(learner.take(Batch))
    assert not learner.got(Restore)


@pytest.mark.parametrize(("updates", "back"), [(3, True), (5, False)])
def test_an_actor_lost_while_the_learner_works_is_looked_at_once_the_update_is_done(updates: int, back: bool) -> None:
    world, learner, actors, grants = run(updates=updates)
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    lose(world, 1)
    assert not learner.got(Restore)
    learner.publish(learner.take(Batch))
    assert learner.got(Restore) == back
    assert actors[0].got(Grant) != back


def test_an_actor_lost_behind_a_barrier_with_its_work_done_is_missed_one_update_later() -> None:
    world, learner, actors, grants = run(updates=3)
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    batch = learner.take(Batch)
    lose(world, 1)
    learner.publish(batch)
    assert learner.got(Restore)


def test_a_lease_given_back_counts_as_lost() -> None:
    _, learner, actors, grants = run(updates=4)
    actors[0].tell(Abort(slot=grants[0].slot, epoch=grants[0].epoch, reason="no"))
    assert learner.got(Restore)


def test_the_last_update_is_not_taken_back() -> None:
    world, learner, actors, grants = run(updates=4, total_updates=5)
    for actor, grant in zip(actors, grants, strict=True):
        actor.commit(grant)
    lose(world, 1)
    learner.publish(learner.take(Batch))
    assert not learner.got(Restore)
    assert learner.take(Stop).reason == "finished"


def test_a_learner_that_missed_it_is_told_again_and_its_old_words_change_nothing() -> None:
    world, learner, actors, grants = run(updates=4)
    version = world.coordinator.version
    assert version is not None
    lose(world, 1)
    told = learner.take(Restore)
    assert told.version == version
    learner.tell(Publish(update=4, version=version))
    assert learner.take(Restore) == told
    learner.tell(Ready(version=version, updates_done=4))
    go_back(learner, updates=3)
    learner.tell(Ready(version=version + 1, updates_done=3))
    assert not learner.got(Restore)
    assert world.coordinator.version == version + 1
    assert actors[0].got(Grant) is False, "it still fills a slot of before"
    actors[0].commit(grants[0])
    assert anew([actors[0].take(Grant)]) == {(4, StartFrom.FRESH, True)}


@dataclass
class Place:
    """The process in one place, and what its envs have been through."""

    peer: Peer
    incarnation: int
    grant: Grant | None = None
    began: int = 0
    """The update for which it began anew."""
    since: int = 0
    """Leases that it has filled since."""


class AnyOrder(RuleBasedStateMachine):
    """Two actors, one learner that saves at barriers; everybody may die, and miss what it was told, at any time."""

    @initialize()
    def start(self) -> None:
        self.world = World(2, barrier_interval=EVERY, total_updates=10**6)
        self.places: dict[int, Place] = {}
        self.lives = [0, 0]
        self.saved = 0
        self.learner: Peer | None = None
        self.last: Ready | Publish | None = None
        self.checked: Batch | None = None
        self.filled: dict[int, tuple[int, int]] = {}
        """Slot -> began and since, as its last rollout was collected."""

    @rule(actor_id=st.integers(0, 1))
    def an_actor_comes_and_goes(self, actor_id: int) -> None:
        if (place := self.places.pop(actor_id, None)) is not None:
            lose(self.world, actor_id, place.incarnation)
        else:
            peer = self.world.hello(actor_id, self.lives[actor_id])
            peer.tell(make_join(self.world.spec))
            self.places[actor_id] = Place(peer, self.lives[actor_id])
            self.lives[actor_id] += 1

    @rule(actor_id=st.integers(0, 1))
    def it_fills_its_slot(self, actor_id: int) -> None:
        place = self.places.get(actor_id)
        if place is None:
            return
        self.read(place)
        if place.grant is not None:
            grant, place.grant = place.grant, None
            self.filled[grant.slot] = (place.began, place.since)
            place.since += 1
            place.peer.commit(grant)

    def read(self, place: Place) -> None:
        for grant in (message for message in place.peer.inbox if isinstance(message, Grant)):
            if place.grant is None or grant.epoch > place.grant.epoch or grant.slot != place.grant.slot:
                place.grant = grant
                if grant.reset_envs:
                    place.began, place.since = grant.update, 0
        place.peer.inbox.clear()

    @precondition(lambda self: self.learner is None)
    @rule()
    def a_learner_comes(self) -> None:
        self.learner = self.world.learner(ready=False)
        self.say_ready((self.world.coordinator.version or 0) + 1)

    @precondition(lambda self: self.learner is not None)
    @rule()
    def it_is_killed(self) -> None:
        assert self.learner is not None
        self.world.carry_out(self.world.coordinator.learner_lost(self.world.now, self.learner.pid))
        self.learner = None

    @precondition(lambda self: self.learner is not None)
    @rule(lose_it=st.booleans())
    def it_asks_again(self, lose_it: bool) -> None:
        assert self.learner is not None
        assert self.last is not None
        if lose_it:
            self.learner.inbox.clear()
        self.learner.tell(self.last)

    @precondition(lambda self: self.learner is not None)
    @rule()
    def it_does_what_it_is_told(self) -> None:
        assert self.learner is not None
        told, self.learner.inbox = self.learner.inbox, []
        version = self.world.coordinator.version or 0
        match told[-1:]:
            case [Restore(version=told_at)] if told_at >= version:
                self.say_ready(told_at + 1)
            case [Batch() as batch] if batch.update == self.world.coordinator.updates_done + 1:
                if batch.update % EVERY == 0:
                    self.saved = batch.update
                self.last = Publish(update=batch.update, version=version + 1, seeded=batch.seed_into)
                self.learner.tell(self.last)
            case _:
                pass

    def say_ready(self, version: int) -> None:
        assert self.learner is not None
        self.last = Ready(version=version, updates_done=self.saved, env_steps_done=self.saved * ROLLOUT)
        self.learner.tell(self.last)

    @rule(rounds=st.integers(1, 4))
    def nothing_happens_for_a_while(self, rounds: int) -> None:
        """So that runs get further."""
        for actor_id in range(2):
            if actor_id not in self.places:
                self.an_actor_comes_and_goes(actor_id)
        if self.learner is None:
            self.a_learner_comes()
        for _ in range(rounds):
            for actor_id in range(2):
                self.it_fills_its_slot(actor_id)
            self.it_does_what_it_is_told()

    @invariant()
    def batches_are_what_an_undisturbed_run_would_have_given(self) -> None:
        batch = self.world.coordinator._updates.batch if hasattr(self, "world") else None
        if batch is None or batch is self.checked:
            return
        self.checked = batch
        for slot in batch.slots:
            began, since = self.filled[slot]
            assert began + since == batch.update, "an update was left out, or collected twice"
            assert (began - 1) % EVERY == 0, "it began anew where no barrier is"


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
