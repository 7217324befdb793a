"""What is learned from rollouts that are one update old, all of them: the cue at the start, with either estimator."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_service.config import TrainConfig
from tests.fixtures.training import serial_run
from tests.learner.stream import Stream


@pytest.mark.parametrize("estimator", ["gae", "vtrace"])
def test_a_small_maze_is_learned_from_rollouts_of_the_weights_before(estimator: str) -> None:
    config = TrainConfig(
        env="Memory/TMaze-v0",
        env_kwargs={"corridor": 4},
        num_actors=2,
        envs_per_actor=8,
        num_steps=64,
        hidden_dim=32,
        encoder_dim=32,
        chrono_max=16.0,
        learning_rate=5e-3,
        envs_per_minibatch=8,
        total_steps=30_000,
        max_policy_lag=1,
        advantage_estimator=estimator,
        learner_threads=1,
    )
    with serial_run(config, total_updates=29) as run:
        stream = Stream(run)
        waiting = stream.fill(0, 0), stream.fill(1, 3)
        while not run.trainer.finished:
            taken = {commit.slot for commit in waiting}
            following = stream.fill(0, 2 if 0 in taken else 0), stream.fill(1, 1 if 3 in taken else 3)
            report = stream.learn(*waiting)
            waiting = following
            assert report.metrics["policy_lag_max"] == min(run.trainer.updates_done - 1, 1)
        last = [episode.total_reward for commit in waiting for episode in commit.episodes]
    assert len(last) > 100
    assert np.mean(last) > 0.9
