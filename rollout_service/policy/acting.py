"""The policy's step in numpy: what an actor runs, once per env step, on a few rows.

The same function as `ActorCritic.step`, over the same published arrays, for policies without images. For so few rows
numpy's calls cost less than torch's, its BLAS uses the vector units of every CPU and its tanh is several times as
fast: a step takes between a third and half of the time. And an actor that needs no torch starts in half a second and
a fifth of the memory.

Envs are taken in chunks of R rows. All buffers are made once, every chunk starts on the same alignment and goes
through the same kernels with the same shapes, so a row's result depends on the row and on its place in the chunk, not
on how the envs are split over actors. Nothing of what one layer hands to the next is copied: it is written where the
next product reads it.

    joint  [E, L, W]   hidden | 1 | input       one row per env and layer; hidden | 1 is what the heads read

Writers: this object, into its own arrays; `state` also by the owner, between two steps. Readers: workers/inference.
What must never happen: another result than `ActorCritic.step` by more than rounding (tests/policy compares them; the
ratio law holds the learner's recomputation to it). Left to others: whose noise, which rows start from zero state,
images (torch).

    sigmoid(z) = (1 + tanh(z / 2)) / 2, so one tanh over all four gates serves: columns are ordered i, f, o, g and the
    first three are laid out with half their weights. The outer half is taken once, of what the gates let through.

Axis letters: E envs, R rows of a chunk, L layers, H hidden_dim, C choices, K inputs of a matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollout_service.errors import ConfigError, OutOfRange
from rollout_service.memory.schema import observation_fields
from rollout_service.runspec import Core, Leaf, PolicySpec, SpaceKind, Spaces

Array = NDArray[Any]
Floats = NDArray[np.float32]

HIDDEN, CELL = "hidden", "cell"
ONE, HALF = np.float32(1.0), np.float32(0.5)
ALIGNMENT: Final = 64
"""Bytes: a cache line, a vector register. Equal alignment of every call keeps results equal bit for bit."""
SMALLEST: Final = float(np.finfo(np.float64).tiny)
"""Keeps the logarithm of an exponential draw of exactly 0 finite."""
VARIANCE_EPSILON: Final = 1e-8
"""Added to a variance before the root, so that a constant feature divides by 1e-4 and not by zero."""
CLIP: Final = 10.0
"""Normalised features are cut to [-CLIP, CLIP]: one outlier must not saturate the encoder."""


@dataclass(frozen=True, slots=True)
class Acted:
    """What one step of all envs gives; overwritten by the next one."""

    actions: Array
    """[E, *] in the env's own values."""
    log_probs: Floats
    """[E]"""
    values: Floats
    """[E]"""

    @classmethod
    def of(cls, num_envs: int, spaces: Spaces) -> Acted:
        """Preallocated."""
        return cls(
            actions=np.zeros((num_envs, *spaces.action.shape), spaces.action.dtype),
            log_probs=np.zeros(num_envs, np.float32),
            values=np.zeros(num_envs, np.float32),
        )


def gumbel_noise(generator: np.random.Generator, num_steps: int, num_choices: int) -> Floats:
    """float32 [num_steps, C]: minus the log of an exponential draw."""
    draws = generator.standard_exponential((num_steps, num_choices))
    np.maximum(draws, SMALLEST, out=draws)
    np.log(draws, out=draws)
    return np.negative(draws, out=draws).astype(np.float32)


