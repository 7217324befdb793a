"""RolloutViews: what can be read of a rollout in shared memory, as arrays that read [step][env].

Every accessor is a view without a copy. What actors or `add` write is read-only here, so that no maths in place can
reach the rollout; advantages and returns are the learner's own and can be written. Writers: none here;
`RecurrentRolloutBuffer` is a RolloutViews that also writes. Left to others: whether what is read is complete, or still
of the same rollout.

Axis letters: T num_steps, N num_envs, L recurrent layers, H hidden_dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_service.errors import OutOfOrder
from rollout_service.memory.schema import FINAL_PREFIX, OBSERVATIONS, Per, Role
from rollout_service.memory.slots import RolloutMemory

CARRY = "episode_start_carry"
Epochs = tuple[int, ...]
Grid = NDArray[Any]
"""A view that reads [step][env]."""


class RolloutViews:
    """Adjacent slots as one rollout of N envs and T steps, for reading."""

    def __init__(self, memory: RolloutMemory, slots: range) -> None:
        self._slots = slots
        self._open: tuple[RolloutMemory, dict[str, NDArray[Any]]] | None = (memory, memory.rollout(slots))
        self._fields = {declared.name: declared for declared in memory.fields}
        self._num_steps = memory.num_steps
        self._num_envs = len(slots) * memory.envs_per_slot
        self._state_names = tuple(f.name for f in memory.fields if f.role is Role.SEED and f.per is Per.STEP)
        self._observation_names = tuple(name for name in self._fields if name.startswith(OBSERVATIONS))

    def shape(self) -> tuple[int, ...]:
        """(T, N, *observation shape), so (num_steps, num_envs, obs_dim) for a flat one; (T, N) for several leaves."""
        plain = self._fields.get(OBSERVATIONS)
        return (self._num_steps, self._num_envs, *(plain.shape if plain is not None else ()))

    def hidden_dim(self) -> int:
        """H; 0 without recurrent state."""
        return self._fields[self._state_names[0]].shape[-1] if self._state_names else 0

    def observations(self) -> Grid | dict[str, Grid]:
        """[T, N, *obs] in the space's own dtype; by field name where the observation is not one plain array."""
        leaves = {name: self._grid(name) for name in self._observation_names}
        return leaves.get(OBSERVATIONS, leaves)

    def actions(self) -> Grid:
        """[T, N, *action]."""
        return self._grid("actions")

    def rewards(self) -> Grid:
        """float32 [T, N], raw."""
        return self._grid("rewards")

    def values(self) -> Grid:
        """float32 [T, N]."""
        return self._grid("values")

    def log_probs(self) -> Grid:
        """float32 [T, N]."""
        return self._grid("log_probs")

    def terminated(self) -> Grid:
        """bool [T, N]."""
        return self._grid("terminated").view(np.bool_)

    def truncated(self) -> Grid:
        """bool [T, N]."""
        return self._grid("truncated").view(np.bool_)

    def valid(self) -> Grid:
        """bool [T, N]: False on filler rows and on rows that were not written."""
        return self._grid("valid").view(np.bool_)

    def truncation_values(self) -> Grid:
        """float32 [T, N]; NaN where there is none."""
        return self._grid("truncation_values")

    def advantages(self) -> Grid:
        """float32 [T, N], writable."""
        return self._arrays["advantages"].swapaxes(0, 1)

    def returns(self) -> Grid:
        """float32 [T, N], writable."""
        return self._arrays["returns"].swapaxes(0, 1)

    def hidden(self) -> Grid:
        """float32 [T, N, L, H], entering the step. Raises OutOfOrder without recurrent state."""
        return self._state_grid("hidden")

    def cell(self) -> Grid:
        """float32 [T, N, L, H], entering the step. Raises OutOfOrder without recurrent state."""
        return self._state_grid("cell")

    def episode_start_carry(self) -> Grid:
        """float32 [N]."""
        return _read_only(self._arrays[CARRY])

    def last_values(self) -> Grid:
        """float32 [N]: written by the actors at commit, standalone by the last GAE call."""
        return _read_only(self._arrays["last_values"])

    def incarnations(self) -> NDArray[np.int64]:
        """int [N]: which life of its actor each env's rows are of."""
        lives = [self._memory.header(slot).incarnation for slot in self._slots]
        return np.repeat(np.array(lives, np.int64), self._memory.envs_per_slot)

    def final_state(self) -> dict[str, Grid]:
        """By name, float32 [N, L, H]: written by the actors at commit, standalone by seed_warm_start."""
        return {name: _read_only(self._arrays[FINAL_PREFIX + name]) for name in self._state_names}

    def _grid(self, name: str) -> Grid:
        return _read_only(self._arrays[name].swapaxes(0, 1))

    def _state_grid(self, name: str) -> Grid:
        if name not in self._state_names:
            raise OutOfOrder(f"this buffer has no {name!r} state; build it with hidden_dim to keep one")
        return self._grid(name)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of this rollout."""
        return sum(array.nbytes for array in self._arrays.values())

    def _opened(self) -> tuple[RolloutMemory, dict[str, NDArray[Any]]]:
        if self._open is None:
            raise OutOfOrder("the rollout buffer is closed; use it inside its with block")
        return self._open

    @property
    def _memory(self) -> RolloutMemory:
        return self._opened()[0]

    @property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Field name -> [N, T, *shape] or [N, *shape], env-major."""
        return self._opened()[1]

    def _epochs(self) -> Epochs:
        """Which filling of each slot this is."""
        return tuple(self._memory.header(slot).epoch for slot in self._slots)


def _read_only(array: Grid) -> Grid:
    view = array.view()
    view.flags.writeable = False
    return view
