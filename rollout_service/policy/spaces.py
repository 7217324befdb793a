"""What the network gets from each observation leaf: one rule per kind of space, shared by actors and the learner.

    Box, any dtype     float32, flattened to a vector of `size` numbers
    Box uint8, rank 3  an image: float32 in [0, 1], channels first, [C, Y, X]
    Discrete n         one-hot float32 of n; a value outside the space is all zeros

Readers: the acting path and the sequence path of the policy, through the same functions, so the two cannot differ.
What must never happen: a second scaling of images, or a change to the array that was passed in (it may be shared
memory). Left to others: sizes (shapes.py), statistics (normalizer.py), and the refusal of spaces without a class here
(where an env is made).

Axis letters: M rows; leading axes are written `...`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_service.policy.shapes import channels_last, discrete_size, input_size
from rollout_service.runspec import Leaf, SpaceKind

IMAGE_MAX = 255.0
"""Largest value of a uint8 pixel; it becomes exactly 1.0."""


def scale_image(pixels: Tensor) -> Tensor:
    """uint8 [...] -> float32 [...] in [0, 1]. The only place where pixels are scaled."""
    return torch.div(pixels, IMAGE_MAX)


def network_input(leaf: Leaf, rows: Tensor) -> Tensor:
    """What the encoder reads.

    rows: [M, *leaf.shape] in the space's dtype. Returns float32: [M, input_size] of a vector leaf, [M, C, Y, X] of an
    image. A float32 vector leaf comes back as a view; nobody may write into it.
    """
    if leaf.is_image:
        image = rows.permute(0, 3, 1, 2) if channels_last(leaf.shape) else rows
        return scale_image(image)
    if leaf.kind is SpaceKind.DISCRETE:
        # Compared, not F.one_hot: that raises on the filler of a row that is not valid, and waits for a GPU.
        choices = torch.arange(leaf.start, leaf.start + discrete_size(leaf), device=rows.device, dtype=rows.dtype)
        return (rows.unsqueeze(-1) == choices).to(torch.float32)
    return rows.reshape(rows.shape[0], input_size(leaf)).to(torch.float32)
