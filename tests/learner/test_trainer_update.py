"""One update: what it reads, what it leaves alone, when it stops, what it reports."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from learner.epochs import Outcome
from learner.trainer import Trainer, UpdateReport
from rollout_service.config import Device, Schedule
from rollout_service.errors import ConfigError, RunFailed, ShapeError
from rollout_service.launch.probe import build_run_spec
from rollout_service.launch.serial import SerialRun, weights_digest
from tests.fixtures.training import input_bytes, serial_run, small_config


def collect(run: SerialRun) -> list[int]:
    return [run.collect(actor, slot) for actor, slot in zip(run.actors, run.spec.bank(run.bank), strict=True)]


def test_an_update_of_four_epochs_leaves_its_inputs_as_they_were_and_equals_one_on_copies() -> None:
    config = small_config(epochs=4, normalize_observations=True, normalize_returns=True, learning_rate=1e-2)
    with serial_run(config) as run:
        lengths = collect(run)
        twin = Trainer(config, run.spec, total_updates=16)
        with run.rollouts[0].clone() as copy:
            on_copies = twin.update(copy, valid_steps=lengths, seed_into=None, update=1)
        before = input_bytes(run, 0)
        report = run.learn(lengths).report
        assert input_bytes(run, 0) == before
        assert report.metrics == on_copies.metrics
        assert weights_digest(run.trainer.weights()) == weights_digest(twin.weights())


def test_figures_and_phases_are_reported() -> None:
    with serial_run(small_config()) as run:
        report = run.one_update().report
    assert report.outcome is Outcome.COMPLETE
    assert report.metrics["optimizer_steps"] == 4 * 2
    assert report.metrics["valid_rows"] == 64
    assert report.metrics["entropy"] == pytest.approx(math.log(3), abs=1e-3)
    assert report.metrics["ratio_deviation"] <= 1e-4
    expected = {
        "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance", "grad_norm",
        "learning_rate", "ratio_deviation", "value_mean", "return_target_mean", "advantage_mean", "reward_scale",
    }  # fmt: skip
    assert expected <= set(report.metrics)
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert set(report.seconds) == {"gae", "batch", "seed", "update", "normalize"}


def test_a_rollout_without_a_valid_row_skips_the_update_and_is_counted() -> None:
    with serial_run(small_config()) as run:
        run.one_update()
        before = weights_digest(run.trainer.weights())
        steps = run.trainer.env_steps_done
        carried = {name: run.memory.rollout(run.spec.bank(run.bank))[name][:, 0].copy() for name in ("hidden", "cell")}
        report = run.learn([0, 0]).report
        assert report.outcome is Outcome.SKIPPED
        assert report.metrics["updates_skipped"] == 1
        assert weights_digest(run.trainer.weights()) == before
        assert run.trainer.env_steps_done == steps
        assert run.trainer.updates_done == 2
        handed_on = run.memory.rollout(run.spec.bank(run.bank))
        for name, state in carried.items():
            np.testing.assert_array_equal(handed_on[name][:, 0], state)


def test_one_actor_without_steps_takes_no_part() -> None:
    with serial_run(small_config()) as run:
        run.collect(run.actors[0], 0)
        report = run.learn([16, 0]).report
        assert report.outcome is Outcome.COMPLETE
        assert report.metrics["valid_rows"] == 32
        assert run.trainer.env_steps_done == 32


def test_too_much_kl_stops_the_whole_update() -> None:
    with serial_run(small_config(target_kl=1e-7, learning_rate=1e-2)) as run:
        report = run.one_update().report
    assert report.outcome is Outcome.STOPPED_BY_KL
    assert 1 <= report.metrics["optimizer_steps"] < 8
    assert report.metrics["approx_kl"] > 0


def test_a_kl_below_its_limit_stops_nothing() -> None:
    with serial_run(small_config(target_kl=10.0)) as run:
        report = run.one_update().report
    assert report.outcome is Outcome.COMPLETE
    assert report.metrics["optimizer_steps"] == 8


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_smallest_shapes_train(num_layers: int, normalize: bool) -> None:
    config = small_config(
        env_kwargs={"size": 1, "actions": 1 + num_layers},
        num_actors=1,
        envs_per_actor=1,
        num_steps=1,
        hidden_dim=1,
        encoder_dim=1,
        num_layers=num_layers,
        envs_per_minibatch=1,
        total_steps=3,
        normalize_observations=normalize,
        normalize_returns=normalize,
        self_check=1,
    )
    with serial_run(config, total_updates=3) as run:
        for _ in range(3):
            report = run.one_update().report
            assert report.outcome is Outcome.COMPLETE
            assert all(math.isfinite(value) for value in report.metrics.values())
        assert run.trainer.policy.initial_state(1)["hidden"].shape == (1, num_layers, 1)
        assert all(np.isfinite(array).all() for array in run.trainer.weights().values())


def test_a_lone_row_keeps_its_advantage_instead_of_dividing_by_a_deviation_of_zero() -> None:
    with serial_run(small_config(num_actors=1, envs_per_actor=1, num_steps=1, total_steps=1)) as run:
        report = run.one_update().report
    assert math.isfinite(report.metrics["policy_loss"])
    # With a ratio of 1 the loss of the first epoch is minus the advantage; later epochs stay near it.
    assert report.metrics["policy_loss"] == pytest.approx(-report.metrics["advantage_mean"], rel=0.1)


def test_the_learning_rate_falls_linearly_to_its_end() -> None:
    config = small_config(learning_rate=1e-3, learning_rate_end_fraction=0.05)
    trainer = Trainer(config, build_run_spec(config), total_updates=100)
    steps = 100 * trainer.spec.steps_per_rollout
    assert trainer.learning_rate(0) == pytest.approx(1e-3)
    assert trainer.learning_rate(steps // 2) == pytest.approx(1e-3 * (1 - 0.95 / 2))
    assert trainer.learning_rate(steps) == pytest.approx(5e-5)
    assert trainer.learning_rate(2 * steps) == pytest.approx(5e-5)


def test_a_constant_learning_rate_stays() -> None:
    config = small_config(learning_rate=1e-3, learning_rate_schedule=Schedule.CONSTANT)
    trainer = Trainer(config, build_run_spec(config), total_updates=100)
    assert {trainer.learning_rate(steps) for steps in (0, 3200, 6400)} == {1e-3}


def test_the_schedule_reaches_the_optimiser() -> None:
    with serial_run(small_config(learning_rate=1e-3), total_updates=4) as run:
        rates = [run.one_update().report.metrics["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([1e-3 * (1 - 0.95 * share) for share in (0, 0.25, 0.5, 0.75)])


def test_statistics_change_after_the_last_epoch_and_count_every_valid_row_once() -> None:
    with serial_run(small_config(normalize_observations=True, self_check=1)) as run:
        for update in (1, 2, 3):
            run.one_update()
            counts = [value for name, value in run.trainer.weights().items() if name.endswith("count")]
            assert [float(count.reshape(-1)[0]) for count in counts] == [64.0 * update]
    means = [value for name, value in run.trainer.weights().items() if name.endswith("mean")]
    np.testing.assert_allclose(means[0], np.ones(3), atol=1.0)


def test_a_stop_between_minibatches_gives_the_trainer_back_as_it_was() -> None:
    config = small_config(normalize_observations=True, normalize_returns=True)
    with serial_run(config) as run:
        run.one_update()
        lengths = collect(run)
        before = run.trainer.capture()
        answers = iter([False, False, False, True])
        report = run.trainer.update(
            run.rollouts[run.bank],
            valid_steps=lengths,
            seed_into=run.rollouts[1 - run.bank],
            update=2,
            should_stop=lambda: next(answers),
        )
        after = run.trainer.capture()
        assert report.outcome is Outcome.ABANDONED
        assert run.trainer.updates_done == 1
        assert after.generators == before.generators
        assert set(after.arrays) == set(before.arrays)
        for name, array in before.arrays.items():
            np.testing.assert_array_equal(after.arrays[name], array, err_msg=name)


def test_an_abandoned_update_can_be_made_again_with_the_same_result() -> None:
    with serial_run(small_config()) as run, serial_run(small_config()) as twin:
        for each in (run, twin):
            each.one_update()
        lengths, _ = collect(run), collect(twin)
        answers = iter([False, False, True])
        run.trainer.update(
            run.rollouts[1], valid_steps=lengths, seed_into=run.rollouts[0], update=2, should_stop=lambda: next(answers)
        )
        run.learn(lengths)
        twin.learn(lengths)
        assert weights_digest(run.trainer.weights()) == weights_digest(twin.trainer.weights())


def test_a_gradient_that_is_not_finite_fails_the_run_in_words() -> None:
    with serial_run(small_config(reward_scale=1e30)) as run, pytest.raises(RunFailed, match="lower learning_rate"):
        run.one_update()


def update_with(**settings: Any) -> UpdateReport:
    with serial_run(small_config(**settings)) as run:
        return run.one_update().report


def test_the_value_clip_and_the_advantage_normalisation_can_be_chosen() -> None:
    plain = update_with(epochs=1)
    assert update_with(epochs=1, value_clip_range=1e-3).metrics["value_loss"] >= plain.metrics["value_loss"]
    assert update_with(epochs=1, normalize_advantages=False).metrics["policy_loss"] != plain.metrics["policy_loss"]


def test_the_reward_scale_reaches_advantages_and_not_the_buffer() -> None:
    with serial_run(small_config(reward_scale=0.5)) as run, serial_run(small_config()) as plain:
        for each in (run, plain):
            each.one_update()
        np.testing.assert_array_equal(run.rollouts[0].rewards(), plain.rollouts[0].rewards())
        gap = np.abs(run.rollouts[0].returns()).mean() / np.abs(plain.rollouts[0].returns()).mean()
        assert 0.4 < gap < 0.6


def test_truncation_as_termination_is_an_ablation_that_changes_advantages() -> None:
    with serial_run(small_config(truncation_as_termination=True)) as run, serial_run(small_config()) as plain:
        for each in (run, plain):
            each.one_update()
        assert not np.array_equal(run.rollouts[0].advantages(), plain.rollouts[0].advantages())


def test_valid_steps_of_a_wrong_number_are_refused() -> None:
    with serial_run(small_config()) as run, pytest.raises(ShapeError, match=r"3 entries; give one per slot \(2\)"):
        run.trainer.update(run.rollouts[0], valid_steps=[1, 2, 3], seed_into=run.rollouts[1], update=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none_is_one_clear_line() -> None:
    config = small_config(device=Device.CUDA)
    with pytest.raises(ConfigError, match="--device cpu or auto") as refused:
        build_run_spec(config)
    assert "\n" not in str(refused.value)
