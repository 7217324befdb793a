"""One learner after another: what the journal says, what numbers and logs do, and when there is no next one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollout_service import checkpoint as checkpoints
from rollout_service.config import TrainConfig
from rollout_service.control.events import LearnerReady
from rollout_service.control.messages import Role
from rollout_service.launch.children import Child
from rollout_service.launch.run import Run
from rollout_service.launch.succession import Succession
from rollout_service.observe.metrics import RunMetrics
from rollout_service.tally import TallyRecord
from tests.test_checkpoint import save

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nRuntimeError: boom'


@dataclass
class Paper:
    """Journal and logs of a run that is only on paper."""

    said: list[str] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    reaches: int = 0
    entries: list[tuple[int, int, dict[str, float]]] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.said.append(text)

    def cut_back(self, env_steps: int) -> None:
        self.cuts.append(env_steps)

    def write(self, env_steps: int, update: int, scalars: dict[str, float]) -> None:
        self.entries.append((env_steps, update, scalars))


class Learners:
    """The learners of one run; it has checkpoints of updates 2 and 4, and has reached update 6."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.paper = Paper()
        self.metrics = RunMetrics(total_steps=10_000, total_updates=10, num_actors=2, started=0.0)
        self.path = path
        for update in (2, 4):
            save(path, update)
        run = SimpleNamespace(
            config=TrainConfig(**settings), path=path, journal=self.paper, logs=self.paper, metrics=self.metrics
        )
        self.succession = Succession(cast(Run, run))
        self.reach(6)

    def reach(self, update: int) -> None:
        self.metrics.update(update=update, env_steps=1000 * update, figures={}, seconds={}, now=1.0)

    def die(self, code: int, words: str = "", pid: int = 7, now: float = 1.0) -> float | None:
        process = cast(Any, SimpleNamespace(pid=pid))
        child = Child(Role.LEARNER, process, self.path / "learner.log", 0)
        return self.succession.after_death(child, f"ended with code {code}", code, words, now)


@pytest.fixture
def learners(tmp_path: Path) -> Learners:
    return Learners(tmp_path)


def test_a_death_is_said_with_pid_reason_checkpoint_and_what_is_rolled_back(learners: Learners) -> None:
    kept = checkpoints.newest(learners.path).checkpoint
    assert kept is not None
    steps = kept.manifest.env_steps
    assert learners.die(-9) == 0.0
    assert learners.paper.said == [
        "learner (pid 7) ended with code -9; restarted now (restart 1 of 10 within 300 s) from checkpoint-00000004 "
        f"(update 4, env step {steps}): {6000 - steps} env steps are rolled back"
    ]
    assert learners.metrics.learner_restarts == 1
    assert learners.paper.cuts == [], "nothing is taken back before another learner is there"


def test_a_damaged_newest_checkpoint_is_said_aloud(learners: Learners) -> None:
    (checkpoints.listed(learners.path)[-1] / checkpoints.ARRAYS_FILE).write_bytes(b"")
    assert learners.die(-9) == 0.0
    warning, death = learners.paper.said
    assert "checkpoint-00000004 is damaged" in warning
    assert "from checkpoint-00000002 (update 2," in death


def test_without_a_usable_checkpoint_nobody_begins_again_from_nothing(learners: Learners) -> None:
    for path in checkpoints.listed(learners.path):
        (path / checkpoints.ARRAYS_FILE).write_bytes(b"")
    assert learners.die(-9) is None
    assert "the run stops: there is no usable checkpoint to go on from" in learners.paper.said[-1]


def test_a_learner_that_died_before_its_first_checkpoint_begins_anew(learners: Learners) -> None:
    checkpoints.checkpoint_root(learners.path).rename(learners.path / "elsewhere")
    assert learners.die(-9) == 0.0
    assert "from the start (update 0, env step 0)" in learners.paper.said[-1]


def test_an_exception_ends_the_run_and_its_traceback_is_said_once(learners: Learners) -> None:
    assert learners.die(1, TRACEBACK) is None
    assert learners.paper.said == [
        "learner (pid 7) ended with code 1; the run stops: an error of the learner's own is not tried again\n"
        + TRACEBACK
    ]
    assert learners.metrics.learner_restarts == 0


def test_a_learner_that_left_because_it_was_told_to_is_followed_by_another(learners: Learners) -> None:
    assert learners.die(0) == 0.0


def test_numbers_and_logs_go_back_to_where_the_next_one_stands(learners: Learners) -> None:
    learners.die(-9)
    ready = LearnerReady(8, 9, 4, 4000, True, False, 2, 1000, 2, 2000)
    learners.succession.ready(ready, 5.0)
    assert learners.paper.cuts == [4000]
    assert (learners.metrics.updates, learners.metrics.env_steps) == (4, 4000)
    assert learners.paper.said[-1] == (
        "learner (pid 8) goes on from update 4, env step 4000, with weights version 9; rolled back: 2 updates, "
        "2000 env steps; dropped: 2 rollouts, 1000 env steps"
    )
    assert learners.metrics.counters == {
        "dropped_rollouts": 2,
        "dropped_env_steps": 1000,
        "rolled_back_updates": 2,
        "rolled_back_env_steps": 2000,
    }


def test_the_first_learner_takes_nothing_back_and_is_not_talked_of(tmp_path: Path) -> None:
    learners = Learners(tmp_path)
    learners.succession.ready(LearnerReady(8, 1, 6, 6000), 5.0)
    assert (learners.paper.cuts, learners.paper.said, learners.metrics.counters) == ([], [], {})


def test_with_no_restarts_allowed_the_first_death_ends_the_run(tmp_path: Path) -> None:
    learners = Learners(tmp_path, max_restarts=0)
    assert learners.die(-9) is None
    assert "all 0 restarts within 300 s are used up" in learners.paper.said[-1]


@pytest.mark.parametrize(("reaches", "missing"), [(3000, True), (4000, False)])
def test_an_update_that_is_saved_and_was_never_logged_is_logged_by_whoever_goes_on(
    tmp_path: Path, reaches: int, missing: bool
) -> None:
    learners = Learners(tmp_path)
    learners.metrics.go_back(update=4, env_steps=4000, now=1.0)
    learners.paper.reaches = reaches
    tally = TallyRecord(episodes=12, returns=(1.0, 2.0), lengths=(4, 4))
    learners.succession.ready(LearnerReady(8, 9, 4, 4000, figures={"entropy": 0.5}, tally=tally), 5.0)
    assert learners.metrics.tally.record() == tally
    assert bool(learners.paper.entries) == missing
    if missing:
        ((env_steps, update, scalars),) = learners.paper.entries
        assert (env_steps, update) == (4000, 4)
        names = ("learner/entropy", "learner/version", "rollout/return_mean", "rollout/episodes")
        assert [scalars[name] for name in names] == [0.5, 9.0, 1.5, 12.0]
