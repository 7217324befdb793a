"""RolloutViews: what can be read of a rollout in shared memory, as arrays that read [step][env].

Every accessor is a view without a copy: of the slots themselves if they are adjacent, else of what was gathered from
them; a gathered rollout knows the recurrent state of row 0 only. What actors or `add` write is read-only here, so that
no maths in place can reach the rollout; advantages and returns are the learner's own and can be written. Writers: none
here; `RecurrentRolloutBuffer` is a RolloutViews that also writes. Left to others: whether what is read is complete, or
still of the same rollout.

Axis letters: T num_steps, N num_envs, L recurrent layers, H hidden_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.gathering import Gathered, require_slots, runs
from rollout_service.errors import OutOfOrder
from rollout_service.memory.schema import FINAL_PREFIX, OBSERVATIONS, Per, Role
from rollout_service.memory.slots import RolloutMemory, SlotHeader

CARRY = "episode_start_carry"
Epochs = tuple[int, ...]
Grid = NDArray[Any]
"""A view that reads [step][env]."""


class RolloutViews:
    """Some slots as one rollout of N envs and T steps, for reading."""

    def __init__(self, memory: RolloutMemory, slots: Sequence[int], *, at_once: bool = True) -> None:
        """at_once: slots that are not adjacent are copied here and now, not each field when it is first read.

        Raises OutOfRange unless `slots` are slots of the memory, at least one, none twice.
        """
        self._slots = require_slots(memory, slots)
        places = runs(self._slots)
        self._stamps: tuple[SlotHeader, ...] | None = None
        """Of a gathered rollout, from when it was made."""
        arrays: Mapping[str, NDArray[Any]]
        if len(places) == 1:
            arrays = memory.rollout(places[0])
        else:
            self._stamps = tuple(memory.header(slot) for slot in self._slots)
            arrays = Gathered(memory, places)
            arrays = dict(arrays) if at_once else arrays
        self._open: tuple[RolloutMemory, Mapping[str, NDArray[Any]]] | None = (memory, arrays)
        self._fields = {declared.name: declared for declared in memory.fields}
        self._num_steps = memory.num_steps
        self._num_envs = len(self._slots) * memory.envs_per_slot
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

    @property
    def is_gathered(self) -> bool:
        """Whether the arrays are copies of slots that are not adjacent."""
        return self._stamps is not None

    def hidden(self) -> Grid:
        """float32 [T, N, L, H], entering the step; [1, N, L, H] if gathered. Raises OutOfOrder without such state."""
        return self._state_grid("hidden")

    def cell(self) -> Grid:
        """float32 [T, N, L, H], entering the step; [1, N, L, H] if gathered. Raises OutOfOrder without such state."""
        return self._state_grid("cell")

    def episode_start_carry(self) -> Grid:
        """float32 [N]."""
        return _read_only(self._arrays[CARRY])

    def last_values(self) -> Grid:
        """float32 [N]: written by the actors at commit, standalone by the last GAE call."""
        return _read_only(self._arrays["last_values"])

    def incarnations(self) -> NDArray[np.int64]:
        """int [N]: which life of its actor each env's rows are of."""
        lives = [stamp.incarnation for stamp in self._headers()]
        return np.repeat(np.array(lives, np.int64), self._memory.envs_per_slot)

    def run_env_ids(self) -> NDArray[np.int64]:
        """int [N]: each env's number in the run, actor * E + e; 0..N-1 standalone. Two slots of one actor share them.

        Of a slot that nobody has filled it says nothing.
        """
        count = self._memory.envs_per_slot
        firsts = np.array([stamp.actor * count for stamp in self._headers()], np.int64)
        return (firsts[:, None] + np.arange(count)).reshape(-1)

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

    def _opened(self) -> tuple[RolloutMemory, Mapping[str, NDArray[Any]]]:
        if self._open is None:
            raise OutOfOrder("the rollout buffer is closed; use it inside its with block")
        return self._open

    @property
    def _memory(self) -> RolloutMemory:
        return self._opened()[0]

    @property
    def _arrays(self) -> Mapping[str, NDArray[Any]]:
        """Field name -> [N, T, *shape] or [N, *shape], env-major."""
        return self._opened()[1]

    def _headers(self) -> tuple[SlotHeader, ...]:
        """The stamps of the slots; of a gathered rollout as they stood when it was made."""
        return self._stamps or tuple(self._memory.header(slot) for slot in self._slots)

    def _epochs(self) -> Epochs:
        """Which filling of each slot this is."""
        return tuple(stamp.epoch for stamp in self._headers())


def _read_only(array: Grid) -> Grid:
    view = array.view()
    view.flags.writeable = False
    return view
