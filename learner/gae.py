"""Generalized advantage estimation as pure functions: one recursion, three rules for episode ends.

Flags become next values and chain cuts first (`bootstrap`), so the recursion itself (`generalized_advantages`) has no
branches and runs over T with vectors of N. `advantages_and_returns` puts the two together over the rows of a rollout
and refuses rows that cannot be estimated. Who calls: the rollout buffer, which writes the results. Never: IO,
randomness, writes into an argument.

Papers: GAE, Schulman et al. 2016, eq. 16 (arXiv 1506.02438); time limits, Pardo et al. 2018 (arXiv 1712.00378).
Axis letters: T num_steps, N num_envs, K valid_steps of an env.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, assert_never

import numpy as np
from numpy.typing import NDArray

from rollout_service.config import GaeRule
from rollout_service.errors import IncompleteRollout, ShapeError

F = TypeVar("F", bound=np.floating[Any])
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Estimator:
    """How advantages are estimated. Ranges are checked by whoever takes them from a user."""

    gamma: float
    lam: float
    rule: GaeRule = GaeRule.BOUNDARY_CORRECT
    reward_scale: float = 1.0
    """Factor on the rewards, here only."""
    truncation_as_termination: bool = False
    """Ablation: time limits as real ends. Biased."""


def advantages_and_returns(
    rows: Mapping[str, NDArray[Any]],
    last_values: NDArray[np.float64],
    valid_steps: NDArray[np.int64],
    estimator: Estimator,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Advantages and returns over the first T columns of a rollout.

    rows: rewards, values, log_probs, truncation_values float32 [N, T], terminated, truncated, valid bool or 0/1 [N, T];
    last_values: float [N], V(observation after row K-1); valid_steps: K, int [N], each in 0..T.
    Returns two float64 [N, T], 0 on rows that are not valid and from row K on; float64 so that a return of 0.1 beside
    values of 1e5 keeps its digits. Raises ShapeError, and IncompleteRollout, naming step and env, for a valid row that
    is not finite, or is truncated without a truncation value under boundary_correct.
    """
    live = rows["valid"].astype(np.bool_) & (np.arange(rows["valid"].shape[1]) < valid_steps[:, None])
    terminated, truncated = rows["terminated"].astype(np.bool_), rows["truncated"].astype(np.bool_)
    if estimator.truncation_as_termination:
        terminated, truncated = terminated | truncated, np.zeros_like(truncated)
    if estimator.rule is GaeRule.BOUNDARY_CORRECT:
        _refuse_first(
            live & truncated & ~terminated & np.isnan(rows["truncation_values"]),
            "is truncated and has no truncation value; add it with truncation_value=V(final observation), "
            "or choose one of the original rules, which do not read truncations",
        )
    for name in ("rewards", "values", "log_probs"):
        _refuse_first(
            live & ~np.isfinite(rows[name]), f"holds {name} that are not finite; check the env and the policy"
        )
    values = rows["values"].astype(np.float64)
    next_values, cut = bootstrap(
        estimator.rule,
        values=values,
        last_values=last_values,
        truncation_values=rows["truncation_values"].astype(np.float64),
        terminated=terminated,
        truncated=truncated,
        valid=live,
        valid_steps=valid_steps,
    )
    _refuse_first(
        live & ~np.isfinite(next_values),
        "is followed by a value that is not finite; check last_values, the truncation values and the row after it",
    )
    values = np.where(live, values, 0.0)
    advantages = generalized_advantages(
        np.where(live, rows["rewards"].astype(np.float64) * estimator.reward_scale, 0.0),
        values,
        np.where(live, next_values, 0.0),
        cut,
        gamma=estimator.gamma,
        lam=estimator.lam,
    )
    return advantages, advantages + values


class Bootstrap(NamedTuple):
    """What a rule makes of the flags."""

    next_values: NDArray[np.floating[Any]]
    """[N, T]: the value that follows the row; may be NaN on rows that are not live."""
    cut: Bools
    """[N, T]: no advantage flows back across this row."""


