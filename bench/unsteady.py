"""An env for long runs in which things go wrong: now and then it returns bad data, or takes its time.

Who makes it: the actors of chaos and soak runs, once per env. It draws from its own generator alone, so that what it
does is a function of its seed and its actions, as a run that has to repeat itself asks for.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from rollout_service.envs.memory_tasks import StepResult, TMaze

NAME: Final = f"{__name__}:UnsteadyMaze"
LIMIT: Final = 10.0
"""`--obs-limit` for it."""
BAD_SHARE: Final = 5e-4
SLOW_SHARE: Final = 2e-5
LONGEST_STEP_S: Final = 0.2
BAD_OBSERVATIONS: Final = (np.nan, -np.inf, 1e3 * LIMIT)


class UnsteadyMaze(TMaze):
    """A T-maze of which BAD_SHARE of the steps return bad data, and SLOW_SHARE take up to LONGEST_STEP_S."""

    def step(self, action: Any) -> StepResult:
        shown, reward, terminated, truncated, info = super().step(action)
        drawn = self.np_random.random()
        if drawn < BAD_SHARE:
            kind = int(self.np_random.integers(len(BAD_OBSERVATIONS) + 1))
            if kind == len(BAD_OBSERVATIONS):
                reward = float("nan")
            else:
                shown[0] = BAD_OBSERVATIONS[kind]
        elif drawn > 1.0 - SLOW_SHARE:
            time.sleep(float(self.np_random.uniform(0.0, LONGEST_STEP_S)))
        return shown, reward, terminated, truncated, info
