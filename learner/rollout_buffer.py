"""RecurrentRolloutBuffer: one rollout of N envs and T steps, with recurrent state, in shared memory.

Two ways to hold one. Standalone (`RecurrentRolloutBuffer(...)`) it creates its own memory and the caller writes it cell
by cell; it needs no service. Over slots that actors filled (`RecurrentRolloutBuffer.over(...)`) it is the learner's
face of them, and only the learner's products and another rollout's row 0 are written through it. Slots that are not
adjacent are gathered once; from then on it is a rollout of its own, and the slots may be filled again.

Writers: standalone the caller, over slots the actors; in both cases the learner for advantages, returns and the seed of
the next rollout. Readers: the trainer, through batches that own their memory.
Must never happen: a batch from stale advantages, or one whose row 0 was already seeded for the next rollout.
Left to others: leases and order between processes (control), the byte layout (memory), checking and writing cells
(cells, cell_writer), accessors (rollout_views), what is in order when (rollout_life), estimators (gae), tensors
(sequences).

Life of a standalone rollout:

    add_recurrent_state, add ... -> compute_advantages -> batches -> seed_warm_start -> the next rollout begins

The next rollout begins with the first `add` or `add_recurrent_state` after `seed_warm_start`: from then on every row
of the old one counts as unwritten, only row 0's state and the carry flag live on. Between the two, batches are refused.
`reset` begins nothing, and without a seed a rollout is simply overwritten. Every `add` makes earlier advantages stale.
Over slots the next rollout begins when an actor opens a slot anew.

Axis letters: T num_steps, N num_envs, n envs of one call, L recurrent layers, H hidden_dim, K valid_steps of an env.
Indices read [step][env] outside, arrays lie env-major inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from learner.cell_writer import CellWriter, state_cells
from learner.cells import (
    EnvIds,
    per_env,
    require_finite,
    require_fraction,
    require_positive,
    require_size,
    spaces_of,
)
from learner.gae import Estimator
from learner.rollout_life import Life
from learner.rollout_views import CARRY, RolloutViews
from learner.sequences import Generator, SequenceBatch, check_envs_per_minibatch, materialize
from learner.single_pass import write_advantages
from learner.upload import TrainingRows
from rollout_service.config import GaeRule
from rollout_service.errors import IncompleteRollout, OutOfOrder, ShapeError
from rollout_service.memory.schema import FINAL_PREFIX, Per, rollout_fields
from rollout_service.memory.slots import RolloutMemory
from rollout_service.recurrence import ended, warm_start

if TYPE_CHECKING:
    from gymnasium import Space


class RecurrentRolloutBuffer(RolloutViews):
    """A rollout of `num_envs` envs over `num_steps` steps. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        obs_dim: int | None = None,
        hidden_dim: int | None = None,
        *,
        observation_space: Space[Any] | None = None,
        action_space: Space[Any] | None = None,
        num_layers: int = 1,
    ) -> None:
        """A standalone buffer.

        Either obs_dim (observations float32 [obs_dim], actions int64) or gymnasium spaces; without hidden_dim there is
        no recurrent state. Raises OutOfRange, ConfigError, SpaceNotSupported, SegmentTooLarge.
        """
        for name, size in [("num_steps", num_steps), ("num_envs", num_envs), ("num_layers", num_layers)]:
            require_size(name, size)
        state: dict[str, tuple[int, ...]] = {}
        if hidden_dim is not None:
            require_size("hidden_dim", hidden_dim)
            state = {"hidden": (num_layers, hidden_dim), "cell": (num_layers, hidden_dim)}
        fields = rollout_fields(spaces_of(obs_dim, observation_space, action_space), state)
        memory = RolloutMemory.create(fields, num_slots=1, envs_per_slot=num_envs, num_steps=num_steps)
        self._bind(memory, range(1), own=True)
        self._begin_rollout()

    @classmethod
    def over(cls, memory: RolloutMemory, slots: Sequence[int], *, at_once: bool = True) -> RecurrentRolloutBuffer:
        """The learner's face of slots that actors fill, in the order given; `memory` stays its owner's to close.

        Adjacent slots are read where they are. Others are copied together here, once, so they must be committed; see
        `learner.gathering` for what training needs of them. A batch of a gathered rollout shares its memory, not the
        slots'.
        at_once=False: each field is copied when it is first read, so the slots must stay as they are until nothing more
        is read, as adjacent ones must.
        Raises OutOfRange.
        """
        buffer = cls.__new__(cls)
        buffer._bind(memory, slots, own=False, at_once=at_once)
        return buffer

    def _bind(self, memory: RolloutMemory, slots: Sequence[int], *, own: bool, at_once: bool = True) -> None:
        super().__init__(memory, slots, at_once=at_once)
        self._life = Life(self._epochs)
        self._cells: CellWriter | None = None
        if own:
            self._cells = CellWriter(memory.writer(slots[0]), memory.fields)

    # Reading the learner's products

    def advantages(self) -> NDArray[Any]:
        """float32 [T, N], writable; 0 until GAE has run over this rollout."""
        self._forget_products()
        return super().advantages()

    def returns(self) -> NDArray[Any]:
        """float32 [T, N], writable; 0 until GAE has run over this rollout."""
        self._forget_products()
        return super().returns()

    def _forget_products(self) -> None:
        """What GAE made of a rollout that has been overwritten since. Actors cannot do it: they may not write here."""
        if self._cells is None and self._life.is_outdated:
            self.reset()

    # Writing

    def add(
        self,
        step: int,
        env_id: EnvIds,
        observation: ArrayLike | Mapping[str, Any],
        action: ArrayLike,
        reward: ArrayLike,
        value: ArrayLike,
        log_prob: ArrayLike,
        terminated: ArrayLike,
        truncated: ArrayLike,
        *,
        truncation_value: ArrayLike | None = None,
        valid: ArrayLike = True,
    ) -> None:
        """Write one transition, or those of a range of envs at once (arguments then start with an axis [n]).

        truncation_value: V(final observation, state exiting the step), NaN or None where there is none. A row with
        valid=False (autoreset filler) gets zero state. Raises OutOfRange, ShapeError, IncompleteRollout (not finite).
        """
        cells = self._require_own("add")
        transition = cells.checked(
            step,
            env_id,
            observation,
            {"action": action, "reward": reward, "value": value, "log_prob": log_prob},
            {"terminated": terminated, "truncated": truncated, "valid": valid},
            truncation_value,
        )
        self._begin_rollout_if_seeded()
        cells.write(transition)
        self._life.changed()

    def add_recurrent_state(self, step: int, env_id: EnvIds, h: ArrayLike, c: ArrayLike | None = None) -> None:
        """Record the state ENTERING the step: [L, H] for one env, [n, L, H] for a range; [H], [n, H] with L = 1.

        Raises OutOfRange, ShapeError, IncompleteRollout (not finite).
        """
        cells = self._require_own("add_recurrent_state")
        state = cells.checked_state(step, env_id, {"h": h, "c": c})
        self._begin_rollout_if_seeded()
        cells.write_state(state)
        self._life.changed()

    def seed_warm_start(
        self,
        last_step: ArrayLike,
        final_hidden: ArrayLike | None = None,
        final_cell: ArrayLike | None = None,
        *,
        into: RecurrentRolloutBuffer | None = None,
        where: ArrayLike = True,
    ) -> None:
        """Seed row 0 and the carry flag of the next rollout, per env.

        Where the row at last_step ended: zeros and 1; else the final state and 0. Nothing but that row's flags is read.
        last_step: int, or int [N], or one per slot; -1 (K = 0) hands row 0 and the carry flag on unchanged.
        final_hidden, final_cell: float [N, L, H] ([N, H] with L = 1), the state exiting that row.
        into: the buffer over the next rollout's FREE slots; this one then stays readable. Without it (standalone only)
        the arrays of this rollout are written, and batches are refused until the next rollout begins.
        where: bool, or bool [N], or one per slot: rows of the next rollout that may be written; others stay.
        Raises OutOfRange, ShapeError, OutOfOrder, IncompleteRollout.
        """
        last = self._per_env("last_step", last_step, low=-1, high=self._num_steps - 1)
        given = {"final_hidden": final_hidden, "final_cell": final_cell}
        final = state_cells(self._state_shapes(), given, self._num_envs, single=False)
        target = self._seed_target(into)
        played = last >= 0
        ours = self._per_env("where", np.asarray(where, np.bool_).astype(np.int64), low=0, high=1).astype(np.bool_)
        self._require_rows(last + 1, only_last=True)
        envs, row = np.arange(self._num_envs), np.maximum(last, 0)
        mine = self._arrays
        ended_last = ended(*(mine[name][envs, row] for name in ("terminated", "truncated", "valid")))
        carried = played & ~ended_last
        for name, array in final.items():
            require_finite(FINAL_PREFIX + name, array[carried], envs[carried], None)

        entering, carry = warm_start(ended_last, final)
        theirs = target._arrays
        for name, rows in entering.items():
            seed = np.where(played[:, None, None], rows, mine[name][:, 0])
            theirs[name][ours, 0] = seed[ours]
        theirs[CARRY][ours] = np.where(played, carry, mine[CARRY])[ours]
        if self._cells is not None:
            for name, array in final.items():
                mine[FINAL_PREFIX + name][played] = array[played]
        target._life.seeded()

    def reset(self) -> None:
        """Zero advantages and returns. Rows, states and carry flags survive; batches need GAE again."""
        self._arrays["advantages"][...] = 0.0
        self._arrays["returns"][...] = 0.0
        self._life.changed()

    # Estimating

    def compute_advantages(
        self,
        last_values: ArrayLike,
        gamma: float,
        gae_lambda: float,
        *,
        rule: GaeRule = GaeRule.BOUNDARY_CORRECT,
        reward_scale: float = 1.0,
        truncation_as_termination: bool = False,
    ) -> None:
        """GAE over all T rows; see `compute_advantages_partial`."""
        self.compute_advantages_partial(
            self._num_steps,
            last_values,
            gamma,
            gae_lambda,
            rule=rule,
            reward_scale=reward_scale,
            truncation_as_termination=truncation_as_termination,
        )

    def compute_advantages_partial(
        self,
        valid_steps: ArrayLike,
        last_values: ArrayLike,
        gamma: float,
        gae_lambda: float,
        *,
        rule: GaeRule = GaeRule.BOUNDARY_CORRECT,
        reward_scale: float = 1.0,
        truncation_as_termination: bool = False,
    ) -> None:
        """GAE over the first K rows of each env; writes those rows of advantages and returns, reads nothing beyond.

        valid_steps: K, an int, or int [N], or one per slot; K = 0 touches nothing.
        last_values: float [N], V(observation after row K-1).
        reward_scale: factor on rewards here only, the stored ones stay raw.
        truncation_as_termination: time limits as real ends; biased, for ablations.
        Raises OutOfRange, ShapeError, and IncompleteRollout for a row that was not written, is not finite, or is
        truncated without a truncation value under boundary_correct; rows that were refused leave no products at all.
        """
        steps = self._per_env("valid_steps", valid_steps, low=0, high=self._num_steps)
        estimator = Estimator(
            gamma=require_fraction("gamma", gamma),
            lam=require_fraction("gae_lambda", gae_lambda),
            rule=GaeRule(rule),
            reward_scale=require_positive("reward_scale", reward_scale),
            truncation_as_termination=truncation_as_termination,
        )
        last = np.asarray(last_values, np.float64)
        if last.shape != (self._num_envs,):
            raise ShapeError(f"last_values has shape {last.shape}; it needs one value per env, ({self._num_envs},)")
        self._require_rows(steps)
        self._forget_products()
        columns = int(steps.max())
        rows = {name: array[:, :columns] for name, array in self._arrays.items() if self._fields[name].per is Per.STEP}
        try:
            write_advantages(rows, last, steps, estimator)
        except IncompleteRollout:
            self.reset()
            raise
        if self._cells is not None:
            self._arrays["last_values"][steps > 0] = last[steps > 0]
        self._life.estimated(steps)

    # Batches

    def to_sequence_batch(self, device: torch.device | str = "cpu") -> SequenceBatch:
        """All N envs, all T columns, env-major. Raises OutOfOrder unless GAE has covered all of them."""
        return self.to_sequence_batch_partial(self._num_steps, device)

    def to_sequence_batch_partial(self, valid_steps: ArrayLike, device: torch.device | str = "cpu") -> SequenceBatch:
        """All N envs, max K columns, valid False past each env's K; [N, 0] where K = 0 everywhere.

        Raises OutOfRange, ShapeError, OutOfOrder unless GAE has covered those rows.
        """
        steps = self._per_env("valid_steps", valid_steps, low=0, high=self._num_steps)
        covered = self._ready()
        if (beyond := np.flatnonzero(steps > covered)).size:
            env = int(beyond[0])
            raise OutOfOrder(
                f"a batch of {steps[env]} steps was asked for, but GAE has covered {covered[env]} of env {env}; "
                "run compute_advantages over those rows first, or ask for to_sequence_batch_partial(valid_steps)"
            )
        return self._batch(steps, np.arange(self._num_envs), device)

    def to_training_batch(self, device: torch.device | str = "cpu") -> SequenceBatch:
        """One batch of every env with K > 0, K from the last GAE call: what `to_minibatches` cuts into chunks."""
        covered = self._ready()
        return self._batch(covered, np.flatnonzero(covered), device)

    def training_rows(self, valid_steps: ArrayLike) -> TrainingRows:
        """What a batch of these rows is made of, where it lies, for whoever estimates advantages elsewhere.

        valid_steps: K, an int, or int [N], or one per slot. Nothing is written, and batches of this buffer still need
        GAE here. Raises OutOfRange, ShapeError, IncompleteRollout for a row that was not written, OutOfOrder if row 0
        was seeded.
        """
        steps = self._per_env("valid_steps", valid_steps, low=0, high=self._num_steps)
        self._life.require_unseeded()
        self._require_rows(steps)
        return TrainingRows.of(self._arrays, self._fields, steps)

    def to_minibatches(
        self,
        envs_per_minibatch: int,
        shuffle: bool = True,
        device: torch.device | str = "cpu",
        generator: Generator | None = None,
    ) -> Iterator[SequenceBatch]:
        """Chunks of whole envs: every env with K > 0 exactly once, K from the last GAE call; the last may be shorter.

        Without shuffle in the order 0..N-1; more per minibatch than there are gives one batch.
        generator: a torch or numpy generator; None takes torch's global one.
        Raises OutOfRange for envs_per_minibatch < 1, and OutOfOrder.
        """
        check_envs_per_minibatch(envs_per_minibatch)
        batch = self.to_training_batch(device)
        return batch.minibatches(
            envs_per_minibatch, shuffle, torch.default_generator if generator is None else generator
        )

    @property
    def is_standalone(self) -> bool:
        """Whether the caller writes it cell by cell."""
        return self._cells is not None

    @property
    def valid_steps(self) -> NDArray[np.int64]:
        """int [N]: K of each env in the last GAE call. Raises OutOfOrder before it."""
        return self._life.covered().copy()

    def _batch(self, steps: NDArray[np.int64], env_ids: NDArray[np.int64], device: torch.device | str) -> SequenceBatch:
        return materialize(
            self._arrays,
            state_names=self._state_names,
            valid_steps=steps,
            env_ids=env_ids,
            device=device,
            owned=self.is_gathered,
        )

    # Whole

    def clone(self) -> RecurrentRolloutBuffer:
        """A deep copy: a standalone buffer with memory of its own, in the same place of its life."""
        self._forget_products()
        twin = RecurrentRolloutBuffer.__new__(RecurrentRolloutBuffer)
        memory = RolloutMemory.create(
            self._memory.fields, num_slots=1, envs_per_slot=self._num_envs, num_steps=self._num_steps
        )
        twin._bind(memory, range(1), own=True)
        twin._begin_rollout()
        for name, array in self._arrays.items():
            theirs = twin._arrays[name]
            (theirs[:, : array.shape[1]] if theirs.ndim > 1 else theirs)[...] = array
        if twin._cells is not None:
            twin._cells.written[...] = self._written()
        self._life.hand_to(twin._life)
        return twin

    def close(self) -> None:
        """Give the memory up; standalone it is removed. Closing twice is harmless."""
        if self._open is None:
            return
        memory, standalone = self._memory, self._cells is not None
        self._open = self._cells = None
        if standalone:
            memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = f"num_steps={self._num_steps}, num_envs={self._num_envs}, hidden_dim={self.hidden_dim()}"
        if self._open is None:
            return f"RecurrentRolloutBuffer({sizes}, closed)"
        return f"RecurrentRolloutBuffer({sizes}, {self._memory.name}, {self.nbytes} bytes)"

    # Order and ranges

    def _require_own(self, operation: str) -> CellWriter:
        if self._cells is None:
            self._opened()
            raise OutOfOrder(
                f"{operation} writes a standalone buffer; the slots of this one are written by their actors"
            )
        return self._cells

    def _begin_rollout(self) -> None:
        self._require_own("a new rollout").begin(epoch=self._epochs()[0] + 1)
        self._life.begun()
        self.reset()

    def _begin_rollout_if_seeded(self) -> None:
        if self._life.is_over:
            self._begin_rollout()

    def _ready(self) -> NDArray[np.int64]:
        """K of the last GAE call, if a batch may be taken now."""
        self._life.require_unseeded()
        return self._life.covered()

    def _written(self) -> NDArray[np.bool_]:
        """bool [N, T]: cells that this rollout has; over slots the rows that were committed."""
        if self._cells is not None:
            return self._cells.written
        committed = np.array([header.valid_steps if header.committed else 0 for header in self._headers()])
        return np.arange(self._num_steps) < np.repeat(committed, self._memory.envs_per_slot)[:, None]

    def _require_rows(self, steps: NDArray[np.int64], *, only_last: bool = False) -> None:
        """Rows 0..K-1 of every env must be there, or only row K-1."""
        columns = np.arange(self._num_steps)
        needed = columns == steps[:, None] - 1 if only_last else columns < steps[:, None]
        missing = np.argwhere((needed & ~self._written()).T)
        if missing.size:
            step, env = missing[0]
            remedy = "add it first" if self._cells is not None else "its slot holds fewer committed rows"
            raise IncompleteRollout(
                f"step {step} of env {env} was not written in this rollout; {remedy}, or give fewer valid steps"
            )

    def _seed_target(self, into: RecurrentRolloutBuffer | None) -> RecurrentRolloutBuffer:
        if into is None:
            self._require_own("seed_warm_start without into=")
            return self
        if into.is_gathered:
            raise OutOfOrder("into= is a gathered copy of its slots, a seed in it reaches nobody; name adjacent slots")
        same_place = into is self or (into._memory is self._memory and set(into._slots) & set(self._slots))
        if same_place:
            raise OutOfOrder("into= names slots of this very rollout; name the next rollout's FREE slots")
        for what, mine, theirs in [
            ("envs", self._num_envs, into._num_envs),
            ("state", self._state_shapes(), into._state_shapes()),
        ]:
            if mine != theirs:
                raise ShapeError(f"into= has {what} {theirs}, this rollout has {mine}; both must be of one run")
        return into

    def _state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._fields[name].shape for name in self._state_names}

    def _per_env(self, name: str, value: ArrayLike, *, low: int, high: int) -> NDArray[np.int64]:
        return per_env(name, value, low=low, high=high, num_envs=self._num_envs, num_slots=len(self._slots))