def bootstrap(
    rule: GaeRule,
    *,
    values: NDArray[F],
    last_values: NDArray[F],
    truncation_values: NDArray[F],
    terminated: Bools,
    truncated: Bools,
    valid: Bools,
    valid_steps: NDArray[np.int64],
) -> Bootstrap:
    """Next values and chain cuts of every row under one rule.

    values, truncation_values: float [N, T]; last_values: float [N]; terminated, truncated, valid: bool [N, T];
    valid_steps: int [N], each K in 0..T. Row K-1 is an env's last row; rows from K on never matter.

    rule                next value                                                            chain is cut where
    boundary_correct    0 if terminated, truncation value if truncated, last_values on row     terminated or truncated
                        K-1, values[t+1] otherwise
    original_stated     0 if terminated, last_values on row K-1, values[t+1] otherwise         terminated
    original_actual     last_values on row K-1 even if terminated, 0 if terminated,            terminated
                        values[t+1] otherwise

    The two original rules let the next episode's value and advantage flow back through a truncation: a bias, kept for
    comparison. Under every rule the chain is also cut on rows that are not valid. Raises ShapeError.
    """
    _require_one_shape(
        values=values, truncation_values=truncation_values, terminated=terminated, truncated=truncated, valid=valid
    )
    if last_values.shape != values.shape[:1] or valid_steps.shape != values.shape[:1]:
        raise ShapeError(
            f"last_values {last_values.shape} and valid_steps {valid_steps.shape} need one number per env, "
            f"{values.shape[:1]}"
        )
    last_row = np.arange(values.shape[1]) == valid_steps[:, None] - 1
    successors = np.empty_like(values)
    successors[:, :-1] = values[:, 1:]
    successors[:, -1:] = last_values[:, None]
    successors = np.where(last_row, last_values[:, None], successors)
    unless_terminated = np.where(terminated, 0.0, successors)
    match rule:
        case GaeRule.BOUNDARY_CORRECT:
            next_values = np.where(truncated & ~terminated, truncation_values, unless_terminated)
            return Bootstrap(next_values, terminated | truncated | ~valid)
        case GaeRule.ORIGINAL_STATED:
            return Bootstrap(unless_terminated, terminated | ~valid)
        case GaeRule.ORIGINAL_ACTUAL:
            return Bootstrap(np.where(last_row, last_values[:, None], unless_terminated), terminated | ~valid)
        case _:
            assert_never(rule)


def generalized_advantages(
    rewards: NDArray[F], values: NDArray[F], next_values: NDArray[F], ended: Bools, *, gamma: float, lam: float
) -> NDArray[F]:
    """GAE(lambda): A[t] = delta[t] + gamma * lambda * (1 - ended[t]) * A[t+1], delta = r + gamma * V' - V.

    rewards, values, next_values: float [N, T], of one dtype, in which the sums are made; ended: bool [N, T], cuts the
    chain. A row of zeros that is cut gets advantage 0. Returns float [N, T] of the inputs' dtype. Raises ShapeError.
    """
    _require_one_shape(rewards=rewards, values=values, next_values=next_values, ended=ended)
    gamma, lam = float(gamma), float(lam)
    return flow_back(rewards + gamma * next_values - values, np.where(ended, 0.0, gamma * lam))


def flow_back(increments: NDArray[F], decays: NDArray[np.floating[Any]]) -> NDArray[F]:
    """x[t] = increments[t] + decays[t] * x[t+1], with nothing behind the last column: the recursion of GAE and V-trace.

    increments, decays: float [N, T]. Returns float [N, T] of the dtype of the increments.
    """
    sums = increments.T.copy()  # time-major: a step reads and writes contiguous rows
    factors = decays.T.astype(sums.dtype, order="C")
    for t in range(len(sums) - 2, -1, -1):
        sums[t] += factors[t] * sums[t + 1]
    return np.ascontiguousarray(sums.T)


def _require_one_shape(**arrays: NDArray[np.generic]) -> None:
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 2 for shape in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ShapeError(f"advantages need arrays of one shape [N, T], got {listed}")


def _refuse_first(wrong: Bools, complaint: str) -> None:
    """wrong: bool [N, T]. Raises IncompleteRollout for the earliest wrong row."""
    if wrong.any():
        step, env = np.argwhere(wrong.T)[0]
        raise IncompleteRollout(f"the row of step {step}, env {env} {complaint}")
