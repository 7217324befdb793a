"""The built-in check of an env: what it turns out to be, and episodes that end inside it without a word."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from rollout_service.cli import main
from rollout_service.envs.check import EnvFacts, check_env, check_env_advances
from rollout_service.envs.make import make_env
from rollout_service.envs.memory_tasks import register
from rollout_service.errors import EnvFault
from rollout_service.launch.probe import EnvWarning, build_run_spec
from rollout_service.runspec import AutoresetMode, RunSpec, Vectorize
from tests.fixtures.envs import BoomEnv, RandomTickEnv, SilentRestartEnv, TickEnv
from tests.fixtures.training import small_config
from tests.fixtures.vector_envs import SilentVectorEnv, TickVectorEnv

HERE = "tests.fixtures.envs"
VECTORS = "tests.fixtures.vector_envs"


def test_a_counter_that_jumps_back_without_an_end_is_reported_and_an_ordinary_env_is_not() -> None:
    (warning,) = check_env(f"{HERE}:SilentRestartEnv", {"every": 91}).warnings
    assert f"env '{HERE}:SilentRestartEnv'" in warning
    assert "its attribute t counts steps and went from 90 back to 0" in warning
    assert "neither terminated nor truncated was set" in warning
    assert check_env(f"{HERE}:TickEnv", {"length": 91}).warnings == ()


@pytest.mark.parametrize(
    ("shown", "says"),
    [("info", "its info step counts steps"), ("observation", "its observation element observations[1] counts steps")],
)
def test_without_an_attribute_the_info_or_the_observation_tells(shown: str, says: str) -> None:
    warning = check_env_advances(SilentRestartEnv(20, shown), "Fixture")
    assert warning is not None
    assert says in warning


def test_a_time_limit_that_counts_on_outside_hides_nothing() -> None:
    limited = gymnasium.wrappers.TimeLimit(SilentRestartEnv(30), 500)
    assert "went from 29 back to 0" in str(check_env_advances(limited, "Fixture"))


@pytest.mark.parametrize(
    "env",
    [
        TickEnv(1),
        TickEnv(5, "trunc"),
        TickEnv(3, "both"),
        RandomTickEnv(9),
        SilentRestartEnv(shown="cycle"),
        SilentRestartEnv(shown="nowhere"),
        gymnasium.wrappers.TimeLimit(TickEnv(1000), 7),
        BoomEnv(at=20),
    ],
    ids=str,
)
def test_ends_that_are_reported_and_cycles_within_an_episode_are_no_restart(env: gymnasium.Env[Any, Any]) -> None:
    assert check_env_advances(env, "Fixture") is None


@pytest.mark.parametrize(
    "name",
    [
        "CartPole-v1", "MountainCar-v0", "Acrobot-v1", "FrozenLake-v1", "CliffWalking-v1", "Blackjack-v1",
        "Memory/TMaze-v0", "Memory/Recall-v0", "Memory/FlickeringCartPole-v0", "Memory/PositionCartPole-v0",
    ],
)  # fmt: skip
def test_envs_in_common_use_are_not_suspected(name: str) -> None:
    register()
    if name not in gymnasium.registry:
        pytest.skip(f"this gymnasium has no {name}")
    assert check_env_advances(make_env(name), name) is None


@pytest.mark.parametrize("autoreset", ["NextStep", "SameStep", "Disabled"])
def test_a_vector_env_is_watched_env_by_env_in_every_mode(autoreset: str) -> None:
    silent = SilentVectorEnv(3, every=40, autoreset=autoreset)
    assert "its attribute ticks counts steps and went from 39 back to 0 (env 0)" in str(
        check_env_advances(silent, "Fixture")
    )
    assert check_env_advances(TickVectorEnv(3, autoreset, length=5), "Fixture") is None


def test_gymnasiums_own_vector_env_is_watched_through_its_single_envs() -> None:
    silent = gymnasium.vector.SyncVectorEnv([lambda: SilentRestartEnv(25)] * 2)
    assert "attribute t" in str(check_env_advances(silent, "Fixture"))
    assert check_env_advances(gymnasium.vector.SyncVectorEnv([lambda: TickEnv(4)] * 2), "Fixture") is None


def test_a_slow_env_is_watched_for_a_second_and_no_longer() -> None:
    moments = iter(range(10_000))
    assert check_env_advances(SilentRestartEnv(91), "Fixture", seconds=50, clock=lambda: next(moments)) is None
    assert next(moments) == 52


@pytest.mark.parametrize(
    ("name", "kwargs", "vectorize", "mode"),
    [
        (f"{HERE}:TickEnv", {}, Vectorize.NONE, AutoresetMode.ACTOR),
        (f"{HERE}:TickEnv", {}, Vectorize.SYNC, AutoresetMode.NEXT_STEP),
        ("CartPole-v1", {"vector_kwargs": {"autoreset_mode": "SameStep"}}, Vectorize.SYNC, AutoresetMode.SAME_STEP),
        ("CartPole-v1", {"vector_kwargs": {"autoreset_mode": "disabled"}}, Vectorize.SYNC, AutoresetMode.DISABLED),
        ("CartPole-v1", {}, Vectorize.VECTOR_ENTRY_POINT, AutoresetMode.NEXT_STEP),
        (f"{VECTORS}:FixtureTicks-v0", {"autoreset": "SameStep"}, Vectorize.VECTOR_ENTRY_POINT,
         AutoresetMode.SAME_STEP),
        (f"{VECTORS}:ticks", {"autoreset": "Disabled"}, Vectorize.FACTORY, AutoresetMode.DISABLED),
    ],
)  # fmt: skip
def test_the_check_says_what_the_env_turned_out_to_be(
    name: str, kwargs: dict[str, Any], vectorize: Vectorize, mode: AutoresetMode
) -> None:
    facts = check_env(name, kwargs, vectorize, num_envs=3)
    single = check_env("CartPole-v1" if "CartPole" in name else f"{HERE}:TickEnv")
    assert facts == EnvFacts(single.spaces, mode, ())


@pytest.mark.parametrize("vectorize", [Vectorize.NONE, Vectorize.SYNC])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FourTupleEnv", "step returned 4 values, expected 5 (observation, reward, terminated, truncated, info)"),
        ("ObservationOnlyResetEnv", "reset returned one ndarray, expected 2 values (observation, info)"),
        ("BrokenResetEnv", "RuntimeError: no-reset-5"),
        ("NotAnEnv", "not a gymnasium.Env"),
    ],
)
def test_an_env_of_the_old_api_is_refused_in_one_line_that_says_what_is_supported(
    name: str, says: str, vectorize: Vectorize
) -> None:
    with pytest.raises(EnvFault) as caught:
        check_env(f"{HERE}:{name}", vectorize=vectorize)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ("supported: gymnasium 1.0 and newer" in str(caught.value)) == (name != "BrokenResetEnv")


def test_a_run_warns_of_a_silent_restart_before_it_starts() -> None:
    config = small_config(env=f"{HERE}:SilentRestartEnv", env_kwargs={})
    with pytest.warns(EnvWarning, match="began episodes anew without reporting an end"):
        spec = build_run_spec(config)
    probe = subprocess.run(
        [sys.executable, "-m", "rollout_service.launch.probe"],
        input=config.to_json(),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )
    warning, answer = probe.stdout.splitlines()
    assert "went from 90 back to 0" in json.loads(warning)["warning"]
    assert json.loads(warning)["warning"] in probe.stderr
    assert RunSpec.from_json(answer) == spec


def test_a_run_spec_says_how_the_vector_env_resets() -> None:
    kwargs = {"autoreset": "SameStep"}
    spec = build_run_spec(small_config(env=f"{VECTORS}:ticks", env_kwargs=kwargs, vectorize="factory"))
    assert (spec.vectorize, spec.autoreset) == (Vectorize.FACTORY, AutoresetMode.SAME_STEP)
    single = build_run_spec(small_config(env=f"{HERE}:TickEnv", env_kwargs={}))
    assert (single.vectorize, single.autoreset) == (Vectorize.NONE, AutoresetMode.ACTOR)
    assert single.spaces == spec.spaces


def test_the_command_reports_a_silent_restart_and_passes_a_sound_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "tests.fixtures.envs:SilentRestartEnv"]) == 1
    assert "warning      " in capsys.readouterr().out
    assert main(["check-env", "tests.fixtures.envs:TickEnv", "--env-kwargs", "length=91"]) == 0
    shown = capsys.readouterr().out
    assert "warning" not in shown
    assert "action       discrete int64, 2 choices from 0" in shown
