"""What the network gets from each observation leaf: one rule per kind of space, shared by actors and the learner.

    Box, any dtype     float32, flattened to a vector of `size` numbers
    Box uint8, rank 3  an image: float32 in [0, 1], channels first, [C, Y, X]
    Discrete n         one-hot float32 of n; a value outside the space is all zeros

Readers: the acting path and the sequence path of the policy, through the same functions, so the two cannot differ.
What must never happen: a second scaling of images, or a change to the array that was passed in (it may be shared
memory). Left to others: statistics (normalizer.py), and the refusal of spaces without a class here (where an env is
made).

Axis letters: M rows; leading axes are written `...`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollout_service.errors import SpaceNotSupported
from rollout_service.runspec import Leaf, SpaceKind

IMAGE_MAX = 255.0
"""Largest value of a uint8 pixel; it becomes exactly 1.0."""


def scale_image(pixels: Tensor) -> Tensor:
    """uint8 [...] -> float32 [...] in [0, 1]. The only place where pixels are scaled."""
    return torch.div(pixels, IMAGE_MAX)


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether an image is [Y, X, C]. Only one whose first axis is shorter than both others is taken as [C, Y, X]."""
    return not (shape[0] < shape[1] and shape[0] < shape[2])


def input_size(leaf: Leaf) -> int:
    """Numbers that a vector leaf puts into the encoder. Raises SpaceNotSupported for a Discrete leaf without size."""
    if leaf.kind is SpaceKind.DISCRETE:
        return discrete_size(leaf)
    return math.prod(leaf.shape)


def discrete_size(leaf: Leaf) -> int:
    """Choices of a Discrete leaf of shape (). Raises SpaceNotSupported for any other leaf."""
    if leaf.kind is not SpaceKind.DISCRETE or leaf.size is None or leaf.shape:
        raise SpaceNotSupported(
            f"leaf {leaf.path!r} is {leaf.kind} of shape {leaf.shape} and size {leaf.size}; "
            "a Discrete leaf of shape () with its number of choices is expected here"
        )
    return leaf.size


def image_size(leaf: Leaf) -> tuple[int, int, int]:
    """(C, Y, X) of an image leaf."""
    if channels_last(leaf.shape):
        return leaf.shape[2], leaf.shape[0], leaf.shape[1]
    return leaf.shape[0], leaf.shape[1], leaf.shape[2]


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
