"""`vectorize envpool`: how the package is called, and that its vector envs are rows like all others."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_service.control.messages import StartFrom
from rollout_service.envs.check import check_env
from rollout_service.envs.make_vector import make_vector_env
from rollout_service.envs.opening import open_envs
from rollout_service.errors import ConfigError, EnvFault
from rollout_service.runspec import AutoresetMode, Vectorize
from tests.fixtures.vector_envs import TickVectorEnv
from tests.workers.rig import make_rig


class Pool(TickVectorEnv):
    """Complains about seeds in a reset, as envpool does."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            warnings.warn("seeds are fixed when the environment is created", stacklevel=2)
        return super().reset(options=options)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """How the package, of which this is a double, was called."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def make_gymnasium(name: str, *, num_envs: int, seed: Any, num_threads: int, length: int = 3) -> Any:
        seen.append((name, {"num_envs": num_envs, "seed": seed, "num_threads": num_threads}))
        return object() if name == "Old-v1" else Pool(num_envs, "NextStep", length=length)

    monkeypatch.setitem(sys.modules, "envpool", SimpleNamespace(make_gymnasium=make_gymnasium))
    return seen


def test_a_pool_gets_one_seed_per_env_and_one_thread(calls: list[tuple[str, dict[str, Any]]]) -> None:
    make_vector_env("Tick-v1", None, Vectorize.ENVPOOL, 2, [7, 2**31 + 4])
    make_vector_env("Tick-v1", {"num_threads": 3}, Vectorize.ENVPOOL, 1, [0])
    assert calls == [
        ("Tick-v1", {"num_envs": 2, "seed": [7, 5], "num_threads": 1}),
        ("Tick-v1", {"num_envs": 1, "seed": [0], "num_threads": 3}),
    ]


@pytest.mark.usefixtures("calls")
def test_a_pool_is_rows_with_fillers_and_is_asked_for_no_seed_later() -> None:
    envs = open_envs("Tick-v1", {"length": 2}, Vectorize.ENVPOOL, env_ids=range(4, 6), seeds=[1, 2])
    out = {"observations": np.zeros((2, 2), np.float32)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs.reset_all(out)
    assert envs.autoreset is AutoresetMode.NEXT_STEP
    actions = np.zeros(2, np.int64)
    envs.step(actions, out)
    assert [(episode.env, episode.length) for episode in envs.step(actions, out).episodes] == [(4, 2)]
    assert envs.step(actions, out).valid.tolist() == [False, True]


@pytest.mark.usefixtures("calls")
def test_check_env_and_an_actor_take_a_pool() -> None:
    assert check_env("Tick-v1", {}, Vectorize.ENVPOOL, 2).autoreset is AutoresetMode.NEXT_STEP
    with make_rig("Tick-v1", {}, envs_per_actor=2, num_steps=6, vectorize=Vectorize.ENVPOOL) as rig:
        commits, rollout = rig.fill_all(StartFrom.FRESH)
    assert rollout["valid"].tolist() == [[1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 1]]
    assert commits[0].env_steps == 10


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigError, match=r"envpool cannot be imported .*; install rollout-service\[envpool\]"):
        make_vector_env("Tick-v1", None, Vectorize.ENVPOOL, 1, [0])


@pytest.mark.usefixtures("calls")
def test_a_release_without_gymnasium_vector_envs_is_refused() -> None:
    with pytest.raises(EnvFault, match=r"not a gymnasium\.vector\.VectorEnv"):
        make_vector_env("Old-v1", None, Vectorize.ENVPOOL, 1, [0])


@pytest.mark.filterwarnings("ignore:.*precision lowered.*:UserWarning")
def test_the_package_itself_if_it_is_installed() -> None:
    pytest.importorskip("envpool")
    with make_rig("CartPole-v1", {}, envs_per_actor=4, num_steps=64, vectorize=Vectorize.ENVPOOL) as rig:
        (commit,), rollout = rig.fill_all(StartFrom.FRESH)
    valid = rollout["valid"] == 1
    assert rig.spec.autoreset is AutoresetMode.NEXT_STEP
    assert commit.env_steps == np.count_nonzero(valid) < valid.size
    assert (rollout["rewards"] == valid).all()
    assert len(commit.episodes) == np.count_nonzero(rollout["terminated"])
    assert len({row.tobytes() for row in rollout["observations"][:, 0]}) == 4
