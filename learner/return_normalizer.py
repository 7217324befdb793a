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

    def update(
        self,
        rewards: np.ndarray,
        ended: np.ndarray,
        valid: np.ndarray,
        starts: np.ndarray,
        envs: np.ndarray | None = None,
    ) -> None:
        """Takes one rollout in.

        rewards: float [N, T]; ended, valid: bool [N, T]; starts: [N], 1 where row 0 begins an episode; envs: int [N],
        of which env each sequence is, 0..N-1 by default. One that comes again goes on where it came before. A row that
        is not valid counts nowhere: if it ended, as in a dropped episode, the return starts anew behind it; if not,
        nothing was there, and the return goes on.
        Raises ShapeError unless all N are the same, and without `envs` the number of envs.
        """
        sequences = np.arange(len(self.carried)) if envs is None else np.asarray(envs)
        if len(rewards) != len(sequences) or not rewards.shape == ended.shape == valid.shape:
            raise ShapeError(
                f"rewards {rewards.shape}, ended {ended.shape} and valid {valid.shape} must all be "
                f"[{len(sequences)}, T]"
            )
        returns = np.zeros(rewards.shape[::-1], np.float64)
        for turn in turns(sequences):
            own = sequences[turn]
            # Selected, not multiplied: an unwritten row holds NaN, and 0 * NaN is NaN.
            counted = np.where(valid[turn], rewards[turn], 0.0).T.astype(np.float64)
            over = ended[turn].T
            stays = ~valid[turn].T
            carried = np.where(np.asarray(starts)[turn] > 0, 0.0, self.carried[own])
            for t, reward in enumerate(counted):
                seen = carried + reward
                returns[t, turn] = seen
                carried = np.where(over[t], 0.0, np.where(stays[t], carried, self.gamma * seen))
            self.carried[own] = carried
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


def turns(envs: np.ndarray) -> list[np.ndarray]:
    """Indices into envs (int [N]), each env at most once per turn: first comings, then second ones, and so on."""
    order = np.argsort(envs, kind="stable")
    ordered = envs[order]
    coming = np.empty(len(envs), np.int64)
    coming[order] = np.arange(len(envs)) - np.searchsorted(ordered, ordered)
    return [np.flatnonzero(coming == turn) for turn in range(int(coming.max(initial=-1)) + 1)]
