"""Advantages and returns of a rollout, written in place: by a compiled single pass where it was built, else by numpy.

`learner.gae` says what is computed; it is the reference, and the fallback. The compiled pass (_single_pass.c) goes over
the rows once, from flags to float32 results, all checks included, and gives the same bits. It takes env-major arrays
with contiguous rows, float32 and one-byte flags, as slots hold them; whatever else it is given, or whatever it finds
wrong with a row, the reference looks at.

Who calls: the rollout buffer. Never: IO, randomness. `BUILT` says which of the two it is here; the extension is left
out when the package is installed where there is no C compiler.

Axis letters: T num_steps, N num_envs, K valid_steps of an env.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from learner.gae import Estimator, advantages_and_returns
from rollout_service.config import GaeRule

_compiled: Callable[..., bool] | None
try:
    from learner._single_pass import estimate as _compiled
except ImportError:
    _compiled = None

BUILT: Final = _compiled is not None
READ: Final = ("terminated", "truncated", "valid", "rewards", "values", "log_probs", "truncation_values")
WRITTEN: Final = ("advantages", "returns")
NOT_BUILT: Final = "advantages are computed by numpy: the compiled pass was not built when this package was installed"
REMEDY: Final = "nothing need be done; for the faster one install a C compiler (gcc), then this package again"


def write_advantages(
    rows: Mapping[str, NDArray[Any]],
    last_values: NDArray[np.float64],
    valid_steps: NDArray[np.int64],
    estimator: Estimator,
) -> None:
    """Writes the first K rows of each env of rows["advantages"] and rows["returns"], float32 [N, T].

    The other arguments, and what is raised, are those of `learner.gae.advantages_and_returns`; where it raises, the
    contents of advantages and returns are anybody's guess.
    """
    if _compiled is not None and _compiled(
        *(rows[name] for name in READ),
        *(rows[name] for name in WRITTEN),
        last_values,
        valid_steps,
        estimator.gamma,
        estimator.gamma * estimator.lam,
        estimator.reward_scale,
        estimator.truncation_as_termination,
        estimator.rule is GaeRule.BOUNDARY_CORRECT,
        estimator.rule is GaeRule.ORIGINAL_ACTUAL,
    ):
        return
    within = np.arange(rows["valid"].shape[1]) < valid_steps[:, None]
    for name, result in zip(WRITTEN, advantages_and_returns(rows, last_values, valid_steps, estimator), strict=True):
        np.copyto(rows[name], result, where=within, casting="same_kind")
