"""V-trace targets as one pure recursion (Espeholt et al. 2018, arXiv 1802.01561, eq. 1 and section 4.2).

    rho_t   = min(rho_bar, pi / mu),  c_t = min(c_bar, pi / mu)
    delta_t = rho_t * (r_t + gamma * next_value_t - V_t)
    v_t     = V_t + delta_t + gamma * c_t * (1 - ended_t) * (v_{t+1} - V_{t+1})
    A_t     = rho_t * (r_t + gamma * v'_{t+1} - V_t),  v'_{t+1} = v_{t+1}, or next_value_t where the row ended

On tensors of any device, by the scan of `learner.scan`: the ratios come out of a forward, so they are where the learner
computes.

Who calls: the learner's off-policy correction. Never: IO, randomness, writes into an argument.

Axis letters: T num_steps, N num_envs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.scan import flow_back, require_one_shape


def vtrace(
    log_ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    ended: Tensor,
    *,
    gamma: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Tensor, Tensor]:
    """Value targets and advantages, each float [N, T] of the inputs' dtype.

    log_ratios (log pi - log mu), rewards, values, next_values: float [N, T]; ended: bool [N, T], cuts the chain, and is
    set on an env's last row too: next_values is what follows there. Raises ShapeError.
    """
    require_one_shape(log_ratios=log_ratios, rewards=rewards, values=values, next_values=next_values, ended=ended)
    ratios = log_ratios.exp()
    rho, c = ratios.clamp(max=rho_bar), ratios.clamp(max=c_bar)
    corrections = flow_back(rho * (rewards + gamma * next_values - values), torch.where(ended, 0.0, gamma * c))
    targets = values + corrections
    return targets, rho * (rewards + gamma * following_targets(targets, next_values, ended) - values)


def following_targets(targets: Tensor, next_values: Tensor, ended: Tensor) -> Tensor:
    """v': the target of the next row, or next_values where the row ended. All [N, T], the last column ended."""
    inner = torch.where(ended[:, :-1], next_values[:, :-1], targets[:, 1:])
    return torch.cat([inner, next_values[:, -1:]], dim=1)
