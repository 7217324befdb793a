"""Recurrence is really there on the actor's path: two pasts with one present give different answers."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollout_service.control.messages import StartFrom
from rollout_service.errors import StateMissing
from rollout_service.runspec import Core
from tests.workers.rig import make_rig


class PastEnv(gymnasium.Env[Any, Any]):
    """Shows the same observation for 5 steps and then zero."""

    def __init__(self, past: float) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.past = past
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return np.full(1, self.past, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.full(1, self.past if self.t < 5 else 0.0, np.float32), 0.0, False, False, {}


def log_odds_of_action_1(rollout: dict[str, np.ndarray], t: int) -> np.ndarray:
    """[N], from the log-prob of whichever of the two actions was taken."""
    taken = rollout["log_probs"][:, t].astype(np.float64)
    other = np.log1p(-np.exp(taken))
    return np.where(rollout["actions"][:, t] == 1, taken - other, other - taken)


def test_two_pasts_with_the_same_present_act_differently() -> None:
    with make_rig(envs=[PastEnv(1.0), PastEnv(-1.0)], envs_per_actor=2, num_steps=6, hidden_dim=16) as rig:
        arrays = rig.policy.to_arrays()
        arrays["policy.weight"] *= 100  # a fresh action head hardly reacts to anything
        rig.weights.publish(1, arrays)
        _, rollout = rig.fill_all(StartFrom.FRESH)
    assert rollout["observations"][:, 5].tolist() == [[0.0], [0.0]]
    odds = log_odds_of_action_1(rollout, 5)
    assert abs(odds[0] - odds[1]) > 1e-3
    assert abs(rollout["values"][0, 5] - rollout["values"][1, 5]) > 1e-3


def test_without_a_recurrent_core_the_present_is_all_there_is() -> None:
    envs = [PastEnv(1.0), PastEnv(-1.0)]
    with make_rig(envs=envs, core=Core.NONE, envs_per_actor=2, num_steps=6, hidden_dim=16) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
    assert rollout["values"][0, 5] == rollout["values"][1, 5]


def test_a_missing_state_is_an_error_and_never_a_silent_zero() -> None:
    with make_rig() as rig, pytest.raises(StateMissing):
        rig.policy.step({"observations": torch.zeros(1, 2)}, None, None)
