"""gae: our advantages against the usual step loop over time-major float32 arrays.

Ours refuses rows that are not finite, keeps three rules apart and sums in float64; the loop does none of that and
gets its time limits already folded into the rewards. Axis letters: N envs, T steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from learner.gae import Estimator, advantages_and_returns, bootstrap, generalized_advantages
from rollout_service.bench.report import Report
from rollout_service.bench.rig import Array
from rollout_service.bench.timing import Figures, alternate

REPETITIONS: Final = 15
SIZES: Final = ((1024, 512), (16, 128))
END_PROBABILITY: Final = 0.01
TRUNCATED_SHARE: Final = 0.2
GAMMA, LAMBDA = 0.99, 0.95

NOTES: Final = (
    "whole: from flags to advantages and returns, float64, all checks; recursion: its inner part alone, float32",
    "naive: numpy step loop over [T, N] float32 with truncation values already added to the rewards",
)
F32 = NDArray[np.float32]


def measure(repetitions: int = REPETITIONS, *, sizes: Sequence[tuple[int, int]] = SIZES) -> Report:
    """One case per (N, T)."""
    cases = {f"[{envs}, {steps}]": one_case(repetitions, envs, steps) for envs, steps in sizes}
    return Report("gae", "advantages and returns of a rollout [envs, steps]", cases, NOTES)


def one_case(repetitions: int, envs: int, steps: int) -> Figures:
    rows, last_values = rollout(envs, steps)
    counts = np.full(envs, steps)
    estimator = Estimator(GAMMA, LAMBDA)
    terminated, truncated = rows["terminated"].astype(np.bool_), rows["truncated"].astype(np.bool_)
    next_values, cut = bootstrap(
        estimator.rule,
        values=rows["values"],
        last_values=last_values,
        truncation_values=rows["truncation_values"],
        terminated=terminated,
        truncated=truncated,
        valid=np.ones_like(terminated),
        valid_steps=counts,
    )
    naive = time_major(rows, last_values)
    samples = alternate(
        {
            "whole": lambda: advantages_and_returns(rows, last_values.astype(np.float64), counts, estimator),
            "recursion": lambda: generalized_advantages(
                rows["rewards"], rows["values"], next_values, cut, gamma=GAMMA, lam=LAMBDA
            ),
            "naive": lambda: naive_advantages(*naive),
        },
        repetitions=repetitions,
    )
    return samples.medians("us") | samples.ratio("whole", "naive") | samples.ratio("recursion", "naive")


def rollout(envs: int, steps: int) -> tuple[dict[str, Array], F32]:
    """Rows [N, T] as a rollout holds them, and last values [N]."""
    generator = np.random.default_rng(0)
    shape = (envs, steps)
    ends = generator.random(shape) < END_PROBABILITY
    truncated = ends & (generator.random(shape) < TRUNCATED_SHARE)
    floats = {name: generator.standard_normal(shape, np.float32) for name in ("rewards", "values", "log_probs")}
    final_values = generator.standard_normal(shape, np.float32)
    return {
        **floats,
        "terminated": (ends & ~truncated).astype(np.uint8),
        "truncated": truncated.astype(np.uint8),
        "valid": np.ones(shape, np.uint8),
        "truncation_values": np.where(truncated, final_values, np.float32(np.nan)),
    }, generator.standard_normal(envs, np.float32)


def time_major(rows: dict[str, Array], last_values: F32) -> tuple[F32, F32, F32, F32]:
    """What `naive_advantages` takes: rewards, values and ends as float32 [T, N], last values [N]."""
    truncated = rows["truncated"].astype(np.bool_)
    rewards = rows["rewards"] + np.where(truncated, np.float32(GAMMA) * rows["truncation_values"], np.float32(0.0))
    ends = (truncated | rows["terminated"].astype(np.bool_)).astype(np.float32)
    values = rows["values"]
    return (
        np.ascontiguousarray(rewards.T),
        np.ascontiguousarray(values.T),
        np.ascontiguousarray(ends.T),
        last_values,
    )


def naive_advantages(rewards: F32, values: F32, ends: F32, last_values: F32) -> tuple[F32, F32]:
    """GAE as it is usually written: advantages and returns, float32 [T, N]."""
    advantages = np.zeros_like(rewards)
    following = np.zeros_like(last_values)
    next_values = last_values
    for t in reversed(range(len(rewards))):
        going_on = 1.0 - ends[t]
        delta = rewards[t] + GAMMA * next_values * going_on - values[t]
        following = delta + GAMMA * LAMBDA * going_on * following
        advantages[t] = following
        next_values = values[t]
    return advantages, advantages + values
