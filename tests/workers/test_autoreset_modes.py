"""However a vector env resets its envs, the actor's slots hold the same transitions, state and values.

In mode next_step a rollout also holds filler rows, one after each end. Nothing of them may be trained on, and they must
hide nothing: neither the final observation's value nor the state of the rows around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from learner import RecurrentRolloutBuffer
from rollout_service.control.messages import Commit, Grant, StartFrom
from rollout_service.errors import HandshakeRefused
from rollout_service.policy.acting import Acted, ActingPolicy
from rollout_service.recurrence import ended, warm_start
from rollout_service.runspec import AutoresetMode, Vectorize
from tests.workers.rig import Arrays, Rig, make_rig
from workers.actor import Actor

SINGLES = "tests.fixtures.envs"
VECTORS = "tests.fixtures.vector_envs"
STATE = ("hidden", "cell")
GYMNASIUM_NAMES = {"next_step": "NextStep", "same_step": "SameStep", "disabled": "Disabled"}


def ways(single: str, **kwargs: Any) -> dict[str, dict[str, Any]]:
    """make_rig's arguments for every way to step the same single envs."""
    env = f"{SINGLES}:{single}"
    options = {mode: {**kwargs, "vector_kwargs": {"autoreset_mode": mode}} for mode in GYMNASIUM_NAMES}
    sync = {mode: {"env": env, "kwargs": options[mode], "vectorize": Vectorize.SYNC} for mode in GYMNASIUM_NAMES}
    return {"actor": {"env": env, "kwargs": kwargs}, **sync}


def own(mode: str, factory: str = "ticks", **kwargs: Any) -> dict[str, Any]:
    """make_rig's arguments for a factory of vector envs; by default one with the numbers of TickEnv."""
    kwargs = {**kwargs, "autoreset": GYMNASIUM_NAMES[mode]}
    return {"env": f"{VECTORS}:{factory}", "kwargs": kwargs, "vectorize": Vectorize.FACTORY}


def tick_ways(**kwargs: Any) -> dict[str, dict[str, Any]]:
    """Single TickEnvs in every mode, and a vector env of its own in every mode."""
    return {**ways("TickEnv", **kwargs), **{f"own {mode}": own(mode, **kwargs) for mode in GYMNASIUM_NAMES}}


@contextmanager
def scripted_actions() -> Iterator[None]:
    """Noise that makes the action a function of the observation [episode, t]."""
    step = ActingPolicy.step

    def scripted(self: ActingPolicy, observations: Any, noise: Any) -> Acted:
        episode, t = observations["observations"].astype(np.int64).T
        forced = np.zeros_like(noise)
        forced[np.arange(len(forced)), (episode + t) % 2] = 1e6
        return step(self, observations, forced)

    with mock.patch.object(ActingPolicy, "step", scripted):
        yield


def transitions(rollouts: list[Arrays], e: int = 0) -> dict[str, list[Any]]:
    """The valid rows of env e, one after the other."""
    found: dict[str, list[Any]] = {}
    for name in ("observations", "actions", "rewards", "terminated", "truncated", *STATE, "values", "log_probs"):
        found[name] = [
            row.tolist() for r in rollouts for row, valid in zip(r[name][e], r["valid"][e], strict=True) if valid
        ]
    found["truncation_values"] = [
        float(value)
        for r in rollouts
        for value, valid in zip(r["truncation_values"][e], r["valid"][e], strict=True)
        if valid
    ]
    return found


def close_to(found: dict[str, list[Any]], expected: dict[str, list[Any]], rows: int) -> None:
    """Equal where nothing is computed, equal to float32 rounding elsewhere."""
    for name, values in expected.items():
        if name in (*STATE, "values", "log_probs", "truncation_values"):
            np.testing.assert_allclose(found[name][:rows], values[:rows], atol=1e-6, err_msg=name)
        else:
            assert found[name][:rows] == values[:rows], name


