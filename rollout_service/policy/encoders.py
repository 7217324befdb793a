"""Encoders: from network inputs to one feature vector per row, in front of the recurrent core.

    vector leaves ─────────────┐
                               ├─ concatenated ─ linear ─ tanh ─> [M, encoder_dim]
    image leaves ─ convolutions┘

Read by the acting path and the sequence path alike. What must never happen: one row's features depending on another row
(no batch statistics), for actors see other rows together than the learner does. Left to others: scaling (spaces.py) and
statistics (normalizer.py).

Axis letters: M rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rollout_service.policy import kernels
from rollout_service.policy.shapes import CONV_CHANNELS, CONV_KERNEL, image_features, image_size, input_size
from rollout_service.runspec import Leaf

ALIGNMENT = 64
"""Bytes: how torch's own memory is aligned."""
HIDDEN_GAIN = math.sqrt(2.0)
"""Gain of the orthogonal weights in front of the core."""


def orthogonal_linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """A linear layer with orthogonal weights and zero bias that leaves torch's global random state alone."""
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def orthogonal_conv(inputs: int, outputs: int, generator: torch.Generator) -> nn.Conv2d:
    """A 3 x 3 convolution of stride 2, orthogonal weights and zero bias."""
    layer = nn.Conv2d(inputs, outputs, kernel_size=CONV_KERNEL, stride=2, padding=1, device="meta").to_empty(
        device="cpu"
    )
    nn.init.orthogonal_(layer.weight, HIDDEN_GAIN, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class ImageStack(nn.Module):
    """Convolutions for one image leaf: [M, C, Y, X] in [0, 1] -> [M, image_features]."""

    def __init__(self, leaf: Leaf, generator: torch.Generator) -> None:
        super().__init__()
        channels = (image_size(leaf)[0], *CONV_CHANNELS)
        self.layers = nn.ModuleList(orthogonal_conv(*pair, generator) for pair in itertools.pairwise(channels))

    def forward(self, image: Tensor) -> Tensor:
        for layer in self.layers:
            image = torch.relu(layer(image))
        return image.flatten(1)


class Encoder(nn.Module):
    """All observation leaves of a row -> [M, dim]."""

    def __init__(self, leaves: Sequence[Leaf], dim: int, generator: torch.Generator) -> None:
        super().__init__()
        self.images = nn.ModuleList(ImageStack(leaf, generator) for leaf in leaves if leaf.is_image)
        vectors = sum(input_size(leaf) for leaf in leaves if not leaf.is_image)
        images = sum(image_features(leaf) for leaf in leaves if leaf.is_image)
        self.linear = orthogonal_linear(vectors + images, dim, HIDDEN_GAIN, generator)

    def forward(self, vectors: Sequence[Tensor], images: Sequence[Tensor]) -> Tensor:
        """vectors: [M, size] each; images: [M, C, Y, X] each; both in the order of the leaves."""
        features = list(vectors)
        features.extend(stack(image) for stack, image in zip(self.images, images, strict=True))
        # cat also copies a lone leaf to aligned memory: rows read from a shared slot may start anywhere, and a matrix
        # product may round differently there.
        lone = len(features) == 1 and features[0].is_contiguous() and features[0].data_ptr() % ALIGNMENT == 0
        # The kernel lays the weights out at each call: right for a rollout's rows, not for a step's.
        compiled = torch.is_grad_enabled() and kernels.takes(self.linear.weight)
        apply = kernels.tanh_linear if compiled else tanh_linear
        return apply(features[0] if lone else torch.cat(features, dim=1), self.linear.weight, self.linear.bias)


def tanh_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """tanh(x W^T + b) as 2 sigmoid(2 (x W^T + b)) - 1: the same to 2e-7, and torch's tanh takes five times as long.

    x: [M, inputs], weight: [outputs, inputs], bias: [outputs]. Returns [M, outputs].
    """
    return torch.sigmoid(torch.addmm(bias, x, weight.t(), beta=2, alpha=2)).mul(2).sub_(1)
