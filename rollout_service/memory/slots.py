"""The rollout segment: slots of transitions, written by actors and the learner, read in place.

Who writes: one process per byte at a time. While a slot is FREE the learner (row 0's state and the carry flag), while
it is LEASED the lease's actor through its `SlotWriter`, while it is READING the learner its own products.
Who reads: the learner, as zero-copy views of adjacent slots.
What must never happen: two writers of one slot; a rollout with an unwritten row passed on as complete. The words in a
slot's header are stamps to validate with, not the truth about the slot: that is the service's ledger, and the hand-over
itself is a message.
Leaves to others: leases (control), checks of single transitions (the buffer's `add`, the actor's envs).

One header line per slot, eight unsigned 64-bit words:

    epoch | actor | incarnation | version | valid_steps | committed_epoch | checksum | -

A lease writes the first four at its start, valid_steps and then committed_epoch at its end: a slot whose committed
epoch equals its epoch holds a whole rollout of that lease.

Unwritten cells hold a sentinel: NaN in floats, 0 in the flags. So a row that was skipped is found at commit, in a
handful of vectorised calls.

Axis letters: S slots, E envs per slot, T steps, K valid_steps, N envs of a rollout, L layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from rollout_service.errors import IncompleteRollout, OutOfRange, SegmentMismatch, ShapeError, TornSlot
from rollout_service.memory.checksum import slot_checksum
from rollout_service.memory.layout import CACHE_LINE, SegmentLayout
from rollout_service.memory.schema import FINAL_PREFIX, OBSERVATIONS, Field, Per, Role
from rollout_service.memory.segment import Segment

KIND: Final = "rollout"
"""Of the segment's name."""

Array = NDArray[Any]
Envs = slice | int | NDArray[np.integer[Any]]
"""Which envs of a slot a call is about."""

ALL_ENVS: Final = slice(None)

_HEADER_WORDS: Final = CACHE_LINE // 8
_EPOCH, _ACTOR, _INCARNATION, _VERSION, _VALID_STEPS, _COMMITTED, _CHECKSUM = range(7)

_CARRY: Final = "episode_start_carry"
_LAST_VALUES: Final = "last_values"
_NEEDED: Final = frozenset(
    ("actions", "rewards", "values", "log_probs", "terminated", "truncated", "valid", "truncation_values")
) | {_CARRY, _LAST_VALUES}
"""What a writer of transitions must find; observations and state are whatever the fields say."""


@dataclass(frozen=True)
class SlotHeader:
    """The stamps of one slot, as they stood when they were read."""

    epoch: int
    """Of the newest lease; 0: never leased."""
    actor: int
    incarnation: int
    version: int
    """Behaviour version: the weights that acted, one per slot."""
    valid_steps: int
    committed_epoch: int
    """Equals the epoch once that lease was closed, 0 before."""
    checksum: int = 0
    """What `checksum.slot_checksum` gave at commit; 0 if it was not asked."""

    @property
    def committed(self) -> bool:
        """Whether the newest lease was closed."""
        return self.epoch > 0 and self.committed_epoch == self.epoch


