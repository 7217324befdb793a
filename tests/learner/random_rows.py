"""Random rollouts with every kind of row, as slots hold them: what the estimators are compared on."""

from __future__ import annotations

import numpy as np


def random_rows(
    seed: int, num_envs: int, num_steps: int, *, end_rate: float = 0.2, filler_rate: float = 0.2, full: bool = False
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Rows [N, T], last values [N] and K [N]; NaN wherever nobody may read. full: K = T everywhere."""
    draw = np.random.default_rng(seed)
    shape = (num_envs, num_steps)
    names = ("rewards", "values", "log_probs", "truncation_values")
    rows = {name: (10 * draw.standard_normal(shape)).astype(np.float32) for name in names}
    for name in ("terminated", "truncated"):
        rows[name] = (draw.random(shape) < end_rate).astype(np.uint8)
    rows["valid"] = (draw.random(shape) >= filler_rate).astype(np.uint8)
    steps = np.full(num_envs, num_steps) if full else draw.integers(0, num_steps + 1, num_envs)
    beyond = np.arange(num_steps) >= steps[:, None]
    for name in names:
        rows[name][beyond] = np.nan
    for name in ("rewards", "log_probs"):
        rows[name][rows["valid"] == 0] = np.nan
    rows["truncation_values"][(rows["truncated"] == 0) | (rows["terminated"] == 1)] = np.nan
    for name in ("advantages", "returns"):
        rows[name] = np.full(shape, 7.0, np.float32)
    return rows, 10 * draw.standard_normal(num_envs), steps
