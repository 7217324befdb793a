"""V-trace in use: GAE with lambda 1 at equal weights, targets of the current weights else, and rho counted once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from learner.gae import Estimator
from learner.off_policy import TraceRows, current_targets, with_current_targets
from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.sequences import SequenceBatch
from learner.upload import in_place
from rollout_service.config import GaeRule, TrainConfig
from rollout_service.policy.actor_critic import SequenceEvaluation
from tests.fixtures.training import after_steps, serial_run, sharpen, small_config
from tests.learner.filled_rollouts import fill

T, N = 12, 6


def random_columns(seed: int, partial: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """[T][N] columns with ends of both kinds and fillers behind some of them, and K per env."""
    random = np.random.default_rng(seed)
    columns: dict[str, np.ndarray] = {
        name: random.normal(size=(T, N)).astype(np.float32)
        for name in ("rewards", "values", "log_probs", "truncation_values")
    }
    columns["terminated"] = random.random((T, N)) < 0.15
    columns["truncated"] = random.random((T, N)) < 0.15
    valid = np.ones((T, N), bool)
    ended = columns["terminated"] | columns["truncated"]
    valid[1:] = ~(ended[:-1] & (random.random((T - 1, N)) < 0.5))
    columns["valid"] = valid
    for name in ("terminated", "truncated"):
        columns[name] &= valid
    steps = random.integers(0, T + 1, N) if partial else np.full(N, T)
    steps[0] = max(steps[0], 1)
    return columns, steps


def trace_rows(rollout: RecurrentRolloutBuffer, batch: SequenceBatch, config: TrainConfig) -> TraceRows:
    estimator = Estimator(
        config.gamma, 1.0, reward_scale=config.reward_scale, truncation_as_termination=config.truncation_as_termination
    )
    return TraceRows.of(in_place(rollout.training_rows(rollout.valid_steps)), batch, estimator)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", [{}, {"vtrace_rho_bar": 2.0, "vtrace_c_bar": 1.5}])
def test_at_equal_weights_it_is_gae_with_lambda_1(seed: int, partial: bool, settings: dict[str, Any]) -> None:
    config = small_config(advantage_estimator="vtrace", gamma=0.95, reward_scale=0.5, **settings)
    columns, steps = random_columns(seed, partial)
    last_values = np.random.default_rng(seed + 100).normal(size=N)
    with RecurrentRolloutBuffer(T, N, obs_dim=2) as rollout:
        fill(rollout, columns)
        rollout.compute_advantages_partial(steps, last_values, config.gamma, 1.0, reward_scale=config.reward_scale)
        batch = rollout.to_training_batch()
        rows = trace_rows(rollout, batch, config)

    def same(part: Any) -> SequenceEvaluation:
        return SequenceEvaluation(part.old_log_probs, part.old_values, torch.zeros_like(part.old_values))

    traced, figures = with_current_targets(batch, rows, same, config)
    torch.testing.assert_close(traced.advantages, batch.advantages, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(traced.returns, batch.returns, rtol=1e-5, atol=1e-5)
    assert not traced.advantages[~batch.valid].any()
    assert not traced.returns[~batch.valid].any()
    assert figures == {"vtrace_rho_mean": 1.0, "vtrace_rho_clipped": 0.0}
    for name in ("obs_seq", "actions", "old_log_probs", "old_values", "valid"):
        assert getattr(traced, name) is getattr(batch, name)


def targets(log_ratios: list[float], truncated: bool = False, **settings: Any) -> tuple[list[float], list[float]]:
    """Two steps of one env: rewards 1 and 2, V 10 and 20, 40 behind the last row, 8 for a truncation at step 0."""
    config = small_config(advantage_estimator="vtrace", gamma=0.5, **settings)
    rows = TraceRows(
        rewards=torch.tensor([[1.0, 2.0]], dtype=torch.float64),
        terminated=torch.tensor([[False, False]]),
        truncated=torch.tensor([[truncated, False]]),
        truncation_values=torch.tensor([[8.0 if truncated else np.nan, np.nan]], dtype=torch.float64),
        last_values=torch.tensor([40.0], dtype=torch.float64),
        valid_steps=torch.tensor([2]),
    )
    advantages, returns = current_targets(
        rows,
        log_ratios=torch.tensor([log_ratios], dtype=torch.float64),
        values=torch.tensor([[10.0, 20.0]], dtype=torch.float64),
        valid=torch.tensor([[True, True]]),
        config=config,
    )
    return advantages[0].tolist(), returns[0].tolist()


def test_a_row_that_the_current_policy_would_hardly_choose_moves_the_values_little_and_the_advantage_not() -> None:
    """By hand: v1 = 20 + 1/4 (2 + 20 - 20) = 20.5; v0 = 10 + (1 + 10 - 10) + 1/2 (20.5 - 20) = 11.25.

    The advantage of row 1 is 2 + 20 - 20 = 2 whatever its ratio: the loss has the ratio.
    """
    advantages, returns = targets([0.0, np.log(0.25)])
    assert returns == pytest.approx([11.25, 20.5])
    assert advantages == pytest.approx([1 + 0.5 * 20.5 - 10, 2.0])


def test_ratios_are_clipped_at_their_bars() -> None:
    """rho 2 and c 1 of a ratio of 3: v1 = 20 + 2 * 2 = 24; v0 = 10 + 2 * 1 + 1/2 * 1 * 4 = 14."""
    advantages, returns = targets([np.log(3.0)] * 2, vtrace_rho_bar=2.0)
    assert returns == pytest.approx([14.0, 24.0])
    assert advantages == pytest.approx([1 + 0.5 * 24 - 10, 2.0])


def test_nothing_flows_back_over_a_truncation_which_has_its_own_value() -> None:
    advantages, returns = targets([0.0, 0.0], truncated=True)
    assert returns == pytest.approx([1 + 0.5 * 8, 22.0])
    assert advantages == pytest.approx([1 + 0.5 * 8 - 10, 2.0])


def test_the_forward_is_made_in_chunks_of_a_minibatch() -> None:
    config = small_config(advantage_estimator="vtrace", envs_per_minibatch=4)
    columns, steps = random_columns(0, partial=False)
    sizes = []
    with RecurrentRolloutBuffer(T, N, obs_dim=2) as rollout:
        fill(rollout, columns)
        rollout.compute_advantages_partial(steps, np.zeros(N), 0.99, 1.0)
        batch = rollout.to_training_batch()
        rows = trace_rows(rollout, batch, config)

    def spied(part: Any) -> SequenceEvaluation:
        assert not torch.is_grad_enabled()
        sizes.append(len(part))
        return SequenceEvaluation(part.old_log_probs, part.old_values, part.old_values)

    with_current_targets(batch, rows, spied, config)
    assert sizes == [4, 2]


@pytest.mark.parametrize("settings", [{}, {"normalize_observations": True, "num_layers": 2}])
def test_a_trainer_with_v_trace_at_lag_0_learns_what_gae_with_lambda_1_does(settings: dict[str, Any]) -> None:
    """First update: the same weights up to rounding, slots cut short included."""
    weights = []
    for estimator in ("gae", "vtrace"):
        config = small_config(
            advantage_estimator=estimator, gae_lambda=1.0, epochs=1, normalize_advantages=False, **settings
        )
        with serial_run(config) as run:
            sharpen(run, gain=10.0)
            slots = run.spec.bank(0)
            lengths = [run.collect(a, s, after_steps(n)) for a, s, n in zip(run.actors, slots, (16, 5), strict=True)]
            report = run.learn(lengths).report
            weights.append(run.trainer.weights())
            assert ("vtrace_rho_mean" in report.metrics) == ("vtrace" in report.seconds) == (estimator == "vtrace")
    for name, array in weights[0].items():
        np.testing.assert_allclose(weights[1][name], array, rtol=1e-3, atol=1e-4, err_msg=name)


def test_truncation_as_termination_holds_for_it_too() -> None:
    config = small_config(advantage_estimator="vtrace", truncation_as_termination=True)
    columns, steps = random_columns(3, partial=False)
    with RecurrentRolloutBuffer(T, N, obs_dim=2) as rollout:
        fill(rollout, columns)
        rollout.compute_advantages_partial(steps, np.zeros(N), 0.99, 1.0, truncation_as_termination=True)
        batch = rollout.to_training_batch()
        rows = trace_rows(rollout, batch, config)
    assert not rows.truncated.any()
    assert (rows.terminated.numpy() == (columns["terminated"] | columns["truncated"]).T).all()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"vtrace_rho_bar": 0.0, "vtrace_c_bar": 0.0}, "vtrace_rho_bar is 0.0; it must be above 0"),
        ({"vtrace_c_bar": float("nan")}, "vtrace_c_bar is nan; it must be above 0"),
        ({"vtrace_c_bar": 1.5}, "vtrace_c_bar 1.5 is above vtrace_rho_bar 1.0.*raise the other"),
        ({"advantage_estimator": "vtrace", "gae_rule": GaeRule.ORIGINAL_STATED}, "gae_rule original_stated cannot be"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        TrainConfig(**settings)
