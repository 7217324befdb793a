"""The factor on a rollout's rewards: the configured one and, if asked for, the running deviation of the return.

Writer and reader: the trainer, once per rollout and before advantages are estimated. Rewards in the rollout stay raw.
What must never happen: a return that runs on from the episode of another env, or of another life of the same place;
two slots of one actor in one batch are taken in one after the other. Behind a rollout that was dropped the return goes
on from the one before it: rows that no update has seen count nowhere. Left to others: the statistics themselves
(return_normalizer).

Axis letters: T num_steps, N envs of the rollout, K valid_steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.return_normalizer import ReturnNormalizer, turns
from learner.rollout_buffer import RecurrentRolloutBuffer
from rollout_service.config import TrainConfig
from rollout_service.recurrence import ended
from rollout_service.runspec import RunSpec, StateStrategy

NOBODY = -1
"""No life of this run has been seen at that env."""


class RewardScale:
    """Of one run. Holds what its statistics need from rollout to rollout."""

    def __init__(self, config: TrainConfig, spec: RunSpec) -> None:
        self._fixed = config.reward_scale
        self._carried_state = spec.state_strategy is StateStrategy.STORED
        self._returns = ReturnNormalizer(spec.num_envs, config.gamma) if config.normalize_returns else None
        self._lives = np.full(spec.num_envs, NOBODY, np.int64)
        """Per env of the run: the incarnation whose rows were taken in last."""

    def take_in(self, rollout: RecurrentRolloutBuffer, counts: NDArray[np.int64]) -> float:
        """The factor on this rollout's rewards; takes the rollout into the statistics first.

        counts: K, int [N]; envs without rows are not looked at. Slots of one actor are in the order of their commits.
        """
        if self._returns is None:
            return self._fixed
        rows = np.flatnonzero(counts)
        valid = live_rows(rollout, counts)[rows]
        ends = ended(rollout.terminated().T[rows], rollout.truncated().T[rows], valid)
        ends &= np.arange(ends.shape[1]) < counts[rows, None]  # behind row K-1 nothing ends
        envs = rollout.run_env_ids()[rows]
        starts = self._starts(rollout.incarnations()[rows], rollout.episode_start_carry()[rows], envs)
        self._returns.update(rollout.rewards().T[rows], ends, valid, starts, envs)
        return self._fixed * self._returns.scale

    def _starts(
        self, lives: NDArray[np.int64], carry: NDArray[np.float32], envs: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """bool [n]: row 0 begins an episode that the last row before it did not end.

        The carry flag says so under `stored`. Under `zero` it is 1 in every rollout, and only a new life tells.
        """
        starts = np.empty(len(envs), np.bool_)
        for turn in turns(envs):
            last = self._lives[envs[turn]]
            other = lives[turn] != last
            starts[turn] = (carry[turn] > 0) | (other & (last != NOBODY)) if self._carried_state else other
            self._lives[envs[turn]] = lives[turn]
        return starts

    def to_arrays(self) -> dict[str, NDArray[np.float64]]:
        """State for a checkpoint: returns/carried, returns/statistics; none without statistics."""
        return {} if self._returns is None else {f"returns/{k}": v for k, v in self._returns.to_arrays().items()}

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """State from a checkpoint, by the names of `to_arrays`; others are not looked at."""
        if self._returns is not None:
            self._returns.load_arrays(arrays["returns/carried"], arrays["returns/statistics"])

    def forget_lives(self) -> None:
        """The rollouts to come are of another run than those before."""
        self._lives[:] = NOBODY


def live_rows(rollout: RecurrentRolloutBuffer, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [N, T]: the first K rows of each env, without those that are not valid (autoreset fillers)."""
    valid = rollout.valid().T
    live: NDArray[np.bool_] = valid & (np.arange(valid.shape[1]) < counts[:, None])
    return live
