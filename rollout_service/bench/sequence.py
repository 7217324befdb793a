"""sequence: forward and backward of the LSTM core over whole rows, with and without episode starts inside.

The loop over cells is what the inserted reset step replaces. One thread. Axis letters: n rows, T steps, D inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from learner.staging import keep_freed_memory
from rollout_service.bench.report import Report
from rollout_service.bench.rig import ENCODER, HIDDEN, STATE
from rollout_service.bench.timing import Figures, Side, alternate
from rollout_service.launch.cpu import one_thread
from rollout_service.policy.recurrent import LSTMCore

REPETITIONS: Final = 9
ROWS: Final = (4, 16, 64)
STEPS: Final = 128
RESETS: Final = {"few": 1.0, "many": 2.6}
"""Side -> mean number of episode starts behind the first column, per row."""

NOTES: Final = (
    f"LSTM {ENCODER} -> {HIDDEN}, T = {STEPS}, forward and backward, one thread",
    "none: no episode starts; few, many: about 1 and 2.6 per row; cells: the step loop with many",
)


def measure(
    repetitions: int = REPETITIONS,
    *,
    rows: Sequence[int] = ROWS,
    steps: int = STEPS,
    inputs: int = ENCODER,
    hidden_dim: int = HIDDEN,
) -> Report:
    """One case per number of rows."""
    keep_freed_memory()  # as the learner does
    with one_thread():
        core = LSTMCore(inputs, hidden_dim, 1, torch.Generator().manual_seed(0))
        cases = {f"{count} rows": one_case(repetitions, core, count, steps) for count in rows}
    return Report("sequence", "forward and backward of the recurrent core", cases, NOTES)


def one_case(repetitions: int, core: LSTMCore, rows: int, steps: int) -> Figures:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, steps, core.inputs, generator=generator).requires_grad_()
    state = {name: torch.randn(1, rows, core.hidden_dim, generator=generator) for name in STATE}
    starts = {name: episode_starts(rows, steps, mean, generator) for name, mean in RESETS.items()}
    starts["none"] = torch.zeros(rows, steps)

    def both_ways(sequence: Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor], flags: Tensor) -> Side:
        def run() -> None:
            core.zero_grad(set_to_none=True)
            x.grad = None
            sequence(x, flags, state).square().mean().backward()  # type: ignore[no-untyped-call]

        return run

    sides = {name: both_ways(core.sequence, starts[name]) for name in ("none", *RESETS)}
    sides["cells"] = both_ways(core.sequence_by_cells, starts["many"])
    samples = alternate(sides, repetitions=repetitions)
    return {
        **{f"{name}_resets_per_row": float(starts[name].sum()) / rows for name in RESETS},
        **samples.medians("ms"),
        **samples.ratio("few", "none"),
        **samples.ratio("many", "none"),
        **{name: value for side in ("none", *RESETS) for name, value in samples.ratio(side, "cells").items()},
    }


def episode_starts(rows: int, steps: int, mean: float, generator: torch.Generator) -> Tensor:
    """float32 [n, T]: starts behind the first column with equal probability, on average `mean` per row."""
    starts = (torch.rand(rows, steps, generator=generator) < mean / (steps - 1)).float()
    starts[:, 0] = 0.0
    return starts
