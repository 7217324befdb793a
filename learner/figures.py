"""What is reported of an update: means over all rows that its minibatches used.

Blocks leave their raw terms; figures are made of them once, at the end, so that a minibatch pays for none of it. Pure.
Who calls: the epochs loop. What must never happen: a row that is not valid in a mean.

Axis letters: M rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.blocks import Block
from learner.ppo import Evaluation, PpoSettings, Slopes


@dataclass(frozen=True, slots=True)
class Terms:
    """Of one block, float32 [M] each; without meaning where `live` is 0."""

    log_ratio: Tensor
    advantages: Tensor
    miss: Tensor
    """Its square is the value error."""
    entropy: Tensor
    live: Tensor
    """1 where a row counts, else 0."""

    @classmethod
    def of(cls, evaluation: Evaluation, slopes: Slopes, block: Block) -> Terms:
        return cls(slopes.log_ratio, block.advantages, slopes.miss, evaluation.entropy, block.live)

    def log_ratios(self) -> Tensor:
        """log_prob - old_log_prob, 0 where not valid."""
        return torch.where(self.live > 0, self.log_ratio, 0.0)


def mean_kl(terms: Sequence[Terms], count: int) -> float:
    """Approximate KL of one minibatch with so many valid rows; see ppo.approximate_kl."""
    return float(sum(_kl(term.log_ratios()).sum() for term in terms)) / max(count, 1)


def mean_figures(terms: Sequence[Terms], count: int, settings: PpoSettings) -> dict[str, float]:
    """loss, policy_loss, value_loss, entropy, approx_kl and clip_fraction, as ppo_loss defines them.

    count: valid rows of all blocks together.
    """
    live = torch.cat([term.live for term in terms]) > 0

    def mean(x: Tensor) -> float:
        return float(torch.where(live, x, 0.0).sum(dtype=torch.float64)) / max(count, 1)

    log_ratio = torch.cat([term.log_ratios() for term in terms])
    advantages = torch.cat([term.advantages for term in terms])
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - settings.clip_range, 1.0 + settings.clip_range)
    policy_loss = -mean(torch.minimum(ratio * advantages, clipped * advantages))
    value_loss = mean(torch.cat([term.miss for term in terms]).square())
    entropy = mean(torch.cat([term.entropy for term in terms]))
    return {
        "loss": policy_loss + settings.value_coefficient * value_loss - settings.entropy_coefficient * entropy,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": mean(_kl(log_ratio)),
        "clip_fraction": mean(((ratio - 1.0).abs() > settings.clip_range).float()),
    }


def _kl(log_ratio: Tensor) -> Tensor:
    return torch.expm1(log_ratio) - log_ratio
