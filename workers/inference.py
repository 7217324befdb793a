"""Policy calls over the arrays of an actor, in chunks of exactly R rows.

Every chunk goes through the same buffers, so that the same kernels see the same shapes and alignments however the envs
are split over actors: a row's result depends on the row and its place in the chunk. That makes 1 x 8, 2 x 4 and 4 x 2
envs equal bit for bit at R = 2.

    ActingPolicy   numpy (policy/acting.py): all policies without images
    TorchPolicy    the learner's own module, for images; torch is imported here and nowhere else in an actor

Writers: this object, into its own outputs, which the next call reuses. Leaves to others: which rows start from zero
state (the caller passes the state to act from).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_service.errors import ConfigError
from rollout_service.memory.schema import OBSERVATIONS
from rollout_service.policy.acting import ActedRows, ActingPolicy, acts_in_numpy, aligned
from rollout_service.runspec import RunSpec, Spaces

if TYPE_CHECKING:
    from rollout_service.policy.actor_critic import ActorCritic

Array = NDArray[Any]


class Policy(Protocol):
    """What an actor asks of a policy. observations: per field [R, *shape]; state: per name [R, L, H]; noise [R, *].

    Results may be overwritten by the next call. Arguments are not changed and not kept.
    """

    def step(self, observations: Mapping[str, Array], state: Mapping[str, Array], noise: Array) -> ActedRows: ...
    def value(self, observations: Mapping[str, Array], state: Mapping[str, Array]) -> Array: ...


class LoadedPolicy(Policy, Protocol):
    """A policy whose weights come from the learner."""

    def load_arrays(self, arrays: Mapping[str, Array]) -> None: ...
    def draw_noise(self, generator: np.random.Generator, num_steps: int) -> Array: ...


class TorchPolicy:
    """An `ActorCritic`, or anything with its `step` and `value`, for arrays."""

    def __init__(self, module: ActorCritic) -> None:
        import torch

        self._module = module
        self._tensor = torch.from_numpy
        self._inference = torch.inference_mode

    @classmethod
    def of(cls, spec: RunSpec) -> TorchPolicy:
        """The run's policy, on one thread, with weights still to be loaded."""
        import torch

        from rollout_service.policy.actor_critic import ActorCritic

        torch.set_num_threads(1)
        return cls(ActorCritic(spec.spaces, spec.policy, seed=spec.seed).eval())

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        self._module.load_arrays(arrays)

    def draw_noise(self, generator: np.random.Generator, num_steps: int) -> Array:
        return self._module.draw_noise(generator, num_steps)

    def step(self, observations: Mapping[str, Array], state: Mapping[str, Array], noise: Array) -> ActedRows:
        # Tensors over arrays that were made outside inference mode: their storage is shared and written by numpy.
        inputs, entering = self._tensors(observations), self._tensors(state)
        with self._inference():
            step = self._module.step(inputs, entering, self._tensor(noise))
            exiting = {name: rows.numpy() for name, rows in step.state.items()}
            return ActedRows(step.actions.numpy(), step.log_probs.numpy(), step.values.numpy(), exiting)

    def value(self, observations: Mapping[str, Array], state: Mapping[str, Array]) -> Array:
        inputs, entering = self._tensors(observations), self._tensors(state)
        with self._inference():
            values: Array = self._module.value(inputs, entering).numpy()
            return values

    def _tensors(self, arrays: Mapping[str, Array]) -> dict[str, Any]:
        return {name: self._tensor(array) for name, array in arrays.items()}


def policy_for(spec: RunSpec) -> LoadedPolicy:
    """The run's policy as its actors run it; weights are still to be loaded."""
    if acts_in_numpy(spec.spaces):
        return ActingPolicy(spec.spaces, spec.policy, spec.envs_per_forward)
    return TorchPolicy.of(spec)


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
        self._observations = {
            OBSERVATIONS + leaf.path: aligned((rows, *leaf.shape), leaf.dtype) for leaf in spaces.observation
        }
        self._state = {name: aligned((rows, *shape), "float32") for name, shape in state.items()}
        self._noise = aligned((rows, *noise_shape), "float32")
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
            self._noise[...] = noise[chunk]
            step = self._policy.step(self._observations, self._state, self._noise)
            acted.actions[chunk] = step.actions
            acted.log_probs[chunk] = step.log_probs
            acted.values[chunk] = step.values
            for name, exiting in acted.state.items():
                exiting[chunk] = step.state[name]
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
            values = self._policy.value(self._observations, self._state)
            for e in envs:
                if start <= e < chunk.stop:
                    out[e] = values[e - start]

    def _fill(self, chunk: slice, observations: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        for name, rows in self._observations.items():
            rows[...] = observations[name][chunk]
        for name, rows in self._state.items():
            rows[...] = state[name][chunk]
