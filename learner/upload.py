"""A rollout on a device: uploaded once, one copy per field and run of slots, and made into a batch there.

    TrainingRows (numpy, where the actors wrote)  --CopyLane-->  DeviceRows  --GAE by a scan-->  SequenceBatch

`make_batch` is `learner.sequences.materialize` for tensors: the same fields, the same harmless contents, without a
kernel launch per step or a wait for the device. It works on a CPU too, where the tests compare the two. Advantages
and returns stay on the device: unlike on a CPU they are not written back into the slots.

Who calls: the learner's staging. What must never happen: a return of `upload` whose copies could still be going when
their targets are used or freed; a batch that refers to the rollout's memory; a read of a slot after `CopyLane.wait`.
Left to others: which rows may be read, and when (rollout_buffer), pinning.

Axis letters: T num_steps, N envs of the rollout, t columns of the batch, n envs of the batch or of a piece, L layers, H
hidden_dim, K valid_steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.gae import Estimator
from learner.gathering import Pieces, pieces
from learner.scan import advantages_and_returns_on_device
from learner.sequences import SequenceBatch
from rollout_service.memory.schema import OBSERVATIONS, Field, Per, Role

LAST_VALUES: Final = "last_values"
CARRY: Final = "episode_start_carry"
BATCH_FIELDS: Final = ("actions", "log_probs", "values")
"""Fields per step that a batch keeps, beside observations."""
SAME_WIDTH: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Torch has few operations on these. Moved and zeroed, bits are bits."""


@dataclass(frozen=True)
class TrainingRows:
    """What training reads of a rollout, where it lies, in contiguous pieces. To be read only."""

    steps: Mapping[str, Pieces]
    """Per field [n, T, *shape]."""
    envs: Mapping[str, Pieces]
    """last_values and episode_start_carry, float32 [n]."""
    state: Mapping[str, Pieces]
    """State entering row 0 by name, float32 [n, L, H]."""
    valid_steps: NDArray[np.int64]
    """K, [N]."""

    @classmethod
    def of(
        cls, arrays: Mapping[str, NDArray[Any]], fields: Mapping[str, Field], valid_steps: NDArray[np.int64]
    ) -> TrainingRows:
        """arrays: the rollout's fields by name, [N, T, *shape] per step and [N, *shape] per env."""
        return cls(
            steps={name: pieces(arrays, name) for name, field in fields.items() if is_uploaded_whole(field)},
            envs={name: pieces(arrays, name) for name in (LAST_VALUES, CARRY)},
            state={
                name: tuple(np.ascontiguousarray(piece[:, 0]) for piece in pieces(arrays, name))
                for name, field in fields.items()
                if is_state(field)
            },
            valid_steps=valid_steps,
        )


def is_state(field: Field) -> bool:
    """Recurrent state entering a step. Of it training needs row 0 only, T times less than there is."""
    return field.role is Role.SEED and field.per is Per.STEP


def is_uploaded_whole(field: Field) -> bool:
    """Copied to a device as it lies."""
    return field.role is Role.ACTOR and field.per is Per.STEP


@dataclass(frozen=True)
class DeviceRows:
    """The same as tensors where the learner computes, each in one: [N, ...] for [n, ...]."""

    steps: dict[str, Tensor]
    envs: dict[str, Tensor]
    state: dict[str, Tensor]
    valid_steps: Tensor
    columns: int
    """The largest K."""
    env_ids: NDArray[np.int64]
    """Envs with K above 0."""


class CopyLane(Protocol):
    """Where copies to the device run: beside its work, or, on a CPU, at once."""

    def copying(self) -> AbstractContextManager[None]:
        """Copies issued inside go to the lane; what is issued on the current stream afterwards comes behind them."""
        ...

    def wait(self) -> None:
        """Returns once the copies are complete: their sources may be overwritten. Raises what the device raised."""
        ...


