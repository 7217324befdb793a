"""Envs to time with: `rollout_service.bench.envs:NullEnv` costs next to nothing, so what is left is ours."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Observation = NDArray[np.float32]


class NullEnv(gymnasium.Env[Observation, Any]):
    """Always the same zeros, float32 [size]; reward 0; an episode of `length` steps ends by termination."""

    metadata = {"render_modes": []}

    def __init__(self, size: int = 64, actions: int = 6, length: int = 200) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.action_space = spaces.Discrete(actions)
        self._observation = np.zeros(size, np.float32)
        self._length = length
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._steps = 0
        return self._observation, {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:  # noqa: ARG002
        self._steps += 1
        return self._observation, 0.0, self._steps >= self._length, False, {}


class SleepingEnv(NullEnv):
    """A NullEnv whose step takes `step_s` seconds and no CPU, as of a simulator elsewhere."""

    def __init__(self, step_s: float = 0.002, size: int = 64, actions: int = 6, length: int = 200) -> None:
        super().__init__(size, actions, length)
        self._step_s = step_s

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        time.sleep(self._step_s)
        return super().step(action)


class NotingEnv(NullEnv):
    """A NullEnv of an actor that notes when its process stepped it first: `<directory>/<actor>`, monotonic seconds.

    The probe, which only looks at the env, is no actor and notes nothing.
    """

    noted: ClassVar[bool] = False

    def __init__(self, directory: str, size: int = 64, actions: int = 6, length: int = 200) -> None:
        super().__init__(size, actions, length)
        self._directory = Path(directory)

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if not NotingEnv.noted and (actor := os.environ.get("ROLLOUT_SERVICE_ACTOR")) is not None:
            NotingEnv.noted = True
            (self._directory / actor).write_text(str(time.perf_counter()))
        return super().step(action)
