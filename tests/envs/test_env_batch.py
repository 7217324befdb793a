"""EnvBatch: E envs as rows, episode ends, statistics, and everything a transition cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as gym_spaces

from rollout_service.envs.make import spaces_from_gymnasium
from rollout_service.envs.vector import EnvBatch, FinishedEpisode, Silent
from rollout_service.errors import EnvFault, OutOfOrder, SpaceNotSupported
from tests.fixtures.envs import (
    BoomEnv,
    BrokenResetEnv,
    FourTupleEnv,
    ObservationOnlyResetEnv,
    RecallEnv,
    SameArrayEnv,
    ScriptedEnv,
    TickEnv,
    TreeEnv,
)

Env = gymnasium.Env[Any, Any]
Rows = dict[str, np.ndarray]


def batch_of(*envs: Env, first: int = 0, actor_id: int | None = None) -> tuple[EnvBatch, Rows]:
    """A batch that was reset, and the rows of its observations."""
    spaces = spaces_from_gymnasium(envs[0].observation_space, envs[0].action_space)
    ids = range(first, first + len(envs))
    batch = EnvBatch(envs, spaces, env_ids=ids, seeds=ids, name="Fixture", actor_id=actor_id)
    out = {f"observations{leaf.path}": np.zeros((len(envs), *leaf.shape), leaf.dtype) for leaf in spaces.observation}
    batch.reset_all(out)
    return batch, out


def zeros(batch: EnvBatch) -> np.ndarray:
    return np.zeros(len(batch), np.int64)


def steps(batch: EnvBatch, out: Rows, count: int) -> list[FinishedEpisode]:
    return [episode for _ in range(count) for episode in batch.step(zeros(batch), out).episodes]


def test_a_step_fills_one_row_per_env() -> None:
    batch, out = batch_of(TickEnv(5), TickEnv(5), TickEnv(5))
    outcome = batch.step(zeros(batch), out)
    assert out["observations"].tolist() == [[0, 1], [0, 1], [0, 1]]
    assert outcome.rewards.tolist() == [1, 1, 1]
    assert not outcome.terminated.any()
    assert not outcome.truncated.any()
    assert outcome.ended_envs == outcome.episodes == []


@pytest.mark.parametrize(
    ("end", "terminated", "truncated"), [("term", True, False), ("trunc", False, True), ("both", True, True)]
)
def test_an_ended_env_shows_its_next_episode_and_keeps_both_flags(end: str, terminated: bool, truncated: bool) -> None:
    batch, out = batch_of(TickEnv(9), TickEnv(2, end))
    batch.step(zeros(batch), out)
    outcome = batch.step(zeros(batch), out)
    assert out["observations"].tolist() == [[0, 2], [1, 0]]
    assert outcome.terminated.tolist() == [False, terminated]
    assert outcome.truncated.tolist() == [False, truncated]
    assert outcome.ended_envs == [1]
    assert outcome.truncated_envs == ([1] if end == "trunc" else [])
    after = batch.step(zeros(batch), out)
    assert out["observations"].tolist() == [[0, 3], [1, 1]]
    assert after.ended_envs == after.truncated_envs == []
    assert not after.terminated.any()
    assert not after.truncated.any()


@pytest.mark.parametrize("kind", [TickEnv, SameArrayEnv])
def test_the_final_observation_of_a_truncation_is_kept_before_the_reset(kind: type[TickEnv]) -> None:
    batch, out = batch_of(kind(9), kind(2, "trunc"))
    batch.step(zeros(batch), out)
    outcome = batch.step(zeros(batch), out)
    assert outcome.final_observations["observations"][1].tolist() == [0, 2]
    assert out["observations"].tolist() == [[0, 2], [1, 0]]


def test_observations_go_into_the_rows_that_are_given() -> None:
    batch, _ = batch_of(TickEnv(9), TickEnv(9))
    field = np.full((2, 3, 2), -1, np.float32)
    for t in range(3):
        batch.step(zeros(batch), {"observations": field[:, t]})
    assert field[:, :, 1].tolist() == [[1, 2, 3], [1, 2, 3]]


def test_episode_statistics_count_real_steps_only() -> None:
    batch, out = batch_of(TickEnv(4), TickEnv(4, "trunc"), first=6)
    episodes = steps(batch, out, 12)
    assert len(episodes) == 6
    assert {(e.env, e.length, e.total_reward, e.success, e.truncated) for e in episodes} == {
        (6, 4, 4.0, None, False),
        (7, 4, 4.0, None, True),
    }


def test_success_comes_from_the_last_info() -> None:
    batch, out = batch_of(*(RecallEnv(2) for _ in range(8)))
    episodes = steps(batch, out, 2)
    assert [episode.success for episode in episodes] == [bool(episode.total_reward) for episode in episodes]
    assert {episode.success for episode in episodes} == {True, False}


def test_each_env_has_its_own_seed_and_keeps_its_stream_across_episodes() -> None:
    def cues(seeds: Sequence[int]) -> list[list[float]]:
        envs = [RecallEnv(1) for _ in seeds]
        spaces = spaces_from_gymnasium(envs[0].observation_space, envs[0].action_space)
        batch = EnvBatch(envs, spaces, env_ids=range(len(envs)), seeds=seeds)
        out = {"observations": np.zeros((len(envs), 1), np.float32)}
        batch.reset_all(out)
        seen = [out["observations"][:, 0].tolist()]
        for _ in range(20):
            batch.step(zeros(batch), out)
            seen.append(out["observations"][:, 0].tolist())
        batch.reseed(seeds)
        batch.reset_all(out)
        assert out["observations"][:, 0].tolist() == seen[0]
        return [list(column) for column in zip(*seen, strict=True)]

    ab, ba = cues([1, 2]), cues([2, 1])
    assert ab == ba[::-1]
    assert ab[0] != ab[1]


def test_nested_observations_are_copied_leaf_by_leaf_and_actions_keep_their_start() -> None:
    env = TreeEnv()
    batch, out = batch_of(env)
    batch.step(np.array([5]), out)
    assert out["observations/image"].tolist() == np.full((1, 2, 2, 3), 10).tolist()
    assert out["observations/position"].dtype == np.float32
    assert out["observations/position"].tolist() == [[1, -1]]
    assert out["observations/room"].tolist() == [2]
    assert out["observations/pair/0"].tolist() == [0.125]
    assert out["observations/pair/1"].tolist() == [1]
    assert env.actions == [5]


@pytest.mark.parametrize("reward", [1, np.float64(1), np.float32(1), np.int8(1), True, np.array(1.0), np.array([1.0])])
def test_odd_but_plain_rewards_are_stored_as_one(reward: Any) -> None:
    batch, out = batch_of(ScriptedEnv("reward", {0: reward}))
    outcome = batch.step(zeros(batch), out)
    assert outcome.rewards.dtype == np.float32
    assert outcome.rewards.tolist() == [1.0]


@pytest.mark.parametrize("flag", [True, np.True_, 1, np.int64(1), 1.0, np.array(True), np.array([1])])
def test_odd_but_plain_flags_are_stored_as_bools(flag: Any) -> None:
    batch, out = batch_of(ScriptedEnv("truncated", {0: flag}))
    outcome = batch.step(zeros(batch), out)
    assert outcome.truncated.dtype == np.bool_
    assert outcome.truncated.tolist() == [True]
    assert outcome.truncated_envs == [0]


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("reward", np.array([1.0, 2.0]), "reward is array([1., 2.]), expected one number"),
        ("reward", None, "reward is None, expected one number"),
        ("reward", "1", "reward is '1', expected one number"),
        ("reward", float("inf"), "reward is inf"),
        ("reward", float("nan"), "reward is nan"),
        ("reward", 1e300, "reward is 1e+300"),
        ("terminated", None, "terminated is None, expected True or False"),
        ("truncated", 2, "truncated is 2, expected True or False"),
        ("truncated", np.array([True, False]), "expected True or False"),
        ("observation", np.array([0, np.nan], np.float32), "observations is not finite: [ 0. nan]"),
        ("observation", np.array([np.inf, -np.inf], np.float32), "observations is not finite: [ inf -inf]"),
        ("observation", np.zeros(3, np.float32), "observations has shape (3,), its space says (2,)"),
        ("observation", np.zeros((1, 2), np.float32), "observations has shape (1, 2), its space says (2,)"),
        ("observation", 0.0, "observations has shape (), its space says (2,)"),
        ("observation", np.array(["a", "b"]), "observations is of dtype <U1"),
    ],
)
@pytest.mark.filterwarnings("ignore:(invalid|overflow):RuntimeWarning")
def test_what_a_transition_cannot_hold_is_refused_by_name(part: str, value: Any, says: str) -> None:
    batch, out = batch_of(TickEnv(), TickEnv(), ScriptedEnv(part, {3: value}), TickEnv(), first=8, actor_id=2)
    steps(batch, out, 3)
    with pytest.raises(EnvFault) as caught:
        batch.step(zeros(batch), out)
    text = str(caught.value)
    assert says in text
    assert "env 2 of actor 2 (Fixture, global index 10), step 4 of its episode, last action 0" in text
    assert "\n" not in text


def test_a_final_observation_that_is_not_finite_is_refused() -> None:
    bad = ScriptedEnv("observation", {1: np.full(2, np.nan, np.float32)}, length=2, end="trunc")
    batch, out = batch_of(bad)
    steps(batch, out, 1)
    with pytest.raises(EnvFault, match=r"step 2 of its episode.*observations is not finite"):
        batch.step(zeros(batch), out)


def test_float64_observations_are_stored_as_float32_and_lists_are_taken() -> None:
    script = {0: np.array([0.1, 2.0]), 1: [3, 4], 2: (5.0, 6.0)}
    batch, out = batch_of(ScriptedEnv("observation", script))
    batch.step(zeros(batch), out)
    assert out["observations"].tolist() == [[float(np.float32(0.1)), 2.0]]
    batch.step(zeros(batch), out)
    assert out["observations"].tolist() == [[3.0, 4.0]]
    batch.step(zeros(batch), out)
    assert out["observations"].tolist() == [[5.0, 6.0]]


class ByteEnv(TickEnv):
    """Declares uint8 and a room of 3, returns what it is told to."""

    def __init__(self, pixel: Any, room: Any) -> None:
        super().__init__(100)
        self.observation_space = gym_spaces.Dict(
            {"pixel": gym_spaces.Box(0, 255, (1,), np.uint8), "room": gym_spaces.Discrete(3)}
        )
        self.shown = {"pixel": np.array([0], np.uint8), "room": 0}
        self.later = {"pixel": pixel, "room": room}

    def step(self, action: Any) -> Any:
        _, *rest = super().step(action)
        return self.later, *rest

    def observation(self) -> Any:
        return self.shown


@pytest.mark.parametrize(
    ("pixel", "room", "says"),
    [
        (np.array([300]), 0, "observations/pixel holds 300, which uint8 cannot"),
        (np.array([-1]), 0, "observations/pixel holds -1, which uint8 cannot"),
        (np.array([0.5]), 0, "observations/pixel holds 0.5, which uint8 cannot"),
        (np.array([0], np.uint8), 3, "observations/room is 3, its space allows 0 to 2"),
        (np.array([0], np.uint8), -1, "observations/room is -1, its space allows 0 to 2"),
    ],
)
def test_a_lossy_cast_is_refused_before_anything_is_written(pixel: Any, room: Any, says: str) -> None:
    batch, out = batch_of(ByteEnv(pixel, room))
    with pytest.raises(EnvFault) as caught:
        batch.step(zeros(batch), out)
    assert says in str(caught.value)
    assert out["observations/room"].tolist() == [0]


def test_integers_that_fit_are_taken_whatever_their_type() -> None:
    batch, out = batch_of(ByteEnv(np.array([255.0]), np.int32(2)))
    batch.step(zeros(batch), out)
    assert out["observations/pixel"].tolist() == [[255]]
    assert out["observations/room"].tolist() == [2]


def test_a_leaf_that_is_missing_is_named() -> None:
    batch, out = batch_of(ByteEnv(np.array([1], np.uint8), 0))
    batch._envs[0].unwrapped.later = {"room": 1}  # type: ignore[attr-defined]
    with pytest.raises(EnvFault, match="the observation has no /pixel"):
        batch.step(zeros(batch), out)


def test_an_exception_keeps_its_traceback_and_says_where_it_happened() -> None:
    batch, out = batch_of(TickEnv(), BoomEnv(at=20), first=4, actor_id=2)
    steps(batch, out, 19)
    with pytest.raises(EnvFault) as caught:
        batch.step(np.array([0, 1]), out)
    assert str(caught.value) == (
        "env 1 of actor 2 (Fixture, global index 5), step 20 of its episode, last action 1: "
        "step raised ValueError: boom-7"
    )
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_reset_that_raises_is_named() -> None:
    with pytest.raises(EnvFault, match=r"env 0 .*: reset raised RuntimeError: no-reset-5"):
        batch_of(BrokenResetEnv())


def test_an_env_of_the_old_api_is_refused_at_its_first_step() -> None:
    batch, out = batch_of(FourTupleEnv())
    with pytest.raises(EnvFault, match=r"step returned 4 values, expected 5 \(observation, reward"):
        batch.step(zeros(batch), out)


def test_a_reset_of_the_old_api_is_refused_even_if_its_observation_has_two_entries() -> None:
    with pytest.raises(EnvFault, match=r"reset returned one ndarray, expected 2 values \(observation, info\)"):
        batch_of(ObservationOnlyResetEnv())


def test_envs_of_different_spaces_do_not_share_a_batch() -> None:
    with pytest.raises(SpaceNotSupported, match="start all alike"):
        batch_of(TickEnv(), RecallEnv())


def test_the_pulse_grows_with_every_env_step_and_reset() -> None:
    batch, out = batch_of(TickEnv(2), TickEnv(9))
    batch.pulse = pulse = Silent(phase="env.step")
    batch.step(zeros(batch), out)
    assert pulse.progress == 2
    batch.step(zeros(batch), out)
    assert pulse.progress >= 4
    assert pulse.phase == "env.step"


# A step in a hurry


def answers(*given: bool) -> Callable[[], bool]:
    """A hurry that begins in the middle of a step."""
    left = iter(given)
    return lambda: next(left)


def test_a_hurried_step_leaves_the_remaining_resets_for_later() -> None:
    batch, out = batch_of(TickEnv(1), TickEnv(1, "trunc"), TickEnv(9), TickEnv(1))
    out["observations"].fill(np.nan)  # a row of a slot that nobody has written yet
    outcome = batch.step(zeros(batch), out, answers(False, True))
    assert outcome.ended_envs == outcome.starting_envs == [0, 1, 3]
    assert outcome.final_observations["observations"][1].tolist() == [0, 1]
    assert out["observations"].tolist() == [[1, 0], [0, 0], [0, 1], [0, 0]]
    with pytest.raises(OutOfOrder, match=r"envs \[1, 3\] have ended"):
        batch.step(zeros(batch), out)
    batch.reset_owed(out)
    assert out["observations"].tolist() == [[1, 0], [1, 0], [0, 1], [1, 0]]
    assert [episode.length for episode in batch.step(zeros(batch), out).episodes] == [1, 1, 1]


def test_without_a_hurry_every_reset_is_made_and_nothing_is_owed() -> None:
    batch, out = batch_of(TickEnv(1), TickEnv(1))
    batch.step(zeros(batch), out, answers(False, False))
    assert out["observations"].tolist() == [[1, 0], [1, 0]]
    batch.reset_owed(out)
    assert out["observations"].tolist() == [[1, 0], [1, 0]]


def test_a_reset_of_all_makes_up_for_owed_ones_too() -> None:
    batch, out = batch_of(TickEnv(1), TickEnv(1))
    batch.step(zeros(batch), out, answers(True))
    batch.reset_all(out)
    assert out["observations"].tolist() == [[1, 0], [1, 0]]
    batch.step(zeros(batch), out)


def test_an_owed_reset_that_fails_names_its_env() -> None:
    class BreaksLater(TickEnv):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            if self.episode == 0:
                raise RuntimeError("no second episode")
            return super().reset(seed=seed)

    batch, out = batch_of(TickEnv(9), BreaksLater(1))
    batch.step(zeros(batch), out, answers(True))
    with pytest.raises(EnvFault, match=r"env 1 .* reset raised RuntimeError: no second episode"):
        batch.reset_owed(out)
