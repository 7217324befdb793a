"""Policy calls over the arrays of an actor, in chunks of exactly R rows.

One set of contiguous, 64-byte aligned input buffers serves every chunk, so that the same kernel sees the same shapes
and alignments however the envs are split over actors: a row's result depends on the row and its place in the chunk.
That makes 1 x 8, 2 x 4 and 4 x 2 envs equal bit for bit at R = 2.

Writers: this object, into its own buffers and outputs, which the next call reuses. Never: gradients, allocation of
numpy arrays per call. Leaves to others: which rows start from zero state (the caller passes the state to act from).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_service.errors import ConfigError
from rollout_service.memory.schema import OBSERVATIONS
from rollout_service.policy.actor_critic import PolicyStep
from rollout_service.runspec import Spaces

Array = NDArray[Any]


class Policy(Protocol):
    """What an actor asks of a policy. observations: per field [n, *shape]; state: per name [n, L, H]; noise [n, *]."""

    def step(
        self, observations: Mapping[str, Tensor], state: Mapping[str, Tensor], noise: Tensor | None
    ) -> PolicyStep: ...
    def value(self, observations: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class Acted:
    """Outputs of `Inference.step`, overwritten by the next one."""

    actions: Array
    """[E, *] in the env's own values."""
    log_probs: NDArray[np.float32]
    """[E]"""
    values: NDArray[np.float32]
    """[E]"""
    state: dict[str, Array]
    """name -> [E, L, H]: the state EXITING the step, ended episodes included."""


class Inference:
    """Calls `policy` for E envs, R rows at a time. R must divide E."""

    def __init__(
        self,
        policy: Policy,
        spaces: Spaces,
        state: Mapping[str, tuple[int, ...]],
        *,
        num_envs: int,
        rows_per_forward: int,
        noise_shape: tuple[int, ...],
    ) -> None:
        if num_envs % rows_per_forward:
            raise ConfigError(f"envs_per_forward {rows_per_forward} does not divide the actor's {num_envs} envs")
        rows = rows_per_forward
        self._policy = policy
        self._chunks = tuple(slice(start, start + rows) for start in range(0, num_envs, rows))
        self._rows = rows
        # Tensors made here, outside inference_mode: their storage is shared with numpy and written there.
        self._observations = {
            OBSERVATIONS + leaf.path: torch.from_numpy(aligned((rows, *leaf.shape), leaf.dtype))
            for leaf in spaces.observation
        }
        self._state = {name: torch.from_numpy(aligned((rows, *shape), "float32")) for name, shape in state.items()}
        self._noise = torch.from_numpy(aligned((rows, *noise_shape), "float32"))
        self._observation_rows = [(name, tensor.numpy()) for name, tensor in self._observations.items()]
        self._state_rows = [(name, tensor.numpy()) for name, tensor in self._state.items()]
        self._noise_rows = self._noise.numpy()
        self._acted = Acted(
            actions=np.zeros((num_envs, *spaces.action.shape), spaces.action.dtype),
            log_probs=np.zeros(num_envs, np.float32),
            values=np.zeros(num_envs, np.float32),
            state={name: np.zeros((num_envs, *shape), np.float32) for name, shape in state.items()},
        )

    def step(self, observations: Mapping[str, Array], state: Mapping[str, Array], noise: Array) -> Acted:
        """Act in every env. observations per field [E, *shape], state per name [E, L, H], noise [E, *]."""
        acted = self._acted
        for chunk in self._chunks:
            self._fill(chunk, observations, state)
            self._noise_rows[...] = noise[chunk]
            step = self._policy.step(self._observations, self._state, self._noise)
            acted.actions[chunk] = step.actions.numpy()
            acted.log_probs[chunk] = step.log_probs.numpy()
            acted.values[chunk] = step.values.numpy()
            for name, exiting in acted.state.items():
                exiting[chunk] = step.state[name].numpy()
        return acted

    def values(
        self, observations: Mapping[str, Array], state: Mapping[str, Array], envs: Sequence[int], out: Array
    ) -> None:
        """V of `observations` with `state` for the named envs, into out [E]; other rows of `out` stay as they are.

        Whole chunks are run, those that contain a named env; the state that results is thrown away.
        """
        for start in sorted({e - e % self._rows for e in envs}):
            chunk = slice(start, start + self._rows)
            self._fill(chunk, observations, state)
            values = self._policy.value(self._observations, self._state).numpy()
            for e in envs:
                if start <= e < chunk.stop:
                    out[e] = values[e - start]

    def _fill(self, chunk: slice, observations: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        for name, rows in self._observation_rows:
            rows[...] = observations[name][chunk]
        for name, rows in self._state_rows:
            rows[...] = state[name][chunk]


def aligned(shape: tuple[int, ...], dtype: str, alignment: int = 64) -> Array:
    """A zeroed C-contiguous array that starts on an `alignment` byte boundary (a cache line, a vector register)."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    root = np.zeros(nbytes + alignment, np.uint8)
    offset = -root.ctypes.data % alignment
    return root[offset : offset + nbytes].view(dtype).reshape(shape)