@pytest.mark.parametrize("end", ["term", "trunc", "both"])
@pytest.mark.parametrize("way", ways("EchoEnv"))
def test_nine_steps_of_three_episodes_are_the_same_nine_rows_in_every_mode(way: str, end: str) -> None:
    fillers = 3 if "next_step" in way else 0
    with scripted_actions(), make_rig(**ways("EchoEnv", end=end)["actor"], num_steps=9) as rig:
        expected = transitions([rig.fill_all(StartFrom.FRESH)[1]])
    with scripted_actions(), make_rig(**ways("EchoEnv", end=end)[way], num_steps=9 + fillers) as rig:
        (commit,), rollout = rig.fill_all(StartFrom.FRESH)
    assert rollout["valid"][0].tolist() == [1, 1, 1, 0] * 3 if fillers else [1] * 9
    close_to(transitions([rollout]), expected, 9)
    assert expected["observations"] == [[k, t] for k in range(3) for t in range(3)]
    assert expected["rewards"] == [t + 1 + 10 * ((k + t) % 2) for k in range(3) for t in range(3)]
    assert (commit.valid_steps, commit.env_steps) == (9 + fillers, 9)
    assert [(episode.length, episode.truncated) for episode in commit.episodes] == [(3, end == "trunc")] * 3
    assert np.mean([episode.length for episode in commit.episodes]) == 3.0
    assert [episode.total_reward for episode in commit.episodes] == [16.0, 26.0, 16.0]
    assert commit.counters == {}


@pytest.mark.parametrize("way", tick_ways())
def test_a_filler_has_no_reward_no_flag_and_zero_state(way: str) -> None:
    with make_rig(**tick_ways(end="trunc")[way], envs_per_actor=2, num_steps=23, hidden_dim=5) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
    invalid = rollout["valid"] == 0
    assert invalid.any() == ("next_step" in way)
    for name in ("rewards", "terminated", "truncated", *STATE):
        assert not rollout[name][invalid].any(), name
    after_an_end = np.roll(rollout["truncated"], 1, axis=1) == 1
    assert (invalid == (after_an_end & ("next_step" in way)))[:, 1:].all()
    assert np.abs(rollout["hidden"][rollout["truncated"] == 1]).min() > 0


@pytest.mark.parametrize("way", ways("TickEnv"))
def test_stored_state_is_that_of_each_episode_fed_alone_from_zeros(way: str) -> None:
    with make_rig(**ways("TickEnv")[way], num_steps=9, hidden_dim=5) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
        state = rig.policy.initial_state(1)
        for t in np.flatnonzero(rollout["valid"][0]):
            if rollout["observations"][0, t, 1] == 0:
                state = rig.policy.initial_state(1)
            for name in STATE:
                np.testing.assert_allclose(rollout[name][0, t], state[name][0], atol=1e-6)
            state = rig.policy.step({"observations": torch.tensor(rollout["observations"][:, t])}, state).state
    last = np.flatnonzero(rollout["terminated"][0])
    assert np.abs(rollout["hidden"][0, last]).min() > 0
    assert not rollout["hidden"][0, last[last < 8] + 1].any()


@pytest.mark.parametrize("way", ways("TickEnv"))
def test_a_row_holds_the_state_that_entered_it_in_every_mode(way: str) -> None:
    with make_rig(**ways("TickEnv", length=4)[way], counter=True, num_steps=14) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
    expected = [0, 0.1, 0.2, 0.3, *([0.0] if "next_step" in way else [])]
    np.testing.assert_allclose(
        rollout["cell"][0, :, 0, 0], [*expected, *expected, *expected, *expected][:14], atol=1e-5
    )


def oracle(rig: Rig, rollout: Arrays, e: int, t: int) -> float:
    """V of TickEnv's final observation after row t, with the state that exits row t."""
    entering = {name: torch.tensor(rollout[name][e : e + 1, t]) for name in STATE}
    seen = rollout["observations"][e : e + 1, t]
    exiting = rig.policy.step({"observations": torch.tensor(seen)}, entering).state
    return float(rig.policy.value({"observations": torch.tensor(seen + np.float32([0, 1]))}, exiting))


