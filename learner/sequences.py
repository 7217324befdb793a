"""Sequence batches: whole env rows as torch tensors, env-major, ready for a recurrent forward.

`materialize` copies out of the rollout's shared memory, so a batch owns its memory: nothing the trainer does to a batch
reaches the rollout, and nothing the actors or the next seeding write reaches the batch. Rows that are not valid get
harmless contents (0 * NaN is NaN, in the backward pass too). Never: IO, clocks, hidden randomness (a shuffle needs its
generator), a sequence that mixes envs. Which rows may be taken, and when, is the rollout buffer's business.

Axis letters: T columns, N envs of the rollout, n rows (envs) of the batch, L recurrent layers, H hidden_dim,
K valid_steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_service.errors import OutOfOrder, OutOfRange
from rollout_service.memory.schema import OBSERVATIONS
from rollout_service.recurrence import ended, episode_starts

Generator = torch.Generator | np.random.Generator


@dataclass(frozen=True)
class SequenceBatch:
    """n whole sequences of T steps. Row i of every field belongs to env `env_ids[i]`, column t to step t."""

    obs_seq: Tensor | dict[str, Tensor]
    """[n, T, *obs], or by field name ("observations" + path) where the observation is not one plain array."""
    actions: Tensor
    """[n, T, *action], the env's own values."""
    episode_starts: Tensor
    """float32 [n, T]: 1 where the state entering the row is zero. 0 past the env's K."""
    old_log_probs: Tensor
    """float32 [n, T], under the behaviour policy."""
    old_values: Tensor
    """float32 [n, T], under the behaviour policy."""
    advantages: Tensor
    """float32 [n, T]."""
    returns: Tensor
    """float32 [n, T]."""
    initial_state: dict[str, Tensor]
    """State entering column 0 by name (hidden, cell), each float32 [L, n, H]; empty for a feed-forward core."""
    valid: Tensor
    """bool [n, T]: the rows that count in any sum, mean or loss."""
    env_ids: Tensor
    """int64 [n]."""

    def __len__(self) -> int:
        return len(self.env_ids)

    def to(self, device: torch.device | str) -> SequenceBatch:
        """The same batch on another device; fields that are there already are shared."""
        return self._each(lambda tensor, _: tensor.to(device))

    def take(self, rows: Tensor) -> SequenceBatch:
        """Copies of the given rows (int64 [m]), in that order."""
        rows = rows.to(self.env_ids.device)
        return self._each(lambda tensor, axis: tensor.index_select(axis, rows))

    def minibatches(
        self, envs_per_minibatch: int, shuffle: bool, generator: Generator | None = None
    ) -> Iterator[SequenceBatch]:
        """Every row exactly once, in chunks of whole rows; the last chunk may be shorter, none is padded or dropped.

        Without shuffle the order is 0..n-1. More per minibatch than there are rows gives one batch; a batch without
        rows gives none. Raises OutOfRange for envs_per_minibatch < 1 and OutOfOrder for a shuffle without a generator.
        """
        check_envs_per_minibatch(envs_per_minibatch)
        if shuffle and generator is None:
            raise OutOfOrder("a shuffle needs its generator; pass a torch.Generator or a numpy Generator")
        order = permutation(len(self), generator) if shuffle and generator is not None else torch.arange(len(self))
        return (self.take(order[i : i + envs_per_minibatch]) for i in range(0, len(self), envs_per_minibatch))

    def _each(self, change: Callable[[Tensor, int], Tensor]) -> SequenceBatch:
        """Apply `change(tensor, axis of the rows)` to every field."""
        obs = self.obs_seq
        return SequenceBatch(
            obs_seq=change(obs, 0)
            if isinstance(obs, Tensor)
            else {name: change(leaf, 0) for name, leaf in obs.items()},
            actions=change(self.actions, 0),
            episode_starts=change(self.episode_starts, 0),
            old_log_probs=change(self.old_log_probs, 0),
            old_values=change(self.old_values, 0),
            advantages=change(self.advantages, 0),
            returns=change(self.returns, 0),
            initial_state={name: change(state, 1) for name, state in self.initial_state.items()},
            valid=change(self.valid, 0),
            env_ids=change(self.env_ids, 0),
        )


