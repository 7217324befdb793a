"""Timings on a GPU against the CPU beside it: upload, advantages, batch, update; device memory of an update.

Every timed side ends with the device idle. On a CPU, where `--rehearse` runs them, the figures mean nothing. Sizes are
those of `rollout_service.bench.rig`: 64 floats of observation, LSTM 128, T = 128.

Axis letters: N envs, T steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Final

import numpy as np
import torch

from bench.gpu_checks import ESTIMATOR, Figures, one_update, trainer
from bench.gpu_uploads import filled_memory
from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.staging import DeviceStaging, HostStaging
from learner.upload import estimate, lane_for, make_batch, upload
from rollout_service.bench.rig import null_spaces
from rollout_service.bench.timing import alternate
from rollout_service.config import Device
from rollout_service.runspec import Leaf, SpaceKind, Spaces

STEPS: Final = 128
REPETITIONS: Final = 7
IMAGE: Final = Leaf(kind=SpaceKind.BOX, shape=(64, 64, 3), dtype="uint8", path=".image")


def settled(device: torch.device, side: Callable[[], object]) -> Callable[[], None]:
    """The side, and then a wait for the device."""

    def run() -> None:
        side()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def staging_times(device: torch.device, envs: int, steps: int = STEPS, *, images: bool = False) -> Figures:
    """Upload from pinned and from pageable memory, advantages, batch; and the whole way beside the CPU's, from slots to
    a batch on the device."""
    spaces = Spaces(observation=(IMAGE,), action=null_spaces().action) if images else null_spaces()
    with (
        filled_memory(envs=envs, steps=steps, spaces=spaces, slots=1) as memory,
        closing(DeviceStaging(device)) as staging,
    ):
        rollout = RecurrentRolloutBuffer.over(memory, (0,))
        counts = np.full(envs, steps)
        rows = rollout.training_rows(counts)
        lane = lane_for(device)
        nbytes = sum(piece.nbytes for pieces in rows.steps.values() for piece in pieces)

        def send() -> None:
            upload(rows, device, lane)

        pageable = alternate({"upload_pageable": settled(device, send)}, repetitions=REPETITIONS)
        refused = staging.prepare(memory) is not None
        there = upload(rows, device, lane)
        advantages, returns = estimate(there, ESTIMATOR)
        host = HostStaging()
        pinned = alternate(
            {
                "upload_pinned": settled(device, send),
                "gae": settled(device, lambda: estimate(there, ESTIMATOR)),
                "batch": settled(device, lambda: make_batch(there, advantages, returns)),
                "all_here": settled(device, lambda: staging.batch(rollout, counts, ESTIMATOR, no_phase)),
                "all_by_the_cpu": settled(
                    device, lambda: host.batch(rollout, counts, ESTIMATOR, no_phase)[0].to(device)
                ),
            },
            repetitions=REPETITIONS,
        )
        lane.wait()
    return {
        "uploaded_mib": nbytes / 2**20,
        "was_refused": float(refused),
        **pageable.medians("ms"),
        **pinned.medians("ms"),
        "upload_pinned_gib_per_s": nbytes / 2**30 / pinned.median("upload_pinned"),
        **pinned.ratio("all_here", "all_by_the_cpu"),
    }


def no_phase(_: str) -> nullcontext[None]:
    return nullcontext()


def update_times(device: torch.device, envs: int, steps: int = STEPS, *, beside_cpu: bool = True) -> Figures:
    """One update, four epochs of four minibatches, on the device and on the CPU; the device's memory at its peak."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what earlier parts have left is not this one's
        torch.cuda.reset_peak_memory_stats(device)
    with filled_memory(envs=envs, steps=steps, slots=1) as memory:
        trainers = {"update": trainer(Device(device.type), envs, steps)}
        if beside_cpu:
            trainers["update_on_cpu"] = trainer(Device.CPU, envs, steps)
        try:
            for each in trainers.values():
                each.attach(memory)
            sides = {name: settled(device, one_update(each, memory)) for name, each in trainers.items()}
            samples = alternate(sides, repetitions=3)
            figures = samples.medians("ms")
            figures["trained_rows_per_s"] = envs * steps / samples.median("update")
            if beside_cpu:
                figures |= samples.ratio("update", "update_on_cpu")
        finally:
            for each in trainers.values():
                each.close()
    if device.type == "cuda":
        figures["peak_allocated_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
        figures["peak_reserved_mib"] = torch.cuda.max_memory_reserved(device) / 2**20
    return figures
