"""Encoders: images of any size, rows that do not see each other."""

from __future__ import annotations

import pytest
import torch

from rollout_service.policy.encoders import Encoder, tanh_linear
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


def test_tanh_by_sigmoid_is_tanh_in_value_and_gradient() -> None:
    x = torch.cat([torch.linspace(-100, 100, 401), torch.logspace(-8, 0, 50)]).unsqueeze(1)
    weight, bias = torch.ones(1, 1, requires_grad=True), torch.tensor([0.25], requires_grad=True)
    found, expected = tanh_linear(x, weight, bias), torch.tanh(x @ weight.t() + bias)
    assert torch.allclose(found, expected, atol=2e-7, rtol=0.0)
    for got, want in zip(
        torch.autograd.grad(found.sum(), [weight, bias]),
        torch.autograd.grad(expected.sum(), [weight, bias]),
        strict=True,
    ):
        assert torch.allclose(got, want, rtol=1e-5)


def test_a_lone_leaf_gives_the_same_bits_from_memory_that_is_not_aligned() -> None:
    leaf = Leaf(kind=SpaceKind.BOX, shape=(7,), dtype="float32")
    encoder = Encoder([leaf], 16, torch.Generator().manual_seed(0))
    rows = torch.randn(9, 7, generator=torch.Generator().manual_seed(1))
    shifted = torch.zeros(9 * 7 + 1)[1:].view(9, 7).copy_(rows)
    assert torch.equal(encoder([shifted], []), encoder([rows], []))
