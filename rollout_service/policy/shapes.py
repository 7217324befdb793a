"""What a policy is made of, without making one: sizes of its inputs, its recurrent state, its arrays. Pure; no torch.

Readers: the modules, for their sizes; the probe, which describes a run long before anybody computes, and starts three
times as fast without torch. What must never happen: another list than `ActorCritic.parameter_specs` and `state_spec`
give (tests/policy compares them for every kind of space and core). Left to others: values.

Axis letters: L layers, H hidden_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rollout_service.errors import SpaceNotSupported
from rollout_service.runspec import ArraySpec, Core, Leaf, PolicySpec, SpaceKind, Spaces

CONV_CHANNELS = (16, 32, 32)
"""Of the convolutions of an image leaf. Each halves both sides, rounded up: 84 x 84 ends as 11 x 11, and no image is
too small."""
CONV_KERNEL = 3


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether an image is [Y, X, C]. Only one whose first axis is shorter than both others is taken as [C, Y, X]."""
    return not (shape[0] < shape[1] and shape[0] < shape[2])


def image_size(leaf: Leaf) -> tuple[int, int, int]:
    """(C, Y, X) of an image leaf."""
    if channels_last(leaf.shape):
        return leaf.shape[2], leaf.shape[0], leaf.shape[1]
    return leaf.shape[0], leaf.shape[1], leaf.shape[2]


def image_features(leaf: Leaf) -> int:
    """Numbers that the convolutions of an image leaf put into the encoder."""
    _, height, width = image_size(leaf)
    for _ in CONV_CHANNELS:
        height, width = (height + 1) // 2, (width + 1) // 2
    return CONV_CHANNELS[-1] * height * width


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


def num_choices(action: Leaf) -> int:
    """Choices of an action space. Raises SpaceNotSupported for one without a distribution."""
    match action.kind:
        case SpaceKind.DISCRETE:
            return discrete_size(action)
        case SpaceKind.BOX:
            raise SpaceNotSupported(
                f"no policy for a Box action space of shape {action.shape}; Discrete actions are supported"
            )


def is_normalized(leaf: Leaf, spec: PolicySpec) -> bool:
    """Whether statistics of this leaf are kept: of vectors, when asked for."""
    return spec.normalize_observations and leaf.kind is SpaceKind.BOX and not leaf.is_image


def state_shapes(spec: PolicySpec) -> dict[str, tuple[int, ...]]:
    """Array name -> shape of one env's recurrent state: hidden and cell, (L, H) each; {} without memory."""
    match spec.core:
        case Core.LSTM:
            return dict.fromkeys(("hidden", "cell"), (spec.num_layers, spec.hidden_dim))
        case Core.NONE:
            return {}


def array_specs(spaces: Spaces, spec: PolicySpec) -> tuple[ArraySpec, ...]:
    """Every parameter and buffer, in publication order. Raises SpaceNotSupported as the policy would."""
    return (*_statistics(spaces.observation, spec), *_weights(spaces, spec))


def _statistics(leaves: Sequence[Leaf], spec: PolicySpec) -> Iterator[ArraySpec]:
    for index, leaf in enumerate(leaves):
        if is_normalized(leaf, spec):
            for name, shape in (("mean", leaf.shape), ("variance", leaf.shape), ("count", (1,))):
                yield ArraySpec(name=f"normalizers.{index}.{name}", shape=shape, dtype="float64")


def _weights(spaces: Spaces, spec: PolicySpec) -> Iterator[ArraySpec]:
    features, images = 0, 0
    for leaf in spaces.observation:
        if not leaf.is_image:
            features += input_size(leaf)
            continue
        inputs = image_size(leaf)[0]
        for layer, outputs in enumerate(CONV_CHANNELS):
            yield from _layer(f"encoder.images.{images}.layers.{layer}", outputs, inputs, CONV_KERNEL, CONV_KERNEL)
            inputs = outputs
        features, images = features + image_features(leaf), images + 1
    yield from _layer("encoder.linear", spec.encoder_dim, features)
    width, gates = spec.hidden_dim, 4 * spec.hidden_dim
    match spec.core:
        case Core.LSTM:
            for layer in range(spec.num_layers):
                inputs = width if layer else spec.encoder_dim
                for part, shape in (("ih", (gates, inputs)), ("hh", (gates, width))):
                    yield _float32(f"core.weight_{part}_l{layer}", shape)
                for part in ("ih", "hh"):
                    yield _float32(f"core.bias_{part}_l{layer}", (gates,))
        case Core.NONE:
            yield from _layer("core.linear", width, spec.encoder_dim)
    yield from _layer("policy", num_choices(spaces.action), width)
    yield from _layer("value_head", 1, width)


def _layer(name: str, outputs: int, *inputs: int) -> Iterator[ArraySpec]:
    yield _float32(f"{name}.weight", (outputs, *inputs))
    yield _float32(f"{name}.bias", (outputs,))


def _float32(name: str, shape: tuple[int, ...]) -> ArraySpec:
    return ArraySpec(name=name, shape=shape, dtype="float32")