def check_envs_per_minibatch(envs_per_minibatch: int) -> None:
    """Raises OutOfRange, naming the value."""
    if isinstance(envs_per_minibatch, bool) or not isinstance(envs_per_minibatch, int | np.integer):
        raise OutOfRange(f"envs_per_minibatch is {envs_per_minibatch!r}; it must be a whole number of envs, at least 1")
    if envs_per_minibatch < 1:
        raise OutOfRange(f"envs_per_minibatch is {envs_per_minibatch}; a minibatch holds at least 1 whole env row")


def materialize(
    arrays: Mapping[str, NDArray[Any]],
    *,
    state_names: tuple[str, ...],
    valid_steps: NDArray[np.int64],
    env_ids: NDArray[np.int64],
    device: torch.device | str,
    owned: bool = False,
) -> SequenceBatch:
    """Copy the rows of some envs out of a rollout.

    arrays: the rollout's fields by name, [N, T, *shape] per step and [N, *shape] per env; valid_steps: K of every env
    of the rollout, int [N]; env_ids: which envs, int [n].
    The batch has max K columns over those envs, `valid` is False past each env's K. Rows that are not valid hold zeros,
    but signed integers (choices of a Discrete space, whose first one need not be 0) repeat a choice of a valid row, so
    that an embedding or a gather can take them.
    owned: the arrays are the caller's own copies of a rollout: the batch then shares those of which it takes every row,
    and writes the harmless contents into them.
    Every field is copied once at most, in one piece where all envs and columns are taken.
    """
    steps = valid_steps[env_ids]
    columns = int(steps.max(initial=0))
    every_env = bool(np.array_equal(env_ids, np.arange(len(valid_steps))))
    whole = every_env and columns == arrays["valid"].shape[1]

    def rows(name: str) -> NDArray[Any]:
        if every_env:
            part = arrays[name][:, :columns]
            return part if owned and whole else part.copy()
        return np.ascontiguousarray(arrays[name][env_ids, :columns])  # an index array always copies

    taken = np.s_[:] if every_env else env_ids  # of the fields that are read and not kept
    flags = {name: arrays[name][taken, :columns] for name in ("terminated", "truncated", "valid")}
    within = np.arange(columns) < steps[:, None]
    valid = flags["valid"].astype(np.bool_) & within
    gaps = None if valid.all() else np.nonzero(~valid)
    starts = episode_starts(ended(flags["terminated"], flags["truncated"], valid), arrays["episode_start_carry"][taken])
    starts[~within] = 0.0

    def harmless(name: str) -> Tensor:
        own = rows(name)
        if gaps is not None:
            own[gaps] = own[valid][0] if own.dtype.kind == "i" and valid.any() else 0
        return torch.from_numpy(own).to(device)

    with torch.inference_mode(False):  # an inference tensor would break a later backward
        leaves = {name: harmless(name) for name in arrays if name.startswith(OBSERVATIONS)}
        return SequenceBatch(
            obs_seq=leaves.get(OBSERVATIONS, leaves),
            actions=harmless("actions"),
            episode_starts=torch.from_numpy(starts).to(device),
            old_log_probs=harmless("log_probs"),
            old_values=harmless("values"),
            advantages=harmless("advantages"),
            returns=harmless("returns"),
            initial_state={
                name: torch.from_numpy(arrays[name][taken, 0].swapaxes(0, 1).copy()).to(device) for name in state_names
            },
            valid=torch.from_numpy(valid).to(device),
            env_ids=torch.from_numpy(env_ids.copy()).to(device),
        )


def permutation(n: int, generator: Generator) -> Tensor:
    if isinstance(generator, np.random.Generator):
        return torch.from_numpy(generator.permutation(n))
    return torch.randperm(n, generator=generator, device=generator.device).cpu()