@pytest.mark.parametrize("way", tick_ways())
@pytest.mark.parametrize("num_steps", [3, 4, 5, 8])
def test_a_truncation_has_the_value_of_its_final_observation_wherever_the_rollout_ends(
    way: str, num_steps: int
) -> None:
    """num_steps 3: the end is the last row, and the filler row 0 of the next lease. 4: the filler is the last row."""
    with make_rig(**tick_ways(end="trunc")[way], num_steps=num_steps, hidden_dim=5) as rig:
        for lease in range(4):
            _, rollout = rig.fill_all(StartFrom.FRESH if lease == 0 else StartFrom.CARRY, bank=lease % 2)
            cut = np.flatnonzero(rollout["truncated"][0])
            expected = [oracle(rig, rollout, 0, t) for t in cut]
            np.testing.assert_allclose(rollout["truncation_values"][0, cut], expected, atol=1e-6)
            assert np.isnan(np.delete(rollout["truncation_values"][0], cut)).all()


@pytest.mark.parametrize("num_steps", [3, 4])
def test_a_filler_at_the_border_of_two_rollouts_hands_on_nothing(num_steps: int) -> None:
    with make_rig(**ways("TickEnv", end="trunc")["next_step"], counter=True, num_steps=num_steps) as rig:
        rows = [rig.fill_all(StartFrom.CARRY, bank=lease % 2)[1] for lease in range(4)]
    valid = [row["valid"][0].tolist() for row in rows]
    carry = [float(row["episode_start_carry"][0]) for row in rows]
    cells = np.concatenate([row["cell"][0, :, 0, 0] for row in rows])
    if num_steps == 3:
        assert valid == [[1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0]]
        assert carry == [1, 1, 0, 0]
    else:
        assert valid == [[1, 1, 1, 0]] * 4
        assert carry == [1, 1, 1, 1]
    np.testing.assert_allclose(cells, np.tile([0, 0.1, 0.2, 0], 4)[: len(cells)], atol=1e-5)


@pytest.mark.parametrize("way", ways("RandomTickEnv"))
def test_the_state_the_learner_seeds_is_the_one_the_actor_carries(way: str) -> None:
    with make_rig(**ways("RandomTickEnv", longest=4)[way], envs_per_actor=4, num_steps=6) as rig:
        rig.fill(StartFrom.FRESH)
        kinds = set()
        for lease in range(1, 9):
            rollout = rig.rollout((lease - 1) % 2)
            last = ended(rollout["terminated"], rollout["truncated"], rollout["valid"])[:, -1]
            kinds |= set(zip(rollout["valid"][:, -1].tolist(), last.tolist(), strict=True))
            state, carry = warm_start(last, {name: rollout[f"final_{name}"] for name in STATE})
            live = rig.actors[0].live
            following = rig.memory.rollout(rig.spec.bank(lease % 2))
            for name, rows in state.items():
                assert rows.tobytes() == live.state[name].tobytes()
                following[name][:, 0] = rows
            following["episode_start_carry"][:] = carry
            assert rig.fill(StartFrom.SEEDED, bank=lease % 2).counters == {}
    assert kinds == {(1, False), (1, True)} | ({(0, True)} if "next_step" in way else set())


@pytest.mark.parametrize("way", ways("RandomTickEnv"))
def test_envs_have_the_seeds_and_episodes_they_have_alone(way: str) -> None:
    """Random lengths and random ends: 4 envs, several leases, the same transitions as from single envs."""
    results = []
    for each in ("actor", way):
        with make_rig(**ways("RandomTickEnv", longest=5)[each], envs_per_actor=4, num_steps=12) as rig:
            leases = [rig.fill_all(StartFrom.CARRY, bank=k % 2) for k in range(4)]
            results.append(([rollout for _, rollout in leases], [c for commits, _ in leases for c in commits]))
    for e in range(4):
        expected, found = (transitions(rollouts, e) for rollouts, _ in results)
        for name in ("observations", "terminated", "truncated"):
            rows = min(len(found[name]), len(expected[name]))
            assert rows > 20
            assert found[name][:rows] == expected[name][:rows]
    lengths = [episodes_of(commits) for _, commits in results]
    assert [a[: len(b)] == b[: len(a)] for a, b in zip(*lengths, strict=True)] == [True] * 4


