"""Layers over whole rollouts by compiled kernels, where they can run: tanh(x W^T + b), LSTM with exact resets, heads.

Where they are not usable (compiled.py), and for sizes or devices that they do not take, torch's operations do the same.
The LSTM zeroes its state in place, so a sequence needs no inserted steps. A row's outputs depend on no other row.

Who calls: encoder, core and policy; any thread, and the interpreter is given up meanwhile. What must never happen: a
tensor of another dtype or device in a kernel. Left to others: when an episode starts.

Axis letters: T steps, n rows, M rows of any kind, D inputs, H hidden_dim, or outputs, C choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollout_service.policy.compiled import USABLE

if USABLE:
    from rollout_service.policy import _layers

UNITS: Final = 16
"""The hidden_dim in front of the heads, and that of an LSTM, has to be a multiple of it."""


def takes(weight: Tensor) -> bool:
    """Whether the kernels can work with such weights."""
    return USABLE and weight.device.type == "cpu" and weight.dtype == torch.float32


def tanh_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """tanh(x W^T + b), with gradients. x: [M, D], weight: [H, D], bias: [H]. Returns [M, H]."""
    return _TanhLinear.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def lstm_layer(x: Tensor, starts: Tensor, hidden: Tensor, cell: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """x [T, n, D] -> [T, n, H], with gradients for all but starts.

    starts: [T, n], nonzero where the state that enters is zero; hidden, cell: [n, H], entering the first step; weights:
    input, recurrent, and their biases, as torch.nn.LSTM has them. All float32; T and n above 0.
    """
    return _LSTMLayer.apply(x, starts, hidden, cell, *weights)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class CategoricalHeads:
    """Both heads over M rows for a categorical distribution, and the way back through them."""

    features: Tensor
    """[M, H]"""
    policy: Tensor
    """[C, H]"""
    value: Tensor
    """[1, H]"""
    actions: Tensor
    """int64 [M], from start on."""
    start: int
    log_p: Tensor
    """[C, M]"""
    values: Tensor
    """[M]"""
    log_probs: Tensor
    """[M]"""
    entropy: Tensor
    """[M]"""

    def gradients(
        self, by_log_prob: Tensor, by_value: Tensor, by_entropy: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of a loss with these slopes, [M] each: gradient at the features [M, H], and at the head parameters."""
        (rows, width), choices = self.features.shape, len(self.policy)
        by_features, by_policy, by_value_weight = (
            torch.empty_like(tensor) for tensor in (self.features, self.policy, self.value)
        )
        by_biases = by_features.new_empty(choices), by_features.new_empty(1)
        _layers.heads_backward(
            rows, width, choices, self.start,
            _arrays(self.features, self.policy, self.value, self.actions, self.log_p, self.entropy,
                    by_log_prob.contiguous(), by_value.contiguous(), by_entropy.contiguous(),
                    by_features, by_policy, by_biases[0], by_value_weight, by_biases[1]),
        )  # fmt: skip
        return by_features, (by_policy, by_biases[0], by_value_weight, by_biases[1])


def categorical_heads(
    features: Tensor, policy: tuple[Tensor, Tensor], value: tuple[Tensor, Tensor], actions: Tensor, start: int
) -> CategoricalHeads:
    """features: [M, H], M above 0; policy, value: the heads' weights and biases; actions: int64 [M], from start on."""
    (rows, width), choices = features.shape, len(policy[0])
    features, actions = features.detach().contiguous(), actions.contiguous()
    log_p, figures = features.new_empty(choices, rows), features.new_empty(3, rows)
    values, log_probs, entropy = figures
    _layers.heads_forward(
        rows, width, choices, start, _arrays(features, *policy, *value, actions, log_p, values, log_probs, entropy)
    )
    return CategoricalHeads(
        features, policy[0].detach(), value[0].detach(), actions, start, log_p, values, log_probs, entropy
    )


class _TanhLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        (rows, inputs), outputs = x.shape, len(weight)
        out = x.new_empty(rows, outputs)
        _layers.dense_forward(rows, inputs, outputs, _arrays(x, weight, bias, out))
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_outs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        (rows, inputs), outputs, asked = x.shape, len(weight), bool(ctx.needs_input_grad[0])
        by_x = torch.empty_like(x) if asked else x.new_empty(0)
        by_weight, by_bias = torch.empty_like(weight), weight.new_empty(outputs)
        _layers.dense_backward(
            rows, inputs, outputs, asked,
            _arrays(x, weight, out, by_outs[0].contiguous(), by_x, by_weight, by_bias),
        )  # fmt: skip
        return by_x if asked else None, by_weight, by_bias


class _LSTMLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, starts: Tensor, hidden: Tensor, cell: Tensor,
        weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor,
    ) -> Tensor:  # fmt: skip
        steps, rows, inputs = x.shape
        size = weight_hh.shape[1]
        keep = any(ctx.needs_input_grad)
        x, starts, weight_ih, weight_hh = (a.contiguous() for a in (x, starts, weight_ih, weight_hh))
        gates = x.new_empty(steps if keep else 1, 4 * rows * size)
        entering = x.new_empty(2, steps + 1, rows, size)
        entering[0, 0], entering[1, 0] = hidden, cell
        out = x.new_empty(steps, rows, size)
        _layers.lstm_forward(
            steps, rows, inputs, size, keep,
            _arrays(x, starts, weight_ih, weight_hh, bias_ih, bias_hh, gates, entering, out),
        )  # fmt: skip
        ctx.save_for_backward(x, starts, weight_ih, weight_hh, gates, entering)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_outs: Tensor) -> tuple[Tensor | None, ...]:
        x, starts, weight_ih, weight_hh, gates, entering = ctx.saved_tensors
        steps, rows, inputs = x.shape
        size = weight_hh.shape[1]
        by_x, by_ih, by_hh = torch.empty_like(x), torch.empty_like(weight_ih), torch.empty_like(weight_hh)
        by_state, by_bias = x.new_empty(2, rows, size), x.new_empty(4 * size)
        _layers.lstm_backward(
            steps, rows, inputs, size,
            _arrays(x, starts, weight_ih, weight_hh, gates, entering, by_outs[0].contiguous(),
                    by_x, by_state, by_ih, by_hh, by_bias),
        )  # fmt: skip
        return by_x, None, by_state[0], by_state[1], by_ih, by_hh, by_bias, by_bias


def _arrays(*tensors: Tensor) -> tuple[NDArray[Any], ...]:
    return tuple([tensor.detach().numpy() for tensor in tensors])
