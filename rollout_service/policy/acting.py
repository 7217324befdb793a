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
from rollout_service.policy.shapes import input_size, is_normalized, num_choices
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


def gumbel_noise(generators: Sequence[np.random.Generator], num_steps: int, num_choices: int) -> Floats:
    """float32 [num_steps, n, C], row n from generator n: minus the log of an exponential draw."""
    draws = np.empty((len(generators), num_steps, num_choices))
    for own, generator in zip(draws, generators, strict=True):
        generator.standard_exponential(out=own)
    np.maximum(draws, SMALLEST, out=draws)
    np.log(draws, out=draws)
    return np.ascontiguousarray(np.negative(draws, out=draws).swapaxes(0, 1), np.float32)


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
        self.num_choices: Final = num_choices(spaces.action)
        self._start = spaces.action.start
        leaves = zip(observation_fields(spaces), spaces.observation, strict=True)
        self._leaves = [_LeafReader(field, leaf, is_normalized(leaf, spec)) for field, leaf in leaves]
        self._weights = _Weights(sum(reader.size for reader in self._leaves), spec, self.num_choices)
        joint, cells = self._weights.state_arrays(num_envs)
        recurrent = bool(self._weights.cells)
        self.state: Final[dict[str, Floats]] = {HIDDEN: joint[..., : spec.hidden_dim], CELL: cells} if recurrent else {}
        """Name -> [E, L, H]: entering the next step. The owner may write into it: zeros where an episode starts."""
        self._scratch = _Scratch(rows, self._weights)
        self._chunks = [
            (chunk, _Forward(self._weights, self._scratch, joint[chunk], cells[chunk]))
            for chunk in chunks_of(num_envs, rows)
        ]
        self._acted = Acted.of(num_envs, spaces)

    def draw_noise(self, generators: Sequence[np.random.Generator], num_steps: int) -> Floats:
        """Noise of n envs, each from its own generator, float32 [num_steps, n, C]; row t goes into `step`."""
        return gumbel_noise(generators, num_steps, self.num_choices)

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Takes over the contents of a published version. Raises OutOfRange for a missing array."""

        def named(name: str) -> Array:
            if name not in arrays:
                raise OutOfRange(f"array {name!r} is missing; the weights are of a policy with other settings")
            return arrays[name]

        for index, reader in enumerate(self._leaves):
            if reader.normalizes:
                reader.moments(named(f"normalizers.{index}.mean"), named(f"normalizers.{index}.variance"))
        weights = self._weights
        weights.load_encoder(named("encoder.linear.weight"), named("encoder.linear.bias"))
        if not weights.cells:
            weights.load_hidden(named("core.linear.weight"), named("core.linear.bias"))
        for layer in range(len(weights.cells)):
            parts = (named(f"core.{part}_l{layer}") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            weights.load_cell(layer, *parts)
        weights.load_heads(
            np.concatenate([named("value_head.weight"), named("policy.weight")]),
            np.concatenate([named("value_head.bias"), named("policy.bias")]),
        )

    def step(self, observations: Mapping[str, Array], noise: Array | None) -> Acted:
        """Choose one action per env; `state` becomes the state that EXITS the step.

        observations: field name -> [E, *shape] in the space's dtype; noise: [E, C] from `draw_noise`, None for the most
        probable action. Arguments are not changed and not kept.
        """
        acted = self._acted
        for rows, forward in self._chunks:
            self._read(rows, observations)
            heads = forward.advance()
            acted.values[rows] = heads[0]
            choice = self._choose(heads[1:], None if noise is None else noise[rows].T, acted.log_probs[rows])
            np.add(choice, self._start, out=acted.actions[rows], casting="unsafe")
        return acted

    def values(self, observations: Mapping[str, Array], envs: Sequence[int], out: Array) -> None:
        """V of `observations` with `state`, which stays as it is, for the named envs, into out [E].

        Whole chunks are run, those that contain a named env; other rows of `out` stay as they are.
        """
        for rows, forward in self._chunks:
            if named := [e for e in envs if rows.start <= e < rows.stop]:
                self._read(rows, observations)
                out[named] = forward.look_ahead()[0, [e - rows.start for e in named]]

    def _read(self, rows: slice, observations: Mapping[str, Array]) -> None:
        """Observations of a chunk, as the encoder wants them."""
        column, into = 0, self._scratch.observed
        for reader in self._leaves:
            reader.read(observations[reader.field][rows], into[:, column : (column := column + reader.size)])

    def _choose(self, logits: Floats, noise: Floats | None, log_probs: Floats) -> Array:
        """argmax(log p + noise) per column [R], and its log p into log_probs [R]; logits, noise: [C, R].

        log p differs from the logits by the same number in all rows of a column, which the argmax does not see.
        """
        scratch = self._scratch
        np.maximum.reduce(logits, axis=0, out=scratch.of_column)
        np.subtract(logits, scratch.of_column, out=logits)
        np.exp(logits, out=scratch.choices)
        log_sum = np.add.reduce(scratch.choices, axis=0, out=scratch.of_column)
        np.log(log_sum, out=log_sum)
        choice: Array = (logits if noise is None else np.add(logits, noise, out=scratch.choices)).argmax(axis=0)
        np.subtract(logits[choice, scratch.columns], log_sum, out=log_probs)
        return choice


class _LeafReader:
    """One observation leaf as the encoder wants it; the rule of policy/spaces.py, in numpy."""

    def __init__(self, field: str, leaf: Leaf, normalizes: bool) -> None:
        self.field = field
        self.normalizes = normalizes
        self.size = input_size(leaf)
        self._choices: Array | None = None
        self._offset: Floats | None = None
        self._scale: Floats | None = None
        if leaf.kind is SpaceKind.DISCRETE:
            self._choices = np.arange(leaf.start, leaf.start + self.size, dtype=leaf.dtype)

    def moments(self, mean: Array, variance: Array) -> None:
        self._offset = mean.reshape(-1).astype(np.float32)
        self._scale = (1.0 / np.sqrt(variance.reshape(-1) + VARIANCE_EPSILON)).astype(np.float32)

    def read(self, rows: Array, out: Floats) -> None:
        if self._choices is not None:
            np.equal(rows[:, None], self._choices, out=out, casting="unsafe")
            return
        out[...] = rows.reshape(len(rows), self.size)
        if self._offset is not None and self._scale is not None:
            np.subtract(out, self._offset, out=out)
            np.multiply(out, self._scale, out=out)
            np.clip(out, -CLIP, CLIP, out=out)


class _Weights:
    """Matrices as the products want them, [inputs, outputs]; the bias is one more row, for a one among the inputs."""

    def __init__(self, inputs: int, spec: PolicySpec, num_choices: int) -> None:
        width = self.width = spec.hidden_dim
        layers = spec.num_layers if spec.core is Core.LSTM else 0
        self.encoder: Floats = aligned((inputs + 1, spec.encoder_dim))
        self.hidden: Floats = aligned((1 + spec.encoder_dim, width))
        self.cells: list[Floats] = [
            aligned((width + 1 + (width if layer else spec.encoder_dim), 4 * width)) for layer in range(layers)
        ]
        self.heads: Floats = aligned((1 + num_choices, width + 1))
        """[outputs, inputs], for the heads come out as columns: a softmax along rows takes longer."""

    def state_arrays(self, num_envs: int) -> tuple[Floats, Floats]:
        """joint [E, L, W] and cells [E, L, H], zeros with ones in place; every row is aligned alike."""
        layers = max(1, len(self.cells))
        longest = max([self.width + len(self.hidden), *(len(matrix) for matrix in self.cells)])
        joint = aligned_rows((num_envs, layers), longest)
        joint[..., self.width] = 1.0
        return joint, aligned_rows((num_envs, layers), self.width)

    def load_encoder(self, weight: Array, bias: Array) -> None:
        self.encoder[:-1], self.encoder[-1] = weight.T, bias

    def load_hidden(self, weight: Array, bias: Array) -> None:
        self.hidden[0], self.hidden[1:] = bias, weight.T

    def load_cell(self, layer: int, weight_ih: Array, weight_hh: Array, bias_ih: Array, bias_hh: Array) -> None:
        """Parameters as torch has them: gates i, f, g, o."""
        i, f, g, o = np.split(np.concatenate([weight_hh, (bias_ih + bias_hh)[:, None], weight_ih], axis=1), 4)
        self.cells[layer][...] = np.concatenate([i * HALF, f * HALF, o * HALF, g]).T

    def load_heads(self, weight: Array, bias: Array) -> None:
        self.heads[:, :-1], self.heads[:, -1] = weight, bias


class _Scratch:
    """What the forward of a chunk of R rows needs besides its state; all chunks share it."""

    def __init__(self, rows: int, weights: _Weights) -> None:
        width, choices = weights.width, len(weights.heads) - 1
        self.encoder_input = aligned_rows((rows,), len(weights.encoder))
        self.encoder_input[:, -1] = 1.0
        self.observed: Floats = self.encoder_input[:, :-1]
        """[R, inputs]: to be filled before a forward."""
        self.encoded: Floats = aligned((rows, weights.encoder.shape[1]))
        self.gates: Floats = aligned((rows, 4 * width))
        self.fresh: Floats = aligned((rows, width))
        self.joint, self.cells = weights.state_arrays(rows)
        """Where the exiting state goes that nobody wants; of the same strides as the state, for equal bits."""
        self.heads: Floats = aligned((1 + choices, rows))
        self.choices: Floats = aligned((choices, rows))
        self.of_column: Floats = aligned((rows,))
        self.columns = np.arange(rows)


@dataclass(frozen=True, slots=True)
class _Cell:
    """One LSTM layer over R rows (Hochreiter and Schmidhuber 1997; Gers et al. 2000), as views of what it works on."""

    joint: Floats
    """[R, H + 1 + K]: hidden | 1 | input."""
    weight: Floats
    cell: Floats
    """[R, H] entering."""
    hidden_out: Floats
    """[R, H] exiting; may be the hidden part of `joint`."""
    cell_out: Floats
    """[R, H] exiting; may be `cell`."""
    following: Floats | None
    """Input of the next layer, [R, H]."""

    def run(self, scratch: _Scratch) -> None:
        width = self.cell.shape[1]
        gates, fresh, cell = scratch.gates, scratch.fresh, self.cell_out
        np.matmul(self.joint, self.weight, out=gates)
        np.tanh(gates, out=gates)
        twice = gates[:, : 3 * width]
        np.add(twice, ONE, out=twice)
        np.multiply(gates[:, :width], gates[:, 3 * width :], out=fresh)
        np.multiply(gates[:, width : 2 * width], self.cell, out=cell)
        np.add(cell, fresh, out=cell)
        np.multiply(cell, HALF, out=cell)
        np.tanh(cell, out=fresh)
        np.multiply(gates[:, 2 * width : 3 * width], fresh, out=fresh)
        np.multiply(fresh, HALF, out=self.hidden_out)
        if self.following is not None:
            self.following[...] = self.hidden_out


class _Forward:
    """From the scratch's `observed` to the heads, for one chunk and its part of the state."""

    def __init__(self, weights: _Weights, scratch: _Scratch, joint: Floats, cells: Floats) -> None:
        self._weights, self._scratch = weights, scratch
        width = weights.width
        self._first: Floats = joint[:, 0, width + 1 : width + weights.encoder.shape[1] + 1]
        """Input of the first layer."""
        self._one_and_first: Floats = joint[:, 0, width : width + len(weights.hidden)]
        self._moving = self._layers(joint, cells, joint, cells)
        self._looking = self._layers(joint, cells, scratch.joint, scratch.cells)
        self._moved: Floats = joint[:, -1, : width + 1].T
        """hidden | 1 of the last layer, as the heads read it."""
        self._looked: Floats = scratch.joint[:, -1, : width + 1].T

    def advance(self) -> Floats:
        """Heads [1 + C, R], value first. The state becomes the exiting one."""
        return self._run(self._moving, self._moved)

    def look_ahead(self) -> Floats:
        """The same heads; the state stays as it is."""
        return self._run(self._looking, self._looked)

    def _run(self, layers: list[_Cell], hidden_and_one: Floats) -> Floats:
        weights, scratch = self._weights, self._scratch
        np.matmul(scratch.encoder_input, weights.encoder, out=scratch.encoded)
        np.tanh(scratch.encoded, out=self._first)
        for layer in layers:
            layer.run(scratch)
        if not layers:
            np.tanh(np.matmul(self._one_and_first, weights.hidden, out=scratch.fresh), out=hidden_and_one[:-1].T)
        return np.matmul(weights.heads, hidden_and_one, out=scratch.heads)

    def _layers(self, joint: Floats, cells: Floats, joint_out: Floats, cells_out: Floats) -> list[_Cell]:
        width, matrices = self._weights.width, self._weights.cells
        return [
            _Cell(
                joint=joint[:, layer, : len(matrix)],
                weight=matrix,
                cell=cells[:, layer],
                hidden_out=joint_out[:, layer, :width],
                cell_out=cells_out[:, layer],
                following=joint[:, layer + 1, width + 1 : 2 * width + 1] if layer + 1 < len(matrices) else None,
            )
            for layer, matrix in enumerate(matrices)
        ]
