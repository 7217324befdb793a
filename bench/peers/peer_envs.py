"""The envs of the comparison, one code for every side: `peer_envs:make_cartpole`, `peer_envs:make_null`.

Runs in the environment of each peer: numpy and gymnasium (0.29 or newer) only. With the variable PEER_EPISODES set to a
directory, every process that steps these envs writes a file there: its first step, and each finished episode, with the
system's monotonic clock. So times to a return are measured in one way for every side. PEER_EPISODES_WHERE names a
variable that a process must have for that: a probe that only tries the env out is not what is measured.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

EPISODES_VARIABLE = "PEER_EPISODES"
WHERE_VARIABLE = "PEER_EPISODES_WHERE"
HIGHEST = np.array([4.8, 0.418], np.float32) * 2
"""CartPole's bounds of position and angle."""


class MaskedVelocities(gymnasium.ObservationWrapper):
    """CartPole-v1 without its velocities: float32 [position, angle]."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-HIGHEST, HIGHEST, dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]]


class NullEnv(gymnasium.Env):
    """Always the same 64 zeros, 6 actions, reward 0, episodes of 200: a step that costs next to nothing."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    render_mode = None

    def __init__(self, length: int = 200, size: int = 64, actions: int = 6) -> None:
        self.observation_space = spaces.Box(-1, 1, (size,), np.float32)
        self.action_space = spaces.Discrete(actions)
        self.zeros = np.zeros(size, np.float32)
        self.length = length
        self.t = 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None):  # noqa: ARG002
        self.t = 0
        return self.zeros, {}

    def step(self, action: Any):  # noqa: ARG002
        self.t += 1
        return self.zeros, 0.0, self.t >= self.length, False, {}


class EpisodeLog(gymnasium.Wrapper):
    """Writes this process's first step, and a line per finished episode: time, return, length."""

    file: ClassVar[Any] = None

    def __init__(self, env: gymnasium.Env, directory: Path) -> None:
        super().__init__(env)
        self.directory = directory
        self.total, self.length = 0.0, 0

    def reset(self, **keywords: Any):
        self.total, self.length = 0.0, 0
        return self.env.reset(**keywords)

    def step(self, action: Any):
        if EpisodeLog.file is None:
            EpisodeLog.file = (self.directory / f"{os.getpid()}.jsonl").open("a", buffering=1)
            self.write(first_step=time.perf_counter())
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.total += reward
        self.length += 1
        if terminated or truncated:
            self.write(time=time.perf_counter(), total=self.total, length=self.length)
        return observation, reward, terminated, truncated, info

    @staticmethod
    def write(**fields: float) -> None:
        EpisodeLog.file.write(json.dumps(fields) + "\n")


def make_cartpole() -> gymnasium.Env:
    """CartPole-v1, velocities masked."""
    return logged(MaskedVelocities(gymnasium.make("CartPole-v1", disable_env_checker=True)))


def make_null() -> gymnasium.Env:
    """NullEnv."""
    return logged(NullEnv())


def logged(env: gymnasium.Env) -> gymnasium.Env:
    """With the episode log where it is asked for."""
    directory, where = os.environ.get(EPISODES_VARIABLE), os.environ.get(WHERE_VARIABLE)
    here = where is None or where in os.environ
    return EpisodeLog(env, Path(directory)) if directory and here else env


MAKERS = {"cartpole": make_cartpole, "null": make_null}