class CudaLane:
    """A stream of its own, and an event behind the last copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Without spinning: actors need the cores.
        self._behind_copies = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # memory that the allocator hands out may still be in use there
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # also behind an error: the targets belong to the current stream
            self._behind_copies.record(self._stream)
            current.wait_event(self._behind_copies)

    def wait(self) -> None:
        self._behind_copies.synchronize()


class HostLane:
    """No lane: copies on a CPU are complete when they return."""

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self) -> None:
        pass


def lane_for(device: torch.device) -> CopyLane:
    return CudaLane(device) if device.type == "cuda" else HostLane()


def upload(rows: TrainingRows, device: torch.device, lane: CopyLane) -> DeviceRows:
    """One copy per piece, into its place. The rows must live, and stay as they are, until `lane.wait` has returned."""
    copies: list[tuple[Tensor, Tensor]] = []

    def place(sources: list[Tensor]) -> Tensor:
        shape = (sum(map(len, sources)), *sources[0].shape[1:])
        whole = torch.empty(shape, dtype=sources[0].dtype, device=device)
        copies.extend(zip(torch.split(whole, [len(source) for source in sources]), sources, strict=True))
        return whole

    with torch.inference_mode(False):  # an inference tensor would break a later backward
        # Targets are of the current stream, so that they can be freed without asking the lane.
        there = _field_by_field(rows, place)
        with lane.copying():
            for target, source in copies:
                target.copy_(source, non_blocking=True)
    return there


def in_place(rows: TrainingRows) -> DeviceRows:
    """For a learner on the CPU: no copy, but of what lies in several pieces. To be read only."""
    with torch.inference_mode(False):
        return _field_by_field(rows, lambda sources: sources[0] if len(sources) == 1 else torch.cat(sources))


def _field_by_field(rows: TrainingRows, join: Callable[[list[Tensor]], Tensor]) -> DeviceRows:
    """join: from the pieces of a field to one tensor."""

    def joined(fields: Mapping[str, Pieces]) -> dict[str, Tensor]:
        return {name: join([torch.from_numpy(piece) for piece in field]) for name, field in fields.items()}

    return DeviceRows(
        steps=joined(rows.steps),
        envs=joined(rows.envs),
        state=joined(rows.state),
        valid_steps=joined({"": (rows.valid_steps,)})[""],
        columns=int(rows.valid_steps.max(initial=0)),
        env_ids=np.flatnonzero(rows.valid_steps),
    )


def estimate(rows: DeviceRows, estimator: Estimator) -> tuple[Tensor, Tensor]:
    """Advantages and returns, float32 [N, t], 0 where not live.

    Raises IncompleteRollout, naming step and env, for rows that cannot be estimated.
    """
    with torch.inference_mode(False), torch.no_grad():
        advantages, returns = advantages_and_returns_on_device(
            {name: field[:, : rows.columns] for name, field in rows.steps.items() if field.dim() == 2},
            rows.envs[LAST_VALUES],
            rows.valid_steps,
            estimator,
        )
        return advantages.float(), returns.float()


def make_batch(rows: DeviceRows, advantages: Tensor, returns: Tensor) -> SequenceBatch:
    """The batch of every env with K above 0, max K columns. Takes the tensors over, and may write into them.

    advantages, returns: float32 [N, t]. Rows that are not valid hold zeros, of signed integers a valid row's value.
    """
    device = rows.valid_steps.device
    with torch.inference_mode(False), torch.no_grad():
        env_ids = torch.from_numpy(rows.env_ids).to(device, non_blocking=True)
        chosen = None if len(rows.env_ids) == len(rows.valid_steps) else env_ids

        def taken(field: Tensor) -> Tensor:
            return field if chosen is None else field.index_select(0, chosen)

        def columns(field: Tensor) -> Tensor:
            bits = SAME_WIDTH.get(field.dtype, field.dtype)
            return taken(field.view(bits)[:, : rows.columns]).contiguous().view(field.dtype)

        within = torch.arange(rows.columns, device=device) < taken(rows.valid_steps)[:, None]
        valid = columns(rows.steps["valid"]).bool() & within
        ended = columns(rows.steps["terminated"]).bool() | columns(rows.steps["truncated"]).bool() | ~valid
        starts = torch.cat([taken(rows.envs[CARRY])[:, None], ended[:, :-1].float()], dim=1)
        # No wait for the device: the first valid row is looked up there. argmax gives the first of equals.
        first_valid = valid.flatten().byte().argmax().view(1) if valid.numel() else None

        def harmless(field: Tensor) -> Tensor:
            own = columns(field)
            bits = own.view(SAME_WIDTH.get(own.dtype, own.dtype))
            gaps = ~valid.view(*valid.shape, *(1,) * (own.dim() - 2))
            if own.dtype in (torch.int8, torch.int16, torch.int32, torch.int64) and first_valid is not None:
                filler = own.flatten(0, 1).index_select(0, first_valid)[0] * valid.any().to(own.dtype)
                return torch.where(gaps, filler, own)
            return bits.masked_fill_(gaps, 0).view(own.dtype)

        leaves = {name: harmless(field) for name, field in rows.steps.items() if name.startswith(OBSERVATIONS)}
        actions, log_probs, values = (harmless(rows.steps[name]) for name in BATCH_FIELDS)
        return SequenceBatch(
            obs_seq=leaves.get(OBSERVATIONS, leaves),
            actions=actions,
            episode_starts=torch.where(within, starts, 0.0),
            old_log_probs=log_probs,
            old_values=values,
            advantages=harmless(advantages),
            returns=harmless(returns),
            initial_state={name: taken(array).transpose(0, 1).contiguous() for name, array in rows.state.items()},
            valid=valid,
            env_ids=env_ids,
        )
