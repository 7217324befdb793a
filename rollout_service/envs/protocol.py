"""What an actor asks of its E envs, however they are stepped, and what one step of them brings.

Two classes keep this contract: `vector.EnvBatch` steps single envs one after another and resets them itself;
`vectorized.VectorEnvBatch` drives a gymnasium vector env, whose autoreset mode decides what a row is. For the same
actions both give the same valid rows.

    mode        what follows an ended row                    final observation of a truncation
    ACTOR       the next episode's first row                 `final_observations`
    SAME_STEP   the next episode's first row                 `final_observations`, or `blind_envs` if the env hides it
    DISABLED    the next episode's first row                 `final_observations`
    NEXT_STEP   a filler: its action is ignored, its          the filler's own observation (`deferred_envs`)
                reward 0, `valid` False

An env that returns bad data, in a run that drops their episode, is reset at once under ACTOR and DISABLED. Under the
other two nobody can reset it: its rows are not valid until its own episode ends. What was bad reads as zeros.

Writers: the classes. Readers: the actor's loop, evaluation. Leaves to others: values of final observations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_service.envs.bad_data import BadData
from rollout_service.runspec import AutoresetMode, Spaces

Array = NDArray[Any]


class Pulse(Protocol):
    """Signs of life for a watcher in another thread: plain attributes, written here only."""

    progress: int
    phase: str


@dataclass
class Silent:
    """A pulse that nobody watches."""

    progress: int = 0
    phase: str = ""


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """One episode that ran to its end, from real transitions only. `total_reward` is raw."""

    env: int
    """Global index."""
    total_reward: float
    length: int
    success: bool | None
    """What the env's last info said; None if it said nothing."""
    truncated: bool


@dataclass
class StepOutcome:
    """What one step of all E envs brought, besides the observations. Reused by the next step."""

    rewards: NDArray[np.float32]
    """[E]; 0 on filler rows."""
    terminated: NDArray[np.bool_]
    """[E]"""
    truncated: NDArray[np.bool_]
    """[E]"""
    valid: NDArray[np.bool_]
    """[E]: False on filler rows, whose action no env saw, and on rows of a dropped episode."""
    final_observations: dict[str, Array]
    """[E, *shape] per observation field; a row is meaningful only for the envs in `truncated_envs`."""
    ended_envs: list[int] = field(default_factory=list)
    """Rows whose episode ended in this step, ascending."""
    starting_envs: list[int] = field(default_factory=list)
    """Rows whose next valid row begins an episode and starts from zero state."""
    truncated_envs: list[int] = field(default_factory=list)
    """Rows truncated and not terminated that need V(final observation), which is in `final_observations`."""
    deferred_envs: list[int] = field(default_factory=list)
    """Such rows whose final observation is what the filler row shows: the forward on it gives that value."""
    blind_envs: list[int] = field(default_factory=list)
    """Such rows without a final observation: there is nothing to take the value of."""
    episodes: list[FinishedEpisode] = field(default_factory=list)
    """Episodes that ended in this step, in the order of `ended_envs`."""
    dropped_envs: list[int] = field(default_factory=list)
    """Rows whose episode, this step included, is dropped for bad data: nobody may train on any row of it."""
    lost_steps: int = 0
    """Real transitions of this step that are not valid, since their episode is dropped."""

    @classmethod
    def of(cls, num_envs: int, fields: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> StepOutcome:
        """Preallocated, everything valid and nothing ended. fields: shape and dtype of each observation field."""
        return cls(
            rewards=np.zeros(num_envs, np.float32),
            terminated=np.zeros(num_envs, np.bool_),
            truncated=np.zeros(num_envs, np.bool_),
            valid=np.ones(num_envs, np.bool_),
            final_observations={name: np.zeros((num_envs, *shape), dtype) for name, (shape, dtype) in fields.items()},
        )


class EnvRows(Protocol):
    """E envs as rows of [E, *] arrays."""

    pulse: Pulse
    bad_data: BadData

    @property
    def fillers(self) -> Sequence[int]:
        """Rows whose next step only resets their env: the action is ignored, the row is not valid."""
        ...

    @property
    def spaces(self) -> Spaces:
        """Of one env."""
        ...

    @property
    def autoreset(self) -> AutoresetMode: ...

    def __len__(self) -> int: ...

    def reseed(self, seeds: Sequence[int]) -> None:
        """Seeds for the next `reset_all`, one per env."""
        ...

    def reset_all(self, out: Mapping[str, Array]) -> None:
        """Start a new episode in every env; first observations into `out`, [E, *shape] per field."""
        ...

    def reset_owed(self, out: Mapping[str, Array]) -> None:
        """Make up for the resets that a hurried step left out; first observations into their rows of `out`."""
        ...

    def step(
        self, actions: Array, out: Mapping[str, Array], hurried: Callable[[], bool] | None = None, /
    ) -> StepOutcome:
        """One step of every env. actions [E, *]; observations that follow into `out`, [E, *shape] per field.

        hurried: True lets the envs leave resets to `reset_owed`, which has to come before the next step.
        Raises EnvFault for a broken env, and for data that no transition can hold unless the run drops their episode.
        """
        ...

    def close(self) -> None: ...
