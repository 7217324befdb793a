"""V-trace targets as one pure recursion (Espeholt et al. 2018, arXiv 1802.01561, eq. 1 and section 4.2).

    rho_t   = min(rho_bar, pi / mu),  c_t = min(c_bar, pi / mu)
    delta_t = rho_t * (r_t + gamma * next_value_t - V_t)
    v_t     = V_t + delta_t + gamma * c_t * (1 - ended_t) * (v_{t+1} - V_{t+1})
    A_t     = rho_t * (r_t + gamma * v'_{t+1} - V_t),  v'_{t+1} = v_{t+1}, or next_value_t where the row ended

Who calls: the learner's off-policy correction. Never: IO, randomness, writes into an argument.

Axis letters: T num_steps, N num_envs.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from learner.gae import flow_back
from rollout_service.errors import ShapeError

F = TypeVar("F", bound=np.floating[Any])


def vtrace(
    log_ratios: NDArray[F],
    rewards: NDArray[F],
    values: NDArray[F],
    next_values: NDArray[F],
    ended: NDArray[np.bool_],
    *,
    gamma: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[NDArray[F], NDArray[F]]:
    """Value targets and advantages, each float [N, T] of the inputs' dtype.

    log_ratios (log pi - log mu), rewards, values, next_values: float [N, T]; ended: bool [N, T], cuts the chain, and is
    set on an env's last row too: next_values is what follows there. Raises ShapeError.
    """
    shapes = {a.shape for a in (log_ratios, rewards, values, next_values, ended)}
    if len(shapes) != 1 or values.ndim != 2:
        raise ShapeError(f"V-trace needs arrays of one shape [N, T], got {sorted(shapes)}")
    ratios = np.exp(log_ratios)
    rho, c = np.minimum(ratios, rho_bar), np.minimum(ratios, c_bar)
    corrections = flow_back(rho * (rewards + gamma * next_values - values), np.where(ended, 0.0, gamma * c))
    targets = values + corrections
    following = next_values.copy()
    np.copyto(following[:, :-1], targets[:, 1:], where=~ended[:, :-1])
    return targets, rho * (rewards + gamma * following - values)
