"""Action noise: one stream per env, drawn in blocks of one lease.

A stream belongs to (seed, env, incarnation, update), so which actor runs an env does not matter, nor does the order
in which leases arrive. A lease that ends early leaves the rest of its block unused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollout_service.envs.seeding import Purpose, generator
from rollout_service.errors import OutOfOrder

Draw = Callable[[Sequence[np.random.Generator], int], NDArray[np.float32]]
"""A policy's `draw_noise`: (one generator per env, T) -> float32 [T, E, *]."""


class ActionNoise:
    """Noise of E envs for one lease at a time. draw: the distribution's own, so that its shape is known to it alone."""

    def __init__(self, draw: Draw, *, seed: int, env_ids: range, incarnation: int, num_steps: int) -> None:
        self._draw = draw
        self._seed = seed
        self._env_ids = env_ids
        self._incarnation = incarnation
        self._num_steps = num_steps
        self.reseed(0)
        self._block: NDArray[np.float32] | None = None

    def reseed(self, update: int) -> None:
        """Start every env's stream anew."""
        self._generators = [
            generator(self._seed, Purpose.ACTION, env, self._incarnation, update) for env in self._env_ids
        ]

    def next_block(self) -> None:
        """Draw the noise of the next lease."""
        self._block = self._draw(self._generators, self._num_steps)

    def at(self, t: int) -> NDArray[np.float32]:
        """Noise of step t of this lease, [E, *]."""
        if self._block is None:
            raise OutOfOrder("there is no noise yet; call next_block before the first step of a lease")
        row: NDArray[np.float32] = self._block[t]
        return row
