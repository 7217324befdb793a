"""Arguments of the rollout buffer as checked arrays: shape, dtype, range, finiteness.

Pure functions; they return arrays or raise errors that teach. Nothing is repaired silently: a value that would change
in the buffer's dtype (300 into uint8, 0.5 into an integer) is refused, a scalar may come as an array of size 1.

Axis letters: n envs of one call.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollout_service.errors import ConfigError, IncompleteRollout, OutOfRange, ShapeError
from rollout_service.memory.schema import OBSERVATIONS
from rollout_service.runspec import Leaf, SpaceKind, Spaces

if TYPE_CHECKING:
    from gymnasium import Space

EnvIds = int | range | slice
"""One env by number, or adjacent ones."""


def spaces_of(obs_dim: int | None, observation_space: Space[Any] | None, action_space: Space[Any] | None) -> Spaces:
    """The spaces of a standalone buffer, from the simple size or from gymnasium spaces.

    Raises OutOfRange, SpaceNotSupported, ConfigError for both or neither of obs_dim and observation_space.
    """
    if obs_dim is not None and observation_space is not None:
        raise ConfigError("obs_dim and observation_space were both given; give one of them")
    if observation_space is None:
        if obs_dim is None:
            raise ConfigError("neither obs_dim nor observation_space was given; give one of them")
        require_size("obs_dim", obs_dim)
        if action_space is None:
            return Spaces(
                observation=(Leaf(kind=SpaceKind.BOX, shape=(obs_dim,), dtype="float32"),),
                action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64"),
            )
    from gymnasium import spaces

    from rollout_service.envs.make import spaces_from_gymnasium

    size = () if obs_dim is None else (obs_dim,)
    return spaces_from_gymnasium(
        spaces.Box(-np.inf, np.inf, size) if observation_space is None else observation_space,
        spaces.Discrete(2) if action_space is None else action_space,
    )


def leaf_of(observation: ArrayLike | Mapping[str, Any], field: str) -> Any:
    """The part of an env's observation that field `field` ("observations" + "/key/key") stores. Raises ShapeError."""
    part: Any = observation
    for key in field.removeprefix(OBSERVATIONS).split("/")[1:]:
        try:
            part = part[key] if isinstance(part, Mapping) else part[int(key)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ShapeError(
                f"the observation has no part {key!r}, needed for {field!r}; pass it as the env returns it"
            ) from error
    return part


def to_cells(
    argument: str,
    given: ArrayLike,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    n: int,
    *,
    single: bool,
    broadcast: bool = False,
) -> NDArray[Any]:
    """`given` as [n, *shape] of `dtype`.

    single: one env, given without the leading axis. broadcast: a scalar stands for all n. A shape (1, H) is accepted
    without its 1 (one recurrent layer), a scalar as an array of size 1. Raises ShapeError.
    """
    array = np.asarray(given)
    wanted = shape if single else (n, *shape)
    accepted = array.shape == wanted
    if not accepted and len(shape) == 2 and shape[0] == 1:
        accepted = array.shape == (*wanted[:-2], wanted[-1])
    if not accepted and wanted in {(), (1,)}:
        accepted = array.size == 1
    if not accepted and broadcast and array.ndim == 0:
        array, accepted = np.full(wanted, array), True
    if not accepted:
        raise ShapeError(f"{argument} has shape {array.shape}; it needs {wanted}")
    return to_dtype(argument, array, dtype).reshape(n, *shape)


def to_dtype(argument: str, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """`array` in `dtype`, if every value survives: floats may lose precision, nothing else.

    A float is never taken for an integer, not even a whole one: an action that comes as a float is an oversight.
    Raises ShapeError.
    """
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and dtype.kind in "iu"):
        raise ShapeError(f"{argument} has dtype {array.dtype}, the buffer keeps {dtype}; convert it where it is made")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if dtype.kind in "biu" and not np.array_equal(converted, array):
        wrong = array[converted != array].flat[0]
        raise ShapeError(f"{argument} holds {wrong}, which {dtype} cannot; check it against the space")
    return converted


def is_single(env_id: EnvIds) -> bool:
    """Whether it is one env by number, whose arguments have no leading axis."""
    return not isinstance(env_id, range | slice)


def step_within(step: int, num_steps: int) -> int:
    """Raises OutOfRange unless 0 <= step < num_steps, ShapeError unless it is a whole number."""
    step = to_whole("step", step)
    if not 0 <= step < num_steps:
        raise OutOfRange(f"step is {step}; steps are 0..{num_steps - 1}")
    return step


def envs_within(env_id: EnvIds, num_envs: int) -> slice:
    """The envs as a slice with plain bounds. Raises OutOfRange, ShapeError."""
    if isinstance(env_id, slice):
        envs = range(num_envs)[env_id]
    elif isinstance(env_id, range):
        envs = env_id
    else:
        first = to_whole("env_id", env_id)
        envs = range(first, first + 1)
    if envs.step != 1 or not 0 <= envs.start < envs.stop <= num_envs:
        raise OutOfRange(f"env_id is {env_id}; it must name one env, or adjacent ones, of 0..{num_envs - 1}")
    return slice(envs.start, envs.stop)


def per_env(name: str, value: ArrayLike, *, low: int, high: int, num_envs: int, num_slots: int) -> NDArray[np.int64]:
    """One whole number per env [N], from one for all, one per env, or one per slot. Raises ShapeError, OutOfRange."""
    given = np.asarray(value)
    if given.dtype.kind not in "iu":
        raise ShapeError(f"{name} is {value!r}; it must be a whole number, or one per env")
    if given.ndim == 0:
        numbers = np.full(num_envs, given, np.int64)
    elif given.shape == (num_envs,):
        numbers = given.astype(np.int64)
    elif given.shape == (num_slots,):
        numbers = np.repeat(given.astype(np.int64), num_envs // num_slots)
    else:
        raise ShapeError(
            f"{name} has shape {given.shape}; give one number, {num_envs} (per env) or {num_slots} (per slot)"
        )
    wrong = np.flatnonzero((numbers < low) | (numbers > high))
    if wrong.size:
        raise OutOfRange(f"{name} is {numbers[wrong[0]]} for env {wrong[0]}; it must be in {low}..{high}")
    return numbers


def to_whole(argument: str, value: Any) -> int:
    """A plain int from any integer but bool. Raises ShapeError."""
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:
        pass
    raise ShapeError(f"{argument} is {value!r}; it must be a whole number")


def require_finite(name: str, rows: NDArray[Any], envs: NDArray[np.int64], step: int | None) -> None:
    """rows: [n, *shape] of the envs [n]. Raises IncompleteRollout for the first env with a NaN or an infinity."""
    if rows.dtype.kind != "f" or np.isfinite(rows).all():
        return
    finite = np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
    where = "" if step is None else f" at step {step}"
    raise IncompleteRollout(
        f"{name} of env {envs[np.flatnonzero(~finite)[0]]}{where} holds a value that is not finite in {rows.dtype}; "
        "check the env and the policy"
    )


def require_size(name: str, size: int) -> None:
    """Raises OutOfRange unless `size` is a whole number from 1 up."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
        raise OutOfRange(f"{name} is {size!r}; it must be a whole number, at least 1")


def require_fraction(name: str, value: float) -> float:
    """Raises OutOfRange unless 0 <= value <= 1."""
    if not 0.0 <= float(value) <= 1.0:
        raise OutOfRange(f"{name} is {value}; it must be in 0..1")
    return float(value)


def require_positive(name: str, value: float) -> float:
    """Raises OutOfRange unless value is above 0 and finite."""
    if not 0.0 < float(value) < np.inf:
        raise OutOfRange(f"{name} is {value}; it must be above 0 and finite")
    return float(value)
