"""GAE by the scan equals the step loop, on every kind of row, and refuses what the reference refuses; no step of T is
an operation of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.gpu_checks import scan_launches
from learner import gae
from learner.gae import Estimator, advantages_and_returns
from learner.scan import advantages_and_returns_on_device, flow_back
from rollout_service.config import GaeRule
from rollout_service.errors import IncompleteRollout, ShapeError
from tests.learner.random_rows import random_rows


def on_device(rows, last_values, steps, estimator) -> list[np.ndarray]:
    tensors = {name: torch.from_numpy(array) for name, array in rows.items()}
    results = advantages_and_returns_on_device(
        tensors, torch.from_numpy(last_values), torch.from_numpy(steps), estimator
    )
    return [result.numpy() for result in results]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_envs=st.integers(1, 4),
    num_steps=st.sampled_from([1, 2, 3, 4, 5, 8, 17, 64, 200]),
    end_rate=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    filler_rate=st.sampled_from([0.0, 0.3, 1.0]),
    gamma=st.sampled_from([0.0, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    rule=st.sampled_from(GaeRule),
    reward_scale=st.sampled_from([1.0, 0.1]),
    truncation_as_termination=st.booleans(),
)
def test_advantages_equal_the_reference(
    seed, num_envs, num_steps, end_rate, filler_rate, gamma, lam, rule, reward_scale, truncation_as_termination
):
    rows, last_values, steps = random_rows(seed, num_envs, num_steps, end_rate=end_rate, filler_rate=filler_rate)
    estimator = Estimator(gamma, lam, rule, reward_scale, truncation_as_termination)
    before = {name: array.tobytes() for name, array in rows.items()}
    for ours, reference in zip(
        on_device(rows, last_values, steps, estimator),
        advantages_and_returns(rows, last_values, steps, estimator),
        strict=True,
    ):
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, reference, rtol=1e-9, atol=1e-9)
    assert {name: array.tobytes() for name, array in rows.items()} == before


def test_float32_is_kept_and_as_good_as_float32_gets():
    draw = np.random.default_rng(0)
    increments = draw.standard_normal((4, 300)).astype(np.float32)
    decays = np.where(draw.random((4, 300)) < 0.02, 0.0, 0.95).astype(np.float32)
    sums = flow_back(torch.from_numpy(increments), torch.from_numpy(decays))
    assert sums.dtype == torch.float32
    reference = gae.flow_back(increments.astype(np.float64), decays)
    np.testing.assert_allclose(sums.numpy(), reference, rtol=1e-5, atol=1e-5)


def test_no_columns_give_no_advantages():
    rows, last_values, steps = random_rows(0, 3, 0)
    for result in on_device(rows, last_values, steps, Estimator(0.9, 0.9)):
        assert result.shape == (3, 0)


def test_sixteen_times_the_steps_are_fewer_than_twice_the_operations():
    figures = scan_launches(torch.device("cpu"))
    assert 0 < figures["gae_64"] < figures["gae_1024"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rewards", np.nan, "step 5, env 2 holds rewards"),
        ("log_probs", np.inf, "step 5, env 2 holds log_probs"),
        ("truncated", 1, "step 5, env 2 is truncated and has no truncation value"),
    ],
)
def test_a_wrong_row_is_named_as_the_reference_names_it(name, value, words):
    rows, last_values, steps = random_rows(1, 3, 9, end_rate=0.0, filler_rate=0.0, full=True)
    rows[name][2, 5] = value
    with pytest.raises(IncompleteRollout, match=words):
        on_device(rows, last_values, steps, Estimator(0.9, 0.9))


def test_shapes_that_differ_are_refused():
    rows, last_values, steps = random_rows(1, 3, 9)
    with pytest.raises(ShapeError, match=r"one number per env, \(3,\)"):
        on_device(rows, last_values[:2], steps, Estimator(0.9, 0.9))
    with pytest.raises(ShapeError, match=r"one shape \[N, T\]"):
        on_device(rows | {"values": rows["values"][:, :3]}, last_values, steps, Estimator(0.9, 0.9))
