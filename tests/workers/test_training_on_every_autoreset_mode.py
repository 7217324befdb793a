"""Actor, memory, buffer and trainer on vector envs: the ratio law, the seed law, and nothing learned from a filler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from learner.evaluate import load_policy, play
from rollout_service.checkpoint import POLICY_PREFIX
from rollout_service.config import TrainConfig
from rollout_service.launch.serial import SerialRun, weights_digest
from rollout_service.runspec import AutoresetMode, StateStrategy, Vectorize
from tests.fixtures.random_ends import RANDOM_ENDS
from tests.fixtures.training import after_steps, serial_run, sharpen, small_config

MODES = ("next_step", "same_step", "disabled")
LIMIT = 1e-4
TICK = "tests.fixtures.envs:TickEnv"


def config_of(
    mode: str, env: str = RANDOM_ENDS, env_kwargs: dict[str, Any] | None = None, **settings: Any
) -> TrainConfig:
    """A small run on vector envs of that mode; "actor": on single envs."""
    kwargs, vectorize = dict(env_kwargs or {}), Vectorize.NONE
    if mode != "actor":
        kwargs["vector_kwargs"], vectorize = {"autoreset_mode": mode}, Vectorize.SYNC
    return small_config(env=env, env_kwargs=kwargs, vectorize=vectorize, **settings)


def valid_rows(run: SerialRun, bank: int) -> np.ndarray:
    return run.memory.rollout(run.spec.bank(bank))["valid"].astype(bool)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_ratios_are_one_with_fillers_on_the_first_row_between_and_on_the_last(mode: str, num_layers: int) -> None:
    settings = {"normalize_observations": True, "normalize_returns": True, "learning_rate": 1e-2}
    with serial_run(config_of(mode, env_kwargs={"end": 0.2}, num_layers=num_layers, self_check=1, **settings)) as run:
        assert run.spec.autoreset is AutoresetMode(mode)
        sharpen(run)
        fillers, rows, worst = np.zeros(16, np.int64), 0, 0.0
        for _ in range(8):
            bank = run.bank
            update = run.one_update()
            valid = valid_rows(run, bank)
            fillers += (~valid).sum(axis=0)
            rows += int(valid.sum())
            worst = max(worst, update.report.metrics["self_check_deviation"])
            assert update.report.metrics["valid_rows"] == valid.sum()
            assert update.summary.env_steps == run.trainer.env_steps_done == rows
        assert 0.0 < worst <= LIMIT
        assert "seed_mismatches" not in run.metrics.summary(0.0).counters
    if mode == "next_step":
        assert fillers[0] > 0
        assert fillers[-1] > 0
        assert fillers[1:-1].sum() > 0
        assert rows < 8 * 64
    else:
        assert (fillers.sum(), rows) == (0, 8 * 64)


@pytest.mark.parametrize("mode", MODES)
def test_ratios_are_one_on_partial_slots_and_after_them(mode: str) -> None:
    with serial_run(config_of(mode, env_kwargs={"end": 0.3}, self_check=1)) as run:
        sharpen(run)
        for lengths in ((5, 16), (16, 1), (2, 3), (1, 1), (7, 7), (16, 16)):
            slots = run.spec.bank(run.bank)
            bank = run.bank
            for actor, slot, length in zip(run.actors, slots, lengths, strict=True):
                assert run.collect(actor, slot, after_steps(length)) == length
            valid = valid_rows(run, bank) & (np.arange(16) < np.repeat(lengths, 2)[:, None])
            update = run.learn(list(lengths))
            assert update.report.metrics.get("self_check_deviation", 0.0) <= LIMIT
            assert update.report.metrics.get("valid_rows", 0) == valid.sum()
        assert "seed_mismatches" not in run.metrics.summary(0.0).counters


@pytest.mark.parametrize("settings", [{"state_strategy": StateStrategy.ZERO}, {"core": "none"}])
def test_ratios_are_one_for_the_comparison_arms(settings: dict[str, Any]) -> None:
    with serial_run(config_of("next_step", env_kwargs={"end": 0.3}, self_check=1, **settings)) as run:
        sharpen(run)
        assert max(run.one_update().report.metrics["self_check_deviation"] for _ in range(4)) <= LIMIT


def poison(run: SerialRun, slots: range) -> int:
    """Overwrites everything a filler row holds, but for its state and flags. Returns how many there were."""
    rollout = run.memory.rollout(slots)
    fillers = rollout["valid"] == 0
    rollout["observations"][fillers] = 1e6
    rollout["rewards"][fillers] = -1e6
    rollout["values"][fillers] = 7.0
    rollout["log_probs"][fillers] = -9.0
    rollout["actions"][fillers] = 2
    return int(fillers.sum())


def test_what_a_filler_row_holds_changes_nothing_that_is_learned() -> None:
    settings = {"normalize_observations": True, "normalize_returns": True, "target_kl": 0.5, "self_check": 2}
    config = config_of("next_step", env_kwargs={"end": 0.3}, learning_rate=1e-2, value_clip_range=0.2, **settings)
    digests, metrics = [], []
    for harm in (False, True):
        with serial_run(config) as run:
            poisoned = 0
            for _ in range(4):
                slots = run.spec.bank(run.bank)
                lengths = [run.collect(actor, slot) for actor, slot in zip(run.actors, slots, strict=True)]
                poisoned += poison(run, slots) if harm else 0
                metrics.append(run.learn(lengths).report.metrics)
            digests.append(weights_digest({**run.trainer.weights(), **run.trainer.capture().arrays}))
    assert poisoned > 20
    assert digests[0] == digests[1]
    assert metrics[:4] == metrics[4:]


@pytest.mark.parametrize(("mode", "num_steps"), [("actor", 12), ("next_step", 14), ("same_step", 12), ("disabled", 12)])
def test_twelve_steps_of_two_envs_are_twenty_four_to_every_counter(mode: str, num_steps: int) -> None:
    """Episodes of 4 steps: in mode next_step 12 steps take 14 rows."""
    settings = {"normalize_observations": True, "normalize_returns": True, "num_actors": 1, "num_steps": num_steps}
    with serial_run(config_of(mode, TICK, {"length": 4}, **settings)) as run:
        update = run.one_update()
        counted = run.trainer.capture().arrays
        assert counted["returns/statistics"][2] == 24
        assert [array[0] for name, array in counted.items() if name.startswith(POLICY_PREFIX) and "count" in name] == [
            24
        ]
        assert update.report.metrics["valid_rows"] == 24
        assert (update.summary.env_steps, run.trainer.env_steps_done) == (24, 24)
        assert (update.summary.episodes, update.summary.return_mean, update.summary.length_mean) == (6, 4.0, 4.0)


@pytest.mark.parametrize("mode", [*MODES, "actor"])
def test_return_statistics_are_the_same_in_every_mode(mode: str) -> None:
    """One stream of rewards per env: what 20 steps of TickEnvs say, whatever rows they come in."""
    num_steps = 24 if mode == "next_step" else 20
    settings = {"normalize_returns": True, "num_actors": 1, "num_steps": num_steps, "total_steps": 4096}
    with serial_run(config_of(mode, TICK, {"length": 5}, **settings)) as run:
        for _ in range(2):
            run.one_update()
        mean, variance, count = run.trainer.capture().arrays["returns/statistics"]
    steps = np.array([sum(0.99**k for k in range(t + 1)) for t in range(5)])
    # In mode next_step a rollout of 24 rows ends with the filler or begins with it: 20 or 19 + 1 steps, all of them.
    assert count == 80
    assert (mean, variance) == (pytest.approx(steps.mean()), pytest.approx(steps.var()))


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_plays_the_same_episodes_in_every_mode(mode: str) -> None:
    results = []
    for each in ("actor", mode):
        with serial_run(config_of(each, "tests.fixtures.envs:RecallEnv", {"steps": 5})) as run:
            sharpen(run)
            arrays = {POLICY_PREFIX + name: array for name, array in run.trainer.weights().items()}
            results.append(play(load_policy(run.spec, arrays), run.spec, [3, 2], argmax=True, seed=4))
    key = [
        [(e.env, e.length, e.total_reward, e.success) for e in sorted(found, key=lambda e: e.env)] for found in results
    ]
    assert len(key[0]) == 5
    assert key[0] == key[1]


def test_a_vector_entry_point_trains_under_the_ratio_law() -> None:
    config = small_config(
        env="CartPole-v1", env_kwargs={}, vectorize=Vectorize.VECTOR_ENTRY_POINT, num_steps=32, envs_per_actor=4,
        total_steps=4096, self_check=1,
    )  # fmt: skip
    with serial_run(config) as run:
        sharpen(run)
        updates = [run.one_update() for _ in range(4)]
        rows = 4 * 256
        assert run.trainer.env_steps_done == rows - (updates[-1].summary.episodes - pending_fillers(run))
    assert max(update.report.metrics["self_check_deviation"] for update in updates) <= LIMIT
    assert updates[-1].summary.episodes > 20
    assert updates[-1].summary.counters.get("seed_mismatches", 0) == 0


def pending_fillers(run: SerialRun) -> int:
    """Ends whose filler row belongs to the next rollout."""
    return sum(len(actor._envs.fillers) for actor in run.actors)
