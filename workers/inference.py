"""The policy as its actor runs it: E envs and their recurrent state, in chunks of exactly R rows.

Every chunk goes through the same kernels with the same shapes and alignments however the envs are split over actors: a
row's result depends on the row and its place in the chunk. That makes 1 x 8, 2 x 4 and 4 x 2 envs equal bit for bit at
R = 2.

    ActingPolicy   numpy (policy/acting.py): all policies without images
    TorchPolicy    the learner's own module, for images; torch is imported here and nowhere else in an actor

Writers: the policy, into its state and its outputs, which the next call reuses. Leaves to others: which rows start from
zero state (their owner writes the zeros).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_service.memory.schema import OBSERVATIONS
from rollout_service.policy.acting import Acted, ActingPolicy, acts_in_numpy, aligned, chunks_of
from rollout_service.runspec import RunSpec

if TYPE_CHECKING:
    from rollout_service.policy.actor_critic import ActorCritic

Array = NDArray[Any]


class Policy(Protocol):
    """What an actor asks of a policy for E envs. observations: per field [E, *shape]; arguments are not kept."""

    @property
    def state(self) -> Mapping[str, Array]:
        """Name -> [E, L, H], entering the next call; the owner may write into it."""
        ...

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Take over a published version."""
        ...

    def draw_noise(self, generators: Sequence[np.random.Generator], num_steps: int) -> Array:
        """Noise of n envs, each from its own generator, [num_steps, n, *]."""
        ...

    def step(self, observations: Mapping[str, Array], noise: Array) -> Acted:
        """Act in every env, noise [E, *]; the state moves on to the one that EXITS, ended episodes included."""
        ...

    def values(self, observations: Mapping[str, Array], envs: Sequence[int], out: Array) -> None:
        """V of `observations` with the state, which stays as it is, for the named envs, into out [E].

        Whole chunks are run, those that contain a named env; other rows of `out` stay as they are.
        """
        ...


def policy_for(spec: RunSpec) -> Policy:
    """The run's policy for one actor's envs; weights are still to be loaded."""
    if acts_in_numpy(spec.spaces):
        return ActingPolicy(spec.spaces, spec.policy, spec.envs_per_actor, spec.envs_per_forward)
    import torch

    from rollout_service.policy.actor_critic import ActorCritic

    torch.set_num_threads(1)
    return TorchPolicy(ActorCritic(spec.spaces, spec.policy, seed=spec.seed).eval(), spec)


class TorchPolicy:
    """An `ActorCritic`, or anything with its `step` and `value`, called through buffers of R rows."""

    def __init__(self, module: ActorCritic, spec: RunSpec) -> None:
        import torch

        self._module = module
        self._inference = torch.inference_mode
        envs, rows = spec.envs_per_actor, spec.envs_per_forward
        self.state = {name: np.zeros((envs, *shape), np.float32) for name, shape in spec.state.items()}
        self._chunks = chunks_of(envs, rows)
        self._observations = {
            OBSERVATIONS + leaf.path: aligned((rows, *leaf.shape), leaf.dtype) for leaf in spec.spaces.observation
        }
        self._entering = {name: aligned((rows, *shape)) for name, shape in spec.state.items()}
        noise_shape = module.draw_noise(np.random.default_rng(0), 1).shape[1:]
        self._noise = aligned((rows, *noise_shape))
        # Tensors made here, outside inference mode: their storage is shared with numpy and written there.
        self._seen, self._from, self._by = (
            {name: torch.from_numpy(array) for name, array in arrays.items()}
            for arrays in (self._observations, self._entering, {"noise": self._noise})
        )
        self._acted = Acted.of(envs, spec.spaces)

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        self._module.load_arrays(arrays)

    def draw_noise(self, generators: Sequence[np.random.Generator], num_steps: int) -> Array:
        return np.stack([self._module.draw_noise(own, num_steps) for own in generators], axis=1)

    def step(self, observations: Mapping[str, Array], noise: Array) -> Acted:
        acted = self._acted
        with self._inference():
            for chunk in self._chunks:
                self._fill(chunk, observations)
                self._noise[...] = noise[chunk]
                step = self._module.step(self._seen, self._from, self._by["noise"])
                acted.actions[chunk] = step.actions.numpy()
                acted.log_probs[chunk] = step.log_probs.numpy()
                acted.values[chunk] = step.values.numpy()
                for name, rows in self.state.items():
                    rows[chunk] = step.state[name].numpy()
        return acted

    def values(self, observations: Mapping[str, Array], envs: Sequence[int], out: Array) -> None:
        with self._inference():
            for chunk in self._chunks:
                if named := [e for e in envs if chunk.start <= e < chunk.stop]:
                    self._fill(chunk, observations)
                    values = self._module.value(self._seen, self._from).numpy()
                    out[named] = values[[e - chunk.start for e in named]]

    def _fill(self, chunk: slice, observations: Mapping[str, Array]) -> None:
        for name, rows in self._observations.items():
            rows[...] = observations[name][chunk]
        for name, rows in self._entering.items():
            rows[...] = self.state[name][chunk]
