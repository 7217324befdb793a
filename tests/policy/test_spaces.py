"""What the network gets from each kind of observation leaf."""

from __future__ import annotations

import pytest
import torch

from rollout_service.policy.shapes import input_size
from rollout_service.policy.spaces import network_input, scale_image
from rollout_service.runspec import Leaf, SpaceKind

RGB = Leaf(kind=SpaceKind.BOX, shape=(5, 4, 3), dtype="uint8")


def test_a_pixel_of_255_becomes_exactly_one_and_0_exactly_zero() -> None:
    scaled = scale_image(torch.tensor([0, 51, 255], dtype=torch.uint8))
    assert scaled.dtype == torch.float32
    assert scaled.tolist() == [0.0, pytest.approx(0.2), 1.0]


def test_an_image_of_all_255_reaches_the_network_as_all_ones_channels_first() -> None:
    rows = torch.full((2, 5, 4, 3), 255, dtype=torch.uint8)
    image = network_input(RGB, rows)
    assert image.shape == (2, 3, 5, 4)
    assert torch.equal(image, torch.ones(2, 3, 5, 4))


def test_each_channel_keeps_its_pixels() -> None:
    rows = torch.arange(60, dtype=torch.uint8).view(1, 5, 4, 3)
    image = network_input(RGB, rows)
    assert torch.equal(image[0, 2], rows[0, :, :, 2] / 255)


def test_a_discrete_observation_is_one_hot_from_its_start() -> None:
    leaf = Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=3, start=5)
    assert network_input(leaf, torch.tensor([5, 7, 6])).tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert input_size(leaf) == 3


def test_a_discrete_filler_outside_its_space_is_all_zeros() -> None:
    leaf = Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=3, start=5)
    assert network_input(leaf, torch.tensor([0])).tolist() == [[0, 0, 0]]


def test_a_box_is_flattened_to_float32() -> None:
    leaf = Leaf(kind=SpaceKind.BOX, shape=(2, 3), dtype="int16")
    rows = torch.arange(12, dtype=torch.int16).view(2, 2, 3)
    vector = network_input(leaf, rows)
    assert vector.dtype == torch.float32
    assert vector.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert input_size(leaf) == 6


def test_a_uint8_vector_is_not_an_image_and_stays_unscaled() -> None:
    leaf = Leaf(kind=SpaceKind.BOX, shape=(2,), dtype="uint8")
    assert network_input(leaf, torch.tensor([[0, 255]], dtype=torch.uint8)).tolist() == [[0, 255]]


def test_the_stored_pixels_are_left_alone() -> None:
    rows = torch.full((1, 5, 4, 3), 200, dtype=torch.uint8)
    network_input(RGB, rows)
    assert torch.equal(rows, torch.full((1, 5, 4, 3), 200, dtype=torch.uint8))
