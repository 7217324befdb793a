"""The recursion of GAE and V-trace on tensors, without a kernel launch per step: a scan by doubling. And GAE by it.

The recursion is x[t] = b[t] + a[t] * x[t+1]. Two such steps in a row are one of the same kind,

    (a, b) then (a', b')  =  (a * a', b + a * b')

so composing every row with the one 1, 2, 4, ... rows behind it reaches the end of the longest row in log2(T) rounds of
a few kernels over [N, T] (Hillis and Steele 1986). Sums are made in float64, in another order than the step loop of
`learner.gae`, which stays the reference: equal up to rounding.

Who calls: for GAE whoever has a rollout on a GPU, for V-trace (`learner.vtrace`) every learner. Never: IO, randomness,
writes into an argument. Rows are examined on the device, with one wait for the answer; a row that is wrong is looked
for, and named, by the reference.

Axis letters: T num_steps, N num_envs, K valid_steps of an env.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from learner import gae
from learner.gae import Estimator
from rollout_service.config import GaeRule
from rollout_service.errors import ShapeError


def advantages_and_returns_on_device(
    rows: Mapping[str, Tensor], last_values: Tensor, valid_steps: Tensor, estimator: Estimator
) -> tuple[Tensor, Tensor]:
    """`learner.gae.advantages_and_returns` for tensors of one device.

    rows: rewards, values, log_probs, truncation_values float [N, T], terminated, truncated, valid bool or 0/1 [N, T];
    last_values: float [N]; valid_steps: K, int [N], each in 0..T.
    Returns two float64 [N, T], 0 on rows that are not valid and from row K on. Raises ShapeError, IncompleteRollout.
    """
    names = ("terminated", "truncated", "valid", "truncation_values", "values", "rewards", "log_probs")
    require_one_shape(**{name: rows[name] for name in names})
    envs, lasts, counts = (tuple(shape) for shape in (rows["valid"].shape[:1], last_values.shape, valid_steps.shape))
    if not lasts == counts == envs:
        raise ShapeError(f"last_values {lasts} and valid_steps {counts} need one number per env, {envs}")
    columns = torch.arange(rows["valid"].shape[1], device=rows["valid"].device)
    live = rows["valid"].bool() & (columns < valid_steps[:, None])
    terminated, truncated = rows["terminated"].bool(), rows["truncated"].bool()
    if estimator.truncation_as_termination:
        terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
    values = rows["values"].double()
    next_values, cut = bootstrap(
        estimator.rule,
        values=values,
        last_values=last_values.double(),
        truncation_values=rows["truncation_values"].double(),
        terminated=terminated,
        truncated=truncated,
        valid=live,
        valid_steps=valid_steps,
    )
    increments = rows["rewards"].double() * estimator.reward_scale + estimator.gamma * next_values - values
    if bool((live & ~(increments.isfinite() & rows["log_probs"].isfinite())).any()):
        return _by_the_reference(rows, last_values, valid_steps, estimator)
    decays = torch.full_like(values, float(estimator.gamma) * float(estimator.lam)).masked_fill(cut, 0.0)
    advantages = flow_back(torch.where(live, increments, 0.0), decays)
    return advantages, torch.where(live, advantages + values, 0.0)


class Bootstrap(NamedTuple):
    """What a rule makes of the flags, as in `learner.gae`."""

    next_values: Tensor
    """[N, T]: the value that follows the row; may be NaN on rows that are not live."""
    cut: Tensor
    """bool [N, T]: no advantage flows back across this row."""


def bootstrap(
    rule: GaeRule,
    *,
    values: Tensor,
    last_values: Tensor,
    truncation_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    valid_steps: Tensor,
) -> Bootstrap:
    """`learner.gae.bootstrap` for tensors: next values and chain cuts of every row under one rule."""
    last_row = torch.arange(values.shape[1], device=values.device) == valid_steps[:, None] - 1
    following = torch.cat([values[:, 1:], values.new_zeros(len(values), min(1, values.shape[1]))], dim=1)
    following = torch.where(last_row, last_values[:, None], following)
    unless_terminated = torch.where(terminated, 0.0, following)
    match rule:
        case GaeRule.BOUNDARY_CORRECT:
            next_values = torch.where(truncated & ~terminated, truncation_values, unless_terminated)
            return Bootstrap(next_values, terminated | truncated | ~valid)
        case GaeRule.ORIGINAL_STATED:
            return Bootstrap(unless_terminated, terminated | ~valid)
        case GaeRule.ORIGINAL_ACTUAL:
            return Bootstrap(torch.where(last_row, following, unless_terminated), terminated | ~valid)
        case _:
            assert_never(rule)


def flow_back(increments: Tensor, decays: Tensor) -> Tensor:
    """x[t] = increments[t] + decays[t] * x[t+1], with nothing behind the last column; all float [N, T]."""
    sums, factors = increments.clone(), decays.clone()
    distance = 1
    while distance < sums.shape[1]:
        near, far = sums[:, :-distance], sums[:, distance:]
        composed = torch.addcmul(near, factors[:, :-distance], far)
        if 2 * distance < sums.shape[1]:
            factors[:, :-distance] = factors[:, :-distance] * factors[:, distance:]
        near.copy_(composed)
        distance *= 2
    return sums


def _by_the_reference(
    rows: Mapping[str, Tensor], last_values: Tensor, valid_steps: Tensor, estimator: Estimator
) -> tuple[Tensor, Tensor]:
    """Names the first wrong row; where nothing is wrong with any (sums beyond float64), the reference's own results."""
    advantages, returns = gae.advantages_and_returns(
        {name: tensor.cpu().numpy() for name, tensor in rows.items()},
        last_values.double().cpu().numpy(),
        valid_steps.long().cpu().numpy(),
        estimator,
    )
    device = rows["valid"].device
    return torch.from_numpy(advantages).to(device), torch.from_numpy(returns).to(device)


def require_one_shape(**tensors: Tensor) -> None:
    """Raises ShapeError unless all are [N, T]."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 2 for shape in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ShapeError(f"advantages need tensors of one shape [N, T], got {listed}")
