"""PPO's loss over one minibatch of sequences (Schulman et al. 2017, arXiv 1707.06347), and figures that describe it.

Pure: tensors in, tensors out; nothing passed in is changed. Read by the trainer. What must never happen: a mean over
rows that are not valid, or a NaN of such a row in a gradient; so rows are selected before exp, and every mean is sum
over valid / count of valid. Left to others: where advantages come from, the optimiser, what is logged.

Axis letters: T steps, n sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from learner.sequences import SequenceBatch
from rollout_service.config import TrainConfig

DEVIATION_EPSILON = 1e-8
"""Added to the deviation that advantages are divided by: equal advantages become zeros."""


@dataclass(frozen=True)
class PpoSettings:
    """The settings that the loss reads; see TrainConfig for their meaning and limits."""

    clip_range: float = 0.2
    value_clip_range: float | None = None
    entropy_coefficient: float = 0.01
    value_coefficient: float = 0.5

    @classmethod
    def from_config(cls, config: TrainConfig) -> PpoSettings:
        return cls(
            clip_range=config.clip_range,
            value_clip_range=config.value_clip_range,
            entropy_coefficient=config.entropy_coefficient,
            value_coefficient=config.value_coefficient,
        )


class Targets(Protocol):
    """What a rollout says about its rows."""

    @property
    def old_log_probs(self) -> Tensor: ...
    @property
    def old_values(self) -> Tensor: ...
    @property
    def advantages(self) -> Tensor: ...
    @property
    def returns(self) -> Tensor: ...


class Minibatch(Targets, Protocol):
    """The fields of a sequence batch that the loss reads, [n, T] each."""

    @property
    def valid(self) -> Tensor: ...


class Evaluation(Protocol):
    """What the current policy says about a minibatch, float32 [n, T] each."""

    @property
    def log_probs(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def entropy(self) -> Tensor: ...


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of x over the rows where valid (bool, same shape) is set; 0 where there is none. Scalar."""
    return torch.where(valid, x, torch.zeros_like(x)).sum() / valid.sum().clamp(min=1)


def normalize_advantages(batch: SequenceBatch) -> SequenceBatch:
    """The same batch with advantages of zero mean and unit deviation over its valid rows; `batch` stays as it is."""
    return replace(batch, advantages=normalized(batch.advantages, batch.valid.to(torch.bool)))


def normalized(x: Tensor, valid: Tensor) -> Tensor:
    """x [n, T] with zero mean and unit deviation over the rows where valid (bool) is set; zeros on all others.

    The deviation is the population's. A lone valid row has none: it keeps its value.
    """
    kept = torch.where(valid, x, torch.zeros_like(x))
    centred = torch.where(valid, kept - masked_mean(kept, valid), torch.zeros_like(kept))
    deviation = masked_mean(centred.square(), valid).sqrt()
    return torch.where(valid.sum() > 1, centred / (deviation + DEVIATION_EPSILON), kept)


