"""VectorEnvBatch: a gymnasium vector env as rows, its names, seeds and refusals."""

from __future__ import annotations

import random
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rollout_service.envs import make
from rollout_service.envs.make_vector import autoreset_of, make_vector_env
from rollout_service.envs.opening import open_envs
from rollout_service.envs.protocol import Silent
from rollout_service.envs.vectorized import VectorEnvBatch
from rollout_service.errors import ConfigError, EnvFault, RolloutServiceError
from rollout_service.runspec import AutoresetMode, Vectorize
from tests.fixtures.envs import TreeEnv
from tests.fixtures.vector_envs import IntSeedVectorEnv, NoModeVectorEnv, ScriptedVectorEnv, TickVectorEnv, sync

SINGLES = "tests.fixtures.envs"
VECTORS = "tests.fixtures.vector_envs"
Rows = dict[str, np.ndarray]


def rows_of(batch: Any) -> Rows:
    """The rows of a batch's observations."""
    leaves = batch.spaces.observation
    return {f"observations{leaf.path}": np.zeros((len(batch), *leaf.shape), leaf.dtype) for leaf in leaves}


def batch_of(envs: Any, first: int = 0, **options: Any) -> tuple[VectorEnvBatch, Rows]:
    """A batch that was reset, and the rows of its observations."""
    ids = range(first, first + envs.num_envs)
    batch = VectorEnvBatch(envs, env_ids=ids, seeds=ids, name="Fixture", **options)
    out = rows_of(batch)
    batch.reset_all(out)
    return batch, out


def zeros(batch: VectorEnvBatch) -> np.ndarray:
    return np.zeros(len(batch), np.int64)


@pytest.mark.parametrize("end", ["term", "trunc", "both"])
def test_next_step_shows_the_final_observation_and_then_a_filler(end: str) -> None:
    batch, out = batch_of(TickVectorEnv(2, "NextStep", length=2, end=end), first=6)
    batch.step(zeros(batch), out)
    ended = batch.step(np.array([1, 0]), out)
    assert out["observations"].tolist() == [[0, 2], [0, 2]]
    assert (ended.ended_envs, ended.starting_envs, ended.truncated_envs) == ([0], [], [])
    assert ended.deferred_envs == ([0] if end == "trunc" else [])
    assert ended.valid.tolist() == [True, True]
    assert [(e.env, e.length, e.total_reward, e.truncated) for e in ended.episodes] == [(6, 2, 3.0, end == "trunc")]
    assert batch.fillers == [0]
    filler = batch.step(zeros(batch), out)
    assert out["observations"].tolist() == [[1, 0], [0, 3]]
    assert (filler.ended_envs, filler.starting_envs) == ([1], [0])
    assert filler.valid.tolist() == [False, True]
    assert filler.rewards.tolist() == [0.0, 1.0]
    assert batch.fillers == [1]


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_the_other_modes_show_the_next_episode_at_once_and_keep_the_final_observation(mode: str) -> None:
    vector_env = TickVectorEnv(3, mode, length=2, end="trunc")
    batch, out = batch_of(vector_env)
    batch.step(zeros(batch), out)
    outcome = batch.step(zeros(batch), out)
    assert out["observations"].tolist() == [[1, 0], [0, 2], [0, 2]]
    assert outcome.final_observations["observations"][0].tolist() == [0, 2]
    assert (outcome.ended_envs, outcome.starting_envs, outcome.truncated_envs) == ([0], [0], [0])
    assert outcome.valid.all()
    assert vector_env.resets == ([[True] * 3] if mode == "SameStep" else [[True] * 3, [True, False, False]])
    after = batch.step(zeros(batch), out)
    assert after.ended_envs == after.truncated_envs == [1]
    assert out["observations"].tolist() == [[1, 1], [1, 0], [0, 3]]


def test_a_success_is_that_of_the_episode_that_ended() -> None:
    """RecallEnv says success in its last info; SAME_STEP hides it in final_info."""
    successes = []
    for mode in ("NextStep", "SameStep", "Disabled"):
        batch, out = batch_of(sync(8, "RecallEnv", mode, steps=2))
        batch.step(zeros(batch), out)
        episodes = batch.step(zeros(batch), out).episodes
        assert [bool(e.total_reward) for e in episodes] == [e.success for e in episodes]
        successes.append([e.success for e in episodes])
    assert successes[0] == successes[1] == successes[2]
    assert set(successes[0]) == {True, False}


