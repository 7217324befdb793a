"""Recurrent cores: what carries memory between the encoder and the heads.

    LSTMCore          L layers of LSTM, parameters named and ordered as torch.nn.LSTM has them (gates i, f, g, o)
    FeedForwardCore   no memory: the comparison arm

`Core` is the seam for further ones: a state declared as data, one step for actors, whole sequences for the learner.
What must never happen: state that crosses an episode's end; a loop over time steps in the learner. Left to others:
when an episode ends, and where a first state comes from.

`step` speaks of a state as actors and slots do, [n, L, H] per name; `sequence` as sequence batches do, [L, n, H].

Axis letters: T steps, n rows (envs), D inputs, L layers, H hidden_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from rollout_service.errors import ShapeError, StateMissing
from rollout_service.policy import kernels
from rollout_service.policy.encoders import HIDDEN_GAIN, orthogonal_linear
from rollout_service.policy.resets import ResetPlan, in_place, lay_out, plan_resets

HIDDEN, CELL = "hidden", "cell"
SHUT = -1e4
"""Pre-activation that makes a sigmoid exactly 0 in float32, whatever the other inputs of the gate are."""
FORGET_BIAS = 1.0
"""Forget-gate bias without chrono initialisation: a fresh cell keeps about 0.73 of its content per step."""
ROWS_PER_CALL = 32
"""Rows of one kernel call on a CPU. Larger calls gain nothing, and their buffers are so large that the C library's
allocator fetches fresh pages each time: 64 rows took 27 ms in parts and 42 ms at once."""

StepWeights = tuple[Tensor, ...]
"""Weights as `step` wants them; belongs to the core that made it."""


class Core(Protocol):
    """Contract of a recurrent core."""

    def state_spec(self) -> dict[str, tuple[int, ...]]:
        """Array name -> shape of one env's state, (L, H) each; {} without memory."""
        ...

    def step_weights(self) -> StepWeights:
        """The weights, laid out for `step`. A copy: stale once a parameter changes."""
        ...

    def step(
        self, x: Tensor, state: Mapping[str, Tensor], weights: StepWeights | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One step: x [n, D], state name -> [n, L, H] entering it. Returns out [n, H] and the state that exits."""
        ...

    def sequence(self, x: Tensor, starts: Tensor, initial_state: Mapping[str, Tensor]) -> Tensor:
        """Whole sequences: x [n, T, D], starts [n, T] nonzero where an episode starts, initial_state name -> [L, n, H].

        The state is zero BEFORE each row whose flag is set. Returns out [n, T, H].
        """
        ...

    def __call__(self, x: Tensor, starts: Tensor, initial_state: Mapping[str, Tensor]) -> Tensor:
        """The same as `sequence`."""
        ...

    @property
    def resets_in_place(self) -> bool:
        """Whether `padded` needs no inserted steps. It may change with the device."""
        ...

    def padded(self, x: Tensor, flags: Tensor | None, initial_state: Mapping[str, Tensor]) -> Tensor:
        """`sequence` over rows that are laid out already, by `plan_for`, time-major: x [P, n, D] -> out [P, n, H].

        flags: the plan's, float32 [P, n, 1], or None where all are 0; x is finite everywhere.
        initial_state is zero for a sequence that begins with an episode's start.
        """
        ...


class LSTMCore(nn.Module):
    """LSTM (Hochreiter and Schmidhuber 1997; Gers et al. 2000) with exact resets inside whole-sequence kernels."""

    shut: Tensor

    def __init__(
        self, inputs: int, hidden_dim: int, num_layers: int, generator: torch.Generator, chrono_max: float | None = None
    ) -> None:
        super().__init__()
        self.inputs: Final = inputs
        self.hidden_dim: Final = hidden_dim
        self.num_layers: Final = num_layers
        for layer in range(num_layers):
            width = inputs if layer == 0 else hidden_dim
            weight_ih, weight_hh = torch.empty(4 * hidden_dim, width), torch.empty(4 * hidden_dim, hidden_dim)
            nn.init.orthogonal_(weight_ih, generator=generator)
            nn.init.orthogonal_(weight_hh, generator=generator)
            bias = torch.zeros(4 * hidden_dim)
            if chrono_max is None:
                bias[hidden_dim : 2 * hidden_dim] = FORGET_BIAS
            else:
                bias[: 2 * hidden_dim] = chrono_biases(hidden_dim, chrono_max, generator)
            self.register_parameter(f"weight_ih_l{layer}", nn.Parameter(weight_ih))
            self.register_parameter(f"weight_hh_l{layer}", nn.Parameter(weight_hh))
            self.register_parameter(f"bias_ih_l{layer}", nn.Parameter(bias))
            self.register_parameter(f"bias_hh_l{layer}", nn.Parameter(torch.zeros(4 * hidden_dim)))
        shut = torch.zeros(4 * hidden_dim, 1)
        shut[: 2 * hidden_dim] = SHUT
        shut[3 * hidden_dim :] = SHUT
        # A constant of the method, not of the policy: it is neither published nor saved.
        self.register_buffer("shut", shut, persistent=False)

    def state_spec(self) -> dict[str, tuple[int, ...]]:
        shape = (self.num_layers, self.hidden_dim)
        return {HIDDEN: shape, CELL: shape}

    def layer_weights(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """weight_ih [4H, D], weight_hh [4H, H], bias_ih [4H], bias_hh [4H]."""
        # Not get_parameter: it splits and walks a path, which shows in a minibatch of a few rows.
        weight_ih: Tensor = getattr(self, f"weight_ih_l{layer}")
        weight_hh: Tensor = getattr(self, f"weight_hh_l{layer}")
        bias_ih: Tensor = getattr(self, f"bias_ih_l{layer}")
        bias_hh: Tensor = getattr(self, f"bias_hh_l{layer}")
        return weight_ih, weight_hh, bias_ih, bias_hh

    def step_weights(self) -> StepWeights:
        """Per layer one matrix [D + H, 4H] and one bias [4H], gates reordered i, f, o, g: three share a sigmoid."""
        weights: list[Tensor] = []
        for layer in range(self.num_layers):
            weight_ih, weight_hh, bias_ih, bias_hh = self.layer_weights(layer)
            i, f, g, o = torch.cat([weight_ih, weight_hh], dim=1).chunk(4)
            bi, bf, bg, bo = (bias_ih + bias_hh).chunk(4)
            weights += torch.cat([i, f, o, g]).t().contiguous(), torch.cat([bi, bf, bo, bg])
        return tuple(weights)

    def step(
        self, x: Tensor, state: Mapping[str, Tensor], weights: StepWeights | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        hidden, cell = self._checked_state(state, x.shape[0])
        weights = weights or self.step_weights()
        width = self.hidden_dim
        new_hidden: list[Tensor] = []
        new_cell: list[Tensor] = []
        for layer in range(self.num_layers):
            matrix, bias = weights[2 * layer], weights[2 * layer + 1]
            gates = torch.addmm(bias, torch.cat([x, hidden[:, layer]], dim=1), matrix)
            i, f, o = torch.sigmoid(gates[:, : 3 * width]).chunk(3, dim=1)
            c = torch.addcmul(f * cell[:, layer], i, torch.tanh(gates[:, 3 * width :]))
            x = o * torch.tanh(c)
            new_hidden.append(x)
            new_cell.append(c)
        if self.num_layers == 1:
            return x, {HIDDEN: x.unsqueeze(1), CELL: new_cell[0].unsqueeze(1)}
        return x, {HIDDEN: torch.stack(new_hidden, dim=1), CELL: torch.stack(new_cell, dim=1)}

    def _checked_state(self, state: Mapping[str, Tensor], rows: int) -> tuple[Tensor, Tensor]:
        hidden, cell = state.get(HIDDEN), state.get(CELL)
        if hidden is None or cell is None:
            raise StateMissing(
                f"the state of a recurrent policy has {HIDDEN!r} and {CELL!r}, got {sorted(state)}; "
                "start with initial_state(n) and pass on what each step returns"
            )
        expected = (rows, self.num_layers, self.hidden_dim)
        if hidden.shape != expected or cell.shape != expected:
            raise ShapeError(
                f"hidden has shape {tuple(hidden.shape)} and cell {tuple(cell.shape)}, expected {expected}: "
                "(rows, layers, hidden_dim), one row per observation"
            )
        return hidden, cell

    def forward(self, x: Tensor, starts: Tensor, initial_state: Mapping[str, Tensor]) -> Tensor:
        return self.sequence(x, starts, initial_state)

    def sequence(self, x: Tensor, starts: Tensor, initial_state: Mapping[str, Tensor]) -> Tensor:
        if x.shape[0] == 0 or x.shape[1] == 0:
            return x.new_zeros(x.shape[0], x.shape[1], self.hidden_dim)
        hidden, cell = self._entering(starts, initial_state)
        if x.device.type != "cpu" or x.shape[0] <= ROWS_PER_CALL:
            return self._whole(x, starts, hidden, cell)
        calls = [slice(row, row + ROWS_PER_CALL) for row in range(0, x.shape[0], ROWS_PER_CALL)]
        return torch.cat([self._whole(x[rows], starts[rows], hidden[:, rows], cell[:, rows]) for rows in calls])

    def _entering(self, starts: Tensor, initial_state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """State entering column 0, [L, n, H] each: zeros where an episode starts. Selected, for 0 * NaN is NaN."""
        hidden, cell = initial_state.get(HIDDEN), initial_state.get(CELL)
        if hidden is None or cell is None:
            raise StateMissing(f"initial_state needs {HIDDEN!r} and {CELL!r}, got {sorted(initial_state)}")
        expected = (self.num_layers, starts.shape[0], self.hidden_dim)
        if hidden.shape != expected or cell.shape != expected:
            raise ShapeError(
                f"the initial state has shapes {tuple(hidden.shape)} and {tuple(cell.shape)}, expected {expected}: "
                "(layers, sequences, hidden_dim)"
            )
        fresh = starts[:, :1].ne(0)
        return hidden.masked_fill(fresh, 0.0), cell.masked_fill(fresh, 0.0)

    def _whole(self, x: Tensor, starts: Tensor, hidden: Tensor, cell: Tensor) -> Tensor:
        """One kernel call per layer; zero state has been selected into column 0 already."""
        if self.resets_in_place:
            return self._in_place(x.transpose(0, 1), starts.t().to(x.dtype), hidden, cell).transpose(0, 1)
        plan = plan_resets(starts)
        if plan is None:
            return self._layers(x.transpose(0, 1), None, hidden, cell).transpose(0, 1)
        return plan.gather(self._layers(plan.spread(x), plan.flags, hidden, cell))

    @property
    def resets_in_place(self) -> bool:
        return self.hidden_dim % kernels.UNITS == 0 and kernels.takes(self.layer_weights(0)[1])

    def padded(self, x: Tensor, flags: Tensor | None, initial_state: Mapping[str, Tensor]) -> Tensor:
        hidden, cell = initial_state[HIDDEN], initial_state[CELL]
        if self.resets_in_place:
            return self._in_place(x, x.new_zeros(x.shape[:2]) if flags is None else flags, hidden, cell)
        flagged = x if flags is None else torch.cat([x, flags], dim=2)
        return self._layers(flagged, flags, hidden, cell)

    def _in_place(self, x: Tensor, starts: Tensor, hidden: Tensor, cell: Tensor) -> Tensor:
        """x [T, n, D], starts [T, n] -> [T, n, H], by the compiled kernel."""
        for layer in range(self.num_layers):
            x = kernels.lstm_layer(x, starts, hidden[layer], cell[layer], self.layer_weights(layer))
        return x

    def _layers(self, x: Tensor, flags: Tensor | None, hidden: Tensor, cell: Tensor) -> Tensor:
        """x [P, n, D], or with flags [P, n, D + 1] -> [P, n, H], by torch's kernel.

        One call per layer even without resets, so that both forms round alike; a call over layers cannot reset.
        """
        for layer in range(self.num_layers):
            if flags is not None and layer > 0:
                x = torch.cat([x, flags], dim=2)
            x = self._run_layer(layer, x, hidden[layer], cell[layer], flags is not None)
        return x

    def _run_layer(self, layer: int, x: Tensor, hidden: Tensor, cell: Tensor, flagged: bool) -> Tensor:
        """x [P, n, D or D + 1] -> [P, n, H]."""
        weights = self.layer_weights(layer)
        if flagged:
            weights = (torch.cat([weights[0], self.shut], dim=1), *weights[1:])
        out, _, _ = torch.lstm(
            x.contiguous(),
            (hidden.unsqueeze(0).contiguous(), cell.unsqueeze(0).contiguous()),
            one_block(weights) if x.is_cuda else weights,
            True,
            1,
            0.0,
            torch.is_grad_enabled(),
            False,
            False,
        )
        return out

    def sequence_by_cells(self, x: Tensor, starts: Tensor, initial_state: Mapping[str, Tensor]) -> Tensor:
        """`sequence` as a plain loop over steps: the oracle it is tested against. x, starts, result as there."""
        hidden, cell = list(initial_state[HIDDEN]), list(initial_state[CELL])
        outputs = []
        for t in range(x.shape[1]):
            fresh = starts[:, t : t + 1].ne(0)
            out = x[:, t]
            for layer in range(self.num_layers):
                weight_ih, weight_hh, bias_ih, bias_hh = self.layer_weights(layer)
                h = torch.where(fresh, torch.zeros_like(hidden[layer]), hidden[layer])
                c = torch.where(fresh, torch.zeros_like(cell[layer]), cell[layer])
                i, f, g, o = (out @ weight_ih.t() + bias_ih + h @ weight_hh.t() + bias_hh).chunk(4, dim=1)
                cell[layer] = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                out = hidden[layer] = torch.sigmoid(o) * torch.tanh(cell[layer])
            outputs.append(out)
        return torch.stack(outputs, dim=1)


class FeedForwardCore(nn.Module):
    """A linear layer and tanh in place of memory; same width, no state."""

    def __init__(self, inputs: int, hidden_dim: int, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = orthogonal_linear(inputs, hidden_dim, HIDDEN_GAIN, generator)

    def state_spec(self) -> dict[str, tuple[int, ...]]:
        return {}

    def step_weights(self) -> StepWeights:
        return self.linear.weight, self.linear.bias

    def step(
        self,
        x: Tensor,
        state: Mapping[str, Tensor],  # noqa: ARG002
        weights: StepWeights | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        weight, bias = weights or self.step_weights()
        return torch.tanh_(nn.functional.linear(x, weight, bias)), {}

    def forward(self, x: Tensor, starts: Tensor, initial_state: Mapping[str, Tensor]) -> Tensor:
        return self.sequence(x, starts, initial_state)

    def sequence(self, x: Tensor, starts: Tensor, initial_state: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002
        return torch.tanh_(self.linear(x))

    @property
    def resets_in_place(self) -> bool:
        return True

    def padded(self, x: Tensor, flags: Tensor | None, initial_state: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002
        return torch.tanh_(self.linear(x))


def plan_for(core: Core, starts: Tensor) -> ResetPlan:
    """How rows are laid out for `padded`. starts: bool [n, T], where an episode starts."""
    return in_place(starts) if core.resets_in_place else lay_out(starts)


def chrono_biases(hidden_dim: int, chrono_max: float, generator: torch.Generator) -> Tensor:
    """Input and forget biases [2H] for memories up to about chrono_max steps (Tallec and Ollivier 2018, section 3).

    Forget bias log u with u uniform in [1, chrono_max - 1]; input bias its negative.
    """
    forget = torch.log(1.0 + (chrono_max - 2.0) * torch.rand(hidden_dim, generator=generator))
    return torch.cat([-forget, forget])


def one_block(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same tensors as neighbours in one allocation, as cuDNN wants them; otherwise it copies them and warns."""
    block = torch.cat([weight.reshape(-1) for weight in weights])
    pieces = torch.split(block, [math.prod(weight.shape) for weight in weights])
    return tuple(piece.view(weight.shape) for piece, weight in zip(pieces, weights, strict=True))
