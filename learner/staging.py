"""Where the learner computes: device, threads, allocator pages, and how a rollout becomes a batch there.

    CPU     nothing is uploaded: advantages go into the slots, the batch is copied out of them
    CUDA    the slots are pinned where they lie and uploaded, one copy per field and run of neighbours; everything else
            happens there, and nothing is written back

Readers: the learner's process and the serial run, settings once at start, `Staging` once per update. What must never
happen: that a batch is handed out while anything of the rollout's slots is still to be read.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from learner.gae import Estimator
from learner.pinning import CudaRuntime, PinnedFields, PinningRuntime
from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.sequences import SequenceBatch
from learner.upload import CopyLane, DeviceRows, estimate, in_place, is_uploaded_whole, lane_for, make_batch, upload
from rollout_service.config import Device, TrainConfig
from rollout_service.errors import ConfigError
from rollout_service.memory.slots import RolloutMemory

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
LARGEST_KEPT_BLOCK: Final = 32 << 20
"""Bytes. glibc maps blocks above its threshold (128 KiB at first) freshly from the kernel and unmaps them on every
free, so each minibatch pays for the same pages again. 32 MiB is the highest threshold that glibc accepts."""
KEPT_AT_THE_TOP: Final = 512 << 20
"""Bytes of free heap top that are not given back either."""


def select_device(device: Device) -> torch.device:
    """The device to compute on. Raises ConfigError, one line, if CUDA is asked for and missing."""
    match device:
        case Device.CPU:
            return torch.device("cpu")
        case Device.AUTO:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        case Device.CUDA:
            if not torch.cuda.is_available():
                raise ConfigError(
                    f"device cuda was asked for, but torch {torch.__version__} sees no CUDA device here; "
                    "use --device cpu or auto, or install a CUDA build of torch and a driver"
                )
            return torch.device("cuda")


def compute_exactly(device: torch.device, *, deterministic: bool = False) -> None:
    """Turns off TF32 on CUDA, for this process: its 10-bit mantissas alone would break the ratio law's 1e-3, and
    cuDNN's recurrent kernels use it unless told otherwise.

    deterministic: and only kernels that add up in the same order every time. On a CPU all do.
    """
    if device.type != "cuda":
        return
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is used first
        torch.use_deterministic_algorithms(True)


def usable_cores() -> int:
    """Cores this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def thread_count(config: TrainConfig, blocks: int) -> int:
    """Threads that share the blocks of a minibatch on a CPU: "auto" is every usable core, up to one per block.

    No operation is shared by threads. Two cores, LSTM of 128, T = 128, ms per update with one thread, two threads that
    share blocks, two inside each operation: 16 rows a minibatch 138, 88, 108; beside a process that takes 45 % of a
    core 138, 117, 268. 4 rows, one block, 43; as two blocks on two threads also 43, for twice the work.
    """
    if config.learner_threads != "auto":
        return config.learner_threads
    return max(1, min(usable_cores(), blocks))


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory for the next minibatch. False where there is no glibc: nothing changes then."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_AT_THE_TOP))


Phase = Callable[[str], AbstractContextManager[None]]
"""Gives a phase of an update its time: gae, batch, and on a device upload before them."""


class Staging(Protocol):
    """From a rollout in shared memory to a batch where the learner computes."""

    def prepare(self, memory: RolloutMemory) -> str | None:
        """Before the first rollout of that memory. Returns a warning, or None."""
        ...

    def batch(
        self,
        rollout: RecurrentRolloutBuffer,
        counts: NDArray[np.int64],
        estimator: Estimator,
        phase: Phase,
        *,
        rows_too: bool = False,
    ) -> tuple[SequenceBatch, DeviceRows | None]:
        """The batch of every env with K above 0, some K above 0; with rows_too also the rows that it was made of.

        The batch owns its memory. The rows may be the rollout's, or those of them that a batch keeps the batch's own:
        nobody writes them, and whoever wants to keep some copies them before the slots are given back.
        counts: K, int [N]. Raises IncompleteRollout for rows that cannot be estimated.
        """
        ...

    def close(self) -> None:
        """Before the memory is closed. Closing twice is harmless."""
        ...


class HostStaging:
    """The learner computes where the slots are."""

    def prepare(self, memory: RolloutMemory) -> str | None:  # noqa: ARG002
        return None

    def batch(
        self,
        rollout: RecurrentRolloutBuffer,
        counts: NDArray[np.int64],
        estimator: Estimator,
        phase: Phase,
        *,
        rows_too: bool = False,
    ) -> tuple[SequenceBatch, DeviceRows | None]:
        with phase("gae"):
            rollout.compute_advantages_partial(
                counts,
                rollout.last_values(),
                estimator.gamma,
                estimator.lam,
                rule=estimator.rule,
                reward_scale=estimator.reward_scale,
                truncation_as_termination=estimator.truncation_as_termination,
            )
        with phase("batch"):
            return rollout.to_training_batch(), in_place(rollout.training_rows(counts)) if rows_too else None

    def close(self) -> None:
        pass


class DeviceStaging:
    """The learner computes on a device: rollouts are uploaded, advantages and batches made there."""

    def __init__(
        self, device: torch.device, *, lane: CopyLane | None = None, runtime: PinningRuntime | None = None
    ) -> None:
        """lane, runtime: those of the device by default; a CPU, for tests, copies at once and pins nothing."""
        self._device = device
        self._lane = lane or lane_for(device)
        self._runtime = runtime or (CudaRuntime(device) if device.type == "cuda" else None)
        self.pinned: list[PinnedFields] = []

    def prepare(self, memory: RolloutMemory) -> str | None:
        """Pins what is uploaded whole."""
        if self._runtime is None:
            return None
        names = [field.name for field in memory.fields if is_uploaded_whole(field)]
        self.pinned.append(PinnedFields(memory, names, self._runtime))
        return self.pinned[-1].warning

    def batch(
        self,
        rollout: RecurrentRolloutBuffer,
        counts: NDArray[np.int64],
        estimator: Estimator,
        phase: Phase,
        *,
        rows_too: bool = False,
    ) -> tuple[SequenceBatch, DeviceRows | None]:
        try:
            with phase("upload"):
                sources = rollout.training_rows(counts)  # lives until the copies are complete
                rows = upload(sources, self._device, self._lane)
            with phase("gae"):
                advantages, returns = estimate(rows, estimator)
            with phase("batch"):
                return make_batch(rows, advantages, returns), rows if rows_too else None
        finally:  # also behind an error: whoever handles it may give the slots back
            self._lane.wait()

    def close(self) -> None:
        # A context that is broken has no copies under way, and raises at every call.
        with suppress(RuntimeError):
            self._lane.wait()
        while self.pinned:
            self.pinned.pop().close()


def staging_for(device: torch.device) -> Staging:
    """The staging of the learner's device."""
    return HostStaging() if device.type == "cpu" else DeviceStaging(device)