def test_nested_observations_are_read_leaf_by_leaf_and_actions_keep_their_start() -> None:
    batch, out = batch_of(sync(2, "TreeEnv"))
    batch.step(np.array([3, 5]), out)
    assert out["observations/image"].tolist() == np.full((2, 2, 2, 3), 10).tolist()
    assert out["observations/position"].dtype == np.float32
    assert out["observations/position"].tolist() == [[1, -1]] * 2
    assert out["observations/room"].tolist() == [2, 2]
    assert out["observations/pair/0"].tolist() == [0.125, 0.125]
    assert out["observations/pair/1"].tolist() == [1, 1]
    singles = batch._envs.unwrapped.envs  # type: ignore[attr-defined]
    assert [single.unwrapped.actions for single in singles] == [[3], [5]]


def limited_trees(num_envs: int) -> gymnasium.vector.SyncVectorEnv:
    """Trees that grow for ever, cut after three steps."""
    trees = [lambda: gymnasium.wrappers.TimeLimit(TreeEnv(100), 3)] * num_envs
    return gymnasium.vector.SyncVectorEnv(trees, autoreset_mode="SameStep")


def test_nested_final_observations_are_read_leaf_by_leaf() -> None:
    batch, out = batch_of(limited_trees(2))
    for _ in range(3):
        outcome = batch.step(np.array([3, 3]), out)
    finals = outcome.final_observations
    assert outcome.truncated_envs == [0, 1]
    assert finals["observations/image"].tolist() == np.full((2, 2, 2, 3), 30).tolist()
    assert finals["observations/position"].tolist() == [[3, -3]] * 2
    assert finals["observations/room"].tolist() == [4, 4]
    assert finals["observations/pair/0"].tolist() == [0.375, 0.375]
    assert out["observations/room"].tolist() == [1, 1]


def first_observations(env: str, vectorize: Vectorize, first: int = 0, **kwargs: Any) -> list[list[float]]:
    """Of four envs, and of the episodes that follow."""
    ids = range(first, first + 4)
    batch = open_envs(env, kwargs, vectorize, env_ids=ids, seeds=[100 + e for e in ids])
    out = rows_of(batch)
    batch.reset_all(out)
    seen = [out["observations"].copy()]
    for _ in range(6):
        outcome = batch.step(np.zeros(4, np.int64), out)
        seen.append(np.where(outcome.valid[:, None], out["observations"], -1.0))
    batch.close()
    return np.concatenate(seen, axis=1).tolist()


def test_each_env_has_its_own_seed_whoever_runs_it() -> None:
    env, mode = f"{SINGLES}:RandomTickEnv", {"vector_kwargs": {"autoreset_mode": "same_step"}}
    alone = first_observations(env, Vectorize.NONE)
    assert first_observations(env, Vectorize.SYNC, **mode) == alone
    assert len({row[0] for row in alone}) == 4
    assert not {row[0] for row in first_observations(env, Vectorize.SYNC, 4, **mode)} & {row[0] for row in alone}


def test_envs_that_draw_from_the_global_generators_are_seeded_too() -> None:
    env = f"{SINGLES}:GlobalRandomEnv"
    firsts = [row[:2] for row in first_observations(env, Vectorize.SYNC)]
    assert firsts == [row[:2] for row in first_observations(env, Vectorize.NONE)]
    assert len({tuple(row) for row in firsts}) == 4


def test_a_vector_env_that_takes_one_seed_gets_that_of_its_first_env() -> None:
    env = f"{VECTORS}:IntSeedVectorEnv"
    one, again, other = (first_observations(env, Vectorize.FACTORY, first) for first in (0, 0, 4))
    assert one == again
    assert len({row[0] for row in one} | {row[0] for row in other}) == 8
    observations, _ = IntSeedVectorEnv(4).reset(seed=100)
    assert [row[0] for row in one] == observations[:, 0].tolist()
    assert first_observations("CartPole-v1", Vectorize.VECTOR_ENTRY_POINT) == first_observations(
        "CartPole-v1", Vectorize.VECTOR_ENTRY_POINT
    )


