"""What follows when an actor dies, for each `on_actor_failure`, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollout_service.config import TrainConfig
from rollout_service.control.messages import Role
from rollout_service.launch.children import Child
from rollout_service.launch.ending import Ending, How
from rollout_service.launch.failures import ActorFailures
from rollout_service.launch.run import Run
from rollout_service.observe.metrics import RunMetrics

WHO = "actor 1 (incarnation 2, pid 7) ended with signal 9 (SIGKILL)"


class PaperRun:
    def __init__(self, policy: str, **settings: Any) -> None:
        self.said: list[str] = []
        self.metrics = RunMetrics(total_steps=1000, total_updates=10, num_actors=2, started=0.0)
        config = TrainConfig.model_validate({"on_actor_failure": policy, **settings})
        journal = SimpleNamespace(say=self.said.append)
        run = SimpleNamespace(config=config, journal=journal, metrics=self.metrics)
        self.failures = ActorFailures(cast(Run, run))

    def die(self, left: int) -> float | Ending | None:
        child = Child(Role.ACTOR, cast(Any, SimpleNamespace(pid=7)), Path("actor.log"), 0, 1, 2)
        return self.failures.after_death(child, "ended with signal 9 (SIGKILL)", "boom-7", left, 0.0)


def test_restart_is_within_a_budget_and_ends_with_the_last_words() -> None:
    run = PaperRun("restart", max_restarts=1)
    assert run.die(left=1) == 0.0
    ending = run.die(left=1)
    assert ending == Ending(How.FAILED, "actor 1 ended with signal 9 (SIGKILL), and no restart is left", 1)
    assert run.said == [
        f"{WHO}; replaced now (restart 1 of 1 within 300 s)\nboom-7",
        f"{WHO}; the run stops: all 1 restarts within 300 s are used up (max_restarts, restart_window)\nboom-7",
    ]
    assert (run.metrics.restarts, run.failures.some_given_up) == (1, False)


def test_continue_goes_on_until_nobody_is_left_and_counts() -> None:
    run = PaperRun("continue")
    assert not run.failures.some_given_up
    assert [run.die(left=1), run.die(left=0)] == [None, None]
    assert run.said[-1] == f"{WHO}; not replaced, 0 actors are left (on_actor_failure continue)\nboom-7"
    assert run.failures.some_given_up
    ending = run.failures.nobody_left()
    assert (ending.how, ending.exit_code) == (How.FAILED, 1)
    assert ending.reason.endswith("the last that failed: actor 1 ended with signal 9 (SIGKILL)")
    assert run.metrics.counters["actors_given_up"] == 2
    assert run.metrics.restarts == 0


def test_stop_ends_at_the_first() -> None:
    run = PaperRun("stop")
    assert run.die(left=1) == Ending(How.FAILED, "actor 1 ended with signal 9 (SIGKILL)", 1)
    assert run.said == [f"{WHO}; the run stops (on_actor_failure stop)\nboom-7"]


@pytest.mark.parametrize(
    ("policy", "left", "reason"),
    [
        ("restart", 0, None),
        ("continue", 1, None),
        ("continue", 0, "no actor is left (on_actor_failure continue); the last that failed: it died"),
        ("stop", 1, "it died"),
    ],
)
def test_of_a_guest_nobody_here_starts_another_one(policy: str, left: int, reason: str | None) -> None:
    run = PaperRun(policy)
    ending = run.failures.after_guest("it died", left)
    assert (None if ending is None else ending.reason) == reason
    assert run.said == []
    assert run.failures.some_given_up == (policy == "continue")
