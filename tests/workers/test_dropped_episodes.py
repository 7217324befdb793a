"""Episodes that are dropped for bad data: what slots, updates and counters make of them, in every autoreset mode.

The oracle is a plain loop over the same script (tests/fixtures/bad_data.py): it says which rows a slot holds and which
of them are valid; values and advantages are then computed from the valid rows alone, as if nothing else had been there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from learner import RecurrentRolloutBuffer
from learner.evaluate import load_policy, play
from rollout_service.checkpoint import POLICY_PREFIX
from rollout_service.control.messages import Commit, StartFrom
from rollout_service.envs.bad_data import FRUITLESS_EPISODES, BadData
from rollout_service.errors import EnvFault
from rollout_service.launch.serial import SerialRun, weights_digest
from rollout_service.recurrence import ended, warm_start
from rollout_service.runspec import AutoresetMode, OnBadData, Vectorize
from tests.fixtures.bad_data import BadTickEnv, FlakyEnv, Row, Script, flags, kept_rows, observation, reward_of
from tests.fixtures.envs import TickEnv
from tests.fixtures.training import serial_run, sharpen, small_config
from tests.workers.rig import Arrays, Rig, make_rig

MODES = ("actor", "next_step", "same_step", "disabled")
SCRIPTS: tuple[Script, ...] = (
    {},
    {"0:3": "nan", "2:8": "huge", "4:5": "reward", "6:1": "inf", "6:2": "nan"},
    {"1:0": "nan", "2:9": "reward", "3:1": "reward", "5:0": "inf", "7:4": "nan"},
    {"0:1": "reward", "1:3": "nan", "2:2": "inf", "2:6": "reward", "3:4": "huge", "9:0": "nan", "10:0": "nan"},
)
LENGTHS = (7, 8, 3, 8, 1, 8, 8, 2, 8)
"""Of the leases, of at most 8 steps: some are preempted."""
GAMMA, LAMBDA = 0.9, 0.8


def rig_options(mode: str, **options: Any) -> dict[str, Any]:
    """Arguments of a rig of four flaky envs in that mode."""
    common = {"envs_per_actor": 4, "num_steps": 8, "on_bad_data": OnBadData.DROP, "obs_limit": 1e6, **options}
    if mode == "actor":
        return {"envs": [FlakyEnv(script) for script in SCRIPTS], **common}
    kwargs = {"autoreset": mode, "scripts": list(SCRIPTS)}
    return {
        "env": "tests.fixtures.bad_data:flaky_vector", "kwargs": kwargs, "vectorize": Vectorize.FACTORY, **common,
    }  # fmt: skip


def values_of(rig: Rig, episode: int) -> tuple[list[float], list[Any]]:
    """V of every observation of an episode, the final one included, and the state entering each, from zero state."""
    state, values, entering = rig.policy.initial_state(1), [], []
    with torch.no_grad():
        for t in range(11):
            seen = {"observations": torch.tensor(observation(episode, t))[None]}
            entering.append({name: rows.numpy().copy() for name, rows in state.items()})
            values.append(float(rig.policy.value(seen, state)))
            state = rig.policy.step(seen, state).state
    return values, entering


def advantages_of(rows: list[Row], values: dict[int, list[float]]) -> list[float]:
    """GAE over the valid rows of one slot, in order, one row after the other."""
    valid = [row for row in rows if row.valid and row.t is not None]
    found: list[float] = []
    following = 0.0
    for k in reversed(range(len(valid))):
        episode, t = valid[k].episode, int(valid[k].t or 0)
        terminated, truncated = flags(episode, t + 1)
        after = 0.0 if terminated else values[episode][t + 1]
        delta = reward_of(episode, t + 1) + GAMMA * after - values[episode][t]
        goes_on = k + 1 < len(valid) and not (terminated or truncated)
        following = delta + GAMMA * LAMBDA * following * goes_on
        found.append(following)
    return found[::-1]


def collected(rig: Rig, lengths: Sequence[int]) -> list[tuple[Commit, Arrays, Any]]:
    """Every lease's commit, slot, and advantages [E, K]."""
    found = []
    for lease, length in enumerate(lengths):
        commit = rig.fill(StartFrom.CARRY, bank=lease % 2, preempted=length.__le__)
        rollout = rig.rollout(lease % 2)
        buffer = RecurrentRolloutBuffer.over(rig.memory, rig.spec.bank(lease % 2))
        buffer.compute_advantages_partial(length, rollout["last_values"], GAMMA, LAMBDA)
        found.append((commit, rollout, buffer.advantages().T[:, :length].copy()))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_valid_rows_values_and_advantages_are_those_of_a_loop_without_the_dropped_episodes(mode: str) -> None:
    """Also: the state entering each row, carry flags from slot to slot, counters, and nothing that is not finite."""
    expected = [kept_rows(script, AutoresetMode(mode), LENGTHS) for script in SCRIPTS]
    with make_rig(**rig_options(mode)) as rig:
        with torch.no_grad():
            rig.policy.policy.weight.mul_(50.0)
            rig.weights.publish(1, rig.policy.to_arrays())
        leases = collected(rig, LENGTHS)
        known = {episode: values_of(rig, episode) for episode in range(40)}
    values = {episode: found[0] for episode, found in known.items()}
    dropped = 0
    for lease, (commit, slot, advantages) in enumerate(leases):
        length = LENGTHS[lease]
        for e in range(4):
            rows = expected[e][lease]
            valid = [row.valid for row in rows]
            assert slot["valid"][e, :length].tolist() == valid, (lease, e)
            kept = [(row.episode, int(row.t or 0)) for row in rows if row.valid]
            mask = np.array(valid)
            np.testing.assert_array_equal(
                slot["observations"][e, :length][mask], np.array([observation(*at) for at in kept]).reshape(-1, 2)
            )
            np.testing.assert_array_equal(
                slot["rewards"][e, :length][mask], np.array([reward_of(k, t + 1) for k, t in kept], np.float32)
            )
            np.testing.assert_allclose(slot["values"][e, :length][mask], [values[k][t] for k, t in kept], atol=1e-5)
            for name in rig.spec.state:
                states = [known[k][1][t][name][0] for k, t in kept]
                stored = slot[name][e, :length]
                np.testing.assert_allclose(stored[mask], np.reshape(states, stored[mask].shape), atol=1e-5)
            np.testing.assert_allclose(advantages[e][mask], advantages_of(rows, values), atol=1e-4)
            assert not advantages[e][~mask].any()
            dropped += sum(not row.valid and row.t is not None for row in rows)
        for name in ("observations", "rewards", "values", "log_probs", *rig.spec.state):
            assert np.isfinite(slot[name][:, :length]).all(), name
        over = ended(slot["terminated"], slot["truncated"], slot["valid"])[:, length - 1]
        if lease + 1 < len(leases):
            _, carry = warm_start(over, {})
            np.testing.assert_array_equal(leases[lease + 1][1]["episode_start_carry"], carry)
        assert commit.env_steps == slot["valid"][:, :length].sum()
    total: Counter[str] = Counter()
    for commit, _, _ in leases:
        total.update(commit.counters)
    assert total["dropped_bad_env_steps"] == dropped > 0
    assert total["bad_observations"] > 3
    assert total["bad_rewards"] > 1
    assert total["dropped_episodes"] > 5
    assert all(len(commit.remarks) <= 4 for commit, _, _ in leases)


