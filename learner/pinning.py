"""Registration of the rollout segment with CUDA, where it lies: uploads then need no copy on the host.

    mapped segment --cudaHostRegister, one range of whole pages per field--> same addresses, now pinned

`Tensor.pin_memory` copies, and actors write the original. A field is registered as a whole, over all slots; fields
begin on pages of their own, so ranges never overlap. Fields without bytes are left out: CUDA refuses empty ranges.

Who calls: the learner's staging, once per segment. Registered memory is kept mapped until it is given back. What must
never happen: an unmapping before that, the code of a refused range left behind for torch to find after its next
kernel, or a run that fails because memory cannot be pinned: everything works from pageable memory as well, with the
same numbers.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_service.memory.layout import align
from rollout_service.memory.slots import RolloutMemory

SUCCESS: Final = 0
PORTABLE: Final = 1
"""cudaHostRegisterPortable: pinned for every context of this process."""
REMEDY: Final = "raise the limit of locked memory (ulimit -l unlimited; docker run --ulimit memlock=-1)"


class PinningRuntime(Protocol):
    """The calls of the CUDA runtime that are needed. They return its error codes, 0 for success."""

    def register(self, address: int, nbytes: int) -> int: ...

    def unregister(self, address: int) -> int: ...

    def describe(self, code: int) -> str: ...

    def forget_error(self) -> None:
        """The runtime hands a failed call's code out once more to whoever asks for the last error; afterwards not."""
        ...


class CudaRuntime:
    """Of this process. Calls come from one thread: the last error is kept per thread."""

    def __init__(self, device: torch.device) -> None:
        """device: where the context is made, if there is none yet."""
        self._device = device
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(self, address: int, nbytes: int) -> int:
        with torch.cuda.device(self._device):
            return int(self._cudart.cudaHostRegister(address, nbytes, PORTABLE))

    def unregister(self, address: int) -> int:
        # No choice of a device: what is portable belongs to all, and a broken context would raise here.
        return int(self._cudart.cudaHostUnregister(address))

    def describe(self, code: int) -> str:
        return f"{self._cudart.cudaGetErrorString(self._cudart.cudaError(code))}, code {code}"

    def forget_error(self) -> None:
        """Asks for it: torch does not pass cudaGetLastError on, but calls it after every kernel."""
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).cudaGetLastError()  # the library that torch has loaded, where its symbols are global
        with suppress(RuntimeError):  # of the error before this kernel, if it was still there
            torch.ones(1, device=self._device).add_(1)


@dataclass(frozen=True)
class PageRange:
    """Whole pages of one field."""

    name: str
    address: int
    nbytes: int


def page_ranges(memory: RolloutMemory, names: Iterable[str]) -> list[PageRange]:
    """The pages of the named fields, all slots; a field without bytes has none."""
    ranges = []
    for name in names:
        array = memory.array(name)
        if array.nbytes:
            ranges.append(PageRange(name, int(array.ctypes.data), align(array.nbytes, PAGESIZE)))
    return ranges


class PinnedFields:
    """Some fields of one segment, registered as far as CUDA takes them."""

    def __init__(self, memory: RolloutMemory, names: Iterable[str], runtime: PinningRuntime) -> None:
        """Stops at the first range that is refused: its successors would meet the same limit."""
        self._runtime = runtime
        self._registered: list[tuple[PageRange, NDArray[np.generic]]] = []
        """With a view each, which keeps the segment mapped."""
        self.warning: str | None = None
        """Why not everything is pinned."""
        ranges = page_ranges(memory, names)
        for pages in ranges:
            code = runtime.register(pages.address, pages.nbytes)
            if code != SUCCESS:
                runtime.forget_error()
                self.warning = self._complaint(ranges, pages, runtime.describe(code))
                break
            self._registered.append((pages, memory.array(pages.name)))

    @property
    def names(self) -> tuple[str, ...]:
        """Fields that are pinned."""
        return tuple(pages.name for pages, _ in self._registered)

    @property
    def nbytes(self) -> int:
        return sum(pages.nbytes for pages, _ in self._registered)

    def close(self) -> None:
        """Gives the pages back. No copy out of them may be under way. Closing twice is harmless."""
        while self._registered:
            pages, _ = self._registered.pop()
            if self._runtime.unregister(pages.address) != SUCCESS:
                self._runtime.forget_error()  # a broken context has let go of them already

    def _complaint(self, ranges: list[PageRange], refused: PageRange, reason: str) -> str:
        wanted = sum(pages.nbytes for pages in ranges)
        return (
            f"CUDA could not pin field {refused.name} ({reason}); {_mib(self.nbytes)} of {_mib(wanted)} are pinned, "
            "the rest is uploaded from pageable memory, slower and with the same numbers; the limit of locked memory "
            f"is {_limit()}: {REMEDY}"
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _limit() -> str:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "none" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
