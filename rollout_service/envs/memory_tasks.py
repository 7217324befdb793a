"""Tasks that no memoryless policy can solve, small and fast enough to train on in a minute.

    Memory/TMaze-v0              a cue at the start tells which way to turn at the end of the corridor
    Memory/Recall-v0             a cue at the start is the right answer at the last step
    Memory/FlickeringCartPole-v0 CartPole whose observations go blank at random
    Memory/PositionCartPole-v0   CartPole without its velocities

Importing this module registers them with gymnasium, once per process; gymnasium itself discovers no plugins, so a
user's script imports it, or names it in the id: `gymnasium.make("rollout_service.envs.memory_tasks:Memory/TMaze-v0")`.

The envs end their own episodes (CartPole after 500 steps by truncation) and are registered without wrappers: a step of
a T-maze costs less than one wrapper.
"""

from __future__ import annotations

import math
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs import registration
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from numpy.typing import NDArray

from rollout_service.errors import ConfigError

Observation = NDArray[np.float32]
StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]

CARTPOLE_STEPS: Final = 500
"""Time limit of the CartPole tasks, as in CartPole-v1."""


def _template(*values: float) -> Observation:
    """What a step returns a copy of: copying costs a third of building an array."""
    return np.array(values, dtype=np.float32)


class TMaze(gymnasium.Env[Observation, Any]):
    """Walk down a corridor, then turn the way the cue at its start said. The walk is automatic; only the turn counts.

    Observation float32 [cue, corridor, junction]: cue +1 or -1 at step 0 and 0 later; corridor 1 while walking;
    junction 1 at the junction. An episode has corridor + 1 steps. At the junction action 1 answers cue +1, action 0
    cue -1: reward +1 if right, -1 if wrong; reward 0 before. The last step has info["success"].
    """

    metadata = {"render_modes": []}

    _CUES = (_template(-1, 1, 0), _template(1, 1, 0))
    _CORRIDOR = _template(0, 1, 0)
    _JUNCTION = _template(0, 0, 1)
    _GONE = _template(0, 0, 0)

    def __init__(self, corridor: int = 10) -> None:
        if corridor < 1:
            raise ConfigError(f"corridor is {corridor} steps, the least is 1")
        self.observation_space = spaces.Box(
            np.array([-1, 0, 0], np.float32), np.array([1, 1, 1], np.float32), dtype=np.float32
        )
        self.action_space = spaces.Discrete(2)
        self._corridor = corridor
        self._step = 0
        self._cue = 0

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        self._cue = int(self.np_random.random() < 0.5)
        return self._CUES[self._cue].copy(), {}

    def step(self, action: Any) -> StepResult:
        step = self._step
        self._step = step + 1
        if step < self._corridor - 1:
            return self._CORRIDOR.copy(), 0.0, False, False, {}
        if step < self._corridor:
            return self._JUNCTION.copy(), 0.0, False, False, {}
        success = bool(action == self._cue)
        return self._GONE.copy(), 1.0 if success else -1.0, True, False, {"success": success}


class Recall(gymnasium.Env[Observation, Any]):
    """Remember a cue for `delay` steps. Without memory the expected return is 0.5.

    Observation float32 [cue]: +1 or -1 at step 0, 0 later. An episode has `delay` steps; the action of the last one is
    the answer (1 for +1, 0 for -1) and earns 1 if right, else 0. The last step has info["success"].
    """

    metadata = {"render_modes": []}

    _CUES = (_template(-1), _template(1))
    _BLANK = _template(0)

    def __init__(self, delay: int = 32) -> None:
        if delay < 1:
            raise ConfigError(f"delay is {delay} steps, the least is 1")
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._last = delay - 1
        self._step = 0
        self._cue = 0

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        self._cue = int(self.np_random.random() < 0.5)
        return self._CUES[self._cue].copy(), {}

    def step(self, action: Any) -> StepResult:
        step = self._step
        self._step = step + 1
        if step < self._last:
            return self._BLANK.copy(), 0.0, False, False, {}
        success = bool(action == self._cue)
        return self._BLANK.copy(), float(success), True, False, {"success": success}


