"""Statistics in the trainer, of observations and of returns: which rows they take in, and when."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fixtures.training import after_steps, serial_run, small_config


def test_rows_past_valid_steps_are_no_part_of_the_statistics() -> None:
    """Their cells are filled with zeros for the network; taken in, they would pull the mean of 1 towards 0."""
    with serial_run(small_config(normalize_observations=True, self_check=1)) as run:
        slots = run.spec.bank(run.bank)
        lengths = (2, 16)
        seen = []
        for actor, slot, length in zip(run.actors, slots, lengths, strict=True):
            assert run.collect(actor, slot, after_steps(length)) == length
            seen.append(run.memory.array("observations")[slot, :, :length].reshape(-1, 3).astype(np.float64))
        run.learn(list(lengths))
        weights = run.trainer.weights()
    rows = np.concatenate(seen)
    assert weights["normalizers.0.count"].tolist() == [2.0 * sum(lengths)]
    np.testing.assert_allclose(weights["normalizers.0.mean"], rows.mean(axis=0), atol=1e-9)
    np.testing.assert_allclose(weights["normalizers.0.variance"], rows.var(axis=0), atol=1e-9)


def test_every_minibatch_of_an_update_sees_the_statistics_that_the_actors_acted_on() -> None:
    config = small_config(normalize_observations=True, learning_rate=1e-12, epochs=3)
    with serial_run(config) as run:
        for _ in range(3):
            figures = run.one_update().report.metrics
            # Nothing is learned, so any ratio other than 1 would come from statistics that moved meanwhile.
            assert figures["ratio_deviation"] <= 1e-4
            assert figures["approx_kl"] < 1e-9


@pytest.mark.parametrize("strategy", ["zero", "stored"])
def test_the_discounted_return_runs_on_over_the_border_of_rollouts_under_either_strategy(strategy: str) -> None:
    """Three rollouts of 16 steps are one of 48."""
    config = small_config(
        state_strategy=strategy, normalize_returns=True, gamma=0.9, env_kwargs={"end": 0.05}, learning_rate=1e-12
    )
    rewards, ends = [], []
    with serial_run(config) as run:
        for _ in range(3):
            rollout = run.rollouts[run.bank]
            run.one_update()
            rewards.append(rollout.rewards().copy())
            ends.append((rollout.terminated() | rollout.truncated()).copy())
        mean, variance, count = run.trainer.capture().arrays["returns/statistics"]
    carried, seen = np.zeros(4), []
    for reward, end in zip(np.concatenate(rewards), np.concatenate(ends), strict=True):
        seen.append(0.9 * carried + reward)
        carried = np.where(end, 0.0, seen[-1])
    assert count == 4 * 48
    assert mean == pytest.approx(np.mean(seen), rel=1e-9)
    assert variance == pytest.approx(np.var(seen), rel=1e-9)


def test_under_the_zero_strategy_a_new_actors_return_begins_anew() -> None:
    config = small_config(state_strategy="zero", normalize_returns=True, gamma=1.0, env_kwargs={"end": 0.0})
    with serial_run(config) as run:
        run.one_update()
        bank = run.bank
        run.actors[1].incarnation = 1
        run.one_update()
        carried = run.trainer.capture().arrays["returns/carried"]
        last = run.rollouts[bank].rewards().sum(axis=0)
        first = run.rollouts[1 - bank].rewards().sum(axis=0)
    np.testing.assert_allclose(carried, [*(first + last)[:2], *last[2:]], rtol=1e-5)
