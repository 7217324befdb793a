"""The three rules of GAE against a loop over single rows, golden numbers and numbers checked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.gae import Estimator, advantages_and_returns, bootstrap, generalized_advantages
from rollout_service.config import GaeRule
from rollout_service.errors import IncompleteRollout, ShapeError

DATA = Path(__file__).parent.parent / "data"
GOLDEN = json.loads((DATA / "golden_gae.json").read_text())["cases"]
FILLERS = json.loads((DATA / "golden_recurrent.json").read_text())["filler_rows"]
GOLDEN_NAMES = {
    GaeRule.BOUNDARY_CORRECT: "boundary_correct",
    GaeRule.ORIGINAL_STATED: "seed_stated",
    GaeRule.ORIGINAL_ACTUAL: "seed_actual",
}
TABLE = {"rewards": [[1.0] * 4], "values": [[0.5, 0.6, 0.7, 0.8]], "truncation_values": [[np.nan, 2.0, np.nan, np.nan]]}
"""One env; gamma .9, lambda .8, value after the last row 1.0, V(final observation) 2.0."""


def rows_of(**columns: Any) -> dict[str, np.ndarray]:
    """float32 and uint8 arrays [N, T] as a rollout holds them; what is missing gets harmless contents."""
    shape = np.shape(columns["rewards"])
    rows = {
        name: np.array(columns.get(name, np.zeros(shape)), np.float32) for name in ("rewards", "values", "log_probs")
    }
    rows["truncation_values"] = np.array(columns.get("truncation_values", np.full(shape, np.nan)), np.float32)
    for name, default in (("terminated", 0), ("truncated", 0), ("valid", 1)):
        rows[name] = np.array(columns.get(name, np.full(shape, default)), np.uint8)
    return rows


def estimate(
    rows: dict[str, np.ndarray],
    last_values: Any,
    gamma: float,
    lam: float,
    rule: GaeRule = GaeRule.BOUNDARY_CORRECT,
    valid_steps: Any = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    n, columns = rows["rewards"].shape
    steps = np.full(n, columns) if valid_steps is None else np.asarray(valid_steps)
    estimator = Estimator(gamma=gamma, lam=lam, rule=rule, **options)
    return advantages_and_returns(rows, np.asarray(last_values, np.float64), steps, estimator)


def naive(
    rows: dict[str, np.ndarray], last_values: Any, gamma: float, lam: float, rule: GaeRule, valid_steps: Any
) -> np.ndarray:
    """Advantages [N, T], row by row in plain Python: the oracle."""
    advantages = np.zeros(rows["rewards"].shape)
    for env, steps in enumerate(valid_steps):
        following = 0.0
        for t in range(steps - 1, -1, -1):
            at = {name: float(column[env, t]) for name, column in rows.items()}
            if not at["valid"]:
                following = 0.0
                continue
            successor = last_values[env] if t == steps - 1 else float(rows["values"][env, t + 1])
            if rule is GaeRule.BOUNDARY_CORRECT:
                if at["terminated"]:
                    successor = 0.0
                elif at["truncated"]:
                    successor = at["truncation_values"]
                cut = at["terminated"] or at["truncated"]
            else:
                if at["terminated"] and not (rule is GaeRule.ORIGINAL_ACTUAL and t == steps - 1):
                    successor = 0.0
                cut = at["terminated"]
            following = at["rewards"] + gamma * successor - at["values"] + (0.0 if cut else gamma * lam * following)
            advantages[env, t] = following
    return advantages


@pytest.mark.parametrize("rule", GaeRule)
@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden_numbers(case, rule):
    steps = case["valid_steps"]
    names = {"truncation_values": "final_values"}
    rows = rows_of(
        **{
            name: np.array(case[names.get(name, name)], np.float64).T
            for name in ("rewards", "values", "terminated", "truncated", "truncation_values")
        }
    )
    advantages, returns = estimate(
        rows, case["last_values"], case["gamma"], case["gae_lambda"], rule, [steps] * case["num_envs"]
    )
    for result, name in ((advantages, "advantages"), (returns, "returns")):
        expected = np.array(case["expected"][GOLDEN_NAMES[rule]][name])[:steps].T
        largest = np.abs(np.array(case["expected"][GOLDEN_NAMES[rule]]["advantages"])[:steps]).max(initial=1.0)
        np.testing.assert_allclose(result[:, :steps], expected, rtol=1e-5, atol=1e-5 * max(1.0, largest))
        assert not result[:, steps:].any()


@pytest.mark.parametrize("case", FILLERS, ids=lambda case: case["name"])
def test_filler_rows_get_nothing_and_cut_the_chain(case):
    names = ("rewards", "values", "terminated", "truncated", "valid", "truncation_values")
    rows = rows_of(**{name: [case[name]] for name in names})
    advantages, returns = estimate(rows, [case["last_value"]], case["gamma"], case["gae_lambda"])
    np.testing.assert_allclose(advantages[0], case["expected_advantages"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(returns[0], case["expected_returns"], rtol=1e-5, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 9),
    num_envs=st.integers(1, 5),
    end_rate=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    filler_rate=st.sampled_from([0.0, 0.2, 0.7]),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.8, 0.95, 1.0]),
    rule=st.sampled_from(GaeRule),
)
def test_every_rule_equals_the_loop_over_single_rows(
    seed, num_steps, num_envs, end_rate, filler_rate, gamma, lam, rule
):
    draw = np.random.default_rng(seed)
    shape = (num_envs, num_steps)
    rows = rows_of(
        rewards=draw.normal(size=shape),
        values=draw.normal(size=shape) * 10,
        terminated=draw.random(shape) < end_rate,
        truncated=draw.random(shape) < end_rate,
        valid=draw.random(shape) >= filler_rate,
        truncation_values=draw.normal(size=shape) * 10,
    )
    valid_steps = draw.integers(0, num_steps + 1, num_envs)
    for env, steps in enumerate(valid_steps):
        for name in ("rewards", "values", "log_probs", "truncation_values"):
            rows[name][env, steps:] = np.nan  # nothing beyond K may be read
        for name in ("rewards", "log_probs"):
            rows[name][env, rows["valid"][env] == 0] = np.nan
    last_values = draw.normal(size=num_envs) * 10
    advantages, returns = estimate(rows, last_values, gamma, lam, rule, valid_steps)
    expected = naive(rows, last_values, gamma, lam, rule, valid_steps)
    np.testing.assert_allclose(advantages, expected, rtol=1e-9, atol=1e-9)
    live = (rows["valid"] == 1) & (np.arange(num_steps) < valid_steps[:, None])
    np.testing.assert_allclose(returns, np.where(live, expected + np.nan_to_num(rows["values"]), 0.0), rtol=1e-9)


def test_four_states_give_four_usable_transitions():
    advantages, _ = estimate(rows_of(**TABLE), [1.0], 0.9, 0.8)
    np.testing.assert_allclose(advantages[0], [2.720941, 2.33464, 1.812, 1.1], atol=5e-7)


def test_a_termination_bootstraps_nothing_and_cuts_the_chain():
    advantages, _ = estimate(rows_of(**TABLE, terminated=[[0, 1, 0, 0]]), [1.0], 0.9, 0.8)
    np.testing.assert_allclose(advantages[0], [1.328, 0.4, 1.812, 1.1], atol=5e-7)


def test_a_time_limit_is_not_a_terminal():
    advantages, _ = estimate(rows_of(**TABLE, truncated=[[0, 1, 0, 0]]), [1.0], 0.9, 0.8)
    np.testing.assert_allclose(advantages[0], [2.624, 2.2, 1.812, 1.1], atol=5e-7)


def test_next_episode_does_not_leak_back_through_a_truncation():
    rows = rows_of(**TABLE, truncated=[[0, 1, 0, 0]])
    before, _ = estimate(rows, [1.0], 0.9, 0.8)
    rows["rewards"][0, 2:] += 1000.0
    rows["values"][0, 2:] -= 50.0
    after, _ = estimate(rows, [-7.0], 0.9, 0.8)
    assert before[0, :2].tobytes() == after[0, :2].tobytes()
    leaking, _ = estimate(rows, [1.0], 0.9, 0.8, GaeRule.ORIGINAL_STATED)
    assert leaking[0, 0] > 500.0


@pytest.mark.parametrize("wrong_bootstrap", [0.7, 0.6], ids=["value of the next episode's first row", "own value"])
def test_a_truncation_bootstraps_from_its_own_final_observation(wrong_bootstrap):
    rows = rows_of(**TABLE, truncated=[[0, 1, 0, 0]])
    right, _ = estimate(rows, [1.0], 0.9, 0.8)
    np.testing.assert_allclose(right[0, 1], 2.2, atol=5e-7)
    rows["truncation_values"][0, 1] = wrong_bootstrap
    wrong, _ = estimate(rows, [1.0], 0.9, 0.8)
    np.testing.assert_allclose(wrong[0, :2], {0.7: [1.7816, 1.03], 0.6: [1.7168, 0.94]}[wrong_bootstrap], atol=5e-7)


def test_the_state_before_a_terminating_action_keeps_its_target():
    rows = rows_of(rewards=[[0, 1, 0, 1]], values=[[0.2, 0.6, 0.2, 0.6]], terminated=[[0, 1, 0, 1]])
    _, returns = estimate(rows, [5.0], 0.95, 0.0)
    np.testing.assert_allclose(returns[0], [0.57, 1.0, 0.57, 1.0], rtol=1e-6)


def test_original_rules_differ_at_a_terminated_last_row_only_by_its_bootstrap():
    rows = rows_of(rewards=[[1.0]], values=[[0.5]], terminated=[[1]])
    stated, _ = estimate(rows, [2.0], 0.5, 0.5, GaeRule.ORIGINAL_STATED)
    actual, _ = estimate(rows, [2.0], 0.5, 0.5, GaeRule.ORIGINAL_ACTUAL)
    assert (stated[0, 0], actual[0, 0]) == (0.5, 1.5)


def test_reward_scale_multiplies_rewards_and_nothing_else():
    rows = rows_of(rewards=[[2.0, 4.0]], values=[[1.0, 3.0]])
    scaled, _ = estimate(rows, [1.0], 0.5, 0.5, reward_scale=0.5)
    plain, _ = estimate(rows_of(rewards=[[1.0, 2.0]], values=[[1.0, 3.0]]), [1.0], 0.5, 0.5)
    assert scaled.tolist() == plain.tolist()


def test_time_limits_can_be_taken_for_real_ends():
    rows = rows_of(**TABLE, truncated=[[0, 1, 0, 0]])
    ablated, _ = estimate(rows, [1.0], 0.9, 0.8, truncation_as_termination=True)
    terminated, _ = estimate(rows_of(**TABLE, terminated=[[0, 1, 0, 0]]), [1.0], 0.9, 0.8)
    assert ablated.tolist() == terminated.tolist()


def test_a_small_return_beside_large_values_keeps_its_digits():
    rows = rows_of(rewards=[[0.25]], values=[[1e5]], terminated=[[1]])
    _, returns = estimate(rows, [0.0], 0.99, 0.95)
    assert returns[0, 0] == 0.25


def test_a_truncation_without_its_value_is_refused_naming_step_and_env():
    rows = rows_of(rewards=np.zeros((3, 5)), truncated=np.eye(3, 5, 2))
    rows["truncation_values"][0, 2] = 1.0
    with pytest.raises(IncompleteRollout, match=r"step 3, env 1 .*truncation_value="):
        estimate(rows, np.zeros(3), 0.9, 0.9)
    for rule in (GaeRule.ORIGINAL_STATED, GaeRule.ORIGINAL_ACTUAL):
        advantages, _ = estimate(rows, np.zeros(3), 0.9, 0.9, rule)
        assert not advantages.any()


def test_a_truncation_that_terminated_or_is_not_valid_needs_no_value():
    rows = rows_of(rewards=[[1.0, 1.0]], truncated=[[1, 1]], terminated=[[1, 0]], valid=[[1, 0]])
    advantages, _ = estimate(rows, [0.0], 0.9, 0.9)
    assert advantages.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("name", ["rewards", "values", "log_probs"])
def test_a_valid_row_that_is_not_finite_is_refused_by_name(name):
    rows = rows_of(rewards=np.zeros((2, 3)))
    rows[name][1, 2] = np.nan
    with pytest.raises(IncompleteRollout, match=f"step 2, env 1 holds {name}"):
        estimate(rows, [0.0, 0.0], 0.9, 0.9)


def test_last_values_must_be_finite_only_where_they_are_read():
    rows = rows_of(rewards=np.zeros((2, 2)), terminated=[[0, 1], [0, 0]])
    advantages, _ = estimate(rows, [np.nan, 0.0], 0.9, 0.9)
    assert not advantages.any()
    with pytest.raises(IncompleteRollout, match="step 1, env 1 is followed by"):
        estimate(rows, [0.0, np.inf], 0.9, 0.9)


def test_shapes_that_differ_are_refused():
    two, three = np.zeros((1, 2)), np.zeros((1, 3))
    cut = np.zeros((1, 2), bool)
    with pytest.raises(ShapeError, match=r"rewards \(1, 2\), values \(1, 3\)"):
        generalized_advantages(two, three, two, cut, gamma=0.9, lam=0.9)
    with pytest.raises(ShapeError, match="one shape"):
        generalized_advantages(two[0], two[0], two[0], cut[0], gamma=0.9, lam=0.9)
    with pytest.raises(ShapeError, match="one number per env"):
        bootstrap(
            GaeRule.BOUNDARY_CORRECT,
            values=two,
            last_values=np.zeros(2),
            truncation_values=two,
            terminated=cut,
            truncated=cut,
            valid=~cut,
            valid_steps=np.array([2]),
        )


def test_inputs_stay_as_they_are_and_the_dtype_is_kept():
    draw = np.random.default_rng(0)
    inputs = [draw.normal(size=(2, 3)).astype(np.float32) for _ in range(3)]
    cut = draw.random((2, 3)) < 0.5
    before = [array.tobytes() for array in (*inputs, cut)]
    result = generalized_advantages(*inputs, cut, gamma=0.9, lam=0.8)
    assert [array.tobytes() for array in (*inputs, cut)] == before
    assert result.dtype == np.float32


def test_no_columns_give_no_advantages():
    advantages, returns = estimate(rows_of(rewards=np.zeros((3, 0))), np.full(3, np.nan), 0.9, 0.9)
    assert advantages.shape == returns.shape == (3, 0)
