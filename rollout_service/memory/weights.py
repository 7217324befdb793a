"""The weights segment: two banks, so that actors can load one version while the learner writes the next.

Who writes: the learner, one `publish` per update, into the bank that does not hold the newest version.
Who reads: actors at lease start, evaluators; each into a copy of its own.
What must never happen: a mixed read, parameters of two versions in one policy. Stores of one process may become
visible to another in any order, so no single word proves a bank whole: the reader copies first and then holds the copy
against the checksum, which covers the version too. The generations only make the usual torn read cheap to notice.
Leaves to others: when to load (the PUBLISH and GRANT messages say so), what the arrays mean (policy).

    bank header (64 bytes, one per bank, before both banks)
        generation opened | generation closed | version | crc32
    bank 0   array 0, array 1, ... each 64-byte aligned
    bank 1   the same

A publish opens a generation, copies, stamps version and checksum, and closes the generation. A learner that dies on the
way leaves a bank whose generations differ; the other bank still holds the version before.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from rollout_service.errors import OutOfRange, SegmentMismatch, ShapeError, WaitTimedOut
from rollout_service.memory.layout import CACHE_LINE, STORABLE_KINDS, align
from rollout_service.memory.segment import Segment
from rollout_service.runspec import NUM_BANKS, ArraySpec

KIND: Final = "weights"
"""Of the segment's name."""

NOTHING_PUBLISHED: Final = -1
LOAD_DEADLINE_S: Final = 5.0
"""A torn read lasts as long as one publish, milliseconds; a writer that needs longer than this has died."""

_OPENED, _CLOSED, _VERSION, _CRC = range(4)
_WORDS: Final = CACHE_LINE // 8
_BANKS_AT: Final = NUM_BANKS * CACHE_LINE


@dataclass(frozen=True)
class LoadedWeights:
    """One whole version. The arrays are the reader's own: no later publish or load changes them."""

    version: int
    arrays: dict[str, NDArray[Any]]


