"""`bench advise`: measures a small env, and recommends settings that `train` takes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rollout_service.bench import advise
from rollout_service.bench.rig import NULL_ENV, rollout_memory
from rollout_service.cli import main
from rollout_service.launch.settings import parse_train
from rollout_service.runspec import Leaf, SpaceKind

TINY = ("--hidden-dim", "8", "--encoder-dim", "8", "--num-steps", "8", "--envs-per-minibatch", "2", "--epochs", "1")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise, "PROBED", (1, 2))
    monkeypatch.setattr(advise, "ALONE_S", 0.02)
    monkeypatch.setattr(advise, "LEASE_S", 0.01)


def test_the_advice_is_a_command_line_of_train(short: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "advise", "--env", NULL_ENV, *TINY, "--num-envs", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    config = parse_train(["--env", NULL_ENV, *found["settings"].split()])
    plan = found["plan"]
    assert isinstance(config.num_actors, int)
    assert config.num_actors * config.envs_per_actor == plan["num_envs"] == 4
    assert (config.learner_threads, config.max_policy_lag) == (plan["learner_threads"], plan["max_policy_lag"])
    assert plan["steps_per_s"] > 0
    assert len(found["reasons"]) == 3
    assert {"env_reset_us", "env_step_us", "policy_1_envs_us", "update_of_a_sequence_1_threads_ms"} <= set(
        found["measured"]
    )
    assert all(math.isfinite(value) for value in found["measured"].values())
    assert "cores" in found["machine_cores"] or "affinity" in found["machine_cores"]


def test_people_get_a_table_and_reasons(short: None) -> None:
    config = parse_train(["--env", NULL_ENV, *TINY])
    text = advise.shown(advise.advise(config, (2, 4)))
    assert text.startswith(f"measured: {NULL_ENV}")
    assert "--num-actors" in text
    assert text.count("\n  - ") == 4


def test_wrong_settings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "advise", "--env", "NoSuchEnv-v0"]) == 2
    assert "NoSuchEnv" in capsys.readouterr().err
    assert main(["bench", "advise", "--num-envs", "0"]) == 2
    assert "num_envs is 0" in capsys.readouterr().err


def test_made_up_rows_are_in_the_spaces_of_the_run() -> None:
    config = parse_train(["--env", "Memory/Recall-v0", *TINY])
    spec = advise.resized(advise.run_spec(config), 2, 8)
    with rollout_memory(spec) as memory:
        advise.fill_made_up(memory.writer(0), spec, 1, np.random.default_rng(0), 0.2)
        rows = memory.rollout(range(1))
        assert rows["actions"].min() >= spec.spaces.action.start
        assert rows["actions"].max() < spec.spaces.action.start + (spec.spaces.action.size or 0)
        assert rows["terminated"].any()
        assert np.isfinite(rows["log_probs"]).all()


@pytest.mark.parametrize(
    ("leaf", "lowest", "highest"),
    [
        (Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=3, start=5), 5, 7),
        (Leaf(kind=SpaceKind.BOX, shape=(4,), dtype="uint8"), 0, 255),
    ],
)
def test_a_leaf_is_filled_with_values_that_it_may_have(leaf: Leaf, lowest: int, highest: int) -> None:
    array = np.zeros((64, 8, *leaf.shape), leaf.dtype)
    advise.fill_leaf(array, leaf, np.random.default_rng(1))
    assert (array.min(), array.max()) == (lowest, highest)
