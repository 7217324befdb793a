"""Observation statistics: running mean and variance per feature, kept inside the policy.

Written by the learner alone, between the last epoch over a rollout and the publication of the next weights; read by
every forward. The statistics are module buffers: they travel with the weights under the same version, so an actor
never acts on other statistics than the learner trains with. What must never happen: a change during a forward (the
recomputed log-probs would differ from the stored ones). Left to others: which rows are valid, and that they are
finite.

Axis letters: M rows.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from rollout_service.policy.acting import CLIP, VARIANCE_EPSILON


class RunningMoments(nn.Module):
    """Mean and population variance of one observation leaf, exact under any order of merges.

    Statistics are float64 [*shape]; a forward uses their float32 image. Before the first row they are 0 and 1, so
    that only the clip acts.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape: Final = shape
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    def offset_and_scale(self) -> tuple[Tensor, Tensor]:
        """float32 vectors (offset, scale), each [size]: normalised = (x - offset) * scale."""
        scale = (self.variance + VARIANCE_EPSILON).rsqrt()
        return self.mean.reshape(-1).to(torch.float32), scale.reshape(-1).to(torch.float32)

    @torch.no_grad()
    def update(self, observations: Tensor) -> None:
        """Merge the moments of `observations` [M, *shape] in (Chan, Golub and LeVeque 1979). M = 0 changes nothing."""
        rows = observations.to(torch.float64)
        if rows.shape[0] == 0:
            return
        self._merge(rows.mean(0), rows.var(0, correction=0), rows.new_tensor([float(rows.shape[0])]))

    def _merge(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        total = self.count + count
        share = (count / total).reshape(())  # of rank 0, so that it broadcasts to a leaf of any rank, 0 included
        delta = mean - self.mean
        self.variance.copy_(
            self.variance * (1 - share) + variance * share + delta.square() * (share * (1 - share)),
        )
        self.mean.add_(delta * share)
        self.count.copy_(total)


def normalize(rows: Tensor, offset: Tensor, scale: Tensor) -> Tensor:
    """(rows - offset) * scale, cut to [-CLIP, CLIP]. rows: float32 [M, size]; offset, scale: [size]."""
    return ((rows - offset) * scale).clamp_(-CLIP, CLIP)