class SlotWriter:
    """The one writer of one slot. Trusts its actor about indices and shapes, and checks the whole slot at `close`.

    arrays: field name -> view [E, T, *shape] (per step) or [E, *shape] (per env) of this slot.
    """

    def __init__(
        self,
        slot: int,
        arrays: Mapping[str, Array],
        header: NDArray[np.uint64],
        layout: SegmentLayout,
        *,
        checksummed: bool = False,
    ) -> None:
        if missing := sorted(_NEEDED - arrays.keys()):
            raise ShapeError(
                f"the segment has no fields {missing}; a writer of transitions needs them (rollout_fields)"
            )
        self.slot = slot
        self.num_envs = layout.envs_per_slot
        self.num_steps = layout.num_steps
        self.arrays: dict[str, Array] = dict(arrays)
        self._header = header
        self._summed_fields = layout.fields if checksummed else ()
        self._actions = arrays["actions"]
        self._rewards = arrays["rewards"]
        self._values = arrays["values"]
        self._log_probs = arrays["log_probs"]
        self._terminated = arrays["terminated"]
        self._truncated = arrays["truncated"]
        self._valid = arrays["valid"]
        self._truncation_values = arrays["truncation_values"]
        self._state = {f.name: arrays[f.name] for f in layout.fields if f.role is Role.SEED and f.per is Per.STEP}
        per_step = [f.name for f in layout.fields if f.per is Per.STEP]
        self._rows: tuple[dict[str, Array], ...] = tuple(
            {name: arrays[name][:, t] for name in per_step} for t in range(self.num_steps)
        )
        self._observation_rows: tuple[dict[str, Array], ...] = tuple(
            {name: view for name, view in rows.items() if name.startswith(OBSERVATIONS)} for rows in self._rows
        )
        floats = [f for f in layout.fields if f.role is Role.ACTOR and f.dtype.kind == "f"]
        self._float_arrays = tuple(arrays[f.name] for f in floats)
        # A reward marks its row as written; a row that is not valid (an autoreset filler) needs only that and a state.
        self._finite_everywhere = ("rewards", *self._state)
        self._finite_where_valid = tuple(
            f.name for f in floats if f.per is Per.STEP and f.name not in ("rewards", "truncation_values")
        )
        self._finite_per_env = (_CARRY, *(f.name for f in floats if f.per is Per.ENV))

    def open(self, *, epoch: int, actor: int, incarnation: int, version: int) -> None:
        """Begin a lease: stamp the header, put the sentinels back. Row 0's state and the carry flag stay as seeded."""
        self._header[:] = (epoch, actor, incarnation, version, 0, 0, 0, 0)
        for array in self._float_arrays:
            array.fill(np.nan)
        self._valid.fill(0)
        self._terminated.fill(0)
        self._truncated.fill(0)
        for rows in self._state.values():
            rows[:, 1:] = np.nan

    def rows(self, t: int) -> dict[str, Array]:
        """Where everything of step t goes, for a writer in a hurry: name -> view [E, *shape] of each field per step.

        `open` has put False into the flags and NaN into truncation_values. The dict is shared, do not change it.
        """
        return self._rows[t]

    def observation_rows(self, t: int) -> dict[str, Array]:
        """Where the observations of step t go: name -> view [E, *shape]. The dict is shared, do not change it."""
        return self._observation_rows[t]

    def write_state(self, t: int, state: Mapping[str, Array], envs: Envs = ALL_ENVS) -> None:
        """Record the recurrent state ENTERING step t. state: name -> [E, L, H], or what `envs` selects."""
        for name, rows in state.items():
            self._state[name][envs, t] = rows

    def write_transition(
        self,
        t: int,
        *,
        actions: Any,
        rewards: Any,
        values: Any,
        log_probs: Any,
        terminated: Any,
        truncated: Any,
        truncation_values: Any = None,
        valid: Any = True,
        envs: Envs = ALL_ENVS,
    ) -> None:
        """Record step t. actions: [E, *shape], all others [E] or a scalar, or what `envs` selects.

        truncation_values: V(final observation) where truncated and not terminated; elsewhere, and without one, NaN.
        """
        self._actions[envs, t] = actions
        self._rewards[envs, t] = rewards
        self._values[envs, t] = values
        self._log_probs[envs, t] = log_probs
        self._terminated[envs, t] = terminated
        self._truncated[envs, t] = truncated
        self._truncation_values[envs, t] = np.nan if truncation_values is None else truncation_values
        self._valid[envs, t] = valid

    def close(self, valid_steps: int, *, last_values: Any, final_state: Mapping[str, Array]) -> None:
        """End the lease after `valid_steps` (K) steps.

        last_values: [E], V(observation after the last valid step); final_state: name -> [E, L, H], EXITING that step.
        Raises IncompleteRollout, naming field, step and env, if one of the first K rows was not written or is not
        finite, OutOfRange if K is not within 0..T. The slot then stays uncommitted.
        """
        if not 0 <= valid_steps <= self.num_steps:
            raise OutOfRange(f"valid_steps is {valid_steps}, it must lie in 0..{self.num_steps} (slot {self.slot})")
        self.arrays[_LAST_VALUES][...] = last_values
        for name, rows in final_state.items():
            self.arrays[FINAL_PREFIX + name][...] = rows
        if valid_steps > 0:  # with K = 0 nothing was done here, and nothing of this slot is read
            self._check_complete(valid_steps)
        self._header[_VALID_STEPS] = valid_steps
        if self._summed_fields:
            self._header[_CHECKSUM] = slot_checksum(self.arrays, self._summed_fields, valid_steps)
        self._header[_COMMITTED] = self._header[_EPOCH]

    def _check_complete(self, valid_steps: int) -> None:
        rows = np.s_[:, :valid_steps]
        for name in self._finite_everywhere:
            if not all_finite(written := self.arrays[name][rows]):
                self._refuse_step(name, np.isfinite(written))
        for name in self._finite_where_valid:
            if not all_finite(written := self.arrays[name][rows]):
                finite, invalid = np.isfinite(written), self._valid[rows] == 0
                self._refuse_step(name, finite | invalid.reshape(*invalid.shape, *[1] * (finite.ndim - 2)))
        # A missing truncation value (NaN) is for GAE to judge, which knows the rule; an infinite one is wrong in any.
        if (infinite := np.isinf(self._truncation_values[rows])).any():
            self._refuse_step("truncation_values", ~infinite)
        for name in self._finite_per_env:
            if not (finite := np.isfinite(self.arrays[name])).all():
                self._refuse_env(name, finite)

    def _refuse_step(self, name: str, good: NDArray[np.bool_]) -> None:
        """good: bool [E, K, *]. Raises for the earliest bad row, if there is one."""
        bad = np.argwhere(~good.reshape(*good.shape[:2], -1).all(axis=2).T)
        if len(bad):
            step, env = bad[0].tolist()
            self._refuse(name, self.arrays[name][env, step], f"step {step}, env {env}")

    def _refuse_env(self, name: str, good: NDArray[np.bool_]) -> None:
        """good: bool [E, *], at least one of them False."""
        env = int(np.argmin(good.reshape(len(good), -1).all(axis=1)))
        self._refuse(name, self.arrays[name][env], f"env {env}")

    def _refuse(self, name: str, cell: Array, place: str) -> NoReturn:
        value = np.ravel(cell)[~np.isfinite(np.ravel(cell))][0]
        raise IncompleteRollout(
            f"{name} of slot {self.slot} is {value} at {place}: the row was not written, or the env or policy produced "
            f"that value; write every row with finite numbers before closing, or close with fewer valid_steps"
        )

    def __repr__(self) -> str:
        return f"SlotWriter(slot {self.slot}, {self.num_envs} envs x {self.num_steps} steps)"