def test_bad_data_are_found_in_their_step_and_touch_nothing_else() -> None:
    """Env 2 of 4: NaN at step 50, an infinite reward at step 80, and 1e38 under a limit of 1e6 at step 100."""

    def envs(bad: Any) -> list[Any]:
        return [TickEnv(1000), TickEnv(1000), bad, TickEnv(1000)]

    flaky = BadTickEnv(nan=[50], reward=[80], huge=[100])
    options: dict[str, Any] = {"envs_per_actor": 4, "num_steps": 40, "obs_limit": 1e6}
    with make_rig(envs=envs(flaky), on_bad_data=OnBadData.DROP, **options) as rig:
        leases = [(rig.fill(StartFrom.CARRY, bank=k % 2), rig.rollout(k % 2)) for k in range(3)]
    with make_rig(envs=envs(TickEnv(1000)), **options) as rig:
        clean = [(rig.fill(StartFrom.CARRY, bank=k % 2), rig.rollout(k % 2)) for k in range(3)]
    stories = [story for commit, _ in leases for story in commit.remarks]
    where = "env 2 of actor 0 (tests.fixtures.envs:TickEnv, global index 2), step {} of its episode, last action "
    assert [len(commit.remarks) for commit, _ in leases] == [0, 2, 1]
    assert all(where.format(at) in story for at, story in zip((50, 30, 20), stories, strict=True))
    assert "observations is not finite: [ 0. nan]; the episode is dropped" in stories[0]
    assert "reward is inf, which is not a finite float32; the episode is dropped" in stories[1]
    assert "observations holds 1e+38, beyond obs_limit 1e+06; the episode is dropped" in stories[2]
    # Steps 41 to 50 and 51 to 80 are all of the second slot, 81 to 100 half of the third.
    assert [dict(commit.counters) for commit, _ in leases] == [
        {},
        {"bad_observations": 1, "bad_rewards": 1, "dropped_episodes": 2, "dropped_bad_env_steps": 40},
        {"bad_observations": 1, "dropped_episodes": 1, "dropped_bad_env_steps": 20},
    ]
    assert [commit.env_steps for commit, _ in leases] == [160, 120, 140]
    others = [0, 1, 3]
    for (_, slot), (_, same) in zip(leases, clean, strict=True):
        for name in slot:
            assert slot[name][others].tobytes() == same[name][others].tobytes(), name
    assert leases[2][1]["valid"][2].tolist() == [0] * 20 + [1] * 20
    assert leases[2][1]["observations"][2, 20].tolist() == [3, 0], "the fourth episode begins"
    assert not leases[2][1]["hidden"][2, 20].any(), "from zero state"


