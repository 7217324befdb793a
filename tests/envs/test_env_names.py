"""From a name to an env: ids, modules, factories, and one-line refusals of everything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from pydantic import ValidationError

from rollout_service.config import TrainConfig
from rollout_service.envs.make import check_contract, make_env
from rollout_service.envs.memory_tasks import TMaze
from rollout_service.errors import ConfigError, EnvFault, RolloutServiceError
from tests.fixtures.envs import TickEnv

HERE = "tests.fixtures.envs"


@pytest.mark.parametrize(
    ("name", "kwargs", "kind"),
    [
        ("CartPole-v1", {}, gymnasium.envs.classic_control.CartPoleEnv),
        ("Memory/TMaze-v0", {"corridor": 3}, TMaze),
        ("rollout_service.envs.memory_tasks:Memory/TMaze-v0", {}, TMaze),
        (f"{HERE}:FixtureTick-v0", {}, TickEnv),
        (f"{HERE}:Fixture/Tick-v0", {"end": "trunc"}, TickEnv),
        (f"{HERE}:TickEnv", {"length": 7}, TickEnv),
        (f"{HERE}:make_tick", {"length": 7, "end": "both"}, TickEnv),
    ],
)
def test_an_env_is_found_by_id_and_by_factory(name: str, kwargs: dict[str, object], kind: type) -> None:
    env = make_env(name, kwargs)
    assert isinstance(env.unwrapped, kind)
    for key, value in kwargs.items():
        unwrapped = env.unwrapped
        assert getattr(unwrapped, key, None) == value or getattr(unwrapped, f"_{key}", None) == value
    check_contract(env, name)
    env.close()


def test_a_module_of_the_current_directory_is_found_by_another_process(tmp_path: Path) -> None:
    (tmp_path / "my_corner.py").write_text("from tests.fixtures.envs import TickEnv\nmake = TickEnv\n")
    root = Path(__file__).parents[2]
    code = (
        f"import sys; sys.path.append({str(root)!r}); from rollout_service.envs.make import make_env; "
        "print(make_env('my_corner:make', {'length': 4}).length)"
    )
    shown = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout == "4\n"


def test_our_tasks_are_registered_for_anyone_who_imports_them() -> None:
    code = (
        "import warnings; warnings.simplefilter('error'); import rollout_service.envs.memory_tasks as tasks; "
        "tasks.register(); import gymnasium; print(gymnasium.make('Memory/TMaze-v0', corridor=2))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "<TMaze<Memory/TMaze-v0>>\n"


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "says"),
    [
        ("Nowhere-v0", {}, ConfigError, "Nowhere"),
        ("Memory/TMaz-v0", {}, ConfigError, "Did you mean: `TMaze`"),
        ("", {}, ConfigError, "Malformed environment ID"),
        ("no_such_module:make", {}, ConfigError, "No module named 'no_such_module'"),
        (f"{HERE}:no_such_factory", {}, ConfigError, "no callable 'no_such_factory'"),
        (f"{HERE}:LARGE", {}, ConfigError, "no callable 'LARGE'"),
        (f"{HERE}:NotAnEnv", {}, EnvFault, "tests.fixtures.envs.NotAnEnv, not a gymnasium.Env"),
        (f"{HERE}:TickEnv", {"height": 3}, EnvFault, "unexpected keyword argument 'height'"),
        ("Memory/TMaze-v0", {"corridor": 0}, ConfigError, "corridor is 0 steps, the least is 1"),
        ("gymnasium.vector:SyncVectorEnv", {"env_fns": [TickEnv]}, EnvFault, "vector env; set vectorize to factory"),
    ],
)
def test_what_is_not_an_env_is_refused_in_one_line(
    name: str, kwargs: dict[str, object], error: type[RolloutServiceError], says: str
) -> None:
    with pytest.raises(error) as caught:
        make_env(name, kwargs)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FourTupleEnv", "step returned 4 values, expected 5 (observation, reward, terminated, truncated, info)"),
        ("ObservationOnlyResetEnv", "reset returned one ndarray, expected 2 values (observation, info)"),
        ("BrokenResetEnv", "reset(seed=0) raised RuntimeError: no-reset-5"),
    ],
)
def test_an_env_of_the_old_api_is_refused_in_one_line(name: str, says: str) -> None:
    env = make_env(f"{HERE}:{name}")
    with pytest.raises(EnvFault) as caught:
        check_contract(env, name)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("made_here", [lambda: TickEnv(), TickEnv, TickEnv(length=4)], ids=["lambda", "class", "env"])
def test_an_env_that_is_no_name_is_refused_naming_it_and_what_to_give_instead(made_here: object) -> None:
    """Processes are fresh interpreters on every platform: what exists only in this one cannot reach them."""
    with pytest.raises(ValidationError) as refused:
        TrainConfig(env=made_here)
    (error,) = refused.value.errors()
    assert error["loc"] == ("env",)
    assert f"{made_here!r:.80}" in error["msg"]
    assert "give 'module:factory'" in error["msg"]
    assert "\n" not in error["msg"]


@pytest.mark.parametrize("value", [lambda: 1, TickEnv, {"deep": [object()]}, float("nan"), {1, 2}])
def test_an_argument_that_no_other_process_can_be_told_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValidationError, match=r"env_kwargs: level=.*let 'module:factory' make anything else"):
        TrainConfig(env_kwargs={"corridor": 3, "level": value})