def episodes_of(commits: list[Commit]) -> list[list[tuple[int, float]]]:
    """Per env: length and return of each episode."""
    every = [episode for commit in commits for episode in commit.episodes]
    return [[(each.length, each.total_reward) for each in every if each.env == env] for env in range(4)]


@pytest.mark.parametrize("way", ways("EchoEnv"))
def test_advantages_of_whole_episodes_are_the_same_in_every_mode(way: str) -> None:
    results = []
    for each in ("actor", way):
        with scripted_actions(), make_rig(**ways("EchoEnv", end="trunc", length=4)[each], num_steps=15) as rig:
            rig.fill_all(StartFrom.FRESH)
            with RecurrentRolloutBuffer.over(rig.memory, rig.spec.bank(0)) as rollout:
                rollout.compute_advantages(rollout.last_values(), 0.9, 0.8)
                valid = rollout.valid()[:, 0]
                assert not rollout.advantages()[~valid].any()
                assert not rollout.returns()[~valid].any()
                starts = rollout.to_sequence_batch().episode_starts[0].numpy()
                assert starts[valid][:12].tolist() == [1, 0, 0, 0] * 3
                results.append([rollout.advantages()[valid][:12, 0], rollout.returns()[valid][:12, 0]])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [*ways("SameArrayEnv"), "factory"])
def test_an_env_that_returns_one_array_for_ever_gives_the_same_rows(way: str) -> None:
    results = []
    for single in ("TickEnv", "SameArrayEnv"):
        options = ways(single, end="trunc") | {"factory": own("same_step", "sync", single=single, end="trunc")}
        with make_rig(**options[way], envs_per_actor=2, num_steps=13, hidden_dim=5) as rig:
            results.append(rig.fill_all(StartFrom.FRESH)[1])
    for name, rows in results[0].items():
        assert rows.tobytes() == results[1][name].tobytes(), name


@pytest.mark.parametrize("mode", GYMNASIUM_NAMES)
def test_a_vector_env_that_returns_the_same_arrays_for_ever_gives_the_same_rows(mode: str) -> None:
    results = []
    for same in (False, True):
        with make_rig(**own(mode, end="trunc", same_arrays=same), envs_per_actor=3, num_steps=13) as rig:
            results.append(rig.fill_all(StartFrom.FRESH)[1])
    for name, rows in results[0].items():
        assert rows.tobytes() == results[1][name].tobytes(), name


@pytest.mark.parametrize("final", ["objects", "batch", "old"])
def test_every_form_of_a_hidden_final_observation_is_found(final: str) -> None:
    with make_rig(
        **own("same_step", end="trunc", final=final), envs_per_actor=4, envs_per_forward=2, num_steps=11, hidden_dim=5
    ) as rig:
        (commit,), rollout = rig.fill_all(StartFrom.FRESH)
        rows = np.argwhere(rollout["truncated"])
        expected = [oracle(rig, rollout, e, t) for e, t in rows]
    np.testing.assert_allclose(rollout["truncation_values"][tuple(rows.T)], expected, atol=1e-6)
    assert len(rows) == 3 + 2 + 2 + 1
    assert commit.counters == {}


def test_without_a_final_observation_the_last_value_stands_in_and_is_counted() -> None:
    with make_rig(**own("same_step", end="trunc", final="hidden"), envs_per_actor=4, num_steps=11) as rig:
        leases = []
        with pytest.warns(RuntimeWarning) as warned:
            leases += [rig.fill_all(StartFrom.CARRY, bank=bank) for bank in (0, 1)]
    ((first,), rollout), ((second,), _) = leases
    assert [str(warning.message).split(" truncates")[0] for warning in warned] == [
        f"vector env of actor 0 ({VECTORS}:ticks, global indices 0 to 3)"
    ]
    assert first.counters == {"truncations_without_final_obs": 8}
    assert second.counters["truncations_without_final_obs"] >= 7
    cut = rollout["truncated"] == 1
    assert rollout["truncation_values"][cut].tolist() == rollout["values"][cut].tolist()


