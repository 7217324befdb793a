"""The rules of recurrent state that the actor and the learner share, as pure numpy functions.

Who calls: the actor's loop (which state enters the next row), the learner (episode starts of a batch, the state seeded
for the next rollout). Because both sides call these functions, at equal weights the state that the learner seeds equals
the state that the actor carries, bit for bit.

Never: IO, clocks, randomness, writes into an argument (but for a named `out`). State is dropped by selection, not by
multiplication: 0 * NaN is NaN.

Two masks, different on purpose: values are bootstrapped unless *terminated*, state is reset when *ended*, which is
terminated or truncated or not valid. Only the second lives here; `learner/gae.py` has the first.

Axis letters: T num_steps, N num_envs, n any number of rows, L recurrent layers, H hidden_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import numpy as np
from numpy.typing import NDArray

from rollout_service.errors import ShapeError

State = dict[str, NDArray[np.float32]]
"""Recurrent state by array name, each [n, L, H]; empty for a feed-forward core."""


def ended(
    terminated: NDArray[np.generic], truncated: NDArray[np.generic], valid: NDArray[np.generic]
) -> NDArray[np.bool_]:
    """The one rule: a row ended if it was terminated, or truncated, or is not valid (no one may carry state across it).

    terminated, truncated, valid: bool or 0/1, all of one shape. Returns bool of that shape.
    """
    return terminated.astype(np.bool_) | truncated.astype(np.bool_) | ~valid.astype(np.bool_)


def episode_starts(ended: NDArray[np.bool_], carry: NDArray[np.float32]) -> NDArray[np.float32]:
    """1.0 on every row that has to start from zero state: row 0 by the carry flag, row t if row t-1 ended.

    ended: bool [N, T]; carry: float [N], 1.0 where the env's episode ended with the previous rollout.
    Returns float32 [N, T]; T may be 0. Raises ShapeError.
    """
    if ended.ndim != 2 or carry.shape != ended.shape[:1]:
        raise ShapeError(f"episode_starts needs ended [N, T] and carry [N], got {ended.shape} and {carry.shape}")
    starts = np.empty(ended.shape, np.float32)
    starts[:, 1:] = ended[:, :-1]
    starts[:, :1] = carry[:, None]
    return starts


def warm_start(
    ended_last: NDArray[np.bool_], final_state: Mapping[str, NDArray[np.float32]]
) -> tuple[State, NDArray[np.float32]]:
    """Row 0 and the carry flag of the next rollout, made together so that they cannot disagree.

    ended_last: bool [N], whether the last valid row of the env ended; final_state: arrays [N, L, H], the state that
    exits that row (only used where it did not end).
    Returns the state entering row 0, arrays [N, L, H], and the carry flag, float32 [N].
    """
    return enter_state(final_state, ended_last), ended_last.astype(np.float32)


def enter_state(
    state: Mapping[str, NDArray[np.float32]],
    starts: NDArray[np.generic],
    out: MutableMapping[str, NDArray[np.float32]] | None = None,
) -> State:
    """The state that enters a row: zeros where an episode starts there, `state` elsewhere.

    state: arrays [n, L, H] (any rank from 1 up, rows first); starts: bool or 0/1 [n]. With `out`, its arrays are
    written (they may be those of `state` itself) and nothing is allocated but the mask. Raises ShapeError.
    """
    mask = starts.astype(np.bool_)
    entering: State = {}
    for name, array in state.items():
        if array.shape[:1] != mask.shape:
            raise ShapeError(
                f"state {name!r} has shape {array.shape}, starts has {mask.shape}; both need the same rows"
            )
        target = np.empty_like(array) if out is None else out[name]
        if target is not array:
            np.copyto(target, array)
        target[mask] = 0.0
        entering[name] = target
    return entering
