"""Bootstrap values: where an episode was cut, V of its final observation with the exiting state; at the end of a
rollout, V of what follows."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from rollout_service.control.messages import StartFrom
from rollout_service.policy.acting import ActingPolicy
from tests.fixtures.envs import RandomTickEnv, SameArrayEnv, TickEnv
from tests.workers.rig import Rig, make_rig
from workers.inference import TorchPolicy


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


@pytest.mark.parametrize("kind", [ActingPolicy, TorchPolicy])
def test_values_are_taken_of_the_named_envs_alone_and_leave_the_state_alone(
    kind: type[ActingPolicy | TorchPolicy],
) -> None:
    with make_rig(envs=[TickEnv(9) for _ in range(6)], envs_per_actor=6, envs_per_forward=2) as rig:
        policy = policy_of(kind, rig)
        rng = np.random.default_rng(0)
        observations = {"observations": rng.standard_normal((6, 2)).astype(np.float32)}
        for rows in policy.state.values():
            rows[...] = rng.standard_normal(rows.shape)
        entering = {name: rows.copy() for name, rows in policy.state.items()}
        out = np.full(6, -7, np.float32)
        policy.values(observations, [3, 4], out)
        expected = rig.policy.value(*({name: torch.tensor(rows) for name, rows in each.items()}
                                      for each in (observations, entering)))  # fmt: skip
        assert (out[[0, 1, 2, 5]] == -7).all()
        np.testing.assert_allclose(out[3:5], expected[3:5], atol=2e-6)
        for name, rows in entering.items():
            assert (policy.state[name] == rows).all()
        noise = np.zeros((6, 2), np.float32)
        assert policy.step(observations, noise).values[3:5].tobytes() == out[3:5].tobytes()
        assert not (policy.state["hidden"] == entering["hidden"]).any()


def test_only_chunks_with_a_named_env_are_run() -> None:
    with make_rig(envs=[TickEnv(9) for _ in range(6)], envs_per_actor=6, envs_per_forward=2) as rig:
        policy = TorchPolicy(rig.policy, rig.spec)
        observations = {"observations": np.stack([np.zeros(6, np.float32), np.arange(6, dtype=np.float32)], axis=1)}
        seen: list[list[float]] = []

        def value(rows: dict[str, torch.Tensor], _: object) -> torch.Tensor:
            seen.append(rows["observations"][:, 1].tolist())
            return torch.zeros(2)

        with mock.patch.object(rig.policy, "value", value):
            policy.values(observations, [3, 4], np.zeros(6, np.float32))
    assert seen == [[2.0, 3.0], [4.0, 5.0]]


def policy_of(kind: type[ActingPolicy | TorchPolicy], rig: Rig) -> ActingPolicy | TorchPolicy:
    """A policy with the rig's weights, for all its envs."""
    spec = rig.spec
    if kind is TorchPolicy:
        return TorchPolicy(rig.policy, spec)
    acting = ActingPolicy(spec.spaces, spec.policy, spec.envs_per_actor, spec.envs_per_forward)
    acting.load_arrays(rig.policy.to_arrays())
    return acting
