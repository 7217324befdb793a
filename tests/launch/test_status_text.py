"""What `status` shows of a run whose actors wait for one of them."""

from __future__ import annotations

from rollout_service.control.messages import Batch, Grant
from rollout_service.launch.status import RunStatus, render
from tests.control.world import World, started


def shown(world: World) -> str:
    report = world.coordinator.report(world.now)
    return render(RunStatus("run-1", "runs/x", 7, "ipc:///x", 60.0, 1 << 20, report))


def test_a_wait_is_shown_with_whom_it_is_for_once_it_is_longer_than_a_rollout_should_be() -> None:
    world, _, actors, grants = started(2)
    actors[0].commit(grants[0])
    world.now += 4.0
    assert "waiting " not in shown(world).partition("actor")[0]
    world.now += 8.0
    actors[1].beat(3, "env.reset")
    assert f"  waiting  12 s for actor 1 (pid {actors[1].pid}, env.reset)" in shown(world).splitlines()


def test_each_actor_has_the_share_of_time_that_the_others_waited_for_it() -> None:
    world, learner, actors, grants = started(2)
    for _ in range(3):
        actors[0].commit(grants[0])
        world.now += 1.0
        actors[1].commit(grants[1])
        learner.publish(learner.take(Batch))
        grants = [actor.take(Grant) for actor in actors]
        world.now += 3.0
    header, first, second = shown(world).splitlines()[-3:]
    assert header.split() == ["actor", "inc", "pid", "state", "steps/s", "waited", "for", "lag", "silent"]
    assert (first.split()[5], second.split()[5]) == ("0%", "25%")
