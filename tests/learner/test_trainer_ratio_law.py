"""Before the first optimiser step the learner recomputes what the actors stored: actor, memory, buffer and trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rollout_service.errors import RatioLawBroken
from rollout_service.launch.serial import SerialRun, SerialUpdate
from rollout_service.runspec import Core, StateStrategy
from tests.fixtures.counter_lstm import turn_into_counter
from tests.fixtures.training import after_steps, serial_run, sharpen, small_config

LIMIT = 1e-4


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("normalize", [False, True])
def test_ratios_are_one_with_ends_truncations_and_carried_states(num_layers: int, normalize: bool) -> None:
    config = small_config(num_layers=num_layers, normalize_observations=normalize, self_check=1)
    with serial_run(config) as run:
        sharpen(run)
        updates = [run.one_update() for _ in range(5)]
    deviations = [update.report.metrics["self_check_deviation"] for update in updates]
    assert max(deviations) <= LIMIT
    assert max(deviations) > 0.0, "equal to the last bit: the learner would have to share the actor's kernel"
    assert updates[-1].summary.counters.get("seed_mismatches", 0) == 0


@pytest.mark.parametrize("num_layers", [1, 2])
def test_ratios_are_one_on_partial_slots_and_after_them(num_layers: int) -> None:
    with serial_run(small_config(num_layers=num_layers, self_check=1)) as run:
        sharpen(run)
        for lengths in ((5, 16), (16, 1), (7, 7), (16, 16)):
            update = collect_and_learn(run, lengths)
            assert update.report.metrics["self_check_deviation"] <= LIMIT
            assert update.report.metrics["valid_rows"] == 2 * sum(lengths)
        assert "seed_mismatches" not in run.metrics.summary(0.0).counters


def collect_and_learn(run: SerialRun, lengths: tuple[int, ...]) -> SerialUpdate:
    """One update from slots of the given valid_steps."""
    slots = run.spec.bank(run.bank)
    filled = [
        run.collect(actor, slot, after_steps(length))
        for actor, slot, length in zip(run.actors, slots, lengths, strict=True)
    ]
    assert tuple(filled) == lengths
    return run.learn(filled)


def test_the_state_that_enters_a_rollout_is_the_one_that_left_the_last_one() -> None:
    """A cell that grows by 0.1 per row, episodes that do not end: 0, 0.8, 1.6 at row 0 of three rollouts of 8."""
    config = small_config(
        env="tests.fixtures.envs:TickEnv", env_kwargs={"length": 1000}, num_steps=8, learning_rate=1e-12, self_check=1
    )
    with serial_run(config) as run:
        turn_into_counter(run.trainer.policy)
        run.publish()
        entering = []
        for _ in range(3):
            slots = run.spec.bank(run.bank)
            run.one_update()
            cells = run.memory.rollout(slots)["cell"][:, 0]
            np.testing.assert_array_equal(cells, np.broadcast_to(cells[0, 0, 0], cells.shape))
            entering.append(float(cells[0, 0, 0]))
        assert "seed_mismatches" not in run.metrics.summary(0.0).counters
    assert entering == pytest.approx([0.0, 0.8, 1.6], abs=1e-5)


@pytest.mark.parametrize("settings", [{"state_strategy": StateStrategy.ZERO}, {"core": Core.NONE}])
def test_ratios_are_one_for_the_comparison_arms(settings: dict[str, Any]) -> None:
    with serial_run(small_config(self_check=1, **settings)) as run:
        sharpen(run)
        assert max(run.one_update().report.metrics["self_check_deviation"] for _ in range(4)) <= LIMIT


def test_no_minibatch_of_a_first_epoch_is_clipped_when_nothing_is_learned() -> None:
    config = small_config(learning_rate=1e-12, epochs=1, envs_per_minibatch=1)
    with serial_run(config) as run:
        sharpen(run)
        for _ in range(3):
            metrics = run.one_update().report.metrics
            assert metrics["approx_kl"] < 1e-6
            assert metrics["clip_fraction"] == 0.0
            assert metrics["ratio_deviation"] <= LIMIT


def test_a_self_check_runs_every_kth_update_only() -> None:
    with serial_run(small_config(self_check=3)) as run:
        checked = ["self_check_deviation" in run.one_update().report.metrics for _ in range(7)]
    assert checked == [True, False, False, True, False, False, True]


def zero_state(rollout: dict[str, np.ndarray]) -> None:
    rollout["hidden"][...] = 0.0
    rollout["cell"][...] = 0.0


def late_resets(rollout: dict[str, np.ndarray]) -> None:
    for name in ("terminated", "truncated"):
        rollout[name][...] = np.roll(rollout[name], 1, axis=1)
    rollout["truncation_values"][...] = 0.0


def other_env(rollout: dict[str, np.ndarray]) -> None:
    rollout["hidden"][...] = rollout["hidden"][::-1].copy()
    rollout["cell"][...] = rollout["cell"][::-1].copy()


@pytest.mark.parametrize("harm", [zero_state, late_resets, other_env])
def test_a_wrong_state_is_found_by_the_self_check(harm: Callable[[dict[str, np.ndarray]], None]) -> None:
    with serial_run(small_config(self_check=2)) as run:
        sharpen(run)
        run.one_update()
        run.one_update()
        slots = run.spec.bank(run.bank)
        lengths = [run.collect(actor, slot) for actor, slot in zip(run.actors, slots, strict=True)]
        harm(run.memory.rollout(slots))
        with pytest.raises(RatioLawBroken, match=r"env \d+, step \d+: \|ratio - 1\| is .* the limit is 0.0001"):
            run.learn(lengths)


def test_other_weights_than_the_actors_had_are_found_by_the_self_check() -> None:
    with serial_run(small_config(self_check=1)) as run:
        sharpen(run)
        slots = run.spec.bank(run.bank)
        lengths = [run.collect(actor, slot) for actor, slot in zip(run.actors, slots, strict=True)]
        with torch.no_grad():
            run.trainer.policy.policy.bias.add_(torch.tensor([0.1, 0.0, 0.0]))
        with pytest.raises(RatioLawBroken):
            run.learn(lengths)


def test_a_log_prob_that_is_not_a_number_breaks_the_law_too() -> None:
    with serial_run(small_config(self_check=1)) as run:
        slots = run.spec.bank(run.bank)
        lengths = [run.collect(actor, slot) for actor, slot in zip(run.actors, slots, strict=True)]
        with torch.no_grad():
            run.trainer.policy.policy.bias.fill_(torch.nan)
        with pytest.raises(RatioLawBroken, match="inf"):
            run.learn(lengths)