class _ScalarCartPole(CartPoleEnv):
    """Gymnasium's CartPole, its physics in Python floats (about five times faster), cut off after CARTPOLE_STEPS."""

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 50}

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self._steps = 0

    def _restart(self, seed: int | None, options: dict[str, Any] | None) -> None:
        super().reset(seed=seed, options=options)
        self._physics: tuple[float, float, float, float] = tuple(map(float, self.state))  # type: ignore[assignment, arg-type]
        self._steps = 0

    def _move(self, action: Any) -> tuple[bool, bool]:
        """One Euler step of the cart. Returns terminated, truncated."""
        x, x_dot, theta, theta_dot = self._physics
        force = self.force_mag if action == 1 else -self.force_mag
        cos, sin = math.cos(theta), math.sin(theta)
        push = (force + self.polemass_length * theta_dot * theta_dot * sin) / self.total_mass
        theta_acc = (self.gravity * sin - cos * push) / (
            self.length * (4.0 / 3.0 - self.masspole * cos * cos / self.total_mass)
        )
        x_acc = push - self.polemass_length * theta_acc * cos / self.total_mass
        x, x_dot = x + self.tau * x_dot, x_dot + self.tau * x_acc
        theta, theta_dot = theta + self.tau * theta_dot, theta_dot + self.tau * theta_acc
        self._physics = (x, x_dot, theta, theta_dot)
        self._steps += 1
        terminated = abs(x) > self.x_threshold or abs(theta) > self.theta_threshold_radians
        if self.render_mode is not None:
            self.state = np.array(self._physics)
            if self.render_mode == "human":
                self.render()  # type: ignore[no-untyped-call]
        return terminated, self._steps >= CARTPOLE_STEPS and not terminated


class PositionCartPole(_ScalarCartPole):
    """CartPole that shows only [cart position, pole angle], float32; reward 1 per step, truncated after 500."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        high = np.array([self.x_threshold * 2, self.theta_threshold_radians * 2], dtype=np.float32)
        self.observation_space = spaces.Box(-high, high, dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self._restart(seed, options)
        return self._view(), {}

    def step(self, action: Any) -> StepResult:
        terminated, truncated = self._move(action)
        return self._view(), 1.0, terminated, truncated, {}

    def _view(self) -> Observation:
        x, _, theta, _ = self._physics
        return np.array((x, theta), np.float32)


class FlickeringCartPole(_ScalarCartPole):
    """CartPole whose observation is replaced by zeros at random; reward 1 per step, truncated after 500.

    Each shown frame, the first of an episode included, goes blank with `blank_probability`, and then so do the next
    burst_length - 1 frames.
    """

    _BLANK = _template(0, 0, 0, 0)

    def __init__(self, blank_probability: float = 0.5, burst_length: int = 1, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        if not 0.0 <= blank_probability <= 1.0:
            raise ConfigError(f"blank_probability is {blank_probability}, it must lie in [0, 1]")
        if burst_length < 1:
            raise ConfigError(f"burst_length is {burst_length} frames, the least is 1")
        self._blank_probability = blank_probability
        self._burst_length = burst_length
        self._blank_left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self._restart(seed, options)
        self._blank_left = 0
        return self._view(), {}

    def step(self, action: Any) -> StepResult:
        terminated, truncated = self._move(action)
        return self._view(), 1.0, terminated, truncated, {}

    def _view(self) -> Observation:
        if self._blank_left == 0 and self.np_random.random() < self._blank_probability:
            self._blank_left = self._burst_length
        if self._blank_left > 0:
            self._blank_left -= 1
            return self._BLANK.copy()
        return np.array(self._physics, np.float32)


TASKS: Final[dict[str, type[gymnasium.Env[Any, Any]]]] = {
    "Memory/TMaze-v0": TMaze,
    "Memory/Recall-v0": Recall,
    "Memory/FlickeringCartPole-v0": FlickeringCartPole,
    "Memory/PositionCartPole-v0": PositionCartPole,
}


def register() -> None:
    """Register the tasks with gymnasium. Calling it again does nothing."""
    for task_id, task in TASKS.items():
        if task_id not in registration.registry:
            registration.register(
                task_id, entry_point=f"{__name__}:{task.__name__}", order_enforce=False, disable_env_checker=True
            )


register()