def all_finite(values: Array) -> bool:
    """Whether no NaN and no infinity is among these numbers; there may be none, as in a space of shape (0,).

    Without a temporary array, whose fresh pages cost several times as much as the look at the numbers.
    """
    # A NaN is what either of the two then is, and not below or above anything.
    return values.size == 0 or bool(np.min(values) > -np.inf and np.max(values) < np.inf)


class RolloutMemory:
    """All slots of a run. The owner makes it with `create`, everyone else uses `attach`; both are context managers."""

    def __init__(self, segment: Segment, layout: SegmentLayout) -> None:
        root = segment.root
        self.layout = layout
        self.fields = layout.fields
        self.num_slots = layout.num_slots
        self.envs_per_slot = layout.envs_per_slot
        self.num_steps = layout.num_steps
        self.nbytes = layout.nbytes
        self._segment = segment
        self._headers: NDArray[np.uint64] = (
            root[: layout.num_slots * CACHE_LINE].view(np.uint64).reshape(layout.num_slots, _HEADER_WORDS)
        )
        self._arrays: dict[str, Array] = {
            field.name: root[(start := layout.offsets[field.name]) : start + layout.field_nbytes(field)]
            .view(field.dtype)
            .reshape(layout.shape(field))
            for field in layout.fields
        }

    @classmethod
    def create(
        cls,
        fields: tuple[Field, ...],
        *,
        num_slots: int,
        envs_per_slot: int,
        num_steps: int,
        token: str | None = None,
        spec: bytes = b"",
    ) -> RolloutMemory:
        """A new, ready segment with every cell at its field's `fill`; row 0's state is 0 and the carry flag 1.

        spec: what `status` and `clean` are to find in the header. Raises SegmentTooLarge if there is no room.
        """
        layout = SegmentLayout(fields, num_slots, envs_per_slot, num_steps)
        segment = Segment.create(layout.nbytes, kind=KIND, token=token, layout=layout.to_json(), spec=spec)
        try:
            memory = cls(segment, layout)
            for field in fields:
                array = memory._arrays[field.name]
                if field.fill != 0.0:  # new shared memory is zero
                    array.fill(field.fill)
                if field.role is Role.SEED and field.per is Per.STEP:
                    array[:, :, 0] = 0.0
            segment.mark_ready()
        except BaseException:
            segment.close()
            raise
        return memory

    @classmethod
    def attach(cls, name: str) -> RolloutMemory:
        """The segment of another process; fields and sizes come from its header.

        Raises SegmentNotFound or SegmentMismatch.
        """
        segment = Segment.attach(name, kind=KIND)
        try:
            layout = SegmentLayout.from_json(segment.layout)
            if layout.nbytes > segment.nbytes:
                raise SegmentMismatch(f"segment {name} holds {segment.nbytes} bytes, its layout needs {layout.nbytes}")
            return cls(segment, layout)
        except BaseException:
            segment.close()
            raise

    @property
    def name(self) -> str:
        return self._segment.name

    @property
    def owner(self) -> bool:
        return self._segment.owner

    @property
    def spec(self) -> bytes:
        return self._segment.spec

    def share_with_group(self, group: int) -> None:
        """Lets the members of a group (gid) read and write. Raises SegmentError if this user is not in it."""
        self._segment.share_with_group(group)

    def array(self, field: str) -> Array:
        """View [S, E, T, *shape] or [S, E, *shape] of one field."""
        try:
            return self._arrays[field]
        except KeyError:
            raise OutOfRange(f"no field {field!r} in {self!r}; there are {sorted(self._arrays)}") from None

    def rollout(self, slots: range) -> dict[str, Array]:
        """Adjacent slots as one rollout: name -> view [N, T, *shape] or [N, *shape], N = len(slots) * E, no copy."""
        if slots.step != 1 or not 0 <= slots.start < slots.stop <= self.num_slots:
            raise OutOfRange(
                f"slots {slots} are not adjacent slots out of 0..{self.num_slots - 1}; use range(a, b), a < b"
            )
        envs = len(slots) * self.envs_per_slot  # not -1: of an array without bytes it says nothing
        return {
            name: array[slots.start : slots.stop].reshape(envs, *array.shape[2:])
            for name, array in self._arrays.items()
        }

    def writer(self, slot: int, *, checksummed: bool = False) -> SlotWriter:
        """The face of one slot for the process that may write it. checksummed: `verify` will want to know."""
        self._check(slot)
        return SlotWriter(slot, self._of_slot(slot), self._headers[slot], self.layout, checksummed=checksummed)

    def verify(self, slot: int, *, version: int, valid_steps: int) -> bool:
        """Whether the slot has a checksum. Raises TornSlot if it, or a stamp, is not what was committed."""
        header = self.header(slot)
        if not header.checksum:
            return False
        story = f"slot {slot}, epoch {header.epoch} of actor {header.actor} (incarnation {header.incarnation})"
        if not header.committed or (header.version, header.valid_steps) != (version, valid_steps):
            raise TornSlot(
                f"{story} says committed epoch {header.committed_epoch}, version {header.version}, "
                f"{header.valid_steps} steps; its commit said version {version}, {valid_steps} steps"
            )
        if (found := slot_checksum(self._of_slot(slot), self.fields, valid_steps)) != header.checksum:
            raise TornSlot(f"{story} has checksum {found:x}, committed was {header.checksum:x}: it was written since")
        return True

    def _of_slot(self, slot: int) -> dict[str, Array]:
        return {name: array[slot] for name, array in self._arrays.items()}

    def header(self, slot: int) -> SlotHeader:
        """The stamps of one slot."""
        self._check(slot)
        return SlotHeader(*(int(word) for word in self._headers[slot, : _CHECKSUM + 1]))

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise OutOfRange(f"slot {slot} is not one of 0..{self.num_slots - 1} of {self!r}")

    def close(self) -> None:
        """Let go of the segment; the owner's close also removes its name. Views and writers alive stay readable."""
        self._arrays = {}
        self._headers = np.empty((0, _HEADER_WORDS), np.uint64)
        self._segment.close()

    def __enter__(self) -> RolloutMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"RolloutMemory({self.name}, {self.num_slots} slots x {self.envs_per_slot} envs x {self.num_steps} steps, "
            f"{self.nbytes} bytes)"
        )
