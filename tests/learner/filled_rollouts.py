"""Rollout buffers filled from [T][N] lists, and data that names itself: 1000 * env + step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from learner import RecurrentRolloutBuffer


def fill(
    buffer: RecurrentRolloutBuffer, columns: Mapping[str, Any], steps: int | None = None
) -> RecurrentRolloutBuffer:
    """Write columns [T][N] by field name, from actions and rewards to truncation_values.

    Missing columns get 0, valid True. Truncation values are only given for truncated rows. Observations are
    1000 * env + step in every element. Returns the buffer.
    """
    num_steps, num_envs = buffer.shape()[:2]
    shape = buffer.shape()[2:]
    for step in range(num_steps if steps is None else steps):
        for env in range(num_envs):
            cell = {name: np.asarray(column)[step][env] for name, column in columns.items()}
            buffer.add(
                step,
                env,
                np.full(shape, 1000 * env + step),
                int(cell.get("actions", 0)),
                cell.get("rewards", 0.0),
                cell.get("values", 0.0),
                cell.get("log_probs", -0.5),
                cell.get("terminated", 0),
                cell.get("truncated", 0),
                truncation_value=cell.get("truncation_values") if cell.get("truncated", 0) else None,
                valid=cell.get("valid", 1),
            )
    return buffer


def contents(buffer: RecurrentRolloutBuffer) -> dict[str, bytes]:
    """The bytes of every field but the learner's products."""
    names = (
        "observations", "actions", "rewards", "values", "log_probs", "terminated", "truncated", "valid",
        "truncation_values", "hidden", "cell", "episode_start_carry",
    )  # fmt: skip
    return {name: np.ascontiguousarray(getattr(buffer, name)()).tobytes() for name in names}
