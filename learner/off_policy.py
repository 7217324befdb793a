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

Who calls: the trainer, between the batch and the first epoch. Everything is computed where the batch is. Never: writes
into a rollout. What is read of the rollout is copied first (`TraceRows`), so its slots may be given back before the
forward.

Axis letters: T columns of the batch, n envs of the batch, N envs of the rollout, K valid_steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.gae import Estimator
from learner.ppo import masked_mean
from learner.scan import bootstrap
from learner.sequences import SequenceBatch
from learner.upload import LAST_VALUES, DeviceRows
from learner.vtrace import following_targets, vtrace
from rollout_service.config import GaeRule, TrainConfig
from rollout_service.policy.actor_critic import SequenceEvaluation

Evaluate = Callable[[SequenceBatch], SequenceEvaluation]


@dataclass(frozen=True)
class TraceRows:
    """What V-trace reads of a rollout besides the batch; copies. float64 and bool [n, T], float64 and int64 [n]."""

    rewards: Tensor
    """Scaled."""
    terminated: Tensor
    truncated: Tensor
    truncation_values: Tensor
    last_values: Tensor
    valid_steps: Tensor

    @classmethod
    def of(cls, rows: DeviceRows, batch: SequenceBatch, estimator: Estimator) -> TraceRows:
        """Those of `batch`, which was made of `rows`."""

        def of_batch(field: Tensor) -> Tensor:
            return field.index_select(0, batch.env_ids)  # always copies

        def grid(name: str) -> Tensor:
            return of_batch(rows.steps[name][:, : rows.columns])

        terminated, truncated = grid("terminated").bool(), grid("truncated").bool()
        if estimator.truncation_as_termination:
            terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
        return cls(
            rewards=grid("rewards").double() * estimator.reward_scale,
            terminated=terminated,
            truncated=truncated,
            truncation_values=grid("truncation_values").double(),
            last_values=of_batch(rows.envs[LAST_VALUES]).double(),
            valid_steps=of_batch(rows.valid_steps),
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
        rows, log_ratios=log_ratios.double(), values=values.double(), valid=batch.valid, config=config
    )
    ratios = log_ratios.exp()
    figures = {
        "vtrace_rho_mean": float(masked_mean(ratios.clamp(max=config.vtrace_rho_bar), batch.valid)),
        "vtrace_rho_clipped": float(masked_mean((ratios > config.vtrace_rho_bar).to(ratios.dtype), batch.valid)),
    }
    return replace(batch, advantages=advantages.float(), returns=returns.float()), figures


def current_targets(
    rows: TraceRows, *, log_ratios: Tensor, values: Tensor, valid: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """Advantages for PPO and value targets, float64 [n, T]; 0 where not valid.

    log_ratios: log pi - log mu, float64 [n, T]; values: V by the current weights, float64 [n, T]; both 0 where not
    valid, bool [n, T].
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
    next_values = torch.where(valid, next_values, 0.0)
    rewards = torch.where(valid, rows.rewards, 0.0)
    cut = cut | (torch.arange(valid.shape[1], device=valid.device) == rows.valid_steps[:, None] - 1)
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
    following = following_targets(targets, next_values, cut)
    advantages = torch.where(valid, rewards + config.gamma * following - values, 0.0)
    return advantages, torch.where(valid, targets, 0.0)
