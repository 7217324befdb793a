"""What a rollout is made of, as data: every array of a slot, declared once.

Fields come from the spaces and from the policy's state spec. A new field is one line in `rollout_fields` and nowhere
else. The layout, the writers, the buffer and the checks all read this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from rollout_service.runspec import Spaces

OBSERVATIONS = "observations"
FINAL_PREFIX = "final_"


class Per(Enum):
    """What a field has one value of."""

    STEP = "step"
    """[S, E, T, *shape]"""
    ENV = "env"
    """[S, E, *shape]"""


class Role(Enum):
    """Who writes a field, and so what the checks at commit may expect of it."""

    ACTOR = "actor"
    """Written by the actor under its lease."""
    SEED = "seed"
    """Written by the learner while the slot is FREE (row 0 only, for state), or by the actor at lease start."""
    LEARNER = "learner"
    """Products of the learner; zero until it has run."""


@dataclass(frozen=True)
class Field:
    """One array of a slot. `fill` is the sentinel of an unwritten cell: NaN where a float must have been written."""

    name: str
    per: Per
    dtype: np.dtype
    shape: tuple[int, ...] = ()
    fill: float = 0.0
    role: Role = Role.ACTOR


def observation_fields(spaces: Spaces) -> tuple[str, ...]:
    """Names of the observation arrays, one per leaf: "observations" + path."""
    return tuple(OBSERVATIONS + leaf.path for leaf in spaces.observation)


def rollout_fields(spaces: Spaces, state: Mapping[str, tuple[int, ...]]) -> tuple[Field, ...]:
    """Every array of a slot, in memory order.

    state: name -> shape of one env's recurrent state ENTERING a step, e.g. {"hidden": (L, H), "cell": (L, H)}.
    """
    f32, u8, nan = np.dtype(np.float32), np.dtype(np.uint8), float("nan")
    return (
        *(Field(OBSERVATIONS + leaf.path, Per.STEP, np.dtype(leaf.dtype), leaf.shape) for leaf in spaces.observation),
        Field("actions", Per.STEP, np.dtype(spaces.action.dtype), spaces.action.shape),
        Field("rewards", Per.STEP, f32, fill=nan),
        Field("values", Per.STEP, f32, fill=nan),
        Field("log_probs", Per.STEP, f32, fill=nan),
        Field("terminated", Per.STEP, u8),
        Field("truncated", Per.STEP, u8),
        Field("valid", Per.STEP, u8),
        Field("truncation_values", Per.STEP, f32, fill=nan),
        *(Field(name, Per.STEP, f32, shape, nan, Role.SEED) for name, shape in state.items()),
        *(Field(FINAL_PREFIX + name, Per.ENV, f32, shape, nan) for name, shape in state.items()),
        Field("last_values", Per.ENV, f32, fill=nan),
        Field("episode_start_carry", Per.ENV, f32, fill=1.0, role=Role.SEED),
        Field("advantages", Per.STEP, f32, role=Role.LEARNER),
        Field("returns", Per.STEP, f32, role=Role.LEARNER),
    )
