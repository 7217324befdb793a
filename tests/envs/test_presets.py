"""Presets are settings that TrainConfig accepts, and envs that exist."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollout_service.config import TrainConfig
from rollout_service.envs.make import check_contract, make_env
from rollout_service.envs.presets import load_preset, preset_names
from rollout_service.errors import ConfigError


def test_there_is_a_preset_for_every_task() -> None:
    assert preset_names() == ("flickering", "position", "recall", "tmaze")


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_a_whole_configuration_of_sixteen_envs(name: str) -> None:
    config = TrainConfig(**load_preset(name))
    assert config.num_actors == 2
    assert config.envs_per_actor == 8
    assert config.num_steps == 128
    env = make_env(config.env, config.env_kwargs)
    check_contract(env, config.env)
    env.close()


def test_the_demonstration_is_a_corridor_of_twenty_with_chrono_initialisation() -> None:
    preset = load_preset("tmaze")
    assert preset["env_kwargs"] == {"corridor": 20}
    assert (preset["total_steps"], preset["chrono_max"], preset["learning_rate"]) == (150_000, 128.0, 3e-3)


def test_an_unknown_preset_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no preset 'mujoco'; there are flickering, position, recall, tmaze"):
        load_preset("mujoco")


def test_presets_are_read_without_torch_and_gymnasium() -> None:
    code = (
        "import sys; from rollout_service.envs.presets import load_preset; load_preset('tmaze'); "
        "print(sorted({'torch', 'gymnasium'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