def ppo_loss(evaluation: Evaluation, minibatch: Minibatch, settings: PpoSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate, value error and entropy bonus of one minibatch.

        ratio  = exp(log_prob - old_log_prob)
        policy = -mean min(ratio * A, clip(ratio, 1 - c, 1 + c) * A)                             (eq. 7)
        value  =  mean (V - R)^2, or the mean of the larger of that and ((V_old + clip(V - V_old, -c_v, c_v)) - R)^2
        loss   =  policy + value_coefficient * value - entropy_coefficient * mean entropy          (eq. 9, negated)

    Advantages are used as they come. Returns the loss, a scalar with gradient, and detached scalars: policy_loss,
    value_loss, entropy, approx_kl, clip_fraction, loss.
    """
    valid = minibatch.valid.to(torch.bool)
    zero = evaluation.log_probs.new_zeros(())

    def select(x: Tensor) -> Tensor:
        return torch.where(valid, x, zero)

    count = valid.sum().clamp(min=1)
    log_ratio = select(evaluation.log_probs - minibatch.old_log_probs)
    ratio = log_ratio.exp()
    advantages = select(minibatch.advantages)
    clipped = ratio.clamp(1.0 - settings.clip_range, 1.0 + settings.clip_range)
    policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).sum() / count

    values, returns = select(evaluation.values), select(minibatch.returns)
    error = (values - returns).square()
    if settings.value_clip_range is not None:
        old_values = select(minibatch.old_values)
        moved = (values - old_values).clamp(-settings.value_clip_range, settings.value_clip_range)
        error = torch.maximum(error, (old_values + moved - returns).square())
    value_loss = error.sum() / count

    entropy = select(evaluation.entropy).sum() / count
    loss = policy_loss + settings.value_coefficient * value_loss - settings.entropy_coefficient * entropy
    with torch.no_grad():
        figures = {
            "loss": loss.detach(),
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": approximate_kl(log_ratio, valid),
            "clip_fraction": masked_mean(((ratio - 1.0).abs() > settings.clip_range).to(ratio.dtype), valid),
        }
    return loss, figures


class WeighedRows(Targets, Protocol):
    """Rows of a minibatch, float32 [M] each, laid out for `ppo_slopes`: 0 where not valid."""

    @property
    def value_weights(self) -> Tensor:
        """2 * value_coefficient"""
        ...

    @property
    def entropy_weights(self) -> Tensor:
        """entropy_coefficient"""
        ...


@dataclass(frozen=True, slots=True)
class Slopes:
    """How the sum of the rows' objectives, minus their losses, changes with what the policy says about each row.

    Float32 [M] each; the slopes are 0 where not valid. The last two are what figures are made of, and without meaning
    where not valid.
    """

    by_log_prob: Tensor
    by_value: Tensor
    by_entropy: Tensor
    log_ratio: Tensor
    """log_prob - old_log_prob"""
    miss: Tensor
    """Return - value, or of the clipped value if that is what counts; its square is the value error."""


@torch.no_grad()
def ppo_slopes(evaluation: Evaluation, rows: WeighedRows, settings: PpoSettings) -> Slopes:
    """The gradient of -ppo_loss times the number of valid rows, by hand: a sixth of autograd's operations.

    Everything must be finite. Rows may be part of a minibatch: the sums of all parts are divided in the end.
    """
    log_ratio = evaluation.log_probs - rows.old_log_probs
    ratio = log_ratio.exp()
    plain = ratio * rows.advantages
    clipped = ratio.clamp_(1.0 - settings.clip_range, 1.0 + settings.clip_range).mul_(rows.advantages)
    # Where the clip binds, the objective does not depend on the ratio. Inside the range both are the same number.
    by_log_prob = plain.mul_(plain <= clipped)
    miss = rows.returns - evaluation.values
    if settings.value_clip_range is None:
        by_value = miss * rows.value_weights
    else:
        clip_range = settings.value_clip_range
        moved = evaluation.values - rows.old_values
        clipped_miss = rows.returns - rows.old_values - moved.clamp(-clip_range, clip_range)
        binds = clipped_miss.abs() > miss.abs()
        miss = torch.where(binds, clipped_miss, miss)
        by_value = torch.where(binds & (moved.abs() > clip_range), 0.0, miss) * rows.value_weights
    return Slopes(by_log_prob, by_value, rows.entropy_weights, log_ratio, miss)


def approximate_kl(log_ratio: Tensor, valid: Tensor) -> Tensor:
    """KL(old || new) estimated from samples of the old policy: mean of (ratio - 1) - log ratio over the valid rows.

    Unbiased and never negative (Schulman, "Approximating KL divergence", estimator k3). log_ratio: [n, T].
    """
    log_ratio = torch.where(valid, log_ratio, torch.zeros_like(log_ratio))
    return masked_mean(torch.expm1(log_ratio) - log_ratio, valid)


def explained_variance(values: Tensor, returns: Tensor, valid: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the valid rows: 1 perfect, 0 no better than a constant. Scalar.

    0 where the returns do not vary.
    """
    values, returns = (torch.where(valid, x, torch.zeros_like(x)) for x in (values, returns))
    spread = _variance(returns, valid)
    left = _variance(returns - values, valid)
    return torch.where(
        spread > 0, 1.0 - left / spread.clamp(min=torch.finfo(spread.dtype).tiny), torch.zeros_like(spread)
    )


def _variance(x: Tensor, valid: Tensor) -> Tensor:
    return masked_mean((x - masked_mean(x, valid)).square(), valid)
