from typing import Any

import numpy as np
from numpy.typing import NDArray

def estimate(
    terminated: NDArray[Any],
    truncated: NDArray[Any],
    valid: NDArray[Any],
    rewards: NDArray[np.float32],
    values: NDArray[np.float32],
    log_probs: NDArray[np.float32],
    truncation_values: NDArray[np.float32],
    advantages: NDArray[np.float32],
    returns: NDArray[np.float32],
    last_values: NDArray[np.float64],
    valid_steps: NDArray[np.int64],
    gamma: float,
    decay: float,
    reward_scale: float,
    truncation_terminates: bool,
    truncation_bootstraps: bool,
    last_value_always: bool,
    /,
) -> bool: ...
