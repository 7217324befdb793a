"""`sys.exit` in code of the user's is a fault of that env, named like any other: nothing ends without a word."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

from rollout_service.envs.make import make_env, spaces_from_gymnasium
from rollout_service.envs.opening import open_envs
from rollout_service.envs.vector import EnvBatch
from rollout_service.errors import EnvFault, RunFailed
from rollout_service.launch.prepare import _read_answer
from rollout_service.memory.schema import OBSERVATIONS
from rollout_service.runspec import Vectorize


class ExitingEnv(gymnasium.Env[np.ndarray, np.int64]):
    """Exits where it is told to: make, reset, step."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, where: str) -> None:
        self.where = where
        self.exit_at("make")

    def exit_at(self, where: str) -> None:
        if where == self.where:
            sys.exit(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.exit_at("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action: np.int64):
        self.exit_at("step")
        return np.zeros(2, np.float32), 0.0, False, False, {}


NAME = f"{__name__}:ExitingEnv"


def batch(where: str, vectorize: Vectorize = Vectorize.NONE) -> Any:
    return open_envs(NAME, {"where": where}, vectorize, env_ids=range(4, 6), seeds=[1, 2], actor_id=2)


def rows() -> dict[str, np.ndarray]:
    return {OBSERVATIONS: np.zeros((2, 2), np.float32)}


@pytest.mark.parametrize("vectorize", [Vectorize.NONE, Vectorize.SYNC])
def test_an_exit_in_a_step_names_env_step_and_action(vectorize: Vectorize) -> None:
    envs = batch("step", vectorize)
    envs.reset_all(rows())
    with pytest.raises(EnvFault, match=r"of actor 2 .*last action.* step raised SystemExit: 0") as raised:
        envs.step(np.zeros(2, np.int64), rows())
    assert isinstance(raised.value.__cause__, SystemExit)


def test_an_exit_in_a_reset_names_the_env() -> None:
    envs = EnvBatch(
        [ExitingEnv("reset")],
        spaces_from_gymnasium(ExitingEnv.observation_space, ExitingEnv.action_space),
        env_ids=range(3, 4),
        seeds=[1],
    )
    with pytest.raises(EnvFault, match=r"env 0 .*global index 3.*: reset raised SystemExit: 0"):
        envs.reset_all(rows())


def test_an_exit_while_it_is_made_names_its_arguments() -> None:
    with pytest.raises(EnvFault, match=r"with arguments \{'where': 'make'\} could not be built: SystemExit: 0"):
        make_env(NAME, {"where": "make"})


def test_a_probe_that_ends_without_an_answer_is_a_failed_run_and_no_traceback() -> None:
    with pytest.raises(RunFailed, match="the env could not be tried out: the probe ended with exit code 0\nbye"):
        _read_answer(0, b"", "bye")  # as after os._exit(0) in the env