def test_reset_all_forgets_a_reset_that_was_due_and_seeds_only_when_told() -> None:
    batch, out = batch_of(sync(2, "RandomTickEnv", longest=1))
    firsts = out["observations"].copy()
    batch.step(zeros(batch), out)
    assert batch.fillers == [0, 1]
    batch.reset_all(out)
    assert batch.fillers == []
    assert out["observations"].tolist() != firsts.tolist()
    batch.reseed([0, 1])
    batch.reset_all(out)
    assert out["observations"].tolist() == firsts.tolist()
    assert batch.step(zeros(batch), out).valid.all()


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("rewards", np.ones(2), "rewards are [1. 1.], expected 3 numbers [3]"),
        ("rewards", np.ones((3, 1)), "expected 3 numbers [3]"),
        ("rewards", None, "rewards are None"),
        ("rewards", np.array([1, np.nan, 1]), "env 1 of actor 2 (Fixture, global index 9), step 3 of its episode"),
        ("rewards", np.array([1, 1, 1e300]), "reward is 1e+300, which is not a finite float32"),
        ("terminated", np.zeros(2, np.bool_), "terminated is [False False], expected 3 times True or False"),
        ("truncated", [0, 2, 0], "truncated is [0, 2, 0], expected 3 times True or False"),
        ("truncated", None, "truncated is None"),
        ("observations", np.zeros((3, 3), np.float32), "observations has shape (3, 3), its space says (3, 2)"),
        ("observations", np.array([["a", "b"]] * 3), "observations is of dtype <U1"),
        ("observations", np.array([[0, 0], [0, 0], [0, np.inf]]), "env 2 of actor 2 (Fixture, global index 10)"),
        ("all", (1, 2, 3, 4), "step returned (1, 2, 3, 4), expected 5 values (observations, rewards, terminated"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_what_a_transition_cannot_hold_is_refused_by_name(part: str, value: Any, says: str) -> None:
    batch, out = batch_of(ScriptedVectorEnv(3, part, {2: value}, length=9), first=8, actor_id=2)
    for _ in range(2):
        batch.step(zeros(batch), out)
    with pytest.raises(EnvFault) as caught:
        batch.step(zeros(batch), out)
    assert says in str(caught.value)
    assert "of actor 2 (Fixture, global ind" in str(caught.value)
    assert "last action" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_odd_but_plain_rewards_and_flags_are_taken() -> None:
    for part, value in [("rewards", [1, 1]), ("terminated", [0, 1]), ("truncated", np.array([0.0, 1.0]))]:
        batch, out = batch_of(ScriptedVectorEnv(2, part, {0: value}, length=9))
        outcome = batch.step(zeros(batch), out)
        assert outcome.rewards.tolist() == [1.0, 1.0]
        assert outcome.ended_envs == ([] if part == "rewards" else [1])


def test_an_end_reported_by_the_step_that_resets_is_refused() -> None:
    batch, out = batch_of(ScriptedVectorEnv(2, "terminated", {3: np.array([True, False])}, length=3))
    for _ in range(3):
        batch.step(zeros(batch), out)
    with pytest.raises(EnvFault, match=r"env 0 .*the step that resets an env reports an end"):
        batch.step(zeros(batch), out)


def test_the_final_observation_of_a_termination_may_be_anything_that_of_a_truncation_may_not() -> None:
    wild = np.array([[np.nan, 1], [0, 2]], np.float32)
    batch, out = batch_of(ScriptedVectorEnv(2, "observations", {1: wild}, length=2, end="term"))
    for _ in range(2):
        batch.step(zeros(batch), out)
    assert out["observations"].tolist() == [[0, 0], [0, 2]]
    batch, out = batch_of(ScriptedVectorEnv(2, "observations", {1: wild}, length=2, end="trunc"))
    batch.step(zeros(batch), out)
    with pytest.raises(EnvFault, match=r"env 0 .* step 2 of .*observations is not finite: \[nan +1\.\]"):
        batch.step(zeros(batch), out)


def test_an_exception_keeps_its_traceback_and_says_which_envs_it_was() -> None:
    batch, out = batch_of(sync(2, "BoomEnv", at=3), first=4, actor_id=2)
    for _ in range(2):
        batch.step(zeros(batch), out)
    with pytest.raises(EnvFault) as caught:
        batch.step(np.array([0, 1]), out)
    assert str(caught.value) == (
        "vector env of actor 2 (Fixture, global indices 4 to 5), last actions [0 1]: step raised ValueError: boom-7"
    )
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_old_env_inside_a_vector_env_is_refused_in_one_line() -> None:
    kwargs = {"single": "FourTupleEnv"}
    batch = open_envs(f"{VECTORS}:sync", kwargs, Vectorize.FACTORY, env_ids=range(2), seeds=range(2))
    out = rows_of(batch)
    batch.reset_all(out)
    with pytest.raises(EnvFault, match=r"step returned 4 values, expected 5 .*supported: gymnasium 1.0 and newer"):
        batch.step(np.zeros(2, np.int64), out)


def test_the_pulse_grows_by_every_env_in_every_step() -> None:
    batch, out = batch_of(TickVectorEnv(3, "Disabled", length=2))
    batch.pulse = pulse = Silent(phase="env.step")
    for k in range(1, 4):
        batch.step(zeros(batch), out)
        assert pulse.progress == 3 * k
    assert pulse.phase == "env.step"


def test_a_vector_env_that_keeps_its_actions_keeps_those_it_was_given() -> None:
    kept = []
    vector_env = TickVectorEnv(2)
    step = vector_env.step
    vector_env.step = lambda actions: kept.append(actions) or step(actions)  # type: ignore[method-assign]
    batch, out = batch_of(vector_env)
    actions = np.array([1, 0])
    batch.step(actions, out)
    actions[:] = 0, 1
    batch.step(actions, out)
    assert [given.tolist() for given in kept] == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("declared", "mode"),
    [
        (gymnasium.vector.AutoresetMode.NEXT_STEP, AutoresetMode.NEXT_STEP),
        (gymnasium.vector.AutoresetMode.SAME_STEP, AutoresetMode.SAME_STEP),
        ("Disabled", AutoresetMode.DISABLED),
        ("same_step", AutoresetMode.SAME_STEP),
    ],
)
def test_the_mode_is_what_the_metadata_say(declared: Any, mode: AutoresetMode) -> None:
    vector_env = TickVectorEnv()
    vector_env.metadata = {"autoreset_mode": declared}
    assert autoreset_of(vector_env, "Fixture") is mode


