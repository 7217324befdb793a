"""V-trace in the learner: a batch whose weights have moved on gets targets of the policy as it is now.

Of every row the behaviour policy mu (the weights that acted) left its log-prob; one forward without gradients gives
that of the policy pi as the update begins, and its values. From both come V-trace's value targets and advantages
(Espeholt et al. 2018, arXiv 1802.01561, eq. 1 and section 4.2; `learner.vtrace` has the recursion).

    V          of the rows: the current weights', from that same forward, as in the paper, where V is the learner's own.
               Behind the last row and at a truncation: the stored one, up to policy_lag versions old, because the
               observation it belongs to is in no row.
    advantage  r + gamma v' - V. The paper's policy gradient multiplies it by rho; PPO's loss does so itself: its ratio
               pi / mu, clipped, is against the behaviour's log-probs. Multiplied here too, rho would count twice.

At equal weights rho = c = 1 and both are GAE's with lambda 1. Rows that are not valid stay 0.

Who calls: the trainer, between the batch and the first epoch. Never: writes into a rollout. What is read of the
rollout is copied first (`TraceRows`), so its slots may be given back before the forward.

Axis letters: T columns of the batch, n envs of the batch, N envs of the rollout, K valid_steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.gae import bootstrap
from learner.ppo import masked_mean
from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.sequences import SequenceBatch
from learner.vtrace import vtrace
from rollout_service.config import GaeRule, TrainConfig
from rollout_service.policy.actor_critic import SequenceEvaluation

Evaluate = Callable[[SequenceBatch], SequenceEvaluation]


@dataclass(frozen=True)
class TraceRows:
    """What V-trace reads of a rollout besides the batch; copies. float64 and bool [n, T], per env [n]."""

    rewards: NDArray[np.float64]
    """Scaled."""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    truncation_values: NDArray[np.float64]
    last_values: NDArray[np.float64]
    valid_steps: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        rollout: RecurrentRolloutBuffer,
        batch: SequenceBatch,
        counts: NDArray[np.int64],
        reward_scale: float,
        config: TrainConfig,
    ) -> TraceRows:
        """The rows of `batch`, which was taken of `rollout` with these counts (K, int [N])."""
        envs, columns = batch.env_ids.cpu().numpy(), batch.valid.shape[1]

        def rows(grid: NDArray[Any]) -> NDArray[Any]:
            return grid.T[envs, :columns]  # an index array always copies

        terminated, truncated = rows(rollout.terminated()), rows(rollout.truncated())
        if config.truncation_as_termination:
            terminated, truncated = terminated | truncated, np.zeros_like(truncated)
        return cls(
            rewards=rows(rollout.rewards()).astype(np.float64) * reward_scale,
            terminated=terminated,
            truncated=truncated,
            truncation_values=rows(rollout.truncation_values()).astype(np.float64),
            last_values=rollout.last_values()[envs].astype(np.float64),
            valid_steps=counts[envs],
        )


@torch.no_grad()
def with_current_targets(
    batch: SequenceBatch, rows: TraceRows, evaluate: Evaluate, config: TrainConfig
) -> tuple[SequenceBatch, dict[str, float]]:
    """The same batch with V-trace's advantages and returns, and figures: vtrace_rho_mean, vtrace_rho_clipped.

    evaluate: the policy as it is now, over one minibatch; called with config.envs_per_minibatch envs at a time, so it
    needs no more memory than a step of an epoch.
    """
    parts = [evaluate(part) for part in batch.minibatches(config.envs_per_minibatch, False)]
    log_ratios = torch.where(batch.valid, torch.cat([p.log_probs for p in parts]) - batch.old_log_probs, 0.0)
    values = torch.where(batch.valid, torch.cat([p.values for p in parts]), 0.0)
    advantages, returns = current_targets(
        rows,
        log_ratios=log_ratios.double().cpu().numpy(),
        values=values.double().cpu().numpy(),
        valid=batch.valid.cpu().numpy(),
        config=config,
    )

    def placed(array: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(array).to(batch.advantages)

    ratios = log_ratios.exp()
    figures = {
        "vtrace_rho_mean": float(masked_mean(ratios.clamp(max=config.vtrace_rho_bar), batch.valid)),
        "vtrace_rho_clipped": float(masked_mean((ratios > config.vtrace_rho_bar).to(ratios.dtype), batch.valid)),
    }
    return replace(batch, advantages=placed(advantages), returns=placed(returns)), figures


def current_targets(
    rows: TraceRows,
    *,
    log_ratios: NDArray[np.float64],
    values: NDArray[np.float64],
    valid: NDArray[np.bool_],
    config: TrainConfig,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Advantages for PPO and value targets, float64 [n, T]; 0 where not valid.

    log_ratios: log pi - log mu, [n, T]; values: V by the current weights, [n, T]; both 0 where not valid.
    """
    next_values, cut = bootstrap(
        GaeRule.BOUNDARY_CORRECT,
        values=values,
        last_values=rows.last_values,
        truncation_values=rows.truncation_values,
        terminated=rows.terminated,
        truncated=rows.truncated,
        valid=valid,
        valid_steps=rows.valid_steps,
    )
    next_values = np.where(valid, next_values, 0.0)
    rewards = np.where(valid, rows.rewards, 0.0)
    cut = cut | (np.arange(valid.shape[1]) == rows.valid_steps[:, None] - 1)
    targets, _ = vtrace(
        log_ratios,
        rewards,
        values,
        next_values,
        cut,
        gamma=config.gamma,
        rho_bar=config.vtrace_rho_bar,
        c_bar=config.vtrace_c_bar,
    )
    following = next_values.copy()
    np.copyto(following[:, :-1], targets[:, 1:], where=~cut[:, :-1])
    advantages = np.where(valid, rewards + config.gamma * following - values, 0.0)
    return advantages, np.where(valid, targets, 0.0)
