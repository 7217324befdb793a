"""A restored trainer goes on bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.trainer import Trainer
from rollout_service import checkpoint as checkpoints
from rollout_service.config import TrainConfig
from rollout_service.errors import CheckpointError
from rollout_service.launch.probe import build_run_spec
from tests.fixtures.training import serial_run, small_config

CONFIG = small_config(normalize_observations=True, normalize_returns=True, num_layers=2, checkpoints_kept=2)
UPDATES = 4


@pytest.fixture(scope="module")
def rollouts() -> Iterator[list[RecurrentRolloutBuffer]]:
    """Copies of the rollouts of four updates."""
    with ExitStack() as stack:
        copies = []
        with serial_run(CONFIG) as run:
            for _ in range(UPDATES):
                slots = run.spec.bank(run.bank)
                lengths = [run.collect(actor, slot) for actor, slot in zip(run.actors, slots, strict=True)]
                copies.append(stack.enter_context(run.rollouts[run.bank].clone()))
                run.learn(lengths)
        yield copies


def new_trainer(config: TrainConfig = CONFIG) -> Trainer:
    return Trainer(config, build_run_spec(config), total_updates=UPDATES)


def train(trainer: Trainer, rollouts: list[RecurrentRolloutBuffer], updates: range) -> None:
    for update in updates:
        with rollouts[update - 1].clone() as rollout:
            trainer.update(rollout, valid_steps=[16, 16], seed_into=None, update=update)


def test_four_updates_equal_two_a_checkpoint_and_two(rollouts: list[RecurrentRolloutBuffer], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole = new_trainer()
    train(whole, rollouts, range(1, 5))

    first = new_trainer()
    train(first, rollouts, range(1, 3))
    first.save(tmp_path, version=3)
    second = new_trainer()
    second.restore(checkpoints.require(tmp_path).checkpoint)
    assert (second.updates_done, second.env_steps_done) == (2, 128)
    train(second, rollouts, range(3, 5))

    expected, found = whole.capture(), second.capture()
    assert found.generators == expected.generators
    assert set(found.arrays) == set(expected.arrays)
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)
    assert (second.updates_done, second.env_steps_done) == (whole.updates_done, whole.env_steps_done) == (4, 256)
    assert second.learning_rate(192) == whole.learning_rate(192)


def test_a_checkpoint_holds_policy_moments_statistics_and_generators(
    rollouts: list[RecurrentRolloutBuffer], tmp_path: Path
) -> None:
    trainer = new_trainer()
    train(trainer, rollouts, range(1, 2))
    checkpoint = checkpoints.load(trainer.save(tmp_path, version=2))
    parts = {name.split("/")[0] for name in checkpoint.arrays}
    assert parts == {"policy", "adam", "returns", "generator"}
    assert {name.split("/")[1] for name in checkpoint.arrays if name.startswith("adam/")} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert float(checkpoint.arrays["adam/step/policy.bias"]) == 8.0
    assert checkpoint.manifest.version == 2
    assert checkpoint.manifest.env_steps == 64
    assert TrainConfig.model_validate(checkpoint.manifest.config) == CONFIG
    assert checkpoint.manifest.run_digest == trainer.spec.digest()


def test_checkpoint_zero_has_the_same_arrays_as_a_later_one(
    rollouts: list[RecurrentRolloutBuffer], tmp_path: Path
) -> None:
    trainer = new_trainer()
    zero = checkpoints.load(trainer.save(tmp_path, version=1))
    train(trainer, rollouts, range(1, 2))
    one = checkpoints.load(trainer.save(tmp_path, version=2))
    assert set(zero.arrays) == set(one.arrays)
    assert zero.manifest.update == 0


def test_only_the_newest_checkpoints_are_kept(rollouts: list[RecurrentRolloutBuffer], tmp_path: Path) -> None:
    trainer = new_trainer()
    trainer.save(tmp_path, version=1)
    for update in range(1, 4):
        train(trainer, rollouts, range(update, update + 1))
        trainer.save(tmp_path, version=update + 1)
    assert [path.name for path in checkpoints.listed(tmp_path)] == ["checkpoint-00000002", "checkpoint-00000003"]


def test_a_checkpoint_of_another_policy_is_refused_with_both_values(tmp_path: Path) -> None:
    new_trainer().save(tmp_path, version=1)
    other = new_trainer(CONFIG.model_copy(update={"hidden_dim": 4}))
    with pytest.raises(CheckpointError, match=r"policy .*hidden_dim=8.*this run has .*hidden_dim=4"):
        other.restore(checkpoints.require(tmp_path).checkpoint)


def test_another_number_of_actors_and_another_length_may_resume(
    rollouts: list[RecurrentRolloutBuffer], tmp_path: Path
) -> None:
    first = new_trainer()
    train(first, rollouts, range(1, 3))
    first.save(tmp_path, version=3)
    config = CONFIG.model_copy(update={"num_actors": 3, "total_steps": 10_000})
    second = Trainer(config, build_run_spec(config), total_updates=100)
    second.restore(checkpoints.require(tmp_path).checkpoint)
    assert second.updates_done == 2
    np.testing.assert_array_equal(second.capture().arrays["returns/carried"], np.zeros(6))


def test_return_statistics_that_the_checkpoint_lacks_are_named(tmp_path: Path) -> None:
    without = CONFIG.model_copy(update={"normalize_returns": False})
    new_trainer(without).save(tmp_path, version=1)
    with pytest.raises(CheckpointError, match="returns/"):
        new_trainer().restore(checkpoints.require(tmp_path).checkpoint)