@pytest.mark.parametrize("declared", [None, "sometimes", True])
def test_a_vector_env_that_does_not_say_how_it_resets_is_refused(declared: Any) -> None:
    vector_env = NoModeVectorEnv()
    vector_env.metadata = {} if declared is None else {"autoreset_mode": declared}
    with pytest.raises(EnvFault, match=rf"metadata say autoreset_mode {declared!r}; .*gymnasium 1.0 and newer"):
        autoreset_of(vector_env, "Fixture")


def test_before_there_were_modes_every_vector_env_resets_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gymnasium.vector, "AutoresetMode")
    assert autoreset_of(NoModeVectorEnv(), "Fixture") is AutoresetMode.NEXT_STEP


@pytest.mark.parametrize(
    ("name", "kwargs", "vectorize", "error", "says"),
    [
        (f"{VECTORS}:too_few", {}, Vectorize.FACTORY, EnvFault, "was called with num_envs=3 and made 2 envs"),
        (f"{VECTORS}:ticks", {"height": 3}, Vectorize.FACTORY, EnvFault, "unexpected keyword argument 'height'"),
        (f"{VECTORS}:nothing", {}, Vectorize.FACTORY, ConfigError, "has no callable 'nothing'"),
        (f"{VECTORS}:LARGE", {}, Vectorize.FACTORY, ConfigError, "has no callable 'LARGE'"),
        ("CartPole-v1", {}, Vectorize.FACTORY, ConfigError, "names no module; a factory is module:factory"),
        ("builtins:dict", {}, Vectorize.FACTORY, EnvFault, "builtins.dict, not a gymnasium.vector.VectorEnv"),
        (f"{VECTORS}:ticks", {}, Vectorize.VECTOR_ENTRY_POINT, ConfigError, "set vectorize to factory"),
        ("MountainCar-v0", {}, Vectorize.VECTOR_ENTRY_POINT, ConfigError, "doesn't have a vector entry point"),
        ("Nowhere-v0", {}, Vectorize.VECTOR_ENTRY_POINT, ConfigError, "Nowhere"),
        ("Nowhere-v0", {}, Vectorize.SYNC, ConfigError, "Nowhere"),
        ("CartPole-v1", {"vector_kwargs": 3}, Vectorize.SYNC, ConfigError, "vector_kwargs is 3; it must be a table"),
        (
            "CartPole-v1",
            {"vector_kwargs": {"autoreset_mode": "never"}},
            Vectorize.SYNC,
            EnvFault,
            "'never' is not a valid AutoresetMode",
        ),
        ("CartPole-v1", {}, Vectorize.NONE, ConfigError, "vectorize is none"),
    ],
)
def test_what_is_not_a_vector_env_is_refused_in_one_line(
    name: str, kwargs: dict[str, Any], vectorize: Vectorize, error: type[RolloutServiceError], says: str
) -> None:
    with pytest.raises(error) as caught:
        make_vector_env(name, kwargs, vectorize, 3, range(3))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_old_gymnasium_is_refused_in_one_line_that_says_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium, "__version__", "0.29.1")
    with pytest.raises(ConfigError) as caught:
        make.make_env("CartPole-v1")
    assert str(caught.value) == "gymnasium 0.29.1 is installed; supported: gymnasium 1.0 and newer; upgrade it"
    for version in ("1.0.0", "1.4.0", "2.0.0a1"):
        monkeypatch.setattr(gymnasium, "__version__", version)
        make.check_gymnasium()


