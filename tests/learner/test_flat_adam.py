"""Adam over one flat vector, against torch's Adam over parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learner.optimizer import FlatAdam

SHAPES = {"weight": (5, 3), "bias": (5,), "square": (4, 4), "lone": (1,)}


def parameters() -> list[tuple[str, nn.Parameter]]:
    draw = torch.Generator().manual_seed(0)
    return [(name, nn.Parameter(torch.randn(shape, generator=draw))) for name, shape in SHAPES.items()]


def gradients(step: int, scale: float) -> list[Tensor]:
    draw = torch.Generator().manual_seed(step + 1)
    return [scale * torch.randn(shape, generator=draw) for shape in SHAPES.values()]


@pytest.mark.parametrize("scale", [0.01, 30.0])
def test_steps_are_those_of_torch_with_clipping(scale: float) -> None:
    mine, theirs = parameters(), parameters()
    flat = FlatAdam(mine, epsilon=1e-5)
    reference = torch.optim.Adam([parameter for _, parameter in theirs], lr=1e-2, eps=1e-5)
    for step in range(6):
        found = gradients(step, scale)
        flat.take([-7 * gradient for gradient in found], first=True)
        norm = flat.step(rows=7, learning_rate=1e-2, max_norm=0.5)
        for (_, parameter), gradient in zip(theirs, found, strict=True):
            parameter.grad = gradient.clone()
        expected = torch.nn.utils.clip_grad_norm_([parameter for _, parameter in theirs], 0.5)
        reference.step()
        assert norm.item() / 7 == pytest.approx(expected.item(), rel=1e-5)
    for (_, parameter), (_, other) in zip(mine, theirs, strict=True):
        assert torch.allclose(parameter, other, atol=1e-6)
    arrays = flat.to_arrays()
    for name, other in theirs:
        for part in ("exp_avg", "exp_avg_sq", "step"):
            expected_part = reference.state[other][part].numpy()
            np.testing.assert_allclose(arrays[f"{part}/{name}"], expected_part, rtol=1e-4, atol=1e-9)


def test_gradients_of_parts_are_added() -> None:
    flat = FlatAdam(parameters(), epsilon=1e-5)
    first, second = gradients(0, 1.0), gradients(1, 1.0)
    for _ in range(2):  # what was there before is gone
        flat.take(first, first=True)
        flat.take(second, first=False)
    for view, one, two in zip(flat.views(flat.gradient), first, second, strict=True):
        assert torch.equal(view, one + two)


def test_parameters_keep_their_values_and_are_views_on_cache_lines() -> None:
    named = parameters()
    flat = FlatAdam(named, epsilon=1e-5)
    for (_, parameter), (_, untouched) in zip(named, parameters(), strict=True):
        assert torch.equal(parameter, untouched)
        assert parameter.untyped_storage().data_ptr() == flat.values.untyped_storage().data_ptr()
        assert (parameter.data_ptr() - flat.values.data_ptr()) % 64 == 0


def test_the_state_goes_through_arrays_and_back() -> None:
    flat, other = FlatAdam(parameters(), epsilon=1e-5), FlatAdam(parameters(), epsilon=1e-5)
    for step in range(3):
        flat.take(gradients(step, 1.0), first=True)
        flat.step(rows=1, learning_rate=1e-2, max_norm=1.0)
    arrays = flat.to_arrays()
    assert {name: array.shape for name, array in arrays.items()} == {
        f"{part}/{name}": () if part == "step" else shape
        for name, shape in SHAPES.items()
        for part in ("step", "exp_avg", "exp_avg_sq")
    }
    with torch.no_grad():
        other.values.copy_(flat.values)
    other.load_arrays(arrays)
    for each in (flat, other):
        each.take(gradients(9, 1.0), first=True)
        each.step(rows=1, learning_rate=1e-2, max_norm=1.0)
    assert torch.equal(flat.values, other.values)