def aligned(shape: tuple[int, ...], dtype: str = "float32") -> Array:
    """A zeroed C-contiguous array that starts on an ALIGNMENT byte boundary."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    root = np.zeros(nbytes + ALIGNMENT, np.uint8)
    offset = -root.ctypes.data % ALIGNMENT
    return root[offset : offset + nbytes].view(dtype).reshape(shape)


def aligned_rows(rows: Sequence[int], width: int) -> Floats:
    """A zeroed view [*rows, width] of which every row starts on an ALIGNMENT byte boundary."""
    step = ALIGNMENT // 4
    whole: Floats = aligned((*rows, -(-width // step) * step))
    return whole[..., :width]


def chunks_of(num_envs: int, rows: int) -> tuple[slice, ...]:
    """All envs in chunks of `rows`. Raises ConfigError where they do not come out even."""
    if num_envs % rows:
        raise ConfigError(f"envs_per_forward {rows} does not divide the actor's {num_envs} envs")
    return tuple(slice(start, start + rows) for start in range(0, num_envs, rows))


def acts_in_numpy(spaces: Spaces) -> bool:
    """Whether `ActingPolicy` can do it: everything but images."""
    return not any(leaf.is_image for leaf in spaces.observation)


class ActingPolicy:
    """A policy over published arrays for `num_envs` envs, `rows` of them at a time, and their recurrent state."""

    def __init__(self, spaces: Spaces, spec: PolicySpec, num_envs: int, rows: int) -> None:
        self.num_choices: Final = spaces.action.size or 0
        self._normalizes = spec.normalize_observations
        leaves = zip(observation_fields(spaces), spaces.observation, strict=True)
        self._leaves = [_LeafReader(field, leaf) for field, leaf in leaves]
        self._start = spaces.action.start
        self._weights = _Weights(sum(reader.size for reader in self._leaves), spec, self.num_choices)
        layers, hidden_dim = self._weights.layers, spec.hidden_dim
        widest = hidden_dim if layers > 1 else 0
        joint = aligned_rows((num_envs, max(1, layers)), hidden_dim + 1 + max(widest, spec.encoder_dim))
        joint[..., hidden_dim] = 1.0
        cells = aligned_rows((num_envs, max(1, layers)), hidden_dim)
        self.state: Final[dict[str, Floats]] = {HIDDEN: joint[..., :hidden_dim], CELL: cells} if layers else {}
        """Name -> [E, L, H]: entering the next step. The owner may write into it, zeros where an episode starts."""
        self._acted = Acted.of(num_envs, spaces)
        scratch = _Scratch(rows, self._weights)
        self._chunks = [
            _Chunk(chunk, joint[chunk], cells[chunk], self._weights, scratch) for chunk in chunks_of(num_envs, rows)
        ]

    def draw_noise(self, generator: np.random.Generator, num_steps: int) -> Floats:
        """Noise of one env for `num_steps` steps, float32 [num_steps, C]; row t goes into `step`."""
        return gumbel_noise(generator, num_steps, self.num_choices)

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Takes over the contents of a published version. Raises OutOfRange for a missing array."""

        def named(name: str) -> Array:
            if name not in arrays:
                raise OutOfRange(f"array {name!r} is missing; the weights are of a policy with other settings")
            return arrays[name]

        for index, reader in enumerate(self._leaves):
            if self._normalizes and reader.normalizes:
                reader.moments(named(f"normalizers.{index}.mean"), named(f"normalizers.{index}.variance"))
        weights = self._weights
        weights.load_encoder(named("encoder.linear.weight"), named("encoder.linear.bias"))
        if not weights.layers:
            weights.load_hidden(named("core.linear.weight"), named("core.linear.bias"))
        for layer in range(weights.layers):
            parts = (named(f"core.{part}_l{layer}") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            weights.load_cell(layer, *parts)
        weights.load_heads(
            np.concatenate([named("value_head.weight"), named("policy.weight")]),
            np.concatenate([named("value_head.bias"), named("policy.bias")]),
        )

    def step(self, observations: Mapping[str, Array], noise: Array | None) -> Acted:
        """Choose one action per env; `state` becomes the state that exits the step.

        observations: field name -> [E, *shape] in the space's dtype; noise: [E, C] from `draw_noise`, None for the most
        probable action. Arguments are not changed and not kept.
        """
        acted = self._acted
        for chunk in self._chunks:
            rows = chunk.rows
            self._read(chunk, observations)
            heads = chunk.advance()
            acted.values[rows] = heads[0]
            choice = _choose(heads[1:], None if noise is None else noise[rows].T, chunk.scratch, acted.log_probs[rows])
            np.add(choice, self._start, out=acted.actions[rows], casting="unsafe")
        return acted

    def values(self, observations: Mapping[str, Array], envs: Sequence[int], out: Array) -> None:
        """V of `observations` with `state`, which stays as it is, for the named envs, into out [E].

        Other rows of `out` stay as they are. Whole chunks are run, those that contain a named env.
        """
        for chunk in self._chunks:
            named = [e for e in envs if chunk.rows.start <= e < chunk.rows.stop]
            if named:
                self._read(chunk, observations)
                out[named] = chunk.peek()[0, [e - chunk.rows.start for e in named]]

    def _read(self, chunk: _Chunk, observations: Mapping[str, Array]) -> None:
        """Observations of a chunk, as the encoder wants them."""
        column = 0
        for reader in self._leaves:
            into = chunk.scratch.observed[:, column : (column := column + reader.size)]
            reader.read(observations[reader.field][chunk.rows], into)


class _Weights:
    """Matrices as the products want them: [inputs, outputs], the bias one more row, for a column of ones."""

    def __init__(self, inputs: int, spec: PolicySpec, num_choices: int) -> None:
        self.layers = spec.num_layers if spec.core is Core.LSTM else 0
        self.hidden_dim, self.encoder_dim = spec.hidden_dim, spec.encoder_dim
        width = spec.hidden_dim
        self.encoder: Floats = aligned((inputs + 1, spec.encoder_dim))
        self.hidden: Floats = aligned((1 + spec.encoder_dim, width))
        self.cells: list[Floats] = [
            aligned((width + 1 + (width if layer else spec.encoder_dim), 4 * width)) for layer in range(self.layers)
        ]
        self.heads: Floats = aligned((1 + num_choices, width + 1))
        """As torch has it, [outputs, inputs]: heads come out as columns."""

    def load_encoder(self, weight: Array, bias: Array) -> None:
        self.encoder[:-1], self.encoder[-1] = weight.T, bias

    def load_hidden(self, weight: Array, bias: Array) -> None:
        self.hidden[0], self.hidden[1:] = bias, weight.T

    def load_heads(self, weight: Array, bias: Array) -> None:
        self.heads[:, :-1], self.heads[:, -1] = weight, bias

    def load_cell(self, layer: int, weight_ih: Array, weight_hh: Array, bias_ih: Array, bias_hh: Array) -> None:
        """Parameters as torch has them: gates i, f, g, o."""
        rows = np.concatenate([weight_hh, (bias_ih + bias_hh)[:, None], weight_ih], axis=1)
        i, f, g, o = np.split(rows, 4)
        self.cells[layer][...] = np.concatenate([i * HALF, f * HALF, o * HALF, g]).T


class _Scratch:
    """What one forward of R rows needs, whichever chunk they are."""

    def __init__(self, rows: int, weights: _Weights) -> None:
        width = weights.hidden_dim
        inputs = len(weights.encoder)
        self.encoder_input: Floats = aligned_rows((rows,), inputs)
        self.encoder_input[:, -1] = 1.0
        self.observed: Floats = self.encoder_input[:, :-1]
        self.encoded: Floats = aligned((rows, weights.encoder_dim))
        self.gates: Floats = aligned((rows, 4 * width))
        self.sigmoids: Floats = self.gates[:, : 3 * width]
        self.i, self.f, self.o, self.g = (self.gates[:, k * width : (k + 1) * width] for k in range(4))
        self.fresh: Floats = aligned((rows, width))
        self.heads: Floats = aligned((len(weights.heads), rows))
        choices = len(weights.heads) - 1
        self.shifted: Floats = aligned((choices, rows))
        self.weighed: Floats = aligned((choices, rows))
        self.most: Floats = aligned((rows,))
        self.numbers = np.arange(rows)


class _Chunk:
    """The forward of R envs, over their rows of `joint` and `cells`."""

    def __init__(self, rows: slice, joint: Floats, cells: Floats, weights: _Weights, scratch: _Scratch) -> None:
        self.rows = rows
        self.scratch = scratch
        width = weights.hidden_dim
        self._weights = weights
        self._inputs = [joint[:, layer, : len(matrix)] for layer, matrix in enumerate(weights.cells)]
        """Per layer hidden | 1 | input."""
        self._fed = [rows_of_layer[:, width + 1 :] for rows_of_layer in self._inputs]
        self._hidden = [joint[:, layer, :width] for layer in range(joint.shape[1])]
        self._cells = [cells[:, layer] for layer in range(joint.shape[1])]
        self._last = joint[:, -1, : width + 1]
        # Elsewhere, but of the same strides: what `peek` computes is then what `advance` would.
        apart = np.zeros_like(joint.base if joint.base is not None else joint)
        self._joint_apart = aligned_rows(joint.shape[:2], joint.shape[2])
        del apart
        self._joint_apart[..., width] = 1.0

    def advance(self) -> Floats:
        raise NotImplementedError
