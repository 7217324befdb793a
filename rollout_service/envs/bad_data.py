"""What an env returns that no transition can hold, and what follows: the run stops, or the env's episode is dropped.

Bad data are values: an observation that is not finite, beyond the run's limit, or does not fit its space; a reward that
is not one finite number. They are found before anything of the step counts. An exception, a step that returns no five
values, or flags that are no flags are not bad data but a broken env: EnvFault, whatever the policy.

Writers: the batch of envs that found it (vector.py, vectorized.py). Readers: the actor, once per lease. What must never
happen: a bad value in a policy's forward, in a slot or in a statistic; a drop that nobody counts; an env that is reset
for ever because nothing it returns is good. Leaves to others: which rows of a slot a dropped episode has (collect).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollout_service.control.messages import DROPPED_EPISODES, FEW_REMARKS
from rollout_service.envs.reading import Misfit, ObservationField, all_finite, fitted, short
from rollout_service.errors import EnvFault
from rollout_service.runspec import OnBadData, SpaceKind

Array = NDArray[Any]

LARGEST_REWARD: Final = float(np.finfo(np.float32).max)
RESETS_TRIED: Final = 3
"""Resets of one env in a row that may begin with a bad observation: three are no accident."""
FRUITLESS_EPISODES: Final = 20
"""Dropped episodes in a row of one env of which nothing was kept: what is broken for good shall not run for ever."""
STORY_LENGTH: Final = 400


class Bad(StrEnum):
    """What was bad, by the name of its counter."""

    OBSERVATION = "bad_observations"
    REWARD = "bad_rewards"


class BadData:
    """The run's policy, and what became of it since the last `take`."""

    def __init__(self, then: OnBadData = OnBadData.STOP, obs_limit: float | None = None) -> None:
        self.drops: Final = then is OnBadData.DROP
        self.obs_limit: Final = obs_limit
        self._counters: Counter[str] = Counter()
        self._stories: list[str] = []
        self._last = ""
        self._fruitless: Counter[int] = Counter()
        """Env (row of the batch) -> episodes dropped since something of it was kept."""

    def refuse(self, what: Bad, story: str, so: str = "the episode is dropped") -> None:
        """Something bad was found. Raises EnvFault with its story unless it is to be dropped; then it is counted."""
        if not self.drops:
            raise EnvFault(story)
        self._counters[what] += 1
        self._last = story
        if len(self._stories) < FEW_REMARKS:  # the rest is in the counters
            self._stories.append(f"{short(story, STORY_LENGTH)}; {so}")

    def drop(self, e: int, who: str) -> None:
        """Env e loses its episode. Raises EnvFault once nothing of it is kept for many episodes in a row."""
        self._counters[DROPPED_EPISODES] += 1
        self._fruitless[e] += 1
        if self._fruitless[e] >= FRUITLESS_EPISODES:
            raise EnvFault(
                f"{who}: {FRUITLESS_EPISODES} episodes in a row were dropped for bad data and nothing of it was kept; "
                f"fix the env. The last: {self._last}"
            )

    def kept(self, envs: Iterable[int]) -> None:
        """Something of these envs counts."""
        if self._fruitless:
            for e in envs:
                self._fruitless.pop(e, None)

    def take(self) -> tuple[dict[str, int], tuple[str, ...]]:
        """Counters and stories since the last call."""
        taken = dict(self._counters), tuple(self._stories)
        self._counters.clear()
        self._stories.clear()
        return taken


class Ranges:
    """Which numbers the fields of an observation may hold, besides fitting their dtype."""

    def __init__(self, fields: Sequence[ObservationField], obs_limit: float | None) -> None:
        self._limit = obs_limit
        largest = ((of.name, largest_in(of, obs_limit)) for of in fields)
        self._checked = [(name, most) for name, most in largest if most is not None]

    def hold(self, rows: Mapping[str, Array]) -> bool:
        """Whether one look over all rows finds nothing wrong. False may be a mere overflow."""
        for name, most in self._checked:  # noqa: SIM110 - in every step, and a generator takes half as long again
            if not all_within(rows[name], most):
                return False
        return True

    def complaint(self, rows: Mapping[str, Array], e: int) -> str | None:
        """What is wrong with row e, if anything."""
        for name, most in self._checked:
            row = rows[name][e]
            if all_within(row, most):
                continue
            if not np.isfinite(row).all():
                return f"{name} is not finite: {short(row)}"
            if most < math.inf:
                wrong = row[(row > most) | (row < -most)].flat[0] if row.ndim else row
                return f"{name} holds {wrong!s}, beyond obs_limit {self._limit:g}"
        return None


def complaint_about(observation: Any, fields: Sequence[ObservationField], obs_limit: float | None) -> str | None:
    """What is wrong with one observation, if anything."""
    try:
        rows = {of.name: fitted(of.pick(observation), of.leaf.shape, of)[None] for of in fields}
    except Misfit as misfit:
        return str(misfit)
    return Ranges(fields, obs_limit).complaint(rows, 0)


def largest_in(of: ObservationField, obs_limit: float | None) -> float | None:
    """Largest magnitude that a number of this field may have; infinity: any finite one. None: none can be wrong.

    The limit is rounded to the field's own dtype, in which its numbers are.
    """
    if of.leaf.kind is SpaceKind.DISCRETE:
        return None
    if of.dtype.kind == "f":
        largest = float(np.finfo(of.dtype).max)
        if obs_limit is not None and obs_limit < largest:
            return float(of.dtype.type(obs_limit))
        return math.inf if of.dtype.itemsize > 2 else largest  # a sum of a few float16 overflows
    integers = np.iinfo(of.dtype)
    return None if obs_limit is None or obs_limit >= max(integers.max, -integers.min) else obs_limit


def all_within(values: Array, largest: float) -> bool:
    """Whether no number is beyond `largest`, infinite or NaN. False may be a mere overflow where largest is infinite.

    Two passes without a temporary array; one sum where anything finite will do.
    """
    if largest == math.inf:
        return all_finite(values)
    return float(np.max(values)) <= largest and float(np.min(values)) >= -largest


def reward_of(value: Any) -> float | None:
    """A reward as a float: any real number, or an array of one. None for anything else."""
    given = np.asarray(value)
    if given.size != 1 or given.dtype.kind not in "fiub":
        return None
    return float(given.reshape(())[()])
