"""CellWriter: checks and writes the cells of a standalone rollout, and remembers which ones were written.

A thin face of the SlotWriter that actors use: it adds the checks that an actor does not need, because its arguments
come from a stranger. Writer: the rollout buffer's `add` and `add_recurrent_state`. Checking and writing are two calls,
so that a refused cell changes nothing. Left to others: when a rollout begins.

Axis letters: T num_steps, N num_envs, n envs of one call, L recurrent layers, H hidden_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner.cells import EnvIds, envs_within, is_single, leaf_of, require_finite, step_within, to_cells
from rollout_service.errors import ShapeError
from rollout_service.memory.schema import OBSERVATIONS, Field, Per, Role
from rollout_service.memory.slots import SlotWriter
from rollout_service.recurrence import State


@dataclass(frozen=True)
class CheckedTransition:
    """One step of n adjacent envs, ready to be written."""

    step: int
    envs: slice
    observations: dict[str, NDArray[Any]]
    """Field name -> [n, *obs]."""
    columns: dict[str, NDArray[Any]]
    """The other arguments of SlotWriter.write_transition, [n, *shape]."""


@dataclass(frozen=True)
class CheckedState:
    """The state entering one step of n adjacent envs."""

    step: int
    envs: slice
    state: State


class CellWriter:
    """The writer of the one slot of a standalone rollout."""

    def __init__(self, writer: SlotWriter, fields: tuple[Field, ...]) -> None:
        self._writer = writer
        self._fields = {field.name: field for field in fields}
        self._observation_names = tuple(name for name in self._fields if name.startswith(OBSERVATIONS))
        self._state_shapes = {f.name: f.shape for f in fields if f.role is Role.SEED and f.per is Per.STEP}
        self.written: NDArray[np.bool_] = np.zeros((writer.num_envs, writer.num_steps), np.bool_)
        """[N, T]: the cells that this rollout has."""

    def begin(self, epoch: int) -> None:
        """A new rollout: every row counts as unwritten, row 0's state and the carry flag stay."""
        self._writer.open(epoch=epoch, actor=0, incarnation=0, version=0)
        self.written[...] = False

    def checked(
        self,
        step: int,
        env_id: EnvIds,
        observation: ArrayLike | Mapping[str, Any],
        numbers: Mapping[str, ArrayLike],
        flags: Mapping[str, ArrayLike],
        truncation_value: ArrayLike | None,
    ) -> CheckedTransition:
        """numbers: action, reward, value, log_prob; flags: terminated, truncated, valid, where one stands for all n.

        Observations and rewards of valid rows must be finite. Raises OutOfRange, ShapeError, IncompleteRollout.
        """
        step, envs = step_within(step, self._writer.num_steps), envs_within(env_id, self._writer.num_envs)
        n, single = envs.stop - envs.start, is_single(env_id)

        def cells(argument: str, name: str, given: ArrayLike, *, broadcast: bool = False) -> NDArray[Any]:
            declared = self._fields[name]
            return to_cells(argument, given, declared.dtype, declared.shape, n, single=single, broadcast=broadcast)

        observations = {
            name: cells(f"observation{name.removeprefix(OBSERVATIONS)}", name, leaf_of(observation, name))
            for name in self._observation_names
        }
        columns = {f"{argument}s": cells(argument, f"{argument}s", given) for argument, given in numbers.items()}
        for name, given in flags.items():
            columns[name] = to_cells(name, given, np.dtype(np.bool_), (), n, single=single, broadcast=True)
        nothing = truncation_value is None
        final = np.nan if truncation_value is None else truncation_value
        columns["truncation_values"] = cells("truncation_value", "truncation_values", final, broadcast=nothing)
        valid = columns["valid"]
        for name, array in [*observations.items(), ("rewards", columns["rewards"])]:
            require_finite(name, array[valid], np.arange(envs.start, envs.stop)[valid], step)
        return CheckedTransition(step, envs, observations, columns)

    def write(self, transition: CheckedTransition) -> None:
        """A row that is not valid (autoreset filler) gets zero state too."""
        step, envs = transition.step, transition.envs
        rows = self._writer.observation_rows(step)
        for name, array in transition.observations.items():
            rows[name][envs] = array
        self._writer.write_transition(step, **transition.columns, envs=envs)
        for name in self._state_shapes:
            self._writer.arrays[name][envs, step][~transition.columns["valid"]] = 0.0
        self.written[envs, step] = True

    def checked_state(self, step: int, env_id: EnvIds, given: Mapping[str, ArrayLike | None]) -> CheckedState:
        """given: argument name -> state array, in the order of the fields. Raises as `checked` does."""
        step, envs = step_within(step, self._writer.num_steps), envs_within(env_id, self._writer.num_envs)
        state = state_cells(self._state_shapes, given, envs.stop - envs.start, single=is_single(env_id))
        for name, array in state.items():
            require_finite(name, array, np.arange(envs.start, envs.stop), step)
        return CheckedState(step, envs, state)

    def write_state(self, entering: CheckedState) -> None:
        self._writer.write_state(entering.step, entering.state, entering.envs)


def state_cells(
    shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, ArrayLike | None], n: int, *, single: bool
) -> State:
    """State arguments as float32 [n, L, H] by name. shapes: array name -> (L, H). Raises ShapeError."""
    arguments = [(argument, value) for argument, value in given.items() if value is not None]
    if len(arguments) != len(shapes):
        kept = ", ".join(shapes) or "no state"
        raise ShapeError(f"{len(arguments)} of the state arrays {', '.join(given)} were given; the buffer keeps {kept}")
    return {
        name: to_cells(argument, value, np.dtype(np.float32), shape, n, single=single)
        for (name, shape), (argument, value) in zip(shapes.items(), arguments, strict=True)
    }
