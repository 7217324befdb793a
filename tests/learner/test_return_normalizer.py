"""Rewards are divided by the deviation of the discounted return, over real rows only."""

from __future__ import annotations

import numpy as np
import pytest

from learner.return_normalizer import ReturnNormalizer, turns
from rollout_service.errors import ShapeError


def rows(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def flags(*values: int) -> np.ndarray:
    return np.array([values], bool)


def by_hand(rewards: list[float], ends: list[int], gamma: float) -> list[float]:
    """The discounted return of every row of one env, step by step."""
    returns, carried = [], 0.0
    for reward, end in zip(rewards, ends, strict=True):
        carried = gamma * carried + reward
        returns.append(carried)
        if end:
            carried = 0.0
    return returns


def test_statistics_are_those_of_the_discounted_return() -> None:
    normalizer = ReturnNormalizer(1, gamma=0.5)
    normalizer.update(rows(1, 2, 3, 4), flags(0, 1, 0, 0), flags(1, 1, 1, 1), np.ones(1))
    returns = by_hand([1, 2, 3, 4], [0, 1, 0, 0], 0.5)
    assert returns == [1, 2.5, 3, 5.5]
    assert normalizer.count == 4
    assert normalizer.mean == pytest.approx(3.0)
    assert normalizer.variance == pytest.approx(np.var(returns))
    assert normalizer.scale == pytest.approx(1 / np.std(returns))


def test_the_return_runs_on_over_rollouts_as_if_there_were_one() -> None:
    rewards, ends = np.random.default_rng(1).normal(size=(3, 24)), np.random.default_rng(2).random((3, 24)) < 0.2
    valid = np.ones_like(ends)
    whole, parts = ReturnNormalizer(3, 0.9), ReturnNormalizer(3, 0.9)
    whole.update(rewards, ends, valid, np.ones(3))
    starts = np.ones(3)
    for start in range(0, 24, 8):
        part = slice(start, start + 8)
        parts.update(rewards[:, part], ends[:, part], valid[:, part], starts)
        starts = ends[:, part][:, -1].astype(float)
    assert parts.count == whole.count == 72
    assert parts.mean == pytest.approx(whole.mean, rel=1e-12)
    assert parts.variance == pytest.approx(whole.variance, rel=1e-12)
    np.testing.assert_allclose(parts.carried, whole.carried, rtol=1e-12)


def test_rows_that_are_not_valid_are_neither_counted_nor_read() -> None:
    padded, plain = ReturnNormalizer(1, 0.9), ReturnNormalizer(1, 0.9)
    padded.update(rows(1, 2, np.nan, np.nan), flags(0, 0, 0, 0), flags(1, 1, 0, 0), np.ones(1))
    plain.update(rows(1, 2), flags(0, 0), flags(1, 1), np.ones(1))
    assert (padded.mean, padded.variance, padded.count) == (plain.mean, plain.variance, 2)
    np.testing.assert_array_equal(padded.carried, plain.carried)


def test_autoreset_fillers_do_not_change_the_count() -> None:
    """Two episodes of four steps, with and without a filler row after each: eight real rows in both."""
    with_fillers, without = ReturnNormalizer(1, 0.9), ReturnNormalizer(1, 0.9)
    with_fillers.update(
        rows(1, 1, 1, 1, 0, 1, 1, 1, 1, 0),
        flags(0, 0, 0, 1, 1, 0, 0, 0, 1, 1),
        flags(1, 1, 1, 1, 0, 1, 1, 1, 1, 0),
        np.ones(1),
    )
    without.update(rows(*[1] * 8), flags(0, 0, 0, 1, 0, 0, 0, 1), flags(*[1] * 8), np.ones(1))
    assert with_fillers.count == without.count == 8
    assert with_fillers.variance == pytest.approx(without.variance)


def test_a_new_episode_at_row_zero_forgets_the_carried_return() -> None:
    normalizer = ReturnNormalizer(2, gamma=1.0)
    ones = np.ones((2, 3), np.float32)
    normalizer.update(ones, np.zeros((2, 3), bool), np.ones((2, 3), bool), np.ones(2))
    normalizer.update(ones, np.zeros((2, 3), bool), np.ones((2, 3), bool), np.array([0.0, 1.0]))
    np.testing.assert_array_equal(normalizer.carried, [6.0, 3.0])


def test_constant_zero_rewards_then_one_then_huge_ones_stay_finite() -> None:
    normalizer = ReturnNormalizer(1, 0.99)
    none = np.zeros((1, 1000), bool)
    for value in (0.0, 1.0, 1e30):
        normalizer.update(np.full((1, 1000), value, np.float32), none, ~none, np.zeros(1))
        assert np.isfinite(normalizer.scale)
        assert normalizer.scale > 0.0
        assert value * normalizer.scale <= np.sqrt(normalizer.count)


def test_nothing_seen_means_a_factor_of_one() -> None:
    normalizer = ReturnNormalizer(2, 0.9)
    normalizer.update(np.zeros((2, 0), np.float32), np.zeros((2, 0), bool), np.zeros((2, 0), bool), np.ones(2))
    assert normalizer.scale == 1.0


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\[2, T\]"):
        ReturnNormalizer(2, 0.9).update(rows(1), flags(0), flags(1), np.ones(1))


def test_an_env_that_comes_twice_goes_on_where_it_came_first_and_one_left_out_keeps_its_place() -> None:
    """Env 2's two sequences are one of six steps; env 0 has a pause."""
    mixed, alone = ReturnNormalizer(3, 0.5), ReturnNormalizer(3, 0.5)
    rewards = np.arange(1.0, 13.0).reshape(4, 3)
    ends, valid = np.zeros((4, 3), bool), np.ones((4, 3), bool)
    ends[1, 1] = True
    mixed.update(rewards[:1], ends[:1], valid[:1], np.ones(1), np.array([0]))
    mixed.update(rewards[1:3], ends[1:3], valid[1:3], np.array([1, 0]), np.array([2, 2]))
    mixed.update(rewards[3:], ends[3:], valid[3:], np.zeros(1), np.array([0]))
    first = by_hand([*rewards[0], *rewards[3]], [0] * 6, 0.5)
    second = by_hand([*rewards[1], *rewards[2]], [0, 1, 0, 0, 0, 0], 0.5)
    assert mixed.count == 12
    assert mixed.mean == pytest.approx(np.mean(first + second))
    assert mixed.variance == pytest.approx(np.var(first + second))
    assert mixed.carried.tolist() == pytest.approx([0.5 * first[-1], 0.0, 0.5 * second[-1]])
    alone.update(rewards[1:], ends[1:], valid[1:], np.array([1, 0, 1]), np.array([2, 2, 1]))
    assert alone.carried.tolist() == pytest.approx(
        [0.0, 0.5 * by_hand(list(rewards[3]), [0] * 3, 0.5)[-1], 0.5 * second[-1]]
    )


def test_turns_have_every_env_at_most_once_in_the_order_of_its_coming() -> None:
    assert [turn.tolist() for turn in turns(np.array([4, 5, 0, 4, 4, 5]))] == [[0, 1, 2], [3, 5], [4]]
    assert [turn.tolist() for turn in turns(np.array([3, 1, 2]))] == [[0, 1, 2]]
    assert turns(np.array([], np.int64)) == []