def test_where_bad_data_stop_the_run_the_error_names_them() -> None:
    with (
        make_rig(envs=[TickEnv(), BadTickEnv(nan=[3])], envs_per_actor=2) as rig,
        pytest.raises(EnvFault, match=r"env 1 of actor 0 .*step 3 of its episode, last action \d: observations is not"),
    ):
        rig.fill(StartFrom.FRESH)


def test_an_env_that_never_ends_an_episode_goes_on_as_long_as_some_of_its_rows_are_kept() -> None:
    drops = FRUITLESS_EPISODES + 5
    env = BadTickEnv(nan=range(10, 10 * drops + 1, 10))
    with make_rig(envs=[env], num_steps=8, on_bad_data=OnBadData.DROP) as rig:
        counters: Counter[str] = Counter()
        for lease in range(10 * drops // 8 + 1):
            counters.update(rig.fill(StartFrom.CARRY, bank=lease % 2).counters)
    assert counters["dropped_episodes"] == drops


def test_a_barrier_does_not_end_what_was_dropped() -> None:
    with make_rig(envs=[FlakyEnv({"0:2": "nan"}), FlakyEnv()], envs_per_actor=2, num_steps=2,
                  on_bad_data=OnBadData.DROP) as rig:  # fmt: skip
        commit = rig.fill(StartFrom.FRESH, barrier_after=True)
        slot = rig.rollout()
    assert slot["valid"].tolist() == [[0, 0], [1, 1]]
    assert slot["truncated"].tolist() == [[0, 0], [0, 1]]
    assert commit.env_steps == 2


# Training


def flaky_config(mode: str, **settings: Any) -> Any:
    """A small run on envs that are bad every now and then."""
    kwargs: dict[str, Any] = {"bad": 0.05, "end": 0.15}
    vectorize = Vectorize.NONE
    if mode != "actor":
        kwargs["vector_kwargs"], vectorize = {"autoreset_mode": mode}, Vectorize.SYNC
    return small_config(
        env="tests.fixtures.bad_data:FlakyEnds", env_kwargs=kwargs, vectorize=vectorize, on_bad_data="drop",
        obs_limit=1e6, self_check=1, normalize_observations=True, normalize_returns=True, learning_rate=1e-2,
        **settings,
    )  # fmt: skip


def poison(run: SerialRun, slots: range) -> int:
    """Overwrites what rows that are not valid hold, but for their state and flags. Returns how many there were."""
    rollout = run.memory.rollout(slots)
    rows = rollout["valid"] == 0
    for name, value in (("observations", 1e6), ("rewards", -1e6), ("values", 7.0), ("log_probs", -9.0)):
        rollout[name][rows] = value
    return int(rows.sum())


@pytest.mark.filterwarnings("ignore::rollout_service.launch.probe.EnvWarning")
@pytest.mark.parametrize("mode", MODES)
def test_training_obeys_the_ratio_law_and_learns_nothing_from_what_was_dropped(mode: str) -> None:
    digests, rows, poisoned = [], 0, 0
    for harm in (False, True):
        with serial_run(flaky_config(mode)) as run:
            sharpen(run)
            for _ in range(6):
                slots = run.spec.bank(run.bank)
                lengths = [run.collect(actor, slot) for actor, slot in zip(run.actors, slots, strict=True)]
                poisoned += poison(run, slots) if harm else 0
                report = run.learn(lengths).report
                rows += 0 if harm else int(report.metrics["valid_rows"])
                assert 0.0 < report.metrics["self_check_deviation"] <= 1e-4
            state = {**run.trainer.weights(), **run.trainer.capture().arrays}
            counters = run.metrics.summary(0.0).counters
            assert all(np.isfinite(array).all() for array in state.values())
            assert max(np.abs(array).max() for name, array in state.items() if "mean" in name) < 10.0
            assert [state[name][0] for name in state if name.startswith(POLICY_PREFIX) and "count" in name] == [
                run.trainer.env_steps_done
            ]
            assert state["returns/statistics"][2] == run.trainer.env_steps_done
            assert counters.get("seed_mismatches", 0) == 0
            assert counters["dropped_episodes"] > 5
            assert counters["dropped_bad_env_steps"] > counters["dropped_episodes"]
            digests.append(weights_digest(state))
            if not harm:
                assert run.trainer.env_steps_done == rows
                everything = 6 * run.spec.steps_per_rollout
                assert (rows + counters["dropped_bad_env_steps"] == everything) == (mode != "next_step")
    assert poisoned > 20
    assert digests[0] == digests[1]


@pytest.mark.filterwarnings("ignore::rollout_service.launch.probe.EnvWarning")
@pytest.mark.parametrize("mode", ["actor", "next_step"])
def test_evaluation_plays_its_episodes_in_spite_of_bad_data(mode: str) -> None:
    with serial_run(flaky_config(mode)) as run:
        arrays = {POLICY_PREFIX + name: array for name, array in run.trainer.weights().items()}
        policy, spec = load_policy(run.spec, arrays), run.spec
        bad_data = BadData(spec.on_bad_data, spec.obs_limit)
        finished = play(policy, spec, [6, 5], argmax=True, seed=4, bad_data=bad_data)
        assert len(finished) == 11
        assert all(np.isfinite(episode.total_reward) for episode in finished)
        assert bad_data.take()[0]["dropped_episodes"] > 0
        with pytest.raises(EnvFault, match=r"which is not a finite float32|is not finite"):
            play(policy, spec, [6, 5], argmax=True, seed=4)


def test_the_running_return_starts_anew_behind_a_dropped_episode() -> None:
    """Reward 1 per step: with gamma 0.99 the return of a row says how long its episode has lasted."""
    config = small_config(
        env="tests.fixtures.bad_data:BadTickEnv", env_kwargs={"nan": [6, 12]}, normalize_returns=True, num_actors=1,
        envs_per_actor=1, num_steps=4, on_bad_data="drop",
    )  # fmt: skip
    with serial_run(config) as run:
        for _ in range(4):
            run.one_update()
        mean, _, count = run.trainer.capture().arrays["returns/statistics"]
    # Steps 1-4 | 5-6 dropped, 7-8 | 9-12 dropped | 13-16.
    lengths = [*range(1, 5), *range(1, 3), *range(1, 5)]
    assert count == len(lengths)
    assert mean == pytest.approx(np.mean([sum(0.99**k for k in range(length)) for length in lengths]))


@pytest.mark.parametrize("dtype", ["float16", "float64", "uint8"])
def test_boxes_of_every_dtype_train(dtype: str) -> None:
    config = small_config(
        env="tests.envs.test_bad_data:BoxEnv", env_kwargs={"dtype": dtype, "value": 3}, self_check=1, obs_limit=1e6
    )
    with serial_run(config) as run:
        update = run.one_update()
        stored = run.memory.array("observations/box").dtype
    assert stored == ("float32" if dtype == "float64" else dtype)
    assert update.report.metrics["self_check_deviation"] <= 1e-4
