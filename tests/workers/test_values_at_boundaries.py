"""Bootstrap values: where an episode was cut, V of its final observation with the exiting state; at the end of a
rollout, V of what follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from rollout_service.control.messages import StartFrom
from rollout_service.policy.acting import ActedRows
from rollout_service.runspec import Spaces
from tests.fixtures.envs import RandomTickEnv, SameArrayEnv, TickEnv
from tests.workers.rig import Rig, make_rig
from workers.inference import Inference


def value_of(
    rig: Rig, observation: list[float], exiting_from: dict[str, np.ndarray] | None, row: tuple[int, int]
) -> Any:
    """V of an observation with the state that exits `row` of a rollout; without a rollout with zero state."""
    state = rig.policy.initial_state(1)
    if exiting_from is not None:
        e, t = row
        entering = {name: torch.tensor(exiting_from[name][e : e + 1, t]) for name in ("hidden", "cell")}
        seen = {"observations": torch.tensor(exiting_from["observations"][e : e + 1, t])}
        state = rig.policy.step(seen, entering).state
    return rig.policy.value({"observations": torch.tensor([observation])}, state).item()


def test_a_truncated_row_holds_the_value_of_its_final_observation_with_the_exiting_state() -> None:
    with make_rig(envs=[TickEnv(3, "trunc"), TickEnv(100)], envs_per_actor=2, num_steps=8) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
        expected = [value_of(rig, [k, 3.0], rollout, (0, 3 * k + 2)) for k in range(2)]
        of_reset = value_of(rig, [1.0, 0.0], None, (0, 2))
        with_zero_state = value_of(rig, [0.0, 3.0], None, (0, 2))
    stored = rollout["truncation_values"]
    np.testing.assert_allclose(stored[0, [2, 5]], expected, atol=1e-6)
    assert abs(stored[0, 2] - of_reset) > 1e-3
    assert abs(stored[0, 2] - rollout["values"][0, 2]) > 1e-3
    assert abs(stored[0, 2] - with_zero_state) > 1e-3
    assert np.isnan(stored[1]).all()
    assert np.isnan(np.delete(stored[0], [2, 5])).all()


@pytest.mark.parametrize("end", ["term", "both"])
def test_a_terminated_row_has_no_truncation_value(end: str) -> None:
    with make_rig(envs=[TickEnv(3, end)], num_steps=8) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
    assert np.isnan(rollout["truncation_values"]).all()
    assert rollout["terminated"][0].tolist() == [0, 0, 1, 0, 0, 1, 0, 0]
    assert rollout["truncated"][0].any() == (end == "both")


def test_final_observation_survives_an_env_that_reuses_its_array() -> None:
    results = []
    for kind in (TickEnv, SameArrayEnv):
        with make_rig(envs=[kind(3, "trunc")], num_steps=7) as rig:
            results.append(rig.fill_all(StartFrom.FRESH)[1])
    for name, rows in results[0].items():
        assert rows.tobytes() == results[1][name].tobytes(), name


def test_value_after_the_rollout_is_the_first_value_of_the_next_one() -> None:
    """At equal weights the same row is seen twice: ended envs from zero state, the others from the state they carry."""
    with make_rig(envs=[RandomTickEnv(3) for _ in range(8)], envs_per_actor=8, num_steps=6) as rig:
        _, first = rig.fill_all(StartFrom.FRESH)
        _, second = rig.fill_all(StartFrom.CARRY, bank=1)
    assert set(second["episode_start_carry"]) == {0.0, 1.0}
    assert first["last_values"].tobytes() == second["values"][:, 0].tobytes()


Array = np.ndarray[Any, Any]


class RecordingPolicy:
    """Value = the observation's second entry + 100 * the state's only number; each step adds 1 to the state."""

    def __init__(self) -> None:
        self.value_rows: list[tuple[list[float], list[float]]] = []

    def step(self, observations: Mapping[str, Array], state: Mapping[str, Array], noise: Array) -> ActedRows:
        rows = observations["observations"]
        values = rows[:, 1] + 100 * state["hidden"][:, 0, 0]
        return ActedRows(np.zeros(len(rows), np.int64), values * 0, values, {"hidden": state["hidden"] + 1})

    def value(self, observations: Mapping[str, Array], state: Mapping[str, Array]) -> Array:
        seen, held = observations["observations"][:, 1], state["hidden"][:, 0, 0]
        self.value_rows.append((seen.tolist(), held.tolist()))
        values: Array = seen + 100 * held
        return values


def test_only_chunks_with_a_truncated_env_are_run_again(spaces_of_tick: Spaces) -> None:
    policy = RecordingPolicy()
    inference = Inference(policy, spaces_of_tick, {"hidden": (1, 1)}, num_envs=6, rows_per_forward=2, noise_shape=(2,))
    observations = {"observations": np.stack([np.zeros(6, np.float32), np.arange(6, dtype=np.float32)], axis=1)}
    state = {"hidden": np.arange(6, dtype=np.float32).reshape(6, 1, 1)}
    out = np.full(6, -1, np.float32)
    inference.values(observations, state, [3, 4], out)
    assert policy.value_rows == [([2.0, 3.0], [2.0, 3.0]), ([4.0, 5.0], [4.0, 5.0])]
    assert out.tolist() == [-1, -1, -1, 303, 404, -1]


@pytest.fixture
def spaces_of_tick() -> Spaces:
    from rollout_service.envs.make import spaces_from_gymnasium

    env = TickEnv()
    return spaces_from_gymnasium(env.observation_space, env.action_space)
