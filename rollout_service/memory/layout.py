"""Where each byte of a segment lies: the header all segments share, and the arrays of a rollout segment.

Who writes: nobody, a layout is a value; the owner stores it in the segment's header.
Who reads: every process that attaches, which rebuilds the layout from the header and never from the segment's size
(systems round sizes up to a page).
What must never happen: two processes computing different offsets.
Leaves to others: mapping and names (segment), views and the order of writes (slots, weights).

    segment
    0             magic            8 bytes
    8             ready marker     8 bytes, zero until the owner has filled the payload
    16            layout version, payload offset, payload bytes, lengths of layout and spec, owner pid, creation time
    64            layout JSON, then spec bytes, then padding to a page
    page-aligned  payload

    payload of a rollout segment, S slots, E envs per slot, T steps
    0             slot header lines [S] x 64 bytes, one cache line per slot
    page-aligned  field 0   [S, E, T, *shape] (per step) or [S, E, *shape] (per env)
    page-aligned  field 1   ...

Field-major and env-major inside: adjacent slots of one field are one contiguous run, so a whole rollout [N, T, *shape]
is a view of it and a minibatch of envs is a gather of contiguous rows.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import cached_property
from math import isnan, prod
from mmap import PAGESIZE
from typing import Final

import numpy as np

from rollout_service.errors import OutOfRange, SegmentMismatch, ShapeError
from rollout_service.memory.schema import Field, Per, Role

LAYOUT_VERSION: Final = 1
"""Grows with every change of the header or of the order of bytes; other versions are refused at attach."""

CACHE_LINE: Final = 64
"""Slot headers of different writers must not share a cache line."""

STORABLE_KINDS: Final = "biuf"
"""bool, signed, unsigned, float: plain numbers. No objects, no strings, nothing with pointers in it."""

HEADER_BYTES: Final = 64
"""Of the fixed part, before the layout JSON."""

READY: Final = b"ready\x00\x00\x01"
READY_AT: Final = slice(8, 16)

_MAGIC: Final = b"RSVSHM\x01\n"
_FIXED: Final = struct.Struct("<8s8sIIQIIqd8x")


def align(nbytes: int, to: int) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class SegmentHeader:
    """The fixed part of a segment's header. Numbers are little-endian."""

    layout_version: int
    offset: int
    """First byte of the payload."""
    nbytes: int
    """Of the payload."""
    layout_length: int
    spec_length: int
    pid: int
    """Of the owner, as the owner saw it: in another pid namespace it means nothing."""
    created: float
    """Seconds since the machine's start."""
    ready: bool = False

    def pack(self) -> bytes:
        """HEADER_BYTES bytes."""
        numbers = (self.layout_version, self.offset, self.nbytes, self.layout_length, self.spec_length)
        return _FIXED.pack(_MAGIC, READY if self.ready else b"", *numbers, self.pid, self.created)

    @classmethod
    def unpack(cls, raw: bytes) -> SegmentHeader | None:
        """None if these bytes are not a header of ours, finished or not."""
        if len(raw) < HEADER_BYTES or not raw.startswith(_MAGIC):
            return None
        _, ready, version, offset, nbytes, layout_length, spec_length, pid, created = _FIXED.unpack_from(raw)
        return cls(version, offset, nbytes, layout_length, spec_length, pid, created, ready == READY)

    @property
    def layout_at(self) -> slice:
        return slice(HEADER_BYTES, HEADER_BYTES + self.layout_length)

    @property
    def spec_at(self) -> slice:
        return slice(self.layout_at.stop, self.layout_at.stop + self.spec_length)

    @property
    def payload_at(self) -> slice:
        return slice(self.offset, self.offset + self.nbytes)


@dataclass(frozen=True)
class SegmentLayout:
    """Byte offsets of the slot headers and of every field in the payload of a rollout segment."""

    fields: tuple[Field, ...]
    num_slots: int
    envs_per_slot: int
    num_steps: int
    alignment: int = PAGESIZE
    """Of each field's first byte: whole pages, so that one field can be pinned for a device without its neighbours."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "envs_per_slot", "num_steps"):
            if getattr(self, name) < 1:
                raise OutOfRange(f"{name} is {getattr(self, name)}, a rollout segment needs at least 1")
        names = [field.name for field in self.fields]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ShapeError(f"fields {twice} are declared more than once; each array of a slot needs its own name")
        for field in self.fields:
            if field.dtype.kind not in STORABLE_KINDS:
                raise ShapeError(f"field {field.name!r} has dtype {field.dtype}; use a bool, integer or float dtype")
            if isnan(field.fill) and field.dtype.kind != "f":
                raise ShapeError(f"field {field.name!r} has dtype {field.dtype}, which has no NaN; give another fill")

    def shape(self, field: Field) -> tuple[int, ...]:
        """[S, E, T, *shape] or [S, E, *shape]."""
        match field.per:
            case Per.STEP:
                return (self.num_slots, self.envs_per_slot, self.num_steps, *field.shape)
            case Per.ENV:
                return (self.num_slots, self.envs_per_slot, *field.shape)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Field name -> first byte in the payload."""
        offsets: dict[str, int] = {}
        end = self.num_slots * CACHE_LINE
        for field in self.fields:
            offsets[field.name] = align(end, self.alignment)
            end = offsets[field.name] + self.field_nbytes(field)
        return offsets

    def field_nbytes(self, field: Field) -> int:
        """Bytes of one field over all slots."""
        return prod(self.shape(field)) * field.dtype.itemsize

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole payload, a multiple of the alignment."""
        if not self.fields:
            return align(self.num_slots * CACHE_LINE, self.alignment)
        last = self.fields[-1]
        return align(self.offsets[last.name] + self.field_nbytes(last), self.alignment)

    def to_json(self) -> bytes:
        """What the header carries. NaN is written as text: JSON has no such number."""
        return json.dumps(
            {
                "num_slots": self.num_slots,
                "envs_per_slot": self.envs_per_slot,
                "num_steps": self.num_steps,
                "alignment": self.alignment,
                "fields": [
                    {
                        "name": field.name,
                        "per": field.per.value,
                        "dtype": field.dtype.str,
                        "shape": list(field.shape),
                        "fill": repr(float(field.fill)),
                        "role": field.role.value,
                    }
                    for field in self.fields
                ],
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> SegmentLayout:
        """The layout an owner wrote. Raises SegmentMismatch if the text is not one."""
        try:
            document = json.loads(text)
            return cls(
                fields=tuple(
                    Field(
                        name=str(entry["name"]),
                        per=Per(entry["per"]),
                        dtype=np.dtype(entry["dtype"]),
                        shape=tuple(int(size) for size in entry["shape"]),
                        fill=float(entry["fill"]),
                        role=Role(entry["role"]),
                    )
                    for entry in document["fields"]
                ),
                num_slots=int(document["num_slots"]),
                envs_per_slot=int(document["envs_per_slot"]),
                num_steps=int(document["num_steps"]),
                alignment=int(document["alignment"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise SegmentMismatch(
                f"the segment's header holds no readable layout ({error!r}); was it written by another version?"
            ) from error
