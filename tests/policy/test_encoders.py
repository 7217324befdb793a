"""Encoders: images of any size, rows that do not see each other."""

from __future__ import annotations

import pytest
import torch

from rollout_service.policy.encoders import Encoder
from rollout_service.runspec import Leaf, SpaceKind


def image_leaf(*shape: int) -> Leaf:
    return Leaf(kind=SpaceKind.BOX, shape=shape, dtype="uint8")


@pytest.mark.parametrize(("shape", "features"), [((1, 1, 3), 32), ((7, 7, 3), 32), ((84, 84, 4), 32 * 11 * 11)])
def test_no_image_is_too_small_or_too_large(shape: tuple[int, ...], features: int) -> None:
    encoder = Encoder([image_leaf(*shape)], 16, torch.Generator().manual_seed(0))
    assert encoder.linear.in_features == features
    out = encoder([], [torch.rand(2, shape[2], shape[0], shape[1])])
    assert out.shape == (2, 16)
    assert torch.isfinite(out).all()


def test_features_of_a_row_do_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    encoder = Encoder([image_leaf(8, 8, 3), Leaf(kind=SpaceKind.BOX, shape=(2,), dtype="float32")], 16, generator)
    vectors, images = torch.randn(5, 2, generator=generator), torch.rand(5, 3, 8, 8, generator=generator)
    together = encoder([vectors], [images])
    alone = torch.cat([encoder([vectors[row : row + 1]], [images[row : row + 1]]) for row in range(5)])
    assert torch.allclose(together, alone, atol=1e-6)
