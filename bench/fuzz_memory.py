"""The rollout segment under a fuzzed service: real memory, and a copy of every byte that only rightful writes reach.

    segment    header | canaries | slot headers | canaries | field 0, its guard slots | canaries | field 1 ...

Honest actors fill what they are granted, with a checksum; hostile ones scribble over the slot that they hold, for as
long as they hold it; the learner reads a batch and seeds the next. Each of these writes is repeated on the copy, within
the bounds of its slot, so a byte that differs was written by somebody who had no business there. Canaries fill what
belongs to no slot; guard slots stand behind the last one of the run.

Who uses it: `bench.fuzz`, from one thread. What must never happen: a write that is repeated before it is known to be
allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollout_service.bench.rig import STATE, fill_slot
from rollout_service.control.messages import Batch, Grant
from rollout_service.errors import TornSlot
from rollout_service.memory.layout import CACHE_LINE, HEADER_BYTES, SegmentHeader
from rollout_service.memory.room import SHARED_MEMORY
from rollout_service.memory.schema import rollout_fields
from rollout_service.memory.slots import RolloutMemory
from rollout_service.runspec import RunSpec

GUARD_SLOTS: Final = 2
CANARY: Final = 0xC5


class WriteOutOfPlace(RuntimeError):
    """Who may not write there, or has."""


class Ground:
    """Memory of a fuzzed run, and who may write where. Made by `laid_out`."""

    def __init__(self, spec: RunSpec, memory: RolloutMemory, seed: int) -> None:
        self.memory = memory
        self.fills = 0
        self.scribbles = 0
        self._slots = spec.num_slots
        self._noise = np.random.default_rng(seed)
        self._file: NDArray[np.uint8] = np.memmap(SHARED_MEMORY / memory.name, np.uint8, "r+")
        self._ranges = [list(self._ranges_of(slot)) for slot in range(self._slots)]
        self._paint()
        self._copy = np.array(self._file)
        self._held: dict[int, tuple[bytes, int]] = {}
        """slot -> who may write there, under which epoch."""
        self._filled: set[int] = set()
        """Slots whose newest rows are those of an honest actor, committed."""

    def take_part(self, present: Sequence[bytes]) -> None:
        """Whoever is not among these has said goodbye or is dead, and writes no more."""
        if any(peer not in present for peer, _ in self._held.values()):
            self._held = {slot: held for slot, held in self._held.items() if held[0] in present}

    def granted(self, peer: bytes, grant: Grant) -> None:
        """From now on this peer may write there, until `let_go`."""
        if grant.slot >= self._slots:
            raise WriteOutOfPlace(f"slot {grant.slot} was granted to {peer!r}: the run has {self._slots}")
        holder, _ = self._held.get(grant.slot, (peer, 0))
        if holder != peer:
            raise WriteOutOfPlace(f"slot {grant.slot} was granted to {peer!r} while {holder!r} may still write there")
        if self._held.get(grant.slot) != (peer, grant.epoch):
            self._filled.discard(grant.slot)
        self._held[grant.slot] = (peer, grant.epoch)

    def let_go(self, peer: bytes, slot: int, epoch: int) -> None:
        """A COMMIT or an ABORT: whoever sends it for its own lease writes no more."""
        if self._held.get(slot) == (peer, epoch):
            del self._held[slot]

    def fill(self, grant: Grant, version: int) -> None:
        """An honest actor's whole rollout."""
        fill_slot(self.memory.writer(grant.slot, checksummed=True), grant.epoch, self._noise, version=version)
        self._repeat(grant.slot)
        self._filled.add(grant.slot)
        self.fills += 1

    def scribble(self, honest: Sequence[bytes]) -> None:
        """One of the hostile actors that hold a slot writes noise over all of it."""
        slots = [slot for slot, (peer, _) in self._held.items() if peer not in honest]
        if slots:
            slot = int(self._noise.choice(slots))
            for part in self._ranges[slot]:
                self._file[part] = self._noise.integers(0, 256, part.stop - part.start, np.uint8)
            self._repeat(slot)
            self.scribbles += 1

    def learn(self, batch: Batch) -> None:
        """Reads what honest actors committed, which has to be what they wrote, and seeds the rollouts to come."""
        for slot, steps, version in zip(batch.slots, batch.valid_steps, batch.versions, strict=True):
            if not steps:  # nobody filled it, and nobody reads it; a late actor may hold it
                continue
            if slot in self._held:
                raise WriteOutOfPlace(f"slot {slot} is in a batch while {self._held[slot][0]!r} may still write there")
            if slot in self._filled and not self.memory.verify(slot, version=version, valid_steps=steps):
                raise TornSlot(f"slot {slot} has lost its checksum")
        for slot in [each for each in batch.seed_into if each is not None]:
            if slot in self._held:
                raise WriteOutOfPlace(f"slot {slot} was to be seeded while {self._held[slot][0]!r} may write there")
            for name in STATE:
                self.memory.array(name)[slot, :, 0] = batch.update
            self.memory.array("episode_start_carry")[slot] = 0.0
            self._repeat(slot)

    def check(self) -> None:
        """Raises WriteOutOfPlace for the first byte that nobody had a right to change."""
        if not np.array_equal(self._file, self._copy):
            at = int(np.argmax(self._file != self._copy))
            raise WriteOutOfPlace(f"byte {at} of the segment is {self._file[at]:#x}, it was {self._copy[at]:#x}")

    def _repeat(self, slot: int) -> None:
        for part in self._ranges[slot]:
            self._copy[part] = self._file[part]

    def _ranges_of(self, slot: int) -> Iterator[slice]:
        """Where the bytes of one slot lie in the file."""
        layout, payload = self.memory.layout, self._header().offset
        yield slice(start := payload + slot * CACHE_LINE, start + CACHE_LINE)
        for field in layout.fields:
            size = layout.field_nbytes(field) // layout.num_slots
            yield slice(start := payload + layout.offsets[field.name] + slot * size, start + size)

    def _paint(self) -> None:
        """Canaries wherever neither the header nor a slot of the run is."""
        free = np.ones(len(self._file), bool)
        free[: self._header().spec_at.stop] = False
        for parts in self._ranges:
            for part in parts:
                free[part] = False
        self._file[free] = CANARY

    def _header(self) -> SegmentHeader:
        header = SegmentHeader.unpack(self._file[:HEADER_BYTES].tobytes())
        if header is None:
            raise WriteOutOfPlace("the segment has lost its header")
        return header


@contextmanager
def laid_out(spec: RunSpec, seed: int) -> Iterator[Ground]:
    """A segment for this run with room for guard slots; gone afterwards."""
    with RolloutMemory.create(
        rollout_fields(spec.spaces, spec.state),
        num_slots=spec.num_slots + GUARD_SLOTS,
        envs_per_slot=spec.envs_per_actor,
        num_steps=spec.num_steps,
    ) as memory:
        yield Ground(spec, memory, seed)
