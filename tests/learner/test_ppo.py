"""PPO's loss: worked numbers, and figures that mean what they say."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from learner.ppo import (
    PpoSettings,
    approximate_kl,
    explained_variance,
    masked_mean,
    normalize_advantages,
    normalized,
    ppo_loss,
    ppo_slopes,
)
from learner.sequences import SequenceBatch
from rollout_service.config import TrainConfig

SETTINGS = PpoSettings(clip_range=0.2, value_clip_range=None, entropy_coefficient=0.01, value_coefficient=0.5)


@dataclass(frozen=True)
class Evaluated:
    log_probs: Tensor
    values: Tensor
    entropy: Tensor


def batch(
    *,
    old_log_probs: Tensor,
    advantages: Tensor,
    returns: Tensor | None = None,
    old_values: Tensor | None = None,
    valid: Tensor | None = None,
) -> SequenceBatch:
    """A sequence batch of which only what the loss reads matters; missing columns are zeros, all rows valid."""
    zeros = torch.zeros_like(advantages)
    return SequenceBatch(
        obs_seq=zeros.unsqueeze(-1),
        actions=zeros.long(),
        episode_starts=zeros,
        old_log_probs=old_log_probs,
        old_values=zeros if old_values is None else old_values,
        advantages=advantages,
        returns=zeros if returns is None else returns,
        initial_state={},
        valid=torch.ones_like(zeros, dtype=torch.bool) if valid is None else valid,
        env_ids=torch.arange(len(zeros)),
    )


def evaluated(log_probs: Tensor, values: Tensor | None = None, entropy: Tensor | None = None) -> Evaluated:
    zeros = torch.zeros_like(log_probs)
    return Evaluated(log_probs, zeros if values is None else values, zeros if entropy is None else entropy)


def logs(*ratios: float) -> Tensor:
    return torch.log(torch.tensor([list(ratios)]))


def test_at_ratio_one_the_policy_loss_is_minus_the_mean_advantage() -> None:
    old = torch.tensor([[-0.3, -1.2, -0.7]])
    _, figures = ppo_loss(
        evaluated(old), batch(old_log_probs=old, advantages=torch.tensor([[1.0, 2.0, 6.0]])), SETTINGS
    )
    assert figures["policy_loss"].item() == pytest.approx(-3.0)
    assert figures["approx_kl"].item() == 0.0
    assert figures["clip_fraction"].item() == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "moves"),
    [
        (1.5, 2.0, 2.4, False),
        (1.5, -2.0, -3.0, True),
        (0.5, 2.0, 1.0, True),
        (0.5, -2.0, -1.6, False),
        (1.1, 2.0, 2.2, True),
    ],
)
def test_the_ratio_is_clipped_only_where_that_makes_the_objective_smaller(
    ratio: float, advantage: float, surrogate: float, moves: bool
) -> None:
    log_probs = logs(ratio).requires_grad_()
    loss, figures = ppo_loss(
        evaluated(log_probs),
        batch(old_log_probs=torch.zeros(1, 1), advantages=torch.tensor([[advantage]])),
        replace(SETTINGS, value_coefficient=0.0, entropy_coefficient=0.0),
    )
    loss.backward()  # type: ignore[no-untyped-call]
    assert figures["policy_loss"].item() == pytest.approx(-surrogate)
    assert log_probs.grad is not None
    assert (log_probs.grad.item() != 0.0) is moves


def test_the_loss_is_the_weighted_sum_of_its_parts() -> None:
    minibatch = batch(
        old_log_probs=torch.zeros(1, 2),
        advantages=torch.tensor([[1.0, 3.0]]),
        returns=torch.tensor([[1.0, -1.0]]),
    )
    loss, figures = ppo_loss(
        evaluated(torch.zeros(1, 2), torch.tensor([[3.0, 0.0]]), torch.tensor([[0.6, 0.2]])), minibatch, SETTINGS
    )
    assert figures["policy_loss"].item() == pytest.approx(-2.0)
    assert figures["value_loss"].item() == pytest.approx((4.0 + 1.0) / 2)
    assert figures["entropy"].item() == pytest.approx(0.4)
    assert loss.item() == pytest.approx(-2.0 + 0.5 * 2.5 - 0.01 * 0.4)
    assert figures["loss"].item() == pytest.approx(loss.item())
    assert not any(figure.requires_grad for figure in figures.values())


def test_the_clipped_value_error_is_the_larger_of_the_two() -> None:
    minibatch = batch(
        old_log_probs=torch.zeros(1, 3),
        advantages=torch.zeros(1, 3),
        old_values=torch.zeros(1, 3),
        returns=torch.tensor([[1.0, 0.1, 0.1]]),
    )
    values = torch.tensor([[1.0, 0.1, 0.9]])
    _, clipped = ppo_loss(evaluated(torch.zeros(1, 3), values), minibatch, replace(SETTINGS, value_clip_range=0.2))
    assert clipped["value_loss"].item() == pytest.approx((0.8**2 + 0.0 + 0.8**2) / 3)
    _, plain = ppo_loss(evaluated(torch.zeros(1, 3), values), minibatch, SETTINGS)
    assert plain["value_loss"].item() == pytest.approx(0.8**2 / 3)


def test_the_clip_fraction_counts_ratios_outside_the_range_on_either_side() -> None:
    minibatch = batch(old_log_probs=torch.zeros(1, 4), advantages=torch.ones(1, 4))
    _, figures = ppo_loss(evaluated(logs(1.3, 0.7, 1.1, 1.0)), minibatch, SETTINGS)
    assert figures["clip_fraction"].item() == 0.5


def test_the_kl_estimate_is_that_of_schulman_and_never_negative() -> None:
    ratios = torch.tensor([[2.0, 0.5, 1.0]])
    expected = sum(ratio - 1 - math.log(ratio) for ratio in (2.0, 0.5, 1.0)) / 3
    everything = torch.ones(1, 3, dtype=torch.bool)
    assert approximate_kl(ratios.log(), everything).item() == pytest.approx(expected)
    tiny = 1e-4 * torch.randn(50, 50, generator=torch.Generator().manual_seed(0))
    assert approximate_kl(tiny, torch.ones(50, 50, dtype=torch.bool)).item() >= 0.0


def test_advantages_get_zero_mean_and_unit_deviation_over_valid_rows() -> None:
    valid = torch.tensor([[True, True, False], [True, True, False]])
    advantages = torch.tensor([[1.0, 2.0, math.nan], [3.0, 6.0, 1e9]])
    got = normalized(advantages, valid)
    kept = got[valid]
    assert kept.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert kept.std(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    assert got[~valid].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("rows", [1, 0])
def test_one_advantage_or_none_is_left_as_it_is(rows: int) -> None:
    valid = torch.zeros(2, 3, dtype=torch.bool)
    valid.view(-1)[:rows] = True
    got = normalized(torch.full((2, 3), 5.0), valid)
    assert got[valid].tolist() == [5.0] * rows
    assert torch.equal(got[~valid], torch.zeros(6 - rows))


def test_equal_advantages_become_zeros() -> None:
    assert torch.equal(normalized(torch.full((2, 3), 0.1), torch.ones(2, 3, dtype=torch.bool)), torch.zeros(2, 3))


def test_normalising_a_batch_leaves_the_batch_it_was_given_alone() -> None:
    advantages = torch.tensor([[1.0, 3.0]])
    original = batch(old_log_probs=torch.zeros(1, 2), advantages=advantages)
    changed = normalize_advantages(original)
    assert changed.advantages.tolist() == [[pytest.approx(-1.0), pytest.approx(1.0)]]
    assert original.advantages is advantages
    assert advantages.tolist() == [[1.0, 3.0]]
    assert changed.returns is original.returns


def test_the_loss_changes_nothing_it_was_given() -> None:
    minibatch = batch(old_log_probs=logs(0.9, 1.2), advantages=torch.tensor([[1.0, -1.0]]))
    before = {
        name: getattr(minibatch, name).clone() for name in ("old_log_probs", "advantages", "returns", "old_values")
    }
    ppo_loss(evaluated(torch.zeros(1, 2)), minibatch, replace(SETTINGS, value_clip_range=0.2))
    assert all(torch.equal(getattr(minibatch, name), array) for name, array in before.items())


def test_explained_variance_is_1_for_perfect_values_and_0_for_a_constant() -> None:
    returns = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    everything = torch.ones(1, 4, dtype=torch.bool)
    assert explained_variance(returns, returns, everything).item() == 1.0
    assert explained_variance(returns + 7.0, returns, everything).item() == pytest.approx(1.0)
    assert explained_variance(torch.full((1, 4), 9.0), returns, everything).item() == pytest.approx(0.0)
    assert explained_variance(-returns, returns, everything).item() == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(1, 4), everything).item() == 0.0


def test_explained_variance_reads_valid_rows_only() -> None:
    values = torch.tensor([[1.0, 2.0, math.nan]])
    assert explained_variance(values, values, torch.tensor([[True, True, False]])).item() == 1.0


def test_the_mean_of_one_row_is_that_row() -> None:
    valid = torch.tensor([[False, True]])
    assert masked_mean(torch.tensor([[math.nan, 3.0]]), valid).item() == 3.0


def test_the_mean_of_no_rows_is_zero() -> None:
    assert masked_mean(torch.full((2, 2), math.nan), torch.zeros(2, 2, dtype=torch.bool)).item() == 0.0


def test_settings_come_from_the_configuration() -> None:
    config = TrainConfig(clip_range=0.3, value_clip_range=0.4, entropy_coefficient=0.02, value_coefficient=0.7)
    assert PpoSettings.from_config(config) == PpoSettings(0.3, 0.4, 0.02, 0.7)


@dataclass(frozen=True)
class Weighed:
    old_log_probs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    value_weights: Tensor
    entropy_weights: Tensor


@pytest.mark.parametrize("value_clip_range", [None, 0.2])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_slopes_by_hand_are_the_gradient_of_the_loss(value_clip_range: float | None, spread: float) -> None:
    settings = replace(SETTINGS, value_clip_range=value_clip_range, entropy_coefficient=0.3, value_coefficient=0.7)
    draw = torch.Generator().manual_seed(3)
    shape = (6, 40)
    old_log_probs, old_values, advantages, returns = (torch.randn(shape, generator=draw) for _ in range(4))
    valid = torch.rand(shape, generator=draw) < 0.8
    advantages[0] = 0.0
    now = Evaluated(
        (old_log_probs + spread * torch.randn(shape, generator=draw)).requires_grad_(),
        (old_values + spread * torch.randn(shape, generator=draw)).requires_grad_(),
        torch.rand(shape, generator=draw).requires_grad_(),
    )
    minibatch = batch(
        old_log_probs=old_log_probs, advantages=advantages, returns=returns, old_values=old_values, valid=valid
    )
    loss, _ = ppo_loss(now, minibatch, settings)
    expected = torch.autograd.grad(loss, [now.log_probs, now.values, now.entropy])

    def zeroed(x: Tensor) -> Tensor:
        return torch.where(valid, x, 0.0)

    rows = Weighed(
        *(zeroed(x) for x in (old_log_probs, old_values, advantages, returns)),
        value_weights=valid * 2.0 * settings.value_coefficient,
        entropy_weights=valid * settings.entropy_coefficient,
    )
    slopes = ppo_slopes(now, rows, settings)
    for got, want in zip((slopes.by_log_prob, slopes.by_value, slopes.by_entropy), expected, strict=True):
        assert torch.allclose(-got / valid.sum(), want, atol=1e-7)
    assert not slopes.by_log_prob.requires_grad
