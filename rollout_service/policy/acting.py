"""The policy's step in numpy: what an actor runs, once per env step, on a few rows.

The same function as `ActorCritic.step`, over the same published arrays, for policies without images. For so few rows
numpy's calls cost less than torch's, its BLAS uses the vector units of every CPU and its tanh is several times as
fast: a step takes between a third and half of the time. And an actor that needs no torch starts in half a second and
a fifth of the memory.

Writers: this object, into buffers of its own that the next call reuses. Readers: workers/inference. What must never
happen: another result than `ActorCritic.step` by more than rounding (tests/policy compares them; the ratio law holds
the learner's recomputation to it). Left to others: whose noise, which rows start from zero state, images (torch).

    sigmoid(z) = (1 + tanh(z / 2)) / 2, so one tanh over all four gates serves: columns are ordered i, f, o, g and the
    first three are laid out with half their weights.

Axis letters: R rows, L layers, H hidden_dim, C choices, K inputs of a matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollout_service.errors import OutOfRange
from rollout_service.memory.schema import observation_fields
from rollout_service.runspec import Core, Leaf, PolicySpec, SpaceKind, Spaces

Array = NDArray[Any]
Floats = NDArray[np.float32]

HIDDEN, CELL = "hidden", "cell"
HALF: Final = np.float32(0.5)
ALIGNMENT: Final = 64
"""Bytes: a cache line, a vector register. Equal alignment of every call keeps results equal bit for bit."""
SMALLEST: Final = float(np.finfo(np.float64).tiny)
"""Keeps the logarithm of an exponential draw of exactly 0 finite."""
VARIANCE_EPSILON: Final = 1e-8
"""Added to a variance before the root, so that a constant feature divides by 1e-4 and not by zero."""
CLIP: Final = 10.0
"""Normalised features are cut to [-CLIP, CLIP]: one outlier must not saturate the encoder."""


@dataclass(frozen=True, slots=True)
class ActedRows:
    """What one step gives, one row per env; overwritten by the next one."""

    actions: Array
    """[R, *] in the env's own values."""
    log_probs: Floats
    """[R]"""
    values: Floats
    """[R]"""
    state: dict[str, Floats]
    """Name -> [R, L, H], the state that EXITS the step."""


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


def acts_in_numpy(spaces: Spaces) -> bool:
    """Whether `ActingPolicy` can do it: everything but images."""
    return not any(leaf.is_image for leaf in spaces.observation)


