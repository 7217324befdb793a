"""What only a GPU can show; `make gpu` runs the same parts and times more. Skipped, with the reason, without one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bench.gpu import groups, why_not

WHY_NOT = why_not()
CHECKS = {
    f"{group}: {part}": run for group in ("numbers", "uploads", "runs") for part, run in groups()[group].parts.items()
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no GPU: {WHY_NOT}"),
]


@pytest.mark.parametrize("run", CHECKS.values(), ids=CHECKS)
def test_it_holds_on_the_gpu(run: Callable[[torch.device], dict[str, float]]) -> None:
    figures = run(torch.device("cuda"))
    assert all(math.isfinite(figure) for figure in figures.values()), figures
