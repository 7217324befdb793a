"""The compiled pass: the reference's bits, its refusals, and nothing read or written that is not a row's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from learner import single_pass
from learner.gae import Estimator, advantages_and_returns
from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.single_pass import BUILT, READ, write_advantages
from rollout_service.config import GaeRule
from rollout_service.errors import IncompleteRollout
from tests.fixtures.machine import environment
from tests.learner.random_rows import random_rows

needs_the_extension = pytest.mark.skipif(not BUILT, reason=single_pass.NOT_BUILT)
ROOT = Path(__file__).parents[2]


def compiled(rows: dict[str, np.ndarray], last_values: np.ndarray, steps: np.ndarray, rule: GaeRule) -> bool:
    """The pass alone, with gamma = lambda = 1/2."""
    assert single_pass._compiled is not None
    flags = (False, rule is GaeRule.BOUNDARY_CORRECT, rule is GaeRule.ORIGINAL_ACTUAL)
    arrays = [rows[name] for name in (*READ, "advantages", "returns")]
    return single_pass._compiled(*arrays, last_values, steps, 0.5, 0.25, 1.0, *flags)


def expected(rows, last_values, steps, estimator) -> dict[str, np.ndarray]:
    """What the reference leaves in advantages and returns."""
    results = zip(("advantages", "returns"), advantages_and_returns(rows, last_values, steps, estimator), strict=True)
    within = np.arange(rows["valid"].shape[1]) < steps[:, None]
    return {name: np.where(within, result.astype(np.float32), rows[name]) for name, result in results}


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_envs=st.sampled_from([1, 2, 7, 8, 9, 17]),
    num_steps=st.sampled_from([1, 2, 7, 8, 9, 16, 30, 65]),
    end_rate=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    filler_rate=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    full=st.booleans(),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.8, 0.95, 1.0]),
    rule=st.sampled_from(GaeRule),
    reward_scale=st.sampled_from([1.0, 0.1]),
    truncation_as_termination=st.booleans(),
)
@example(1, 9, 1100, 0.01, 0.01, False, 0.99, 0.95, GaeRule.BOUNDARY_CORRECT, 0.3, False)
@example(2, 9, 1024, 0.01, 0.0, True, 0.99, 0.95, GaeRule.ORIGINAL_ACTUAL, 1.0, False)
def test_it_gives_the_bits_of_the_reference(
    seed, num_envs, num_steps, end_rate, filler_rate, full, gamma, lam, rule, reward_scale, truncation_as_termination
):
    rows, last_values, steps = random_rows(
        seed, num_envs, num_steps, end_rate=end_rate, filler_rate=filler_rate, full=full
    )
    # A successor that is a filler has a value of its own; only rows behind K are NaN in `values`.
    estimator = Estimator(gamma, lam, rule, reward_scale, truncation_as_termination)
    wanted = expected(rows, last_values, steps, estimator)
    write_advantages(rows, last_values, steps, estimator)
    for name, array in wanted.items():
        np.testing.assert_array_equal(rows[name], array)


@needs_the_extension
@pytest.mark.parametrize("rule", GaeRule)
def test_it_takes_what_slots_hold_and_needs_no_second_look(rule):
    rows, last_values, steps = random_rows(3, 11, 40, filler_rate=0.0)
    wide = {name: np.pad(array, ((0, 0), (0, 5))) for name, array in rows.items()}
    views = {name: array[:, :40] for name, array in wide.items()}
    for name in READ:
        views[name].flags.writeable = False
    as_bools = views | {name: views[name].view(np.bool_) for name in ("terminated", "truncated", "valid")}
    results = []
    for given_rows in (rows, views, as_bools):
        assert compiled(given_rows, last_values, steps, rule)
        results.append(given_rows["advantages"].copy())
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    assert not wide["advantages"][:, 40:].any()
    assert not wide["returns"][:, 40:].any()


@needs_the_extension
@pytest.mark.parametrize("flag", [2, 255])
def test_every_flag_but_zero_is_set(flag):
    rows, last_values, steps = random_rows(4, 9, 40)
    estimator = Estimator(0.9, 0.8)
    wanted = expected(rows, last_values, steps, estimator)
    for name in ("terminated", "truncated", "valid"):
        rows[name] *= flag
    write_advantages(rows, last_values, steps, estimator)
    for name, array in wanted.items():
        np.testing.assert_array_equal(rows[name], array)


@needs_the_extension
def test_what_it_cannot_take_is_left_alone():
    rows, last_values, steps = random_rows(5, 4, 8)

    def refused(change: dict[str, np.ndarray], last: np.ndarray = last_values, counts: np.ndarray = steps) -> bool:
        given_rows = rows | change
        return not compiled(given_rows, last, counts, GaeRule.BOUNDARY_CORRECT)

    assert refused({"rewards": rows["rewards"].astype(np.float64)})
    assert refused({"values": np.asfortranarray(rows["values"])})
    assert refused({"values": rows["values"][:, :7]})
    assert refused({"log_probs": rows["log_probs"][:3]})
    assert refused({"rewards": rows["rewards"][0]})
    assert refused({"valid": rows["valid"].astype(np.int64)})
    assert refused({}, last=last_values.astype(np.float32))
    assert refused({}, last=last_values[:3])
    assert refused({}, counts=steps.astype(np.int32))
    assert refused({}, counts=np.array([8, 8, 8, 9]))
    assert refused({}, counts=np.array([8, 8, 8, -1]))
    assert (rows["advantages"] == 7.0).all()
    rows["advantages"].flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        compiled(rows, last_values, steps, GaeRule.BOUNDARY_CORRECT)
    with pytest.raises(TypeError):
        compiled(rows | {"rewards": [[1.0]]}, last_values, steps, GaeRule.BOUNDARY_CORRECT)


@needs_the_extension
@pytest.mark.parametrize("num_steps", [3, 40])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["rewards", "values", "log_probs"])
def test_one_wrong_number_anywhere_is_noticed(name, wrong, num_steps):
    for env, step in ((0, 0), (10, num_steps - 1), (4, num_steps // 2)):
        rows, last_values, steps = random_rows(6, 11, num_steps, end_rate=0.0, filler_rate=0.0, full=True)
        assert compiled(rows, last_values, steps, GaeRule.ORIGINAL_STATED)
        rows[name][env, step] = wrong
        assert not compiled(rows, last_values, steps, GaeRule.ORIGINAL_STATED)
        with pytest.raises(IncompleteRollout, match=f"step {step}, env {env} holds {name}"):
            write_advantages(rows, last_values, steps, Estimator(0.5, 0.5, GaeRule.ORIGINAL_STATED))


def refusals(rows, last_values, steps, estimator) -> list[str]:
    """What the reference and the pass say."""
    said = []
    for estimate in (advantages_and_returns, write_advantages):
        with pytest.raises(IncompleteRollout) as raised:
            estimate(rows, last_values, steps, estimator)
        said.append(str(raised.value))
    return said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"truncated": 1, "truncation_values": np.nan}, "step 12, env 3 is truncated and has no truncation value"),
        ({"truncated": 1, "truncation_values": np.inf}, "step 12, env 3 is followed by a value that is not finite"),
        ({"rewards": np.inf}, "step 12, env 3 holds rewards that are not finite"),
        ({"log_probs": np.nan}, "step 12, env 3 holds log_probs that are not finite"),
    ],
)
def test_refusals_are_the_reference_s_own(change, words):
    rows, last_values, steps = random_rows(7, 5, 30, end_rate=0.0, filler_rate=0.0, full=True)
    for name, value in change.items():
        rows[name][3, 12] = value
    first, second = refusals(rows, last_values, steps, Estimator(0.9, 0.9))
    assert first == second
    assert words in first
    last_values[1] = np.nan
    assert words in refusals(rows, last_values, steps, Estimator(0.9, 0.9))[1]


def test_a_refused_rollout_has_no_products_at_all():
    with RecurrentRolloutBuffer(4, 1, obs_dim=1) as buffer:
        for step in range(4):
            buffer.add(step, 0, [0.0], 0, 1.0, 0.5, 0.0, False, False)
        buffer.compute_advantages([1.0], 0.5, 0.5)
        assert buffer.advantages().any()
        with pytest.raises(IncompleteRollout, match="step 3, env 0 is followed by"):
            buffer.compute_advantages([np.nan], 0.5, 0.5)
        assert not buffer.advantages().any()
        assert not buffer.returns().any()


def test_without_the_extension_numpy_writes_the_same(monkeypatch):
    results = []
    for without in (False, True):
        if without:
            monkeypatch.setattr(single_pass, "_compiled", None)
        rows, last_values, steps = random_rows(8, 6, 25)
        write_advantages(rows, last_values, steps, Estimator(0.9, 0.8, reward_scale=0.5))
        results.append(rows)
    for name in ("advantages", "returns"):
        np.testing.assert_array_equal(results[0][name], results[1][name])


def test_where_it_cannot_be_imported_the_module_says_so():
    code = (
        "import sys; sys.modules['learner._single_pass'] = None; "
        "from learner import single_pass; print(single_pass.BUILT, single_pass._compiled)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert shown.stdout.strip() == "False None", shown.stderr