def test_a_termination_needs_no_final_observation() -> None:
    with make_rig(**own("same_step", end="both", final="hidden"), envs_per_actor=2, num_steps=11) as rig:
        (commit,), _ = rig.fill_all(StartFrom.FRESH)
    assert commit.counters == {}


@pytest.mark.parametrize("way", ways("TickEnv"))
def test_a_preempted_lease_ends_well_on_every_kind_of_row(way: str) -> None:
    """Leases of 1 to 5 steps: the next one goes on where the last one stopped."""
    with make_rig(**ways("TickEnv", end="trunc")[way], counter=True, num_steps=8) as rig:
        rollouts = []
        for lease, steps in enumerate((3, 1, 2, 1, 5, 4, 3)):
            commit = rig.fill(StartFrom.CARRY, bank=lease % 2, preempted=steps.__le__)
            assert commit.valid_steps == steps
            rollout = {name: rows[:, :steps] for name, rows in rig.rollout(lease % 2).items() if rows.ndim > 1}
            assert commit.env_steps == int(rollout["valid"].sum())
            cut = rollout["truncated"] == 1
            assert np.isfinite(rollout["truncation_values"][cut]).all()
            assert np.isnan(rollout["truncation_values"][~cut]).all()
            rollouts.append(rollout)
    rows = transitions(rollouts)
    assert rows["observations"] == [[k // 3, k % 3] for k in range(len(rows["observations"]))]
    np.testing.assert_allclose(
        np.array(rows["cell"])[:, 0, 0], [0.1 * (k % 3) for k in range(len(rows["cell"]))], atol=1e-5
    )


@pytest.mark.parametrize("way", ways("TickEnv"))
def test_a_barrier_cuts_running_episodes_and_forgets_a_reset_that_was_due(way: str) -> None:
    with make_rig(**ways("TickEnv", end="term")[way], envs_per_actor=2, num_steps=3) as rig:
        rig.fill(StartFrom.FRESH, barrier_after=True)
        rig.fill(StartFrom.CARRY, bank=1)
        following = rig.rollout(1)
    assert following["valid"].tolist() == [[1, 1, 1]] * 2
    assert following["episode_start_carry"].tolist() == [1, 1]
    assert following["observations"][:, 0, 1].tolist() == [0, 0]


def test_the_ignored_action_reaches_no_env() -> None:
    with make_rig(**ways("EchoEnv")["next_step"], num_steps=12) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
        heard = rig.actors[0]._envs._envs.unwrapped.envs[0].unwrapped.heard  # type: ignore[attr-defined]
    valid = rollout["valid"][0] == 1
    seen = zip(rollout["observations"][0, valid].tolist(), rollout["actions"][0, valid].tolist(), strict=True)
    assert heard == [(int(episode), int(t), action) for (episode, t), action in seen]


def test_an_actor_says_how_its_own_env_resets_and_fills_nothing_under_another_mode() -> None:
    with make_rig(**ways("TickEnv")["same_step"]) as rig:
        assert rig.actors[0].join_facts().autoreset is AutoresetMode.SAME_STEP
        wrong = rig.spec.model_copy(update={"autoreset": AutoresetMode.NEXT_STEP})
        actor = Actor(wrong, rig.memory, rig.weights, 0)
        rig.actors.append(actor)
        assert actor.join_facts().autoreset is AutoresetMode.SAME_STEP
        with pytest.raises(HandshakeRefused, match="autoreset same_step, the run has next_step"):
            actor.fill(Grant(slot=0, epoch=1, version=0, start=StartFrom.FRESH, update=1))
