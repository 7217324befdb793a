"""An actor that dies in a deterministic run sends it back to a barrier; one that dies there again and again ends it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rollout_service.config import TrainConfig
from rollout_service.control.messages import Role
from rollout_service.launch.children import Child
from rollout_service.launch.ending import Ending
from rollout_service.launch.failures import ActorFailures
from rollout_service.launch.run import Run
from rollout_service.observe.metrics import RunMetrics


class PaperRun:
    """A run that has finished three updates, on paper. Deaths come so slowly that the budget never runs out."""

    def __init__(self, *, deterministic: bool) -> None:
        self.said: list[str] = []
        self.metrics = RunMetrics(total_steps=1000, total_updates=10, num_actors=2, started=0.0)
        self.reach(3)
        config = TrainConfig(deterministic=deterministic, max_restarts=2)
        journal = SimpleNamespace(say=self.said.append)
        self.failures = ActorFailures(cast(Run, SimpleNamespace(config=config, journal=journal, metrics=self.metrics)))
        self.now = 0.0

    def reach(self, update: int) -> None:
        self.metrics.update(update=update, env_steps=100 * update, figures={}, seconds={}, now=0.0)

    def die(self, actor_id: int) -> float | Ending | None:
        self.now += 1000.0
        process = cast(Any, SimpleNamespace(pid=7))
        child = Child(Role.ACTOR, process, Path("actor.log"), 0, actor_id)
        return self.failures.after_death(child, "ended with exit code 1", "Traceback: boom-7", 1, self.now)


def test_an_env_that_always_fails_at_the_same_step_ends_the_run_with_its_traceback() -> None:
    run = PaperRun(deterministic=True)
    assert [run.die(0), run.die(0)] == [0.0, 0.0]
    run.metrics.go_back(update=2, env_steps=200, now=0.0)
    run.reach(3)  # once more
    ending = run.die(0)
    assert isinstance(ending, Ending)
    assert ending.reason == "actor 0 ended with exit code 1, and no restart is left"
    assert "the run goes back to the last barrier" in run.said[0]
    assert run.said[-1] == (
        "actor 0 (incarnation 0, pid 7) ended with exit code 1; the run stops: it died 3 times while the run got no "
        "further than update 3 (max_restarts)\nTraceback: boom-7"
    )


def test_progress_between_deaths_earns_more() -> None:
    run = PaperRun(deterministic=True)
    for update in range(4, 10):
        assert run.die(update % 2) == 0.0
        run.reach(update)


def test_in_any_other_run_a_replacement_draws_other_numbers_and_only_the_budget_counts() -> None:
    run = PaperRun(deterministic=False)
    assert [run.die(0) for _ in range(5)] == [0.0] * 5
    assert "barrier" not in "".join(run.said)
