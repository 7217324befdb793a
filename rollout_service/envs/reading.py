"""What envs return, as arrays of the fields that store it: leaves of observations, checked and cast.

Pure functions. Nothing is repaired silently: a value that would change in its field's dtype (300 into uint8, 0.5 into
an integer) is refused, floats may lose precision. Leaves to others: which env it was (the caller puts that in front).

Axis letters: E envs of one actor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rollout_service.envs.make import Keys, observation_leaves
from rollout_service.memory.schema import OBSERVATIONS
from rollout_service.runspec import Leaf, SpaceKind

Array = NDArray[Any]

SUCCESS_KEYS: Final = ("success", "is_success")
"""Keys of the last step's info that say whether an episode succeeded; the first one present counts."""


@dataclass(frozen=True)
class ObservationField:
    """One array of an observation: the field that stores it, and the way to it."""

    name: str
    keys: Keys
    leaf: Leaf
    dtype: np.dtype[Any]

    def pick(self, observation: Any) -> Any:
        """This field's part of an observation, as the env gave it. Raises Misfit if there is none."""
        value = observation
        try:
            for key in self.keys:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            raise Misfit(f"the observation has no {self.leaf.path}, its space says it has") from None
        return value


class Misfit(Exception):
    """Something an env returned has no place in a transition. `row`: which one of E, if that is known."""

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


def observation_fields(space: gymnasium.Space[Any]) -> tuple[ObservationField, ...]:
    """The fields of an env's observations, in a fixed order."""
    return tuple(
        ObservationField(OBSERVATIONS + leaf.path, keys, leaf, np.dtype(leaf.dtype))
        for keys, leaf in observation_leaves(space)
    )


def fitted(value: Any, shape: tuple[int, ...], of: ObservationField) -> Array:
    """The value as an array of that shape and the field's dtype.

    shape: the leaf's own, or [E, *] of it. Raises Misfit for other shapes, and for casts that change a number.
    """
    if type(value) is np.ndarray and value.dtype == of.dtype and value.shape == shape and of.leaf.size is None:
        return value
    given = np.asarray(value)
    batched = len(shape) > len(of.leaf.shape)
    if given.shape != shape:
        raise Misfit(f"{of.name} has shape {given.shape}, its space says {shape}")
    if given.dtype.kind not in "fiub":
        raise Misfit(f"{of.name} is of dtype {given.dtype}, its space says {of.leaf.dtype}")
    with np.errstate(all="ignore"):
        array = given.astype(of.dtype)
    if of.dtype.kind != "f" and not np.array_equal(array, given):
        where = np.argwhere(array != given)
        wrong = given[array != given].flat[0]
        raise Misfit(
            f"{of.name} holds {wrong}, which {of.leaf.dtype} cannot; its space is wrong",
            int(where[0][0]) if batched else None,
        )
    if of.leaf.kind is SpaceKind.DISCRETE:
        last = of.leaf.start + (of.leaf.size or 0) - 1
        outside = np.flatnonzero((array < of.leaf.start) | (array > last))
        if outside.size:
            raise Misfit(
                f"{of.name} is {array.reshape(-1)[outside[0]]}, its space allows {of.leaf.start} to {last}",
                int(outside[0]) if batched else None,
            )
    return array


def all_finite(values: Array) -> bool:
    """Whether one sum over everything says that no NaN and no infinity is there. False may be a mere overflow."""
    return math.isfinite(np.add.reduce(values, axis=None))


def success_of(facts: Any) -> bool | None:
    """What the info of one env says about the episode that ended with it; None if nothing."""
    if isinstance(facts, Mapping):
        for key in SUCCESS_KEYS:
            if key in facts:
                return bool(facts[key])
    return None


def short(value: object, limit: int = 80) -> str:
    """One line of at most `limit` characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
