"""materialize: a training batch out of a rollout's views, against stacking per-step arrays and turning them over.

The naive side keeps one array per step and field, as many scripts do: it stacks them to [T, N, *], makes that env-major
and contiguous, and wraps it. Both sides end with the same tensors. Axis letters: N envs, T steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from learner.rollout_buffer import RecurrentRolloutBuffer
from rollout_service.bench.report import Report
from rollout_service.bench.rig import STATE, Array, fill_slot, paper_spec, rollout_memory
from rollout_service.bench.timing import Figures, alternate
from rollout_service.launch.cpu import one_thread

REPETITIONS: Final = 15
SIZES: Final = ((4, 128), (16, 128), (64, 128))
PER_STEP: Final = ("observations", "actions", "log_probs", "values", "advantages", "returns", "valid")

NOTES: Final = (
    "ours: to_training_batch over slots in shared memory; naive: per-step arrays stacked to [T, N, *], turned, copied",
)


def measure(repetitions: int = REPETITIONS, *, sizes: Sequence[tuple[int, int]] = SIZES) -> Report:
    """One case per (N, T)."""
    with one_thread():
        cases = {f"{envs} envs x {steps}": one_case(repetitions, envs, steps) for envs, steps in sizes}
    return Report("materialize", "a training batch out of a rollout", cases, NOTES)


def one_case(repetitions: int, envs: int, steps: int) -> Figures:
    spec = paper_spec(envs, steps)
    with rollout_memory(spec) as memory:
        fill_slot(memory.writer(0), 1, np.random.default_rng(0))
        with RecurrentRolloutBuffer.over(memory, spec.bank(0)) as rollout:
            rollout.compute_advantages_partial(np.full(envs, steps), rollout.last_values(), 0.99, 0.95)
            stored = per_step_arrays(memory.rollout(spec.bank(0)))
            samples = alternate(
                {"ours": rollout.to_training_batch, "naive": lambda: naive_batch(stored)}, repetitions=repetitions
            )
    return samples.medians("us") | samples.ratio("ours", "naive")


def per_step_arrays(arrays: dict[str, Array]) -> dict[str, list[Array]]:
    """What a script would have kept: for each field a list over T of [N, *]; the carry flag in front of the ends."""
    stored = {name: [column.copy() for column in arrays[name].swapaxes(0, 1)] for name in PER_STEP}
    ends = (arrays["terminated"] | arrays["truncated"]).astype(np.float32)
    stored["starts"] = [arrays["episode_start_carry"].copy(), *(column.copy() for column in ends.T[:-1])]
    return stored | {name: [arrays[name][:, 0].copy()] for name in STATE}


def naive_batch(stored: dict[str, list[Array]]) -> dict[str, Tensor]:
    """name -> [N, T, *]; the initial state [L, N, H]."""
    batch = {}
    for name, columns in stored.items():
        if name in STATE:
            batch[name] = torch.from_numpy(np.ascontiguousarray(columns[0].swapaxes(0, 1)))
        else:
            batch[name] = torch.from_numpy(np.ascontiguousarray(np.stack(columns).swapaxes(0, 1)))
    return batch
