"""One run, one curve: stopped, evaluated and resumed, its steps are those that its envs have taken, in both logs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, ClassVar

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from learner.evaluate import evaluate
from rollout_service.launch.train import train_serially
from tests.fixtures.random_ends import RandomEnds
from tests.fixtures.training import small_config

ACTORS, ENVS, STEPS = 4, 2, 16


class CountingEnv(RandomEnds):
    """RandomEnds that count their steps."""

    made: ClassVar[list[CountingEnv]] = []

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps = 0
        CountingEnv.made.append(self)

    def step(self, action: Any) -> Any:
        self.steps += 1
        return super().step(action)


def train(run_dir: Path, updates: int, **changes: Any) -> int:
    """Trains that far. Returns the steps that the envs of its actors have taken."""
    CountingEnv.made.clear()
    config = small_config(
        env=f"{__name__}:CountingEnv", vectorize="sync", num_actors=ACTORS, envs_per_actor=ENVS, num_steps=STEPS,
        total_steps=updates * ACTORS * ENVS * STEPS, run_dir=run_dir, checkpoint_interval=2, **changes,
    )  # fmt: skip
    train_serially(config, stream=io.StringIO())
    return sum(env.steps for env in CountingEnv.made[-ACTORS * ENVS :])


def test_steps_of_a_run_of_four_actors_are_counted_once_and_in_order(tmp_path: Path) -> None:
    taken = train(tmp_path, 5)
    evaluate(tmp_path, episodes=20, num_envs=2)
    taken += train(tmp_path, 9, resume=True)
    assert taken < 9 * ACTORS * ENVS * STEPS, "there are rows that only reset"

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, 10))
    steps = [line["env_steps"] for line in lines]
    assert steps == sorted(set(steps))
    assert steps[-1] == taken
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curves = {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert curves["learner/version"] == steps
    assert all(set(curve) <= set(steps) and curve == sorted(set(curve)) for curve in curves.values())
    assert [path.parent.name for path in tmp_path.rglob("events.out*")] == ["tensorboard"] * 2
