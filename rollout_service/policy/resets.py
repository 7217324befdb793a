"""Where the extra time steps go that reset a recurrent core inside a whole-sequence kernel.

A kernel that runs a whole sequence cannot zero its state in between. So one time step is inserted in front of every
row at which an episode starts after the first column; at that step a separate input channel, 0 at real steps, shuts
the gates, and zero state leaves it. A sequence grows by one step per such start; shorter ones are filled up behind
their last step, where nothing is read.

    starts       0  0  1  0  1            R: inserted step, .: filler
    real step    0  1  2  3  4
    padded time  0  1  R  2  3  R  4  .

Places without a real step hold whatever row is at hand: what goes into a shut gate does not count, so long as it is
finite, and nothing comes back from there.

A kernel that can zero its state, or has none, needs nothing inserted: `in_place`.

Pure index arithmetic; read by recurrent.py, and by the learner, which lays out a rollout once and takes minibatches
from it. Left to others: the state at the first column, chosen before the kernel runs.

Axis letters: T steps of a sequence, P padded steps, n sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ResetPlan:
    """Places in padded, time-major order: flat index = padded step * n + sequence."""

    num_steps: int
    """P"""
    num_rows: int
    """n"""
    real: Tensor
    """int64 [n * T]: the place of each real step, in env-major order."""
    source: Tensor
    """int64 [P * n]: the env-major row (sequence * T + step) that each place holds; 0 where no real step is."""
    flags: Tensor
    """float32 [P, n, 1]: 1 wherever no real step is; in place, where an episode starts."""
    lengths: Tensor
    """int64 [n]: padded steps up to and with each sequence's last real one; P is the largest."""

    def spread(self, rows: Tensor) -> Tensor:
        """Env-major rows [n, T, D] -> padded [P, n, D + 1], flags last; any row where no real step is."""
        flat = rows.reshape(-1, rows.shape[-1])
        padded: Tensor = _Spread.apply(flat, self)  # type: ignore[no-untyped-call]
        return self.flag(padded.view(self.num_steps, self.num_rows, -1))

    def flag(self, padded: Tensor) -> Tensor:
        """[P, n, D] -> [P, n, D + 1]."""
        return torch.cat([padded, self.flags], dim=2)

    def gather(self, padded: Tensor) -> Tensor:
        """Padded [P, n, H] -> the real steps, env-major [n, T, H]."""
        picked: Tensor = _Gather.apply(padded.reshape(-1, padded.shape[-1]), self)  # type: ignore[no-untyped-call]
        return picked.view(self.num_rows, -1, padded.shape[-1])


# The gradient of index_select adds, for places might repeat: four times the work of these two, which know the way back.


class _Spread(torch.autograd.Function):
    """rows [n * T, D] -> [P * n, D]. Nothing comes back from a place without a real step: its gates are shut."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: ResetPlan) -> Tensor:
        ctx.plan = plan
        return rows.index_select(0, plan.source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.plan.real), None


class _Gather(torch.autograd.Function):
    """padded [P * n, H] -> [n * T, H]. What goes back to a place without a real step ends there: its gates are shut."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, plan: ResetPlan) -> Tensor:
        ctx.plan = plan
        return padded.index_select(0, plan.real)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.plan.source), None


def plan_resets(starts: Tensor) -> ResetPlan | None:
    """Plan for episode starts [n, T], nonzero where an episode starts; column 0 is not looked at.

    None where nothing has to be inserted. T must be at least 1.
    """
    plan = lay_out(starts)
    return plan if plan.num_steps > starts.shape[1] else None


def in_place(starts: Tensor) -> ResetPlan:
    """Time-major order and nothing more: P is T, and every place is a real step."""
    num_rows, num_steps = starts.shape
    rows = torch.arange(num_rows * num_steps, device=starts.device)
    return ResetPlan(
        num_steps=num_steps,
        num_rows=num_rows,
        real=rows.view(num_steps, num_rows).t().reshape(-1),
        source=rows.view(num_rows, num_steps).t().reshape(-1),
        flags=starts.t().to(torch.float32, memory_format=torch.contiguous_format).unsqueeze(2),
        lengths=torch.full((num_rows,), num_steps, device=starts.device),
    )


def lay_out(starts: Tensor) -> ResetPlan:
    """The same, also where nothing has to be inserted: then P is T."""
    num_rows, num_steps = starts.shape
    inner = starts.ne(0)
    inner[:, 0] = False
    shift = inner.cumsum(1)
    padded_steps = num_steps + int(shift[:, -1].max())
    place = (torch.arange(num_steps, device=starts.device) + shift) * num_rows
    place += torch.arange(num_rows, device=starts.device).unsqueeze(1)
    real = place.reshape(-1)
    source = torch.zeros(padded_steps * num_rows, dtype=torch.int64, device=starts.device)
    source.scatter_(0, real, torch.arange(num_rows * num_steps, device=starts.device))
    flags = torch.ones(padded_steps * num_rows, device=starts.device).index_fill_(0, real, 0.0)
    return ResetPlan(
        num_steps=padded_steps,
        num_rows=num_rows,
        real=real,
        source=source,
        flags=flags.view(padded_steps, num_rows, 1),
        lengths=num_steps + shift[:, -1],
    )
