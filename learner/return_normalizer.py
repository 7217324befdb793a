"""Running deviation of the discounted return, by which the learner divides rewards.

Writer and reader: the trainer, once per rollout and before GAE. The rewards in the buffer stay raw, so do logged
returns. Each env has a discounted return g that runs on over rollouts (g := gamma * g + r, from r at an episode
start); mean, variance and count are over every valid row of every env, merged exactly (Chan et al. 1979) in float64.

Rows that are not valid are never counted. There is no clip: a scaled reward is at most about sqrt(count), since the
deviation it is divided by has already seen it. `EPSILON` is the offset under the root: rewards that are all zero stay
zero.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from rollout_service.errors import ShapeError

EPSILON: Final = 1e-8


class ReturnNormalizer:
    """Statistics of one run over N envs."""

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.gamma = gamma
        self.carried = np.zeros(num_envs, np.float64)
        """[N] gamma * g of the last row taken in; 0 where the episode ended."""
        self.mean, self.variance, self.count = 0.0, 0.0, 0

    @property
    def scale(self) -> float:
        """Factor on rewards: 1 / deviation; 1 before anything was seen."""
        return 1.0 if self.count == 0 else float(1.0 / np.sqrt(self.variance + EPSILON))

    def update(self, rewards: np.ndarray, ended: np.ndarray, valid: np.ndarray, starts: np.ndarray) -> None:
        """Takes one rollout in.

        rewards: float [N, T]; ended, valid: bool [N, T]; starts: [N], 1 where row 0 begins an episode.
        Raises ShapeError unless N is the number of envs.
        """
        num_envs, num_steps = rewards.shape
        if num_envs != len(self.carried) or not rewards.shape == ended.shape == valid.shape:
            raise ShapeError(
                f"rewards {rewards.shape}, ended {ended.shape} and valid {valid.shape} must all be "
                f"[{len(self.carried)}, T]"
            )
        returns = np.zeros((num_steps, num_envs), np.float64)
        # Selected, not multiplied: an unwritten row holds NaN, and 0 * NaN is NaN.
        counted = np.where(valid, rewards, 0.0).T.astype(np.float64)
        lives_on = (valid & ~ended).T
        stays = ~valid.T
        carried = np.where(np.asarray(starts) > 0, 0.0, self.carried)
        for t in range(num_steps):
            np.add(carried, counted[t], out=returns[t])
            carried = np.where(stays[t], carried, np.where(lives_on[t], self.gamma * returns[t], 0.0))
        self.carried = carried
        self._merge(returns.T[valid])

    def _merge(self, seen: np.ndarray) -> None:
        if seen.size == 0:
            return
        mean, variance, count = float(seen.mean()), float(seen.var()), int(seen.size)
        total = self.count + count
        difference = mean - self.mean
        squares = self.variance * self.count + variance * count + difference**2 * self.count * count / total
        self.mean += difference * count / total
        self.variance = squares / total
        self.count = total

    def to_arrays(self) -> dict[str, np.ndarray]:
        """State for a checkpoint."""
        return {
            "carried": self.carried.copy(),
            "statistics": np.array([self.mean, self.variance, float(self.count)], np.float64),
        }

    def load_arrays(self, carried: np.ndarray, statistics: np.ndarray) -> None:
        """State from a checkpoint. With another number of envs every env starts its return anew."""
        self.mean, self.variance, self.count = float(statistics[0]), float(statistics[1]), int(statistics[2])
        if carried.shape == self.carried.shape:
            self.carried = carried.astype(np.float64)
        else:
            self.carried = np.zeros_like(self.carried)
