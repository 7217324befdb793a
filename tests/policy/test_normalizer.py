"""Running observation statistics: exact merges, one statistic per feature, a stated clip."""

from __future__ import annotations

import itertools

import pytest
import torch

from rollout_service.policy.normalizer import CLIP, VARIANCE_EPSILON, RunningMoments, normalize


def test_two_actors_merge_exactly_in_either_order() -> None:
    for first, second in (((1.0, 2.0), (3.0, 4.0)), ((3.0, 4.0), (1.0, 2.0))):
        moments = RunningMoments((1,))
        moments.update(torch.tensor(first).unsqueeze(1))
        moments.update(torch.tensor(second).unsqueeze(1))
        assert moments.mean.tolist() == pytest.approx([2.5], abs=1e-12)
        assert moments.variance.tolist() == pytest.approx([1.25], abs=1e-12)
        assert moments.count.tolist() == [4.0]


def test_any_split_of_the_rows_gives_the_moments_of_all_rows() -> None:
    rows = torch.randn(60, 2, 3, generator=torch.Generator().manual_seed(1)) * 7 + 100
    for sizes in itertools.permutations((1, 9, 20, 30)):
        moments = RunningMoments((2, 3))
        for part in torch.split(rows, list(sizes)):
            moments.update(part)
        assert torch.allclose(moments.mean, rows.double().mean(0), atol=1e-10)
        assert torch.allclose(moments.variance, rows.double().var(0, correction=0), atol=1e-10)
        assert moments.count.item() == 60


def test_statistics_have_the_shape_of_the_observation() -> None:
    moments = RunningMoments((2, 3))
    moments.update(torch.randn(4, 2, 3))
    assert moments.mean.shape == moments.variance.shape == (2, 3)


def test_an_observation_that_is_one_plain_number_has_statistics_too() -> None:
    moments = RunningMoments(())
    moments.update(torch.tensor([1.0, 2.0]))
    moments.update(torch.tensor([3.0, 4.0]))
    assert moments.mean.shape == moments.variance.shape == ()
    assert (moments.mean.item(), moments.variance.item(), moments.count.item()) == pytest.approx((2.5, 1.25, 4.0))
    assert [vector.shape for vector in moments.offset_and_scale()] == [(1,), (1,)]


def test_two_far_apart_actors_share_the_moments_of_the_mixture() -> None:
    generator = torch.Generator().manual_seed(2)
    moments = RunningMoments((1,))
    moments.update(torch.randn(20_000, 1, generator=generator))
    moments.update(torch.randn(20_000, 1, generator=generator) + 10)
    assert moments.mean.item() == pytest.approx(5.0, abs=0.1)
    assert moments.variance.item() == pytest.approx(26.0, abs=1.0)


def test_no_rows_change_nothing() -> None:
    moments = RunningMoments((2,))
    moments.update(torch.zeros(0, 2))
    assert moments.count.item() == 0
    assert moments.variance.tolist() == [1.0, 1.0]


def test_before_the_first_row_only_the_clip_acts() -> None:
    rows = torch.tensor([[3.0, -250.0]])
    assert normalize(rows, *RunningMoments((2,)).offset_and_scale()).tolist() == [[3.0, -CLIP]]
    assert rows.tolist() == [[3.0, -250.0]]


def test_normalised_rows_have_zero_mean_and_unit_deviation() -> None:
    rows = torch.randn(500, 3, generator=torch.Generator().manual_seed(3)) * torch.tensor([0.1, 1.0, 40.0]) + 5
    moments = RunningMoments((3,))
    moments.update(rows)
    normalised = normalize(rows, *moments.offset_and_scale())
    assert normalised.dtype == torch.float32
    assert torch.allclose(normalised.mean(0), torch.zeros(3), atol=1e-4)
    assert torch.allclose(normalised.std(0, correction=0), torch.ones(3), atol=1e-4)


def test_a_constant_feature_stays_finite_and_is_cut() -> None:
    moments = RunningMoments((1,))
    moments.update(torch.full((10, 1), 7.0))
    rows = normalize(torch.tensor([[7.0], [7.0 + 1e-5], [8.0]]), *moments.offset_and_scale())
    assert rows[0].item() == 0.0
    assert rows[1].item() == pytest.approx(1e-5 / VARIANCE_EPSILON**0.5, rel=0.1)
    assert rows[2].item() == CLIP
