"""A batch laid out for the epochs: everything that is the same in every minibatch is worked out once.

    PaddedBatch    observations as the network reads them, time-major, as the core wants its resets; once per rollout
    minibatch      some env rows, cut into blocks of a few rows of about the same length
    Block          the rows of one block: one gather per field, ready for `ActorCritic.evaluate_padded`

Blocks depend on the rows alone, never on the number of threads, so neither does any result. A block is small enough for
the core's cache, and large enough to fill its registers and to pay for what a block costs whatever its size: blocks of
4 rows take 1.11 times the time of 8.

Who calls: the epochs loop. What must never happen: contents of a row that is not valid in any sum. Left to others: the
loss, the order of rows, threads.

Axis letters: T steps, P padded steps of the batch, p of a block, N envs of the batch, n of a block, L layers, H
hidden_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.ppo import PpoSettings
from learner.sequences import SequenceBatch
from rollout_service.policy.actor_critic import ActorCritic, NetworkRows
from rollout_service.policy.recurrent import plan_for

Rows = NDArray[np.int64]

BLOCK_ROWS: Final = 8
"""Rows of one block, at most."""
IMAGE_BLOCK_ROWS: Final = 2
"""The same where convolutions come first: they are most of the work, and gain nothing from more rows."""
SPLIT_ROWS: Final = 8
"""A minibatch of so many rows is cut in two even if it were one block, so that two threads can share it."""


@dataclass(frozen=True, slots=True)
class Block:
    """n rows of a minibatch, time-major, padded to p steps. Flat fields are [p * n], 0 where not valid."""

    num_steps: int
    """p"""
    inputs: NetworkRows
    actions: Tensor
    flags: Tensor | None
    """float32 [p, n, 1], as the core wants them; None if all are 0."""
    initial_state: dict[str, Tensor]
    """[L, n, H], zero for rows that begin an episode."""
    old_log_probs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    value_weights: Tensor
    entropy_weights: Tensor
    live: Tensor
    """1 where a real step is, and valid."""


class PaddedBatch:
    """A batch as the epochs read it. Owns copies, so far as they differ from the batch."""

    def __init__(self, batch: SequenceBatch, policy: ActorCritic, settings: PpoSettings) -> None:
        """Statistics of the policy must not change while it is in use. The batch has a row and a column at least."""
        with torch.no_grad():
            valid = batch.valid
            # A row past the end counts as ended, and a reset in front of it would lengthen the sequence for nothing.
            starts = batch.episode_starts.ne(0) & valid
            starts[:, 0] |= ~valid[:, 0]
            plan = plan_for(policy.core, starts)
            places = (plan.num_steps, plan.num_rows)
            self._source = plan.source.view(places)
            flags = plan.flags.view(places)
            live = torch.zeros_like(plan.source, dtype=torch.bool)
            live = live.index_copy_(0, plan.real, valid.reshape(-1)).view(places)
            fields = (batch.old_log_probs, batch.old_values, batch.advantages, batch.returns)
            numbers = torch.stack([field.reshape(-1) for field in fields])[:, plan.source].view(4, *places)
            weight = live.float()
            weights = (weight * 2.0 * settings.value_coefficient, weight * settings.entropy_coefficient, weight, flags)
            self._numbers = torch.cat([numbers.masked_fill_(~live, 0.0), torch.stack(weights)])
            self._inputs = policy.network_rows(batch.obs_seq, valid)
            actions = batch.actions.flatten(0, 1)
            keep = valid.reshape(-1, *(1,) * (actions.dim() - 1))
            self._actions = actions.masked_fill(~keep, policy.spaces.action.start)
            self._state = {name: state.masked_fill(starts[:, :1], 0.0) for name, state in batch.initial_state.items()}
        self.num_steps = batch.valid.shape[1]
        self._unmarked_steps = 0 if policy.core.resets_in_place else self.num_steps
        self.lengths: Rows = plan.lengths.cpu().numpy()
        """int64 [N]: padded steps of every row."""
        self.counts: Rows = valid.sum(1).cpu().numpy()
        """int64 [N]: valid steps of every row."""
        self._block_rows = IMAGE_BLOCK_ROWS if self._inputs.images else BLOCK_ROWS
        self._whole = batch.valid.device.type != "cpu"

    def num_blocks(self, rows: int) -> int:
        """Blocks of a minibatch of so many rows."""
        return 1 if self._whole else num_blocks(rows, self._block_rows)

    def split(self, rows: Rows) -> list[Rows]:
        """The rows of a minibatch as blocks: alike in number and, as far as that goes, in padded steps."""
        count = self.num_blocks(len(rows))
        if count == 1:
            return [rows]
        ordered = rows[np.argsort(self.lengths[rows], kind="stable")]
        return [np.asarray(part) for part in np.array_split(ordered, count)]

    def take(self, rows: Rows) -> Block:
        """The contents of a block."""
        steps = int(self.lengths[rows].max())
        chosen = torch.from_numpy(rows)
        if self._whole:
            chosen = chosen.to(self._source.device)
        source = self._source[:steps].index_select(1, chosen).view(-1)
        numbers = self._numbers[:, :steps].index_select(2, chosen).view(len(self._numbers), -1)
        *fields, flags = numbers.unbind(0)
        return Block(
            steps,
            self._inputs.take(source),
            self._actions.index_select(0, source),
            flags.view(steps, -1, 1) if steps > self._unmarked_steps else None,
            {name: state.index_select(1, chosen) for name, state in self._state.items()},
            *fields,
        )


def num_blocks(rows: int, block_rows: int = BLOCK_ROWS) -> int:
    """Blocks of a minibatch of so many rows."""
    fewest = -(-rows // block_rows)
    return max(fewest, 2) if rows >= SPLIT_ROWS else fewest


def parts(order: NDArray[Any], size: int) -> list[NDArray[Any]]:
    """Minibatches of `size` rows each, the last one maybe smaller."""
    return [order[begin : begin + size] for begin in range(0, len(order), size)]
