"""Bad data in a run that drops their episodes: single envs and vector envs, row by row; and the limit of magnitudes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as gym_spaces

from rollout_service.cli import main
from rollout_service.envs.bad_data import FRUITLESS_EPISODES, BadData
from rollout_service.envs.check import check_env
from rollout_service.envs.make import spaces_from_gymnasium
from rollout_service.envs.opening import open_envs
from rollout_service.envs.vector import EnvBatch
from rollout_service.envs.vectorized import VectorEnvBatch
from rollout_service.errors import EnvFault, OutOfOrder
from rollout_service.runspec import OnBadData, Vectorize
from tests.fixtures.bad_data import FlakyEnv, flaky_vector
from tests.fixtures.envs import ScriptedEnv, TickEnv
from tests.fixtures.vector_envs import ScriptedVectorEnv

Rows = dict[str, np.ndarray]
NAN = np.array([0, np.nan], np.float32)


def dropping(limit: float | None = None) -> BadData:
    return BadData(OnBadData.DROP, limit)


def rows_of(batch: Any) -> Rows:
    leaves = batch.spaces.observation
    return {f"observations{leaf.path}": np.zeros((len(batch), *leaf.shape), leaf.dtype) for leaf in leaves}


def singles(*envs: gymnasium.Env[Any, Any], bad_data: BadData) -> tuple[EnvBatch, Rows]:
    spaces = spaces_from_gymnasium(envs[0].observation_space, envs[0].action_space)
    ids = range(8, 8 + len(envs))
    batch = EnvBatch(envs, spaces, env_ids=ids, seeds=ids, name="Fixture", actor_id=2, bad_data=bad_data)
    out = rows_of(batch)
    batch.reset_all(out)
    return batch, out


def vector(envs: Any, bad_data: BadData) -> tuple[VectorEnvBatch, Rows]:
    ids = range(8, 8 + envs.num_envs)
    batch = VectorEnvBatch(envs, env_ids=ids, seeds=ids, name="Fixture", actor_id=2, bad_data=bad_data)
    out = rows_of(batch)
    batch.reset_all(out)
    return batch, out


def step(batch: Any, out: Rows, *hurried: Any) -> Any:
    return batch.step(np.zeros(len(batch), np.int64), out, *hurried)


@pytest.mark.parametrize(
    ("part", "value", "counter", "says"),
    [
        ("observation", NAN, "bad_observations", "observations is not finite: [ 0. nan]"),
        ("observation", np.array([2e6, 0], np.float32), "bad_observations", ", beyond obs_limit 1e+06"),
        ("observation", np.array([0, -1e38], np.float32), "bad_observations", "beyond obs_limit 1e+06"),
        ("observation", np.zeros(3, np.float32), "bad_observations", "has shape (3,), its space says (2,)"),
        ("observation", np.array(["a", "b"]), "bad_observations", "observations is of dtype <U1"),
        ("reward", float("-inf"), "bad_rewards", "reward is -inf, which is not a finite float32"),
        ("reward", np.float64(1e300), "bad_rewards", "reward is 1e+300"),
        ("reward", np.array([1.0, 2.0]), "bad_rewards", "reward is array([1., 2.]), expected one number"),
        ("reward", None, "bad_rewards", "reward is None, expected one number"),
        ("reward", "1", "bad_rewards", "reward is '1', expected one number"),
    ],
)
def test_the_episode_is_dropped_and_the_env_begins_a_new_one(part: str, value: Any, counter: str, says: str) -> None:
    bad_data = dropping(1e6)
    batch, out = singles(TickEnv(), ScriptedEnv(part, {2: value}), TickEnv(4), bad_data=bad_data)
    for _ in range(2):
        assert step(batch, out).valid.all()
    outcome = step(batch, out)
    assert out["observations"].tolist()[1] == [1, 0], "the first observation of the next episode"
    assert np.isfinite(out["observations"]).all()
    assert outcome.valid.tolist() == [True, False, True]
    assert (outcome.dropped_envs, outcome.lost_steps) == ([1], 1)
    assert 1 in outcome.starting_envs
    assert 1 not in outcome.ended_envs
    assert np.isfinite(outcome.rewards).all()
    counters, (story,) = bad_data.take()
    assert counters == {counter: 1, "dropped_episodes": 1}
    assert says in story
    assert "env 1 of actor 2 (Fixture, global index 9), step 3 of its episode, last action 0" in story
    assert story.endswith("; the episode is dropped")
    after = step(batch, out)
    assert after.valid.all()
    assert (after.dropped_envs, after.lost_steps) == ([], 0)
    assert after.ended_envs == [2]
    assert bad_data.take() == ({}, ())


def test_of_an_episode_that_ends_with_bad_data_nothing_is_recorded() -> None:
    for env in (
        ScriptedEnv("reward", {1: float("nan")}, length=2),
        ScriptedEnv("observation", {1: NAN}, length=2, end="trunc"),
    ):
        batch, out = singles(env, TickEnv(2), bad_data=dropping())
        step(batch, out)
        outcome = step(batch, out)
        assert (outcome.ended_envs, outcome.truncated_envs, outcome.dropped_envs) == ([1], [], [0])
        assert outcome.starting_envs == [1, 0]
        assert [episode.env for episode in outcome.episodes] == [9]
        assert not outcome.terminated[0]
        assert not outcome.truncated[0]
        assert [episode.length for episode in [*step(batch, out).episodes, *step(batch, out).episodes]] == [2, 2]


def test_what_follows_a_termination_may_be_anything() -> None:
    batch, out = singles(ScriptedEnv("observation", {1: NAN}, length=2), bad_data=BadData())
    step(batch, out)
    assert step(batch, out).ended_envs == [0]


def test_a_reset_with_a_bad_observation_is_made_again_without_its_seed() -> None:
    bad_data = dropping()
    envs = FlakyEnv({"0:0": "nan", "1:0": "inf"}), FlakyEnv({"0:2": "nan", "1:0": "nan"})
    batch, out = singles(*envs, bad_data=bad_data)
    assert batch._envs[0].unwrapped.episode == 2  # type: ignore[attr-defined]
    counters, stories = bad_data.take()
    assert counters == {"bad_observations": 2}
    assert stories[0].endswith("; the env is reset again")
    step(batch, out)
    step(batch, out)
    assert batch._envs[1].unwrapped.episode == 2  # type: ignore[attr-defined]
    assert bad_data.take()[0] == {"bad_observations": 2, "dropped_episodes": 1}
    with pytest.raises(EnvFault, match=r"env 0 .*: observations is not finite: .*; so began 3 episodes in a row"):
        singles(FlakyEnv({f"{k}:0": "nan" for k in range(3)}), bad_data=dropping())


def test_a_hurried_step_owes_a_dropped_env_its_reset() -> None:
    batch, out = singles(TickEnv(1), ScriptedEnv("reward", {0: float("nan")}), TickEnv(9), bad_data=dropping())
    out["observations"].fill(np.nan)  # a row of a slot that nobody has written yet
    outcome = step(batch, out, lambda: True)
    assert (outcome.ended_envs, outcome.dropped_envs, outcome.starting_envs) == ([0], [1], [0, 1])
    assert out["observations"].tolist() == [[0, 0], [0, 0], [0, 1]]
    with pytest.raises(OutOfOrder, match=r"envs \[0, 1\] have ended"):
        step(batch, out)
    batch.reset_owed(out)
    assert out["observations"].tolist() == [[1, 0], [1, 0], [0, 1]]
    assert step(batch, out).valid.all()


def test_an_env_that_returns_nothing_good_any_more_is_a_fault() -> None:
    broken = {k: float("nan") for k in range(1000)}
    batch, out = singles(TickEnv(), ScriptedEnv("reward", broken), bad_data=dropping())
    for _ in range(FRUITLESS_EPISODES - 1):
        step(batch, out)
    with pytest.raises(EnvFault, match=rf"env 1 .*{FRUITLESS_EPISODES} episodes in a row .* The last: .*reward is nan"):
        step(batch, out)
    batch, out = singles(TickEnv(), ScriptedEnv("reward", broken), bad_data=dropping())
    for _ in range(3):
        for _ in range(FRUITLESS_EPISODES - 1):
            step(batch, out)
        batch.bad_data.kept([1])


def test_a_broken_env_is_a_fault_whatever_is_dropped() -> None:
    for part, value in (("terminated", None), ("truncated", 2)):
        batch, out = singles(ScriptedEnv(part, {0: value}), bad_data=dropping())
        with pytest.raises(EnvFault, match="expected True or False"):
            step(batch, out)
    for part, value in (("rewards", np.ones(2)), ("observations", np.zeros((3, 3))), ("terminated", None)):
        batch, out = vector(ScriptedVectorEnv(3, part, {0: value}), dropping())
        with pytest.raises(EnvFault, match="vector env of actor 2"):
            step(batch, out)


# Vector envs


def steps(batch: VectorEnvBatch, out: Rows, count: int) -> list[tuple[list[bool], list[int], list[int], int]]:
    """(valid, dropped, starting, lost steps) of each step; everything the policy would see is finite."""
    told = []
    for _ in range(count):
        outcome = step(batch, out)
        assert np.isfinite(out["observations"]).all()
        assert np.isfinite(outcome.rewards).all()
        told.append((outcome.valid.tolist(), [*outcome.dropped_envs], [*outcome.starting_envs], outcome.lost_steps))
    return told


@pytest.mark.parametrize("kind", ["nan", "inf", "huge", "reward"])
def test_a_vector_env_that_resets_itself_is_ignored_until_its_episode_is_over(kind: str) -> None:
    """Episode 0 has 5 steps, the second is bad; the first three rows of each are shown."""
    bad_data = dropping(1e6)
    batch, out = vector(flaky_vector(2, "same_step", [{}, {"0:2": kind, "0:3": "nan"}]), bad_data)
    good, lost = [True, True], [True, False]
    assert steps(batch, out, 6) == [
        (good, [], [], 0),
        (lost, [1], [1], 1),
        (lost, [], [1], 1),
        (lost, [], [1], 1),
        (lost, [], [0, 1], 1),
        (good, [], [], 0),
    ]
    counters, stories = bad_data.take()
    assert counters == {"bad_rewards" if kind == "reward" else "bad_observations": 1, "dropped_episodes": 1}
    assert "env 1 of actor 2 (Fixture, global index 9), step 2 of its episode, last action 0" in stories[0]

    batch, out = vector(flaky_vector(2, "next_step", [{}, {"0:2": kind}]), dropping(1e6))
    assert steps(batch, out, 7)[4:] == [(lost, [], [1], 1), ([False, False], [], [0, 1], 0), (good, [], [], 0)]
    batch, out = vector(flaky_vector(2, "disabled", [{}, {"0:2": kind}]), dropping(1e6))
    assert steps(batch, out, 3)[1:] == [(lost, [1], [1], 1), (good, [], [], 0)]
    np.testing.assert_allclose(out["observations"][1], [np.sin(1.3 + 0.7), np.cos(1 - 0.3)], atol=1e-6)


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_only_the_good_episodes_of_a_vector_env_are_recorded(mode: str) -> None:
    scripts = [{}, {"0:5": "nan"}, {"0:5": "reward"}, {"0:1": "nan", "1:3": "nan"}]
    batch, out = vector(flaky_vector(4, mode, scripts), dropping())
    episodes = [(e.env - 8, e.length) for _ in range(9) for e in step(batch, out).episodes]
    # Episode 1 ends by termination: what it shows then is not looked at, or is no observation of its own.
    assert [length for env, length in episodes if env == 0] == [5, 3]
    assert [length for env, length in episodes if env == 1] == [3]
    assert [length for env, length in episodes if env == 2] == [3]
    assert [length for env, length in episodes if env == 3][:1] == [3]


def test_a_vector_env_whose_next_episode_begins_badly_loses_that_one_alone() -> None:
    for mode in ("same_step", "next_step"):
        bad_data = dropping()
        batch, out = vector(flaky_vector(2, mode, [{}, {"1:0": "nan"}]), bad_data)
        lengths = [e.length for _ in range(9) for e in step(batch, out).episodes if e.env == 9]
        assert lengths == [5], mode
        counters, (story,) = bad_data.take()
        assert counters == {"bad_observations": 1, "dropped_episodes": 1}
        assert "env 1 of actor 2 (Fixture, global index 9), a new episode: observations is not finite" in story


def test_a_masked_reset_and_the_first_one_are_made_again() -> None:
    bad_data = dropping()
    batch, out = vector(flaky_vector(2, "disabled", [{}, {"0:0": "nan", "1:1": "nan", "2:0": "inf"}]), bad_data)
    assert [one.unwrapped.episode for one in batch._envs.unwrapped.envs] == [1, 1]  # type: ignore[attr-defined]
    step(batch, out)
    assert [one.unwrapped.episode for one in batch._envs.unwrapped.envs] == [1, 3]  # type: ignore[attr-defined]
    assert bad_data.take()[0] == {"bad_observations": 3, "dropped_episodes": 1}
    script = {f"{k}:0": "nan" for k in range(3)}
    for mode in ("same_step", "next_step", "disabled"):
        with pytest.raises(EnvFault, match=r"env 1 .*, reset: observations is not finite.*so began 3 resets in a row"):
            vector(flaky_vector(2, mode, [{}, script]), dropping())


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_a_lossy_cast_in_one_env_of_a_vector_env_is_that_envs_own() -> None:
    class Bytes(ScriptedVectorEnv):
        def __init__(self) -> None:
            super().__init__(3, "observations", {1: np.array([[0, 1], [300, 0], [5, 0.5]])}, length=9)
            self.single_observation_space = gym_spaces.Box(0, 255, (2,), np.uint8)

    bad_data = dropping()
    batch, out = vector(Bytes(), bad_data)
    step(batch, out)
    outcome = step(batch, out)
    assert outcome.dropped_envs == [1, 2]
    assert out["observations"].tolist() == [[0, 1], [0, 0], [0, 0]]
    _, stories = bad_data.take()
    assert "env 1 of actor 2 (Fixture, global index 9), step 2 of" in stories[0]
    assert "observations holds 300.0, which uint8 cannot" in stories[0]
    assert "observations holds 0.5, which uint8 cannot" in stories[1]
    batch, out = vector(Bytes(), BadData())
    step(batch, out)
    with pytest.raises(EnvFault, match=r"env 1 of actor 2 .*observations holds 300\.0, which uint8 cannot"):
        step(batch, out)


# The limit, and what is tried before a run


class BoxEnv(TickEnv):
    """One Box of any dtype, beside a Discrete; shows `value` from its first step on."""

    def __init__(self, dtype: str, value: Any) -> None:
        super().__init__(100)
        box = gym_spaces.Box(-np.inf, np.inf, (2,), dtype) if dtype[0] == "f" else gym_spaces.Box(0, 100, (2,), dtype)
        self.observation_space = gym_spaces.Dict({"box": box, "room": gym_spaces.Discrete(2000)})
        self.value = value

    def observation(self) -> Any:
        return {"box": np.array([self.value if self.t else 0, 0], self.observation_space["box"].dtype), "room": 1999}


@pytest.mark.parametrize(
    ("dtype", "value", "limit", "says"),
    [
        ("float32", 1000.0, 1000.0, None),
        ("float32", 0.1, 0.1, None),
        ("float32", 1000.1, 1000.0, "observations/box holds 1000.1, beyond obs_limit 1000"),
        ("float32", np.nan, 1000.0, "observations/box is not finite"),
        ("float64", -1e7, 1e6, ", beyond obs_limit 1e+06"),
        ("float64", 1e300, None, "observations/box is not finite"),
        ("float16", 60000, 1e6, None),
        ("float16", np.inf, 1e6, "observations/box is not finite"),
        ("float16", 600, 500, "observations/box holds 600.0, beyond obs_limit 500"),
        ("uint8", 200, 500, None),
        ("uint8", 200, 100, "observations/box holds 200, beyond obs_limit 100"),
        ("int8", -128, 127, "observations/box holds -128, beyond obs_limit 127"),
        ("int64", 10**12, 1e6, "observations/box holds 1000000000000, beyond obs_limit 1e+06"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_the_limit_is_of_every_box_and_of_no_discrete(dtype: str, value: Any, limit: Any, says: str | None) -> None:
    batch, out = singles(BoxEnv(dtype, value), bad_data=BadData(obs_limit=limit))
    if says is None:
        step(batch, out)
        return
    with pytest.raises(EnvFault) as caught:
        step(batch, out)
    assert says in str(caught.value)


def test_a_sum_that_overflows_is_no_bad_data() -> None:
    class Wide(TickEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = gym_spaces.Box(-np.inf, np.inf, (9,), np.float16)

        def observation(self) -> Any:
            return np.full(9, 60000, np.float16)

    batch, out = singles(Wide(), bad_data=dropping(1e6))
    assert step(batch, out).valid.all()


@pytest.mark.parametrize("vectorize", [Vectorize.NONE, Vectorize.FACTORY])
def test_bad_data_of_the_first_step_are_refused_before_a_run_or_said(vectorize: Vectorize) -> None:
    env = "tests.fixtures.bad_data:" + ("FlakyEnv" if vectorize is Vectorize.NONE else "flaky_vector")
    scripts = [{"0:1": "huge"}]
    kwargs: dict[str, Any] = {"script": scripts[0]}
    if vectorize is Vectorize.FACTORY:
        kwargs = {"autoreset": "same_step", "scripts": scripts}
    assert check_env(env, kwargs, vectorize).warnings == ()
    with pytest.raises(EnvFault, match=r"observations holds 1e\+38.*, beyond obs_limit 1e\+06"):
        check_env(env, kwargs, vectorize, bad_data=BadData(obs_limit=1e6))
    (warning,) = check_env(env, kwargs, vectorize, bad_data=dropping(1e6)).warnings
    assert "beyond obs_limit 1e+06; " in warning


def test_the_command_shows_dtypes_and_takes_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    for dtype, shown in (("float16", "float16"), ("float64", "float32"), ("uint8", "uint8")):
        assert main(["check-env", "tests.envs.test_bad_data:BoxEnv", "--env-kwargs", f"dtype={dtype}", "value=9"]) == 0
        assert f"observation/box  box {shown} [2]" in capsys.readouterr().out
    words = ["check-env", "tests.envs.test_bad_data:BoxEnv", "--env-kwargs", "dtype=float32", "value=9"]
    assert main([*words, "--obs-limit", "8"]) == 2
    assert "its first step: observations/box holds 9.0, beyond obs_limit 8" in capsys.readouterr().err


class ByteEnv(TickEnv):
    """One Box of uint8; shows and pays from its first step on what it is told to."""

    shown: Any = np.zeros(1, np.uint8)
    paid: Any = 1.0

    def __init__(self) -> None:
        super().__init__(100)
        self.observation_space = gym_spaces.Box(0, 255, (1,), np.uint8)

    def observation(self) -> Any:
        return self.shown if self.t else np.zeros(1, np.uint8)

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, self.paid, *rest


def in_gymnasiums_own(bad_data: BadData) -> tuple[VectorEnvBatch, Rows]:
    kwargs: dict[str, Any] = {"vector_kwargs": {"autoreset_mode": "disabled"}}
    name = f"{ByteEnv.__module__}:ByteEnv"
    batch = open_envs(name, kwargs, Vectorize.SYNC, env_ids=range(2), seeds=[1, 2], bad_data=bad_data)
    assert isinstance(batch, VectorEnvBatch)
    out = rows_of(batch)
    batch.reset_all(out)
    return batch, out


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        (np.array([300], np.uint16), "holds 300, which uint8 cannot"),
        (np.array([-1]), "holds -1, which uint8 cannot"),
        (np.zeros(2, np.uint8), "has shape (2,), its space says (1,)"),
    ],
)
def test_gymnasiums_own_vector_envs_are_kept_from_casting(
    shown: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would make 44 of 300."""
    monkeypatch.setattr(ByteEnv, "shown", shown)
    batch, out = in_gymnasiums_own(dropping())
    with pytest.raises(EnvFault) as caught:
        step(batch, out)
    assert f"env 0 (tests.envs.test_bad_data:ByteEnv): observations {says}" in str(caught.value)


@pytest.mark.parametrize("paid", [None, "1", np.array([1.0, 2.0]), np.array([1.0]), np.float64(1), 1, True])
def test_rewards_inside_gymnasiums_own_vector_envs_are_taken_like_others(
    paid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteEnv, "paid", paid)
    batch, out = in_gymnasiums_own(dropping())
    outcome = step(batch, out)
    good = np.size(paid) == 1 and not isinstance(paid, str) and paid is not None
    assert outcome.rewards.tolist() == ([1.0, 1.0] if good else [0.0, 0.0])
    assert outcome.dropped_envs == ([] if good else [0, 1])
