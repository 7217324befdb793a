"""Offsets, header and JSON of segment layouts: pure values."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_service.errors import OutOfRange, SegmentMismatch, ShapeError
from rollout_service.memory.layout import HEADER_BYTES, READY, READY_AT, SegmentHeader, SegmentLayout
from rollout_service.memory.schema import Field, Per, Role

F32, U8, I64 = np.dtype(np.float32), np.dtype(np.uint8), np.dtype(np.int64)
FIELDS = (
    Field("image", Per.STEP, U8, (5, 3)),
    Field("rewards", Per.STEP, F32, fill=float("nan")),
    Field("hidden", Per.STEP, F32, (2, 7), float("nan"), Role.SEED),
    Field("count", Per.ENV, I64),
    Field("carry", Per.ENV, F32, fill=1.0, role=Role.SEED),
)


def layout(**sizes: int) -> SegmentLayout:
    return SegmentLayout(FIELDS, **{"num_slots": 3, "envs_per_slot": 4, "num_steps": 9, "alignment": 4096, **sizes})


def test_step_fields_are_slot_env_step_and_env_fields_slot_env() -> None:
    assert layout().shape(FIELDS[2]) == (3, 4, 9, 2, 7)
    assert layout().shape(FIELDS[3]) == (3, 4)


def test_every_field_starts_on_a_page_behind_the_one_before() -> None:
    # bytes: 192 of slot headers, then 1620, 432, 6048, 96 and 48
    assert layout().offsets == {"image": 4096, "rewards": 8192, "hidden": 12288, "count": 20480, "carry": 24576}
    assert layout().nbytes == 28672


def test_slot_headers_push_the_first_field_on_when_they_fill_a_page() -> None:
    assert layout(num_slots=65).offsets["image"] == 8192


def test_layout_survives_the_header_with_nan_fills() -> None:
    again = SegmentLayout.from_json(layout().to_json())
    assert again.to_json() == layout().to_json()
    assert again.offsets == layout().offsets
    assert [field.role for field in again.fields] == [field.role for field in FIELDS]
    assert np.isnan(again.fields[1].fill)
    assert again.fields[4].fill == 1.0
    assert again.fields[2].shape == (2, 7)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"fields": [{"name": "x"}]}'])
def test_an_unreadable_layout_is_a_mismatch(text: bytes) -> None:
    with pytest.raises(SegmentMismatch, match="no readable layout"):
        SegmentLayout.from_json(text)


@pytest.mark.parametrize("size", ["num_slots", "envs_per_slot", "num_steps"])
def test_a_size_below_one_is_refused_by_name(size: str) -> None:
    with pytest.raises(OutOfRange, match=f"{size} is 0"):
        layout(**{size: 0})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ((FIELDS[0], FIELDS[0]), "image"),
        ((Field("names", Per.STEP, np.dtype(object)),), "dtype object"),
        ((Field("count", Per.STEP, I64, fill=float("nan")),), "no NaN"),
    ],
)
def test_fields_that_shared_memory_cannot_hold_are_refused(fields: tuple[Field, ...], why: str) -> None:
    with pytest.raises(ShapeError, match=why):
        SegmentLayout(fields, 1, 1, 1)


def test_header_survives_packing_and_the_ready_marker_is_a_word_of_its_own() -> None:
    header = SegmentHeader(7, 4096, 2**40, 300, 12, 4711, 1.5e9)
    raw = bytearray(header.pack())
    assert len(raw) == HEADER_BYTES
    assert SegmentHeader.unpack(bytes(raw)) == header
    raw[READY_AT] = READY
    unpacked = SegmentHeader.unpack(bytes(raw))
    assert unpacked is not None
    assert unpacked.ready
    assert (unpacked.layout_at, unpacked.spec_at) == (slice(64, 364), slice(364, 376))


@pytest.mark.parametrize("raw", [b"", b"\0" * HEADER_BYTES, b"RSVSHM\x01\n", b"x" * 5000])
def test_other_bytes_are_no_header(raw: bytes) -> None:
    assert SegmentHeader.unpack(raw) is None
