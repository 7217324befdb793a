"""The straggler bench: its env is slow where it should be, and its runs have settings that parse."""

from __future__ import annotations

import pytest

from bench import stragglers
from bench.stragglers import ACTORS, CASES, LENGTH, RESET_S, SLOW_ACTOR, STEP_S, STREAMING, SleepyEnv
from rollout_service.launch.settings import parse_train


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the env would have slept."""
    times: list[float] = []
    monkeypatch.setattr(stragglers.time, "sleep", times.append)
    return times


def play(env: SleepyEnv) -> int:
    """Steps of one episode."""
    env.reset()
    steps = 1
    while not env.step(0)[2]:
        steps += 1
    return steps


@pytest.mark.parametrize(("actor", "reset_s"), [(str(SLOW_ACTOR), RESET_S), ("0", 0.0), (None, 0.0)])
def test_resets_are_slow_in_one_actor_only(
    actor: str | None, reset_s: float, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLOUT_SERVICE_ACTOR", raising=False)
    if actor is not None:
        monkeypatch.setenv("ROLLOUT_SERVICE_ACTOR", actor)
    env = SleepyEnv(reset_s=RESET_S)
    assert [play(env), play(env)] == [LENGTH, LENGTH]
    assert slept == [reset_s, *[STEP_S] * LENGTH] * 2


def test_spread_envs_end_their_first_episodes_apart(slept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SleepyEnv, "made", 0)
    envs = [SleepyEnv(spread=True) for _ in range(4)]
    assert [play(env) for env in envs] == [100, 75, 50, 25]
    assert [play(env) for env in envs] == [100] * 4


@pytest.mark.parametrize("mode", ACTORS)
def test_every_case_of_a_mode_is_a_run_that_differs_only_in_what_is_compared(mode: str) -> None:
    cases = [case for case in CASES if case.mode == mode]
    configs = [parse_train(case.words(updates=20)[1:]) for case in cases]
    assert [config.env_kwargs["reset_s"] > 0 for config in configs] == [case.slow for case in cases]
    assert [config.preempt_share < 1 for config in configs] == [case.preempt for case in cases]
    assert {config.max_policy_lag > 0 for config in configs} == {mode == STREAMING}
    assert {config.num_actors for config in configs} == {ACTORS[mode]}
    compared = {"env_kwargs", "preempt_share"}
    assert len({config.model_copy(update=dict.fromkeys(compared)).to_json() for config in configs}) == 1


def test_a_slow_run_is_compared_with_the_even_one_of_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"even": 1000.0, "slow, together": 500.0, "even, streaming": 4000.0, "slow, together, streaming": 3000.0}
    monkeypatch.setattr(stragglers, "one_run", lambda case, updates: {"env_steps_per_s": rates[case.name]})
    report = stragglers.measure(1, 20, [case for case in CASES if case.name in rates])
    shares = {name: figures["of_even_share"] for name, figures in report.cases.items()}
    assert shares == {"even": 1.0, "slow, together": 0.5, "even, streaming": 1.0, "slow, together, streaming": 0.75}
