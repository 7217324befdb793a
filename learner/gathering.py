"""Slots of a rollout in any order: adjacent ones stay where they are, others are copied together once.

Streaming hands the learner whichever slots were committed first, so a batch's slots are rarely neighbours. What
training reads of them is then copied into arrays of the learner's own: every field of the envs, every field of the
steps, but of the recurrent state only row 0. The stamps of the slots are read at the same moment, for the slots may be
leased again soon after.

Who calls: the rollout's views, while the slots are the learner's to read (READING). Never: writes into a slot.

Axis letters: S slots of the memory, E envs per slot, T num_steps, N envs of the rollout, L layers, H hidden_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_service.errors import OutOfRange
from rollout_service.memory.schema import Field, Per, Role
from rollout_service.memory.slots import RolloutMemory


def adjacent(slots: Sequence[int]) -> range | None:
    """The same slots as a range if each follows the one before, else None."""
    whole = range(slots[0], slots[0] + len(slots)) if slots else range(0)
    return whole if slots and all(slot == expected for slot, expected in zip(slots, whole, strict=True)) else None


def require_slots(memory: RolloutMemory, slots: Sequence[int]) -> tuple[int, ...]:
    """Raises OutOfRange unless they are slots of the memory, at least one, and none twice."""
    numbers = tuple(int(slot) for slot in slots)
    if not numbers or len(set(numbers)) != len(numbers) or not all(0 <= slot < memory.num_slots for slot in numbers):
        raise OutOfRange(
            f"slots {list(numbers)} cannot make a rollout; give at least one of 0..{memory.num_slots - 1}, none twice"
        )
    return numbers


def gathered(memory: RolloutMemory, slots: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    """Field name -> array of its own, in the order of `slots`: [N, T, *shape] per step, [N, *shape] per env.

    N = len(slots) * E. The recurrent state entering a step has row 0 only, [N, 1, L, H]. The learner's products are
    zeros.
    """
    return {field.name: _copy(field, memory, slots) for field in memory.fields}


def _copy(field: Field, memory: RolloutMemory, slots: tuple[int, ...]) -> NDArray[Any]:
    source = memory.array(field.name)
    envs = len(slots) * memory.envs_per_slot
    if field.role is Role.LEARNER:
        return np.zeros((envs, *source.shape[2:]), source.dtype)
    if field.role is Role.SEED and field.per is Per.STEP:
        source = source[:, :, :1]
    return np.concatenate([source[slot] for slot in slots])