@pytest.fixture
def no_tracker_left() -> Any:
    """Fresh interpreters of multiprocessing bring a tracker process, which would outlive the test."""
    yield
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def test_envs_in_processes_of_their_own_give_the_rows_of_envs_in_this_one(no_tracker_left: None) -> None:
    env, mode = f"{SINGLES}:SameArrayEnv", {"length": 2, "end": "trunc"}
    results = []
    for vectorize in (Vectorize.SYNC, Vectorize.ASYNC):
        kwargs = {**mode, "vector_kwargs": {"autoreset_mode": "same_step"}}
        batch = open_envs(env, kwargs, vectorize, env_ids=range(2), seeds=[1, 2])
        out = rows_of(batch)
        batch.reset_all(out)
        outcomes = [(batch.step(np.zeros(2, np.int64), out), out["observations"].copy()) for _ in range(2)]
        results.append(
            [outcomes[-1][0].final_observations["observations"].tolist(), *(o.tolist() for _, o in outcomes)]
        )
        if vectorize is Vectorize.ASYNC:
            processes = batch._envs.unwrapped.processes  # type: ignore[attr-defined]
            assert all(Path(f"/proc/{process.pid}").exists() for process in processes)
        batch.close()
    assert results[0] == results[1]
    assert results[0][0] == [[0, 2], [0, 2]]
    assert not any(process.is_alive() for process in processes)


@pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting")
def test_a_process_that_dies_is_an_env_fault_and_closing_leaves_none_behind(no_tracker_left: None) -> None:
    kwargs = {"at": 2, "how": "exit", "vector_kwargs": {"context": "fork"}}
    batch = open_envs(f"{SINGLES}:BoomEnv", kwargs, Vectorize.ASYNC, env_ids=range(2), seeds=[1, 2])
    out = rows_of(batch)
    batch.reset_all(out)
    batch.step(np.zeros(2, np.int64), out)
    with pytest.raises(EnvFault, match=r"vector env .*: step raised"):
        batch.step(np.zeros(2, np.int64), out)
    processes = batch._envs.unwrapped.processes  # type: ignore[attr-defined]
    batch.close()
    assert not any(process.is_alive() for process in processes)


def test_the_global_generators_are_left_where_the_seed_puts_them() -> None:
    states = []
    for _ in range(2):
        batch, _ = batch_of(TickVectorEnv(2))
        states.append((random.random(), float(np.random.random())))
        batch.close()
    assert states[0] == states[1]
