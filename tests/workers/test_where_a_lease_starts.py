"""What an actor does with each kind of grant: seeded, carry, fresh, reset, barrier; and with a preemption."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_service import recurrence
from rollout_service.control.messages import StartFrom
from rollout_service.errors import EnvFault, IncompleteRollout, ProtocolError
from tests.fixtures.envs import BoomEnv, RandomTickEnv, ScriptedEnv, TickEnv
from tests.workers.rig import Rig, make_rig

STATE = ("hidden", "cell")


def seed_other_bank(rig: Rig, steps: int = 0) -> dict[str, np.ndarray]:
    """What the learner does after bank 0 (all its steps, or the first `steps`): row 0 and carry of bank 1, returned."""
    rollout = rig.rollout(0)
    last = recurrence.ended(rollout["terminated"], rollout["truncated"], rollout["valid"])[:, steps - 1]
    state, carry = recurrence.warm_start(last, {name: rollout[f"final_{name}"] for name in STATE})
    following = rig.memory.rollout(rig.spec.bank(1))
    for name, rows in state.items():
        following[name][:, 0] = rows
    following["episode_start_carry"][:] = carry
    return following


def test_a_right_seed_is_no_mismatch_and_the_rollout_goes_on() -> None:
    with make_rig(envs=[RandomTickEnv(4) for _ in range(4)], envs_per_actor=4, num_steps=9) as rig:
        rig.fill(StartFrom.FRESH)
        live = {name: rows.copy() for name, rows in rig.actors[0].live.state.items()}
        seed_other_bank(rig)
        commit = rig.fill(StartFrom.SEEDED, bank=1)
        assert commit.counters == {}
        for name in STATE:
            assert rig.rollout(1)[name][:, 0].tobytes() == live[name].tobytes()


def test_a_seed_that_differs_in_one_bit_is_counted_and_used() -> None:
    with make_rig(envs=[TickEnv(100) for _ in range(4)], envs_per_actor=4, num_steps=5) as rig:
        rig.fill(StartFrom.FRESH)
        following = seed_other_bank(rig)
        following["cell"][2, 0, 0, 1] = np.nextafter(following["cell"][2, 0, 0, 1], np.float32(9))
        following["episode_start_carry"][3] = 1.0
        seeded = following["cell"][:, 0].copy()
        commit = rig.fill(StartFrom.SEEDED, bank=1)
        assert commit.counters == {"seed_mismatches": 2}
        assert rig.rollout(1)["cell"][:, 0].tobytes() == seeded.tobytes()
        assert rig.rollout(1)["episode_start_carry"].tolist() == [0, 0, 0, 1]


def test_carry_writes_the_live_state_over_whatever_stands_in_the_slot() -> None:
    with make_rig(envs=[TickEnv(100)], counter=True, num_steps=5) as rig:
        rig.fill(StartFrom.FRESH)
        rig.memory.array("cell")[1] = 77.0
        rig.fill(StartFrom.CARRY, bank=1)
        np.testing.assert_allclose(rig.rollout(1)["cell"][0, :, 0, 0], [0.5, 0.6, 0.7, 0.8, 0.9], atol=1e-5)


def test_a_preempted_lease_commits_the_steps_it_has_and_the_next_one_goes_on() -> None:
    with make_rig(envs=[TickEnv(100), TickEnv(100)], counter=True, envs_per_actor=2, num_steps=8) as rig:
        commit = rig.fill(StartFrom.FRESH, preempted=lambda steps: steps >= 3)
        assert commit.valid_steps == 3
        assert rig.memory.header(0).valid_steps == 3
        assert rig.rollout(0)["valid"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]] * 2
        np.testing.assert_allclose(rig.rollout(0)["final_cell"][:, 0, 0], 0.3, atol=1e-5)
        rig.fill(StartFrom.CARRY, bank=1)
        following = rig.rollout(1)
        np.testing.assert_allclose(following["cell"][0, 0, 0, 0], 0.3, atol=1e-5)
        assert following["observations"][0, 0].tolist() == [0.0, 3.0]


def test_a_lease_that_ends_in_a_hurry_leaves_resets_to_the_next_one() -> None:
    """Both episodes end with the third step, and the lease with it: the commit does not wait for slow resets."""
    envs = [TickEnv(3), TickEnv(3, "trunc")]
    with make_rig(envs=envs, counter=True, envs_per_actor=2, num_steps=8) as rig:
        commit = rig.fill(StartFrom.FRESH, preempted=lambda steps: steps >= 3)
        assert [env.episode for env in envs] == [0, 0]
        first = rig.rollout(0)
        assert (commit.valid_steps, [episode.length for episode in commit.episodes]) == (3, [3, 3])
        assert first["terminated"][:, 2].tolist() == [1, 0]
        assert np.isfinite(first["truncation_values"][1, 2])
        assert np.isfinite(first["last_values"]).all()
        seed_other_bank(rig, 3)
        commit = rig.fill(StartFrom.SEEDED, bank=1)
        assert commit.counters.get("seed_mismatches", 0) == 0
        following = rig.rollout(1)
        assert following["episode_start_carry"].tolist() == [1.0, 1.0]
        assert following["observations"][:, 0].tolist() == [[1.0, 0.0], [1.0, 0.0]]
        np.testing.assert_allclose(following["cell"][:, :4, 0, 0], [[0.0, 0.1, 0.2, 0.0]] * 2, atol=1e-5)


def test_a_barrier_cuts_running_episodes_and_the_next_lease_begins_new_ones() -> None:
    with make_rig(envs=[TickEnv(100), TickEnv(4), TickEnv(4, "trunc")], envs_per_actor=3, num_steps=4) as rig:
        commit = rig.fill(StartFrom.FRESH, barrier_after=True)
        rollout = rig.rollout(0)
        assert rollout["truncated"][:, -1].tolist() == [1, 0, 1]
        assert rollout["terminated"][:, -1].tolist() == [0, 1, 0]
        assert rollout["truncation_values"][0, -1] == rollout["last_values"][0]
        assert np.isnan(rollout["truncation_values"][1, -1])
        assert np.isfinite(rollout["truncation_values"][2, -1])
        assert [episode.env for episode in commit.episodes] == [1, 2]
        rig.fill(StartFrom.CARRY, bank=1)
        following = rig.rollout(1)
        assert following["episode_start_carry"].tolist() == [1, 1, 1]
        assert (following["hidden"][:, 0] == 0).all()
        assert following["observations"][:, 0].tolist() == [[1, 0], [2, 0], [2, 0]]


def test_reset_envs_makes_two_actors_with_different_pasts_equal() -> None:
    rollouts = []
    for leases in (1, 3):
        with make_rig("tests.fixtures.envs:RandomTickEnv", envs_per_actor=2, num_steps=7) as rig:
            for _ in range(leases):
                rig.fill(StartFrom.FRESH)
            rig.fill(StartFrom.FRESH, reset_envs=True, update=12)
            rollouts.append(rig.rollout(0))
    for name, rows in rollouts[0].items():
        assert rows.tobytes() == rollouts[1][name].tobytes(), name


def test_reset_envs_with_another_start_than_fresh_is_refused() -> None:
    with make_rig() as rig, pytest.raises(ProtocolError, match="reset_envs with start=carry"):
        rig.fill(StartFrom.CARRY, reset_envs=True)


def test_the_slot_carries_the_stamps_of_its_lease() -> None:
    with make_rig(num_actors=2, incarnation=3) as rig:
        commit = rig.fill(StartFrom.FRESH, actor=1, bank=1)
        header = rig.memory.header(3)
        assert (header.epoch, header.actor, header.incarnation, header.version) == (commit.epoch, 1, 3, 0)
        assert header.committed
        assert (commit.slot, commit.valid_steps, commit.version) == (3, 8, 0)


def test_weights_are_taken_at_lease_start_and_their_version_is_reported() -> None:
    with make_rig(envs=[TickEnv(100)], num_steps=2) as rig:
        first = rig.fill(StartFrom.FRESH)
        value = rig.rollout(0)["values"][0, 0]
        arrays = rig.policy.to_arrays()
        arrays["value_head.bias"] += 1.0
        rig.weights.publish(5, arrays)
        second = rig.fill(StartFrom.FRESH)
        third = rig.fill(StartFrom.CARRY)
        assert (first.version, second.version, third.version) == (0, 5, 5)
        assert rig.memory.header(0).version == 5
        rig.policy.load_arrays(arrays)
        assert value != rig.rollout(0)["values"][0, 0]


def test_finished_episodes_are_reported_raw_with_their_global_env() -> None:
    with make_rig("tests.fixtures.envs:RecallEnv", {"steps": 5}, num_actors=2, envs_per_actor=2, num_steps=12) as rig:
        rig.fill(StartFrom.FRESH, actor=0)
        commit = rig.fill(StartFrom.FRESH, actor=1)
        rewards = rig.rollout(0)["rewards"][2:]
    assert [(episode.env, episode.length) for episode in commit.episodes] == [(2, 5), (3, 5), (2, 5), (3, 5)]
    returns = [rewards[0, :5].sum(), rewards[1, :5].sum(), rewards[0, 5:10].sum(), rewards[1, 5:10].sum()]
    assert [episode.total_reward for episode in commit.episodes] == returns
    assert [episode.success for episode in commit.episodes] == [bool(total) for total in returns]


def test_an_episode_across_rollouts_is_counted_once_and_whole() -> None:
    with make_rig(envs=[TickEnv(10)], num_steps=4) as rig:
        counts = [rig.fill(StartFrom.CARRY).episodes for _ in range(5)]
    assert [len(episodes) for episodes in counts] == [0, 0, 1, 0, 1]
    assert [(e.length, e.total_reward) for episodes in counts for e in episodes] == [(10, 10.0), (10, 10.0)]


def test_more_episodes_than_a_message_may_carry_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.actor.EPISODES_PER_COMMIT", 3)
    with make_rig(envs=[TickEnv(1)], num_steps=8) as rig:
        commit = rig.fill(StartFrom.FRESH)
    assert len(commit.episodes) == 3
    assert commit.counters == {"episodes_not_reported": 5}


def test_a_raising_env_names_itself_its_actor_its_step_and_its_last_action() -> None:
    envs = [TickEnv(), TickEnv(), TickEnv(), BoomEnv(at=20)]
    with make_rig(envs=envs, num_actors=2, envs_per_actor=2, num_steps=32) as rig:
        rig.fill(StartFrom.FRESH, actor=0)
        with pytest.raises(EnvFault) as caught:
            rig.fill(StartFrom.FRESH, actor=1)
        assert not rig.memory.header(1).committed
    text = str(caught.value)
    assert "env 1 of actor 1" in text
    assert "global index 3" in text
    assert "step 20 of its episode" in text
    assert "last action" in text
    assert "ValueError: boom-7" in text
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_nan_observation_stops_the_lease_before_it_reaches_the_slot() -> None:
    bad = ScriptedEnv("observation", {4: np.array([0, np.nan], np.float32)})
    with make_rig(envs=[TickEnv(), TickEnv(), bad, TickEnv()], envs_per_actor=4, num_steps=8) as rig:
        with pytest.raises(EnvFault, match=r"env 2 of actor 0 .* step 5 .*: observations is not finite: \[ 0. nan\]"):
            rig.fill(StartFrom.FRESH)
        assert np.isfinite(rig.memory.array("observations")[0, :, :5]).all()
        assert not rig.memory.array("valid")[0, :, 4:].any()
        assert not rig.memory.header(0).committed


def test_a_policy_that_turns_nan_cannot_commit() -> None:
    with make_rig() as rig:
        arrays = rig.policy.to_arrays()
        arrays["value_head.bias"][:] = np.nan
        rig.weights.publish(1, arrays)
        with pytest.raises(IncompleteRollout, match="values of slot 0 is nan at step 0, env 0"):
            rig.fill(StartFrom.FRESH)
