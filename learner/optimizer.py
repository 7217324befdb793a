"""Adam over one flat vector that the policy's parameters are views of.

    values     w0 w0 w0 .. w1 w1 ..      parameters[i] is a view of it, and so of gradient and of both moments
    gradient   g0 g0 g0 .. g1 g1 ..

One clip, one fused kernel, whatever the number of parameters. Writer and reader: the epochs loop, one thread at a time.
What must never happen: a parameter that is replaced behind the vector's back (`policy.to`, `p.data = ...`): it would
no longer be trained. So a policy is moved to its device first. Left to others: which gradients are added, and when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

ALIGNMENT: Final = 16
"""Floats. Every parameter starts on a cache line, as in memory of its own: matrix products may round by address."""
BETA1: Final = 0.9
BETA2: Final = 0.999
NORM_EPSILON: Final = 1e-6
"""Added to the norm that gradients are divided by, as torch.nn.utils.clip_grad_norm_ does."""
FIRST, SECOND, STEP = "exp_avg", "exp_avg_sq", "step"


class FlatAdam:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) with a limit on the gradient's norm. It climbs: gradients are of an
    objective that is to be made large."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], *, epsilon: float) -> None:
        """named: float32 parameters of one device, at least one; they become views of `values`."""
        self.named: Final = tuple(named)
        self.epsilon: Final = epsilon
        sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for _, parameter in self.named]
        self._offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        with torch.inference_mode(False):
            self.values, self.gradient, self._first, self._second = (
                torch.zeros(sum(sizes), device=self.named[0][1].device) for _ in range(4)
            )
            self._step = torch.zeros((), device=self.values.device)
            for (_, parameter), view in zip(self.named, self.views(self.values), strict=True):
                view.copy_(parameter.detach())
                parameter.data = view
        self._gradients = self.views(self.gradient)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a vector like `values` that belong to the parameters, in their order and shapes."""
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, (_, parameter) in zip(self._offsets, self.named, strict=True)
        ]

    @torch.no_grad()
    def take(self, gradients: Sequence[Tensor], *, first: bool) -> None:
        """Sets the gradient to `gradients`, one per parameter, or adds them if they are not the first ones."""
        if first:
            torch._foreach_copy_(self._gradients, list(gradients))
        else:
            torch._foreach_add_(self._gradients, list(gradients))

    @torch.no_grad()
    def step(self, *, rows: int, learning_rate: float, max_norm: float) -> Tensor:
        """One step up the gradient / rows, cut to max_norm before. Returns the norm of the whole gradient, a scalar."""
        norm: Tensor = torch.linalg.vector_norm(self.gradient)
        # Divided in the kernel that takes the step: by the rows, and by how far the norm is too large.
        divisor = norm.add(rows * NORM_EPSILON).div_(max_norm).clamp_(min=rows)
        torch._fused_adam_(
            [self.values],
            [self.gradient],
            [self._first],
            [self._second],
            [],
            [self._step.add_(1.0)],
            lr=learning_rate,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=0.0,
            eps=self.epsilon,
            amsgrad=False,
            maximize=True,
            grad_scale=divisor,
        )
        return norm

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Copies of the state by parameter: <part>/<name>, part one of step, exp_avg, exp_avg_sq."""
        arrays: dict[str, NDArray[Any]] = {}
        step = self._step.cpu().numpy()
        for (name, _), first, second in zip(self.named, self.views(self._first), self.views(self._second), strict=True):
            arrays[f"{STEP}/{name}"] = step.copy()
            arrays[f"{FIRST}/{name}"] = first.cpu().numpy().copy()
            arrays[f"{SECOND}/{name}"] = second.cpu().numpy().copy()
        return arrays

    @torch.no_grad()
    def load_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """The reverse of `to_arrays`; other names are not looked at. Shapes are the caller's to check."""
        for (name, _), first, second in zip(self.named, self.views(self._first), self.views(self._second), strict=True):
            first.copy_(torch.as_tensor(np.asarray(arrays[f"{FIRST}/{name}"])))
            second.copy_(torch.as_tensor(np.asarray(arrays[f"{SECOND}/{name}"])))
        # All parameters have taken the same steps.
        self._step.copy_(torch.as_tensor(np.asarray(arrays[f"{STEP}/{self.named[0][0]}"])))
