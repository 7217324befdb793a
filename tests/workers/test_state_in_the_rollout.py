"""Which recurrent state stands in which row. A counter LSTM tells: its cell entering row t of an episode is 0.1 t.

A fault here does not crash and hardly shows in a learning curve; it only makes the memory wrong.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout_service import recurrence
from rollout_service.control.messages import StartFrom
from rollout_service.runspec import Core
from tests.fixtures.envs import RandomTickEnv, TickEnv, TinyEnv, TreeEnv
from tests.workers.rig import COUNTER_STEP, make_rig


def cells(rollout: dict[str, np.ndarray]) -> np.ndarray:
    """[N, T] of a counter LSTM with one layer: all its units are equal."""
    cell = rollout["cell"][:, :, 0]
    assert (cell == cell[:, :, :1]).all()
    return cell[:, :, 0]


def test_memory_of_a_finished_episode_does_not_leak_into_the_next() -> None:
    with make_rig(envs=[TickEnv(3)], counter=True, num_steps=10) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
    np.testing.assert_allclose(cells(rollout)[0], [0, 0.1, 0.2, 0, 0.1, 0.2, 0, 0.1, 0.2, 0], atol=1e-5)


def test_last_row_of_an_episode_has_its_state_and_the_next_row_has_zero() -> None:
    with make_rig(envs=[TickEnv(3)], num_steps=7, hidden_dim=5) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
        state = rig.policy.initial_state(1)
        for t in range(7):
            if t % 3 == 0:
                state = rig.policy.initial_state(1)
            for name in ("hidden", "cell"):
                np.testing.assert_allclose(rollout[name][0, t], state[name][0], atol=1e-6)
            state = rig.policy.step({"observations": torch.tensor(rollout["observations"][:, t])}, state).state
    assert np.abs(rollout["hidden"][0, 2]).min() > 0
    assert (rollout["hidden"][0, 3] == 0).all()
    assert (rollout["cell"][0, 3] == 0).all()


def test_a_row_holds_the_state_that_entered_it_not_the_one_that_left_it() -> None:
    with make_rig(envs=[TickEnv(100)], counter=True, num_steps=4) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
    np.testing.assert_allclose(cells(rollout)[0], [0.0, 0.1, 0.2, 0.3], atol=1e-5)
    np.testing.assert_allclose(rollout["final_cell"][0, 0], 0.4, atol=1e-5)
    np.testing.assert_allclose(rollout["final_hidden"][0, 0], np.tanh(0.4), atol=1e-5)


def test_an_episode_that_goes_on_carries_its_state_into_the_next_rollout() -> None:
    with make_rig(envs=[TickEnv(1000)], counter=True, num_steps=8) as rig:
        firsts, carries = [], []
        for lease, start in enumerate((StartFrom.FRESH, StartFrom.CARRY, StartFrom.CARRY)):
            _, rollout = rig.fill_all(start, bank=lease % 2)
            firsts.append(cells(rollout)[0, 0])
            carries.append(rollout["episode_start_carry"][0])
    np.testing.assert_allclose(firsts, [0.0, 0.8, 1.6], atol=1e-5)
    assert carries == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("end", ["term", "trunc", "both"])
def test_an_episode_that_ends_on_the_last_row_starts_the_next_rollout_from_zero(end: str) -> None:
    with make_rig(envs=[TickEnv(4, end), TickEnv(100)], counter=True, envs_per_actor=2, num_steps=4) as rig:
        _, first = rig.fill_all(StartFrom.FRESH)
        _, second = rig.fill_all(StartFrom.CARRY)
    np.testing.assert_allclose(first["final_cell"][:, 0, 0], [0.4, 0.4], atol=1e-5)
    np.testing.assert_allclose(cells(second)[:, 0], [0.0, 0.4], atol=1e-5)
    assert (second["hidden"][0, 0] == 0).all()
    assert second["episode_start_carry"].tolist() == [1.0, 0.0]
    assert second["observations"][:, 0].tolist() == [[1.0, 0.0], [0.0, 4.0]]


def test_one_finished_env_leaves_its_neighbours_alone() -> None:
    lengths = (3, 5, 7, 11)
    with make_rig(envs=[TickEnv(n) for n in lengths], counter=True, envs_per_actor=4, num_steps=40) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
    expected = [[COUNTER_STEP * (t % n) for t in range(40)] for n in lengths]
    np.testing.assert_allclose(cells(rollout), expected, atol=1e-5)


def test_every_row_of_many_rollouts_counts_the_steps_of_its_own_episode() -> None:
    leases, num_steps = 6, 16
    with make_rig(
        "tests.fixtures.envs:RandomTickEnv",
        counter=True,
        num_actors=2,
        envs_per_actor=4,
        envs_per_forward=2,
        num_steps=num_steps,
    ) as rig:
        ended_before = np.ones(8, bool)
        ends = set()
        for lease in range(leases):
            start = StartFrom.CARRY if lease else StartFrom.FRESH
            _, rollout = rig.fill_all(start, bank=lease % 2)
            np.testing.assert_allclose(cells(rollout), COUNTER_STEP * rollout["observations"][:, :, 1], atol=1e-5)
            assert (rollout["episode_start_carry"] == ended_before).all()
            assert rollout["valid"].all()
            ended = recurrence.ended(rollout["terminated"], rollout["truncated"], rollout["valid"])
            starts = recurrence.episode_starts(ended, rollout["episode_start_carry"])
            assert ((rollout["observations"][:, :, 1] == 0) == starts.astype(bool)).all()
            ended_before = ended[:, -1]
            ends |= set(zip(rollout["terminated"].flat, rollout["truncated"].flat, strict=True))
    assert ends == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_the_state_the_actor_carries_is_what_the_shared_rule_makes_of_its_final_state() -> None:
    with make_rig(
        "tests.fixtures.envs:RandomTickEnv", {"longest": 3}, envs_per_actor=8, num_steps=5, num_layers=2
    ) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
        last = recurrence.ended(rollout["terminated"], rollout["truncated"], rollout["valid"])[:, -1]
        assert 0 < last.sum() < 8
        seeded, carry = recurrence.warm_start(last, {name: rollout[f"final_{name}"] for name in ("hidden", "cell")})
        live = rig.actors[0].live
        for name, rows in seeded.items():
            assert rows.tobytes() == live.state[name].tobytes()
        assert carry.tolist() == live.carry.tolist()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_smallest_shapes_keep_all_their_axes(num_layers: int) -> None:
    with make_rig(envs=[TinyEnv()], num_steps=1, hidden_dim=1, num_layers=num_layers) as rig:
        for start in (StartFrom.FRESH, StartFrom.CARRY, StartFrom.CARRY):
            commits, rollout = rig.fill_all(start)
            assert commits[0].valid_steps == 1
            assert rollout["hidden"].shape == (1, 1, num_layers, 1)
            assert rollout["final_cell"].shape == (1, num_layers, 1)
            assert rollout["episode_start_carry"].tolist() == [1.0]
            assert np.isfinite(rollout["last_values"]).all()


def test_a_policy_without_memory_has_no_state_fields_and_still_fills_its_slot() -> None:
    with make_rig(envs=[TickEnv(3), TickEnv(4)], core=Core.NONE, envs_per_actor=2, num_steps=6) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
    assert "hidden" not in rollout
    assert rollout["observations"][:, :, 1].tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]]


def test_nested_observations_and_shifted_actions_fill_their_own_fields() -> None:
    with make_rig(envs=[TreeEnv(3), TreeEnv(4)], envs_per_actor=2, num_steps=6) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
    clocks = np.array([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])
    assert rollout["observations/image"].dtype == np.uint8
    assert (rollout["observations/image"][:, :, 1, 1, 2] == 10 * clocks).all()
    assert (rollout["observations/position"] == np.stack([clocks, -clocks], axis=2)).all()
    assert (rollout["observations/room"] == 1 + clocks % 4).all()
    assert (rollout["observations/pair/0"] == clocks / 8).all()
    assert (rollout["observations/pair/1"] == clocks % 2).all()
    assert set(rollout["actions"].flat) <= {3, 4, 5}
    assert (rollout["rewards"] == 0.5).all()


def test_fresh_starts_from_zero_in_the_middle_of_an_episode() -> None:
    with make_rig(envs=[TickEnv(1000)], counter=True, num_steps=4) as rig:
        rig.fill_all(StartFrom.FRESH)
        _, rollout = rig.fill_all(StartFrom.FRESH)
    np.testing.assert_allclose(cells(rollout)[0], [0.0, 0.1, 0.2, 0.3], atol=1e-5)
    assert rollout["episode_start_carry"].tolist() == [1.0]
    assert rollout["observations"][0, 0].tolist() == [0.0, 4.0]


def test_every_episode_of_an_actor_begins_with_the_same_zero_state() -> None:
    with make_rig(envs=[RandomTickEnv(5), RandomTickEnv(5)], envs_per_actor=2, num_steps=64) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
    firsts = rollout["observations"][:, :, 1] == 0
    assert firsts.sum() > 20
    assert (rollout["hidden"][firsts] == 0).all()
    assert (rollout["cell"][firsts] == 0).all()
