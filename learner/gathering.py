"""Slots of a rollout in any order: adjacent ones stay where they are, others are copied together, field by field.

Streaming hands the learner whichever slots were committed first, so a batch's slots are rarely neighbours. What
training reads of them is then copied into arrays of the learner's own: every field of the envs, every field of the
steps, but of the recurrent state only row 0. A field that nobody asks for is not copied: an upload takes its pieces
from the slots themselves.

Who calls: the rollout's views, while the slots are the learner's to read (READING). Never: writes into a slot.

Axis letters: S slots of the memory, E envs per slot, T num_steps, N envs of the rollout, n of a piece, L layers, H
hidden_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_service.errors import OutOfRange
from rollout_service.memory.schema import Field, Per, Role
from rollout_service.memory.slots import RolloutMemory

Pieces = tuple[NDArray[Any], ...]
"""A field's rows, one piece behind the other: [n, T, *shape] or [n, *shape] each."""


def runs(slots: Sequence[int]) -> list[range]:
    """The slots in their order as ranges of neighbours: 4, 5, 1 are 4..5 and 1."""
    found: list[range] = []
    for slot in slots:
        if found and slot == found[-1].stop:
            found[-1] = range(found[-1].start, slot + 1)
        else:
            found.append(range(slot, slot + 1))
    return found


def require_slots(memory: RolloutMemory, slots: Sequence[int]) -> tuple[int, ...]:
    """Raises OutOfRange unless they are slots of the memory, at least one, and none twice."""
    numbers = tuple(int(slot) for slot in slots)
    if not numbers or len(set(numbers)) != len(numbers) or not all(0 <= slot < memory.num_slots for slot in numbers):
        raise OutOfRange(
            f"slots {list(numbers)} cannot make a rollout; give at least one of 0..{memory.num_slots - 1}, none twice"
        )
    return numbers


class Gathered(Mapping[str, NDArray[Any]]):
    """Field name -> array of its own, in the order of the slots: [N, T, *shape] per step, [N, *shape] per env.

    Copied when it is first asked for. The recurrent state entering a step has row 0 only, [N, 1, L, H]. The learner's
    products are zeros.
    """

    def __init__(self, memory: RolloutMemory, places: Sequence[range]) -> None:
        """places: the slots as `runs` has them."""
        self._fields = {field.name: field for field in memory.fields}
        self._places = [memory.rollout(place) for place in places]
        self._copies: dict[str, NDArray[Any]] = {}

    def pieces(self, name: str) -> Pieces:
        """The field where it lies: its copy if there is one, else the slots, a piece per run."""
        copy = self._copies.get(name)
        return tuple(place[name] for place in self._places) if copy is None else (copy,)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._copies:
            self._copies[name] = _joined(self._fields[name], self.pieces(name))
        return self._copies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def pieces(arrays: Mapping[str, NDArray[Any]], name: str) -> Pieces:
    """A field of a rollout where it lies."""
    return arrays.pieces(name) if isinstance(arrays, Gathered) else (arrays[name],)


def _joined(field: Field, pieces: Pieces) -> NDArray[Any]:
    if field.role is Role.LEARNER:
        return np.zeros((sum(map(len, pieces)), *pieces[0].shape[1:]), pieces[0].dtype)
    if field.role is Role.SEED and field.per is Per.STEP:
        pieces = tuple(piece[:, :1] for piece in pieces)
    return np.concatenate(pieces)
