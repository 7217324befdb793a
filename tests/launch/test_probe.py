"""The probe says what a run will be, or why it cannot be, in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_service.errors import ConfigError, EnvFault, SpaceNotSupported
from rollout_service.launch.probe import build_run_spec
from rollout_service.runspec import RunSpec, SpaceKind
from tests.fixtures.training import small_config

ROOT = Path(__file__).parents[2]


def probe(text: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the answer, and standard error of a probe process."""
    ended = subprocess.run(
        [sys.executable, "-m", "rollout_service.launch.probe"],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    lines = ended.stdout.splitlines()
    assert len(lines) == 1, ended
    return ended.returncode, json.loads(lines[0]), ended.stderr


def test_a_run_spec_says_what_env_and_policy_turned_out_to_be() -> None:
    config = small_config(num_layers=2, hidden_dim=8, envs_per_forward=1)
    spec = build_run_spec(config)
    assert spec.spaces.observation[0].shape == (3,)
    assert (spec.spaces.action.kind, spec.spaces.action.size) == (SpaceKind.DISCRETE, 3)
    assert spec.state == {"hidden": (2, 8), "cell": (2, 8)}
    assert "core.weight_ih_l1" in {parameter.name for parameter in spec.parameters}
    assert (spec.num_actors, spec.envs_per_actor, spec.envs_per_forward, spec.num_steps) == (2, 2, 1, 16)


def test_the_process_gives_the_same_document_and_lets_nothing_between() -> None:
    config = small_config(env="tests.fixtures.random_ends:talkative", env_kwargs={})
    code, answer, words = probe(config.to_json())
    assert code == 0
    assert RunSpec.model_validate(answer) == build_run_spec(config)
    assert "talking" in words


def test_it_waits_for_no_torch() -> None:
    code = "import sys, rollout_service.launch.probe as probe; print(probe.main(), 'torch' in sys.modules)"
    text = small_config(device="auto", normalize_observations=True).to_json()
    ran = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.splitlines()[-1:] == ["0 False"], ran


def test_an_env_that_does_not_exist_is_one_line_and_exit_code_2() -> None:
    code, answer, _ = probe(small_config(env="Nowhere-v0", env_kwargs={}).to_json())
    assert code == 2
    assert answer["error"] == "ConfigError"
    assert "Nowhere" in answer["message"]


def test_settings_that_are_no_settings_are_refused() -> None:
    code, answer, _ = probe('{"num_steps": 0}')
    assert code == 2
    assert "num_steps" in answer["message"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none_is_one_line_and_exit_code_2() -> None:
    code, answer, _ = probe(small_config(device="cuda").to_json())
    assert code == 2
    assert answer["error"] == "ConfigError"
    assert "\n" not in answer["message"]
    assert "use --device cpu or auto" in answer["message"]


@pytest.mark.parametrize(
    ("env", "error"),
    [
        ("tests.fixtures.envs:FourTupleEnv", EnvFault),
        ("tests.fixtures.envs:ObservationOnlyResetEnv", EnvFault),
        ("tests.fixtures.envs:NotAnEnv", EnvFault),
        ("tests.fixtures.envs:BrokenResetEnv", EnvFault),
        ("Pendulum-v1", SpaceNotSupported),
    ],
)
def test_an_env_that_cannot_be_run_is_refused_before_anything_starts(env: str, error: type[Exception]) -> None:
    with pytest.raises(error) as refused:
        build_run_spec(small_config(env=env, env_kwargs={}))
    assert "\n" not in str(refused.value)


def test_a_number_of_actors_that_is_not_resolved_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_actors is 'auto'"):
        build_run_spec(small_config(num_actors="auto"))