class WeightsMemory:
    """Named arrays in two banks. The owner makes it with `create`, everyone else uses `attach`."""

    def __init__(self, segment: Segment, parameters: tuple[ArraySpec, ...]) -> None:
        self.parameters = parameters
        self._segment = segment
        self._bank_nbytes = _bank_nbytes(parameters)
        root = segment.root
        self._headers: NDArray[np.uint64] = root[:_BANKS_AT].view(np.uint64).reshape(NUM_BANKS, _WORDS)
        starts = [_BANKS_AT + bank * self._bank_nbytes for bank in range(NUM_BANKS)]
        self._banks = [root[start : start + self._bank_nbytes] for start in starts]
        self._arrays = [_views(bank, parameters) for bank in self._banks]

    @classmethod
    def create(cls, parameters: tuple[ArraySpec, ...], *, token: str | None = None, spec: bytes = b"") -> WeightsMemory:
        """A new, ready segment with nothing published. Raises SegmentTooLarge if there is no room."""
        names = [parameter.name for parameter in parameters]
        if len(set(names)) != len(names):
            raise ShapeError(f"parameter names repeat: {sorted({name for name in names if names.count(name) > 1})}")
        for parameter in parameters:
            if np.dtype(parameter.dtype).kind not in STORABLE_KINDS:
                raise ShapeError(
                    f"parameter {parameter.name} has dtype {parameter.dtype}; use a bool, integer or float one"
                )
        layout = json.dumps([parameter.model_dump(mode="json") for parameter in parameters], separators=(",", ":"))
        nbytes = _BANKS_AT + NUM_BANKS * _bank_nbytes(parameters)
        segment = Segment.create(nbytes, kind=KIND, token=token, layout=layout.encode(), spec=spec)
        try:
            memory = cls(segment, parameters)
            segment.mark_ready()
        except BaseException:
            segment.close()
            raise
        return memory

    @classmethod
    def attach(cls, name: str) -> WeightsMemory:
        """The segment of another process; the manifest comes from its header.

        Raises SegmentNotFound or SegmentMismatch.
        """
        segment = Segment.attach(name, kind=KIND)
        try:
            try:
                parameters = tuple(ArraySpec.model_validate(entry) for entry in json.loads(segment.layout))
            except (ValueError, TypeError, ValidationError) as error:
                raise SegmentMismatch(f"segment {name} holds no readable parameter manifest ({error!r})") from error
            if (needed := _BANKS_AT + NUM_BANKS * _bank_nbytes(parameters)) > segment.nbytes:
                raise SegmentMismatch(f"segment {name} holds {segment.nbytes} bytes, its manifest needs {needed}")
            return cls(segment, parameters)
        except BaseException:
            segment.close()
            raise

    @property
    def name(self) -> str:
        return self._segment.name

    @property
    def nbytes(self) -> int:
        return self._segment.nbytes

    @property
    def spec(self) -> bytes:
        return self._segment.spec

    def share_with_group(self, group: int) -> None:
        """Lets the members of a group (gid) read and write. Raises SegmentError if this user is not in it."""
        self._segment.share_with_group(group)

    def newest_version(self) -> int:
        """Highest version in a closed bank, NOTHING_PUBLISHED without one. Proof of it is only a `load`."""
        return self._newest()[0]

    def publish(self, version: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Make `arrays` the newest version. One writer at a time.

        Raises OutOfRange if the version does not grow, ShapeError if names, shapes or dtypes are not those of the
        manifest; both before anything is written.
        """
        newest, holder = self._newest()
        if version <= newest or version < 0:
            raise OutOfRange(
                f"version {version} cannot follow {newest}: versions start at 0 and grow with each publish"
            )
        if arrays.keys() != (wanted := self._arrays[0].keys()):
            raise ShapeError(
                f"published arrays are not the manifest's: missing {sorted(wanted - arrays.keys())}, "
                f"unknown {sorted(arrays.keys() - wanted)}"
            )
        for name, place in self._arrays[0].items():
            if arrays[name].shape != place.shape or arrays[name].dtype != place.dtype:
                raise ShapeError(
                    f"array {name} is {arrays[name].dtype}{list(arrays[name].shape)}, "
                    f"the manifest has {place.dtype}{list(place.shape)}"
                )
        bank = version % NUM_BANKS if holder is None else 1 - holder  # the same while versions grow by one
        header = self._headers[bank]
        generation = int(max(header[_OPENED], header[_CLOSED])) + 1
        header[_OPENED] = generation
        for name, place in self._arrays[bank].items():
            np.copyto(place, arrays[name], casting="no")
        header[_VERSION] = version
        header[_CRC] = _checksum(version, self._banks[bank])
        header[_CLOSED] = generation

    def load(self, at_least: int = 0, *, deadline_s: float = LOAD_DEADLINE_S) -> LoadedWeights:
        """The newest whole version, copied and verified.

        Raises WaitTimedOut if no bank holds a whole version of `at_least` or newer within the deadline. A bank that is
        being written is simply tried again: the message that announced the version came after its last store, so an
        announced version is there at the first try.
        """
        copy = np.empty(self._bank_nbytes, np.uint8)
        begun = time.monotonic()
        while True:
            version, bank = self._newest()
            if bank is not None and version >= at_least and self._copy_whole(bank, version, copy):
                return LoadedWeights(version, _views(copy, self.parameters))
            if time.monotonic() - begun > deadline_s:
                newest = "none" if bank is None else f"version {version}"
                raise WaitTimedOut(
                    f"waited {deadline_s:g} s for whole weights of version {at_least} or newer in {self.name}, "
                    f"the newest there is {newest}; has the learner stopped while publishing?"
                )
            time.sleep(0)  # lets the writer have this core; the deadline above ends the waiting

    def _newest(self) -> tuple[int, int | None]:
        """Highest version in a closed bank, and that bank."""
        best: tuple[int, int | None] = (NOTHING_PUBLISHED, None)
        for bank, words in enumerate(self._headers.tolist()):
            if words[_OPENED] == words[_CLOSED] > 0 and words[_VERSION] > best[0]:
                best = (words[_VERSION], bank)
        return best

    def _copy_whole(self, bank: int, version: int, copy: NDArray[np.uint8]) -> bool:
        """Copy a bank and say whether the copy is one whole `version`."""
        header = self._headers[bank]
        generation = int(header[_CLOSED])
        np.copyto(copy, self._banks[bank])
        crc = int(header[_CRC])
        return generation == int(header[_OPENED]) and crc == _checksum(version, copy)

    def close(self) -> None:
        """Let go of the segment; the owner's close also removes its name. Loaded arrays are unaffected."""
        self._headers = np.empty((0, _WORDS), np.uint64)
        self._banks, self._arrays = [], []
        self._segment.close()

    def __enter__(self) -> WeightsMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"WeightsMemory({self.name}, {len(self.parameters)} arrays, newest version {self.newest_version()})"


def _bank_nbytes(parameters: tuple[ArraySpec, ...]) -> int:
    return sum(align(parameter.nbytes, CACHE_LINE) for parameter in parameters)


def _views(bank: NDArray[np.uint8], parameters: tuple[ArraySpec, ...]) -> dict[str, NDArray[Any]]:
    """The named arrays of one bank, as slices of it."""
    views: dict[str, NDArray[Any]] = {}
    start = 0
    for parameter in parameters:
        place = bank[start : start + parameter.nbytes]
        views[parameter.name] = place.view(np.dtype(parameter.dtype)).reshape(parameter.shape)
        start += align(parameter.nbytes, CACHE_LINE)
    return views


def _checksum(version: int, bank: NDArray[np.uint8]) -> int:
    """crc32 over the version and the bank's bytes."""
    return zlib.crc32(bank.data, zlib.crc32(version.to_bytes(8, "little")))
