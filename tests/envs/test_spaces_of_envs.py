"""From gymnasium's spaces to ours: leaves, dtypes, and refusals that name the space."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import Space, spaces

from rollout_service.envs.make import spaces_from_gymnasium
from rollout_service.errors import SpaceNotSupported
from rollout_service.runspec import Leaf, SpaceKind
from tests.fixtures.envs import TreeEnv

TWO = spaces.Discrete(2)
BOX = SpaceKind.BOX
DISCRETE = SpaceKind.DISCRETE


@pytest.mark.parametrize(
    ("space", "leaf"),
    [
        (spaces.Box(-1, 1, (4,), np.float32), Leaf(kind=BOX, shape=(4,), dtype="float32")),
        (spaces.Box(-1, 1, (4,), np.float64), Leaf(kind=BOX, shape=(4,), dtype="float32")),
        (spaces.Box(-1, 1, (2, 3), np.float16), Leaf(kind=BOX, shape=(2, 3), dtype="float16")),
        (spaces.Box(0, 255, (64, 64, 3), np.uint8), Leaf(kind=BOX, shape=(64, 64, 3), dtype="uint8")),
        (spaces.Box(-9, 9, (), np.int16), Leaf(kind=BOX, shape=(), dtype="int16")),
        (spaces.Discrete(5, start=3), Leaf(kind=DISCRETE, shape=(), dtype="int64", size=5, start=3)),
    ],
)
def test_a_plain_space_is_one_leaf_of_its_own_dtype(space: Space[object], leaf: Leaf) -> None:
    found = spaces_from_gymnasium(space, TWO)
    assert found.observation == (leaf,)
    assert found.action == Leaf(kind=DISCRETE, shape=(), dtype="int64", size=2)


def test_nested_spaces_become_leaves_named_by_their_keys() -> None:
    env = TreeEnv()
    found = spaces_from_gymnasium(env.observation_space, env.action_space)
    assert [(leaf.path, leaf.dtype, leaf.shape) for leaf in found.observation] == [
        ("/image", "uint8", (2, 2, 3)),
        ("/pair/0", "float32", ()),
        ("/pair/1", "int64", ()),
        ("/position", "float32", (2,)),
        ("/room", "int64", ()),
    ]
    assert (found.action.size, found.action.start) == (3, 3)


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary(4),
        spaces.Text(5),
        spaces.Box(-1, 1, (0,), np.float32),
        spaces.Box(-1, 1, (2,), np.longdouble),
        spaces.Sequence(TWO),
        spaces.Dict({"good": TWO, "bad": spaces.MultiBinary(2)}),
    ],
)
def test_an_observation_space_without_a_class_is_refused_by_name(space: Space[object]) -> None:
    with pytest.raises(SpaceNotSupported) as caught:
        spaces_from_gymnasium(space, TWO)
    named = space["bad"] if isinstance(space, spaces.Dict) else space
    assert str(named) in str(caught.value)
    if isinstance(space, spaces.Dict):
        assert "/bad" in str(caught.value)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (3,), np.float32),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary(4),
        spaces.Dict({"a": TWO}),
    ],
)
def test_an_action_space_without_a_class_is_refused_by_name(space: Space[object]) -> None:
    with pytest.raises(SpaceNotSupported, match="action space") as caught:
        spaces_from_gymnasium(TWO, space)
    assert str(space) in str(caught.value)


def test_two_leaves_of_one_name_are_refused() -> None:
    space = spaces.Dict({"a": spaces.Dict({"b": TWO}), "a/b": TWO})
    with pytest.raises(SpaceNotSupported, match="two leaves of one name"):
        spaces_from_gymnasium(space, TWO)
