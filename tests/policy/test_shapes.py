"""What a policy is made of is known without making it, and is what the modules turn out to be."""

from __future__ import annotations

import pytest

from rollout_service.errors import SpaceNotSupported
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.policy.shapes import array_specs, channels_last, discrete_size, image_features, state_shapes
from rollout_service.runspec import Core, Leaf, PolicySpec, SpaceKind, Spaces
from tests.policy.acting import MIXED, PLAIN, SYMBOLS, TWO_ACTIONS

IMAGE = Leaf(path=".frame", kind=SpaceKind.BOX, shape=(4, 84, 83), dtype="uint8")
BYTES = Leaf(path=".bytes", kind=SpaceKind.BOX, shape=(2, 3), dtype="uint8")
PICTURES = Spaces(observation=(IMAGE, BYTES, MIXED.observation[0]), action=TWO_ACTIONS)
SPACES = {"plain": PLAIN, "symbols": SYMBOLS, "mixed": MIXED, "pictures": PICTURES}


@pytest.mark.parametrize("spaces", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize(("core", "layers"), [(Core.LSTM, 1), (Core.LSTM, 3), (Core.NONE, 1)])
def test_they_are_those_of_the_module(spaces: Spaces, normalizes: bool, core: Core, layers: int) -> None:
    spec = PolicySpec(core=core, num_layers=layers, hidden_dim=6, encoder_dim=5, normalize_observations=normalizes)
    module = ActorCritic(spaces, spec, seed=0)
    assert array_specs(spaces, spec) == module.parameter_specs()
    assert state_shapes(spec) == module.state_spec()


def test_an_image_of_84_by_84_ends_as_11_by_11() -> None:
    assert image_features(Leaf(kind=SpaceKind.BOX, shape=(84, 84, 3), dtype="uint8")) == 32 * 11 * 11


@pytest.mark.parametrize(
    ("shape", "last"), [((84, 84, 3), True), ((4, 84, 84), False), ((8, 8, 8), True), ((3, 3, 3), True)]
)
def test_an_image_is_channels_first_only_where_its_first_axis_is_the_shortest(
    shape: tuple[int, ...], last: bool
) -> None:
    assert channels_last(shape) is last


def test_a_discrete_leaf_without_its_size_is_refused() -> None:
    with pytest.raises(SpaceNotSupported, match="number of choices"):
        discrete_size(Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64"))


def test_an_action_space_without_a_distribution_is_refused() -> None:
    box = Leaf(kind=SpaceKind.BOX, shape=(2,), dtype="float32")
    with pytest.raises(SpaceNotSupported, match="Discrete"):
        array_specs(PLAIN.model_copy(update={"action": box}), PolicySpec())
