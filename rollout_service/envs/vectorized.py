"""VectorEnvBatch: the E envs of one actor as one gymnasium vector env, in any of its autoreset modes.

Writers: the owner of the batch, one thread; observations straight into the rows it is given, everything else into one
StepOutcome that is reused. All E envs are read with vector operations; only rows that ended are looked at one by one.
What the vector env returns is copied before its next call: it may return the same arrays for ever.

NEXT_STEP    the step after an end ignores the action and shows the next episode's first observation: a filler row,
             which no one may train on. What the row itself shows is the final observation.
SAME_STEP    the final observation is in the infos, as `final_obs` (or, in older vector envs, `final_observation`): an
             array of observations, or observations batched like the envs' own. Where it is missing, the row is blind;
             that is said once and counted.
DISABLED     the ended envs are reset here, by `reset(options={"reset_mask": ...})`.

Seeds: a vector env gets a list with one seed per env, so that an env's episodes do not depend on which actor runs it.
One that takes no list (gymnasium's own vector entry points) gets the first env's seed as its only one; then the split
of envs over actors matters. Statistics of episodes come from real transitions only.

Never: a loop over all envs, or IO, per step. Leaves to others: values of final observations (the actor).
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rollout_service.envs.make import SUPPORTED, spaces_from_gymnasium
from rollout_service.envs.make_vector import VectorEnv, autoreset_of
from rollout_service.envs.protocol import Array, FinishedEpisode, Pulse, Silent, StepOutcome
from rollout_service.envs.reading import (
    SUCCESS_KEYS,
    Misfit,
    all_finite,
    fitted,
    observation_fields,
    short,
    success_of,
)
from rollout_service.errors import EnvFault
from rollout_service.runspec import AutoresetMode

Rows = NDArray[np.intp]

FINAL_KEYS: Final = ("final_obs", "final_observation")
"""Where a vector env that resets in the same step puts final observations; `_` + key is the mask of its rows."""
FINAL_INFO: Final = "final_info"
"""And the infos that came with them."""


class VectorEnvBatch:
    """A gymnasium vector env as rows of [E, *] arrays.

    env_ids: global index of each env, for statistics and errors. seeds: one per env, used by `reset_all`.
    Raises EnvFault if it does not say its autoreset mode, SpaceNotSupported for spaces without a class here.
    """

    def __init__(
        self,
        envs: VectorEnv,
        *,
        env_ids: range,
        seeds: Sequence[int],
        name: str = "",
        actor_id: int | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        count = envs.num_envs
        self.pulse: Pulse = pulse or Silent()
        self.env_ids = env_ids
        self.fillers: list[int] = []
        self._filler_rows: Rows | None = None
        """The same as an index."""
        self.spaces = spaces_from_gymnasium(envs.single_observation_space, envs.single_action_space)
        self.autoreset = autoreset_of(envs, name)
        self._envs = envs
        self._seeds: tuple[int, ...] | None = tuple(seeds)
        self._name = name
        self._actor_id = actor_id
        self._fields = [(of, (count, *of.leaf.shape)) for of in observation_fields(envs.single_observation_space)]
        self._float_fields = [of.name for of, _ in self._fields if of.dtype.kind == "f"]
        self._outcome = StepOutcome.of(count, {of.name: (of.leaf.shape, of.dtype) for of, _ in self._fields})
        self._untouched = True
        self._ended = np.zeros(count, np.bool_)
        self._awaited: list[int] = []
        """Fillers whose observation is a final one that is needed."""
        self._total_rewards = np.zeros(count, np.float64)
        self._clock = 0
        self._started = np.zeros(count, np.int64)
        self._warned = False

    def __len__(self) -> int:
        return len(self._ended)

    def reseed(self, seeds: Sequence[int]) -> None:
        """Seeds for the next `reset_all`."""
        self._seeds = tuple(seeds)

    def reset_all(self, out: Mapping[str, Array]) -> None:
        """Start a new episode in every env; first observations into `out`, [E, *shape] per field."""
        phase, self.pulse.phase = self.pulse.phase, "env.reset"
        seeds, self._seeds = self._seeds, None
        try:
            result = self._envs.reset() if seeds is None else self._reset_with(seeds)
        except Exception as error:
            self._raised("reset", error, None)
        self._store(out, self._observations_of_reset(result), None)
        self.fillers, self._filler_rows, self._awaited = [], None, []
        self._total_rewards[:] = 0.0
        self._started[:] = self._clock
        self._check_finite(out, range(len(self)), None)
        self.pulse.progress += len(self)
        self.pulse.phase = phase

    def reset_owed(self, out: Mapping[str, Array]) -> None:
        """A vector env resets all that ended at once, within its step: nothing is ever owed."""

    def step(
        self, actions: Array, out: Mapping[str, Array], _hurried: Callable[[], bool] | None = None, /
    ) -> StepOutcome:
        """One step of every env. actions [E, *]; observations that follow into `out`, [E, *shape] per field."""
        outcome, fillers = self._outcome, self._filler_rows
        if not self._untouched:
            self._clear()
        self._clock += 1
        try:
            result = self._envs.step(actions.copy())
        except Exception as error:
            self._raised("step", error, actions)
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvFault(
                f"{self._where(actions)}: step returned {short(result)}, expected 5 values "
                f"(observations, rewards, terminated, truncated, infos; {SUPPORTED})"
            )
        observations, rewards, terminated, truncated, infos = result
        self._store(out, observations, actions)
        self._take_rewards(rewards, actions)
        self._take_flags("terminated", outcome.terminated, terminated, actions)
        self._take_flags("truncated", outcome.truncated, truncated, actions)
        if fillers is not None:
            self._fill_in(fillers, actions)
        np.logical_or(outcome.terminated, outcome.truncated, out=self._ended)
        if np.count_nonzero(self._ended):
            self._end(out, infos, actions)
        self._check_finite(out, range(len(self)), actions)
        self.pulse.progress += len(self)
        return outcome

    def close(self) -> None:
        """Close the vector env; its processes end even if one of them does not answer any more."""
        bare = self._envs.unwrapped
        if not isinstance(bare, gymnasium.vector.AsyncVectorEnv):
            self._envs.close()
            return
        # A process that died or hangs in the middle of a call cannot be closed politely, nor be left behind.
        with contextlib.suppress(Exception):
            self._envs.close()
        bare.closed = True
        for process in bare.processes:
            process.kill()
            process.join()

    # ------------------------------------------------------------------------------------------- episode boundaries

    def _clear(self) -> None:
        outcome = self._outcome
        outcome.ended_envs, outcome.starting_envs, outcome.episodes = [], [], []
        outcome.truncated_envs, outcome.deferred_envs, outcome.blind_envs = [], [], []
        outcome.valid[:] = True
        self._untouched = True

    def _fill_in(self, rows: Rows, actions: Array) -> None:
        """This step was the reset of these envs: no transition, and their next row begins an episode."""
        outcome = self._outcome
        flagged = outcome.terminated[rows] | outcome.truncated[rows]
        if flagged.any():
            e = int(rows[int(flagged.argmax())])
            raise EnvFault(
                f"{self._where(actions, e)}: the step that resets an env reports an end; with autoreset next_step that "
                "step belongs to no episode, its flags must be False"
            )
        outcome.valid[rows] = False
        outcome.starting_envs = self.fillers
        self._started[rows] = self._clock
        self._total_rewards[rows] = 0.0
        self._untouched = False
        self.fillers, self._filler_rows, self._awaited = [], None, []

    def _end(self, out: Mapping[str, Array], infos: Any, actions: Array) -> None:
        """Record the episodes, find their final observations, and start the next ones where the mode asks for it."""
        outcome = self._outcome
        rows = np.flatnonzero(self._ended)
        envs = rows.tolist()
        terminated = outcome.terminated[rows].tolist()
        cut = [e for e, over in zip(envs, terminated, strict=True) if not over]
        outcome.ended_envs = envs
        outcome.episodes = [
            FinishedEpisode(self.env_ids[e], total, length, success, not over)
            for e, total, length, success, over in zip(
                envs,
                self._total_rewards[rows].tolist(),
                (self._clock - self._started[rows]).tolist(),
                _successes(infos, envs),
                terminated,
                strict=True,
            )
        ]
        self._untouched = False
        match self.autoreset:
            case AutoresetMode.NEXT_STEP:
                self.fillers, self._filler_rows = envs, rows
                self._awaited = outcome.deferred_envs = cut
                return
            case AutoresetMode.SAME_STEP:
                outcome.starting_envs = envs
                self._take_final_observations(cut, infos, actions)
            case AutoresetMode.DISABLED:
                outcome.starting_envs = envs
                outcome.truncated_envs = cut
                for name, finals in outcome.final_observations.items():
                    finals[cut] = out[name][cut]
                self._reset_ended(out, rows, actions)
            case AutoresetMode.ACTOR:
                raise EnvFault(f"{self._who()}: autoreset actor is not a mode of vector envs")
        if outcome.truncated_envs:
            self._check_finite(outcome.final_observations, outcome.truncated_envs, actions)
        self._started[rows] = self._clock
        self._total_rewards[rows] = 0.0

    def _reset_ended(self, out: Mapping[str, Array], rows: Rows, actions: Array) -> None:
        phase, self.pulse.phase = self.pulse.phase, "env.reset"
        try:
            # The mask and the dict are given away: vector envs take the mask out of the dict.
            result = self._envs.reset(options={"reset_mask": self._ended.copy()})
        except Exception as error:
            self._raised("reset with a reset_mask", error, actions)
        self._store(out, self._observations_of_reset(result), actions, rows)
        self.pulse.phase = phase

    def _take_final_observations(self, rows: list[int], infos: Any, actions: Array) -> None:
        outcome = self._outcome
        for e in rows:
            final = _final_observation(infos, e)
            if final is None:
                outcome.blind_envs.append(e)
                continue
            for of, shape in self._fields:
                try:
                    outcome.final_observations[of.name][e] = fitted(of.pick(final), shape[1:], of)
                except Misfit as misfit:
                    raise EnvFault(f"{self._where(actions, e)}: final observation: {misfit}") from None
            outcome.truncated_envs.append(e)
        if outcome.blind_envs and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._who()} truncates episodes and gives no final observation (infos {' or '.join(FINAL_KEYS)}); "
                "the value of the last observation before it stands in, counted as truncations_without_final_obs",
                RuntimeWarning,
                stacklevel=2,
            )

    # ---------------------------------------------------------------------------------------------------------- seeds

    def _reset_with(self, seeds: tuple[int, ...]) -> Any:
        random.seed(seeds[0])
        np.random.seed(seeds[0])
        self._envs.action_space.seed(seeds[0])
        self._envs.observation_space.seed(seeds[0])
        reset: Any = self._envs.reset
        bare = self._envs.unwrapped
        takes_lists = isinstance(bare, gymnasium.vector.SyncVectorEnv | gymnasium.vector.AsyncVectorEnv)
        with contextlib.nullcontext() if takes_lists else contextlib.suppress(Exception):
            return reset(seed=list(seeds))
        return reset(seed=seeds[0])

    # ---------------------------------------------------------------------- what the vector env returns, into rows

    def _observations_of_reset(self, result: Any) -> Any:
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvFault(
                f"{self._who()}: reset returned {short(result)}, expected 2 values (observations, infos; {SUPPORTED})"
            )
        return result[0]

    def _store(
        self, out: Mapping[str, Array], observations: Any, actions: Array | None, rows: Rows | None = None
    ) -> None:
        """Copy batched observations into their fields: all rows, or only some."""
        for of, shape in self._fields:
            try:
                values = fitted(of.pick(observations), shape, of)
            except Misfit as misfit:
                raise EnvFault(f"{self._where(actions, misfit.row)}: {misfit}") from None
            if rows is None:
                out[of.name][...] = values
            else:
                out[of.name][rows] = values[rows]

    def _take_rewards(self, rewards: Any, actions: Array) -> None:
        given = np.asarray(rewards)
        if given.shape != self._ended.shape or given.dtype.kind not in "fiub":
            raise EnvFault(
                f"{self._where(actions)}: rewards are {short(rewards)}, expected {len(self)} numbers [{len(self)}]"
            )
        stored = self._outcome.rewards
        stored[:] = given
        if self._filler_rows is not None:
            stored[self._filler_rows] = 0.0
        if not all_finite(stored) and not (finite := np.isfinite(stored)).all():
            e = int(np.argmin(finite))
            raise EnvFault(f"{self._where(actions, e)}: reward is {given[e]}, which is not a finite float32")
        self._total_rewards += given

    def _take_flags(self, what: str, stored: NDArray[np.bool_], flags: Any, actions: Array) -> None:
        given = np.asarray(flags)
        if given.shape != stored.shape or (given.dtype.kind != "b" and not np.isin(given, (0, 1)).all()):
            raise EnvFault(
                f"{self._where(actions)}: {what} is {short(flags)}, expected {len(self)} times True or False"
            )
        stored[:] = given

    def _check_finite(self, values: Mapping[str, Array], rows: Sequence[int], actions: Array | None) -> None:
        """Raise EnvFault if an observation that is used holds NaN or an infinity.

        The final observation of a termination is not used: what is not finite there becomes zero.
        """
        for name in self._float_fields:
            if all_finite(values[name]):
                continue
            for e in rows:
                if np.isfinite(values[name][e]).all():
                    continue
                if e in self.fillers and e not in self._awaited:
                    values[name][e] = 0.0
                    continue
                raise EnvFault(f"{self._where(actions, e)}: {name} is not finite: {short(values[name][e])}")

    # --------------------------------------------------------------------------------------------------------- errors

    def _raised(self, call: str, error: Exception, actions: Array | None) -> NoReturn:
        raised = "" if isinstance(error, EnvFault) else f"{call} raised {type(error).__name__}: "
        raise EnvFault(f"{self._where(actions)}: {raised}{short(error, 500)}") from error

    def _who(self, e: int | None = None) -> str:
        of_actor = "" if self._actor_id is None else f" of actor {self._actor_id}"
        if e is not None:
            return f"env {e}{of_actor} ({self._name or 'env'}, global index {self.env_ids[e]})"
        ids = self.env_ids
        return f"vector env{of_actor} ({self._name or 'env'}, global indices {ids[0]} to {ids[-1]})"

    def _where(self, actions: Array | None, e: int | None = None) -> str:
        if actions is None:
            return self._who(e)
        if e is None:
            return f"{self._who()}, last actions {short(actions)}"
        return f"{self._who(e)}, step {self._clock - self._started[e]} of its episode, last action {short(actions[e])}"


def _final_observation(infos: Any, e: int) -> Any:
    """The final observation of env e, or None: an array of observations, or observations batched like the envs' own."""
    for key in FINAL_KEYS:
        if not isinstance(infos, Mapping) or infos.get(key) is None:
            continue
        mask = infos.get(f"_{key}")
        if mask is not None and not mask[e]:
            continue
        final = _row(infos[key], e)
        if final is not None:
            return final
    return None


def _row(batched: Any, e: int) -> Any:
    """Row e of batched observations, of whatever structure."""
    if isinstance(batched, Mapping):
        return {key: _row(value, e) for key, value in batched.items()}
    if isinstance(batched, tuple):
        return tuple(_row(value, e) for value in batched)
    return batched[e]


def _successes(infos: Any, envs: list[int]) -> list[bool | None]:
    """What the infos of the last step say about the episodes of these envs."""
    facts = infos.get(FINAL_INFO, infos) if isinstance(infos, Mapping) else None
    if isinstance(facts, Mapping):
        for key in SUCCESS_KEYS:
            if key in facts:
                mask = facts.get(f"_{key}")
                return [bool(facts[key][e]) if mask is None or mask[e] else None for e in envs]
        return [None] * len(envs)
    return [None if facts is None else success_of(facts[e]) for e in envs]  # in old vector envs one info per env