class ActingPolicy:
    """A policy over published arrays, for exactly `rows` rows per call."""

    def __init__(self, spaces: Spaces, spec: PolicySpec, rows: int) -> None:
        self.rows: Final = rows
        self.num_choices: Final = spaces.action.size or 0
        self.noise_shape: Final = (self.num_choices,)
        self._spec = spec
        self._start = spaces.action.start
        self._leaves = [
            _LeafReader(field, leaf) for field, leaf in zip(observation_fields(spaces), spaces.observation, strict=True)
        ]
        inputs = sum(reader.size for reader in self._leaves)
        recurrent = spec.core is Core.LSTM
        self._encoder = _Linear(rows, inputs, spec.encoder_dim)
        width = spec.encoder_dim
        self._cells: list[_Cell] = []
        self._hidden_layer = None if recurrent else _Linear(rows, width, spec.hidden_dim)
        for _ in range(spec.num_layers if recurrent else 0):
            self._cells.append(_Cell(rows, width, spec.hidden_dim))
            width = spec.hidden_dim
        self._heads = _Linear(rows, spec.hidden_dim, 1 + self.num_choices)
        shape = (rows, spec.num_layers, spec.hidden_dim)
        self._acted = ActedRows(
            actions=np.zeros(rows, spaces.action.dtype),
            log_probs=np.zeros(rows, np.float32),
            values=np.zeros(rows, np.float32),
            state={HIDDEN: aligned(shape), CELL: aligned(shape)} if recurrent else {},
        )
        self._row_numbers = np.arange(rows)
        self._log_p, self._scratch = (np.zeros((rows, self.num_choices), np.float32) for _ in range(2))

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
            if self._spec.normalize_observations and reader.normalizes:
                reader.moments(named(f"normalizers.{index}.mean"), named(f"normalizers.{index}.variance"))
        self._encoder.load(named("encoder.linear.weight"), named("encoder.linear.bias"))
        if self._hidden_layer is not None:
            self._hidden_layer.load(named("core.linear.weight"), named("core.linear.bias"))
        for layer, cell in enumerate(self._cells):
            cell.load(*(named(f"core.{part}_l{layer}") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")))
        self._heads.load(
            np.concatenate([named("value_head.weight"), named("policy.weight")]),
            np.concatenate([named("value_head.bias"), named("policy.bias")]),
        )

    def step(self, observations: Mapping[str, Array], state: Mapping[str, Array], noise: Array | None) -> ActedRows:
        """Choose one action per row.

        observations: field name -> [R, *shape] in the space's dtype; state: name -> [R, L, H] entering the step; noise:
        [R, C] from `draw_noise`, None for the most probable action. Arguments are not changed and not kept.
        """
        acted, heads = self._acted, self._forward(observations, state)
        acted.values[...] = heads[:, 0]
        log_p = _log_softmax(heads[:, 1:], self._log_p, self._scratch)
        choice = (log_p if noise is None else np.add(log_p, noise, out=self._scratch)).argmax(axis=1)
        acted.log_probs[...] = log_p[self._row_numbers, choice]
        np.add(choice, self._start, out=acted.actions, casting="unsafe")
        return acted

    def value(self, observations: Mapping[str, Array], state: Mapping[str, Array]) -> Floats:
        """V of observations, [R]; arguments as in `step`, whose last result stays as it is but for the state."""
        return self._forward(observations, state)[:, 0]

    def _forward(self, observations: Mapping[str, Array], state: Mapping[str, Array]) -> Floats:
        """Heads [R, 1 + C], value first; the exiting state goes into its buffers."""
        column = 0
        for reader in self._leaves:
            reader.read(observations[reader.field], self._encoder.x[:, column : (column := column + reader.size)])
        if self._hidden_layer is not None:
            np.tanh(self._encoder.run(), out=self._hidden_layer.x)
            np.tanh(self._hidden_layer.run(), out=self._heads.x)
            return self._heads.run()
        np.tanh(self._encoder.run(), out=self._cells[0].x)
        for layer, cell in enumerate(self._cells):
            hidden = self._acted.state[HIDDEN][:, layer]
            cell.run(state[HIDDEN][:, layer], state[CELL][:, layer], hidden, self._acted.state[CELL][:, layer])
            following = self._cells[layer + 1].x if layer + 1 < len(self._cells) else self._heads.x
            following[...] = hidden
        return self._heads.run()


class _LeafReader:
    """One observation leaf as the encoder wants it; the rule of policy/spaces.py, in numpy."""

    def __init__(self, field: str, leaf: Leaf) -> None:
        self.field = field
        self.normalizes = leaf.kind is SpaceKind.BOX
        self._choices: Array | None = None
        self._offset: Floats | None = None
        self._scale: Floats | None = None
        if leaf.kind is SpaceKind.DISCRETE:
            self.size = leaf.size or 0
            self._choices = np.arange(leaf.start, leaf.start + self.size, dtype=leaf.dtype)
        else:
            self.size = int(np.prod(leaf.shape, dtype=np.int64))

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


class _Linear:
    """x W + b over a fixed input buffer. The bias is one more row of W, behind a column of ones in the input."""

    def __init__(self, rows: int, inputs: int, outputs: int) -> None:
        self._padded = aligned((rows, inputs + 1))
        self._padded[:, inputs] = 1.0
        self.x: Floats = self._padded[:, :inputs]
        """[R, inputs]: to be filled before `run`."""
        self._weight = aligned((inputs + 1, outputs))
        self._out = aligned((rows, outputs))

    def load(self, weight: Array, bias: Array) -> None:
        """weight: [outputs, inputs], bias: [outputs], as torch has them."""
        self._weight[:-1], self._weight[-1] = weight.T, bias

    def run(self) -> Floats:
        """[R, outputs], overwritten by the next call."""
        return np.matmul(self._padded, self._weight, out=self._out)


class _Cell:
    """One LSTM layer (Hochreiter and Schmidhuber 1997; Gers et al. 2000), input and state side by side."""

    def __init__(self, rows: int, inputs: int, hidden_dim: int) -> None:
        self._gates = _Linear(rows, inputs + hidden_dim, 4 * hidden_dim)
        self.x: Floats = self._gates.x[:, :inputs]
        """[R, inputs]: to be filled before `run`."""
        self._entering = self._gates.x[:, inputs:]
        self._fresh = np.zeros((rows, hidden_dim), np.float32)

    def load(self, weight_ih: Array, weight_hh: Array, bias_ih: Array, bias_hh: Array) -> None:
        """Parameters as torch has them: gates i, f, g, o."""

        def laid_out(array: Array) -> Array:
            i, f, g, o = np.split(array, 4)
            return np.concatenate([i * HALF, f * HALF, o * HALF, g])

        self._gates.load(laid_out(np.concatenate([weight_ih, weight_hh], axis=1)), laid_out(bias_ih + bias_hh))

    def run(self, hidden: Array, cell: Array, hidden_out: Floats, cell_out: Floats) -> None:
        """hidden, cell: [R, H] entering; hidden_out, cell_out: [R, H] exiting, other arrays than those entering."""
        self._entering[...] = hidden
        gates = self._gates.run()
        np.tanh(gates, out=gates)
        width = cell.shape[1]
        sigmoids, g = gates[:, : 3 * width], gates[:, 3 * width :]
        np.multiply(sigmoids, HALF, out=sigmoids)
        np.add(sigmoids, HALF, out=sigmoids)
        i, f, o = sigmoids[:, :width], sigmoids[:, width : 2 * width], sigmoids[:, 2 * width :]
        np.multiply(i, g, out=self._fresh)
        np.multiply(f, cell, out=cell_out)
        np.add(cell_out, self._fresh, out=cell_out)
        np.tanh(cell_out, out=self._fresh)
        np.multiply(o, self._fresh, out=hidden_out)


def _log_softmax(logits: Floats, out: Floats, scratch: Floats) -> Floats:
    """log p [R, C] of logits [R, C] into out."""
    np.subtract(logits, logits.max(axis=1, keepdims=True), out=out)
    np.exp(out, out=scratch)
    np.subtract(out, np.log(scratch.sum(axis=1, keepdims=True)), out=out)
    return out
