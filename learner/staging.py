"""Where the learner computes, and what has to be set before it does: device, threads, allocator pages.

Readers: the learner's process and the serial run, once at start. On the CPU nothing is uploaded: the rollout is read
where the actors wrote it. On CUDA a batch is uploaded once per update by `SequenceBatch.to`.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

import torch

from rollout_service.config import Device, TrainConfig
from rollout_service.errors import ConfigError

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


def compute_exactly(device: torch.device) -> None:
    """Turns off TF32 on CUDA, for this process: its 10-bit mantissas alone would break the ratio law's 1e-3, and
    cuDNN's recurrent kernels use it unless told otherwise.
    """
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False


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
