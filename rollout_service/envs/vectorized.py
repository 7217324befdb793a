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

Bad data of one env (NaN, beyond the limit, a number its dtype cannot hold) are an EnvFault, unless the run drops their
episode. Then DISABLED resets that env with the ended ones. In the other modes nobody can: its rows are not valid until
its own episode ends, and what it returns meanwhile is not looked at. Arrays of a wrong shape or kind are no env's own:
EnvFault always.

Never: a loop over all envs, or IO, per step. Leaves to others: values of final observations (the actor).
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rollout_service.envs.bad_data import RESETS_TRIED, Bad, BadData, Ranges
from rollout_service.envs.batched import (
    FINAL_KEYS,
    Complaints,
    Rows,
    final_observation,
    flags_into,
    observations_into,
    rewards_into,
    successes,
)
from rollout_service.envs.make import SUPPORTED, spaces_from_gymnasium
from rollout_service.envs.make_vector import VectorEnv, autoreset_of
from rollout_service.envs.protocol import Array, FinishedEpisode, Pulse, Silent, StepOutcome
from rollout_service.envs.reading import Misfit, fitted, observation_fields, short
from rollout_service.errors import USER_ERRORS, EnvFault
from rollout_service.runspec import AutoresetMode


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
        bad_data: BadData | None = None,
    ) -> None:
        count = envs.num_envs
        self.pulse: Pulse = pulse or Silent()
        self.bad_data: BadData = bad_data or BadData()
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
        self._fields = observation_fields(envs.single_observation_space)
        self._ranges = Ranges(self._fields, self.bad_data.obs_limit)
        self._outcome = StepOutcome.of(count, {of.name: (of.leaf.shape, of.dtype) for of in self._fields})
        self._untouched = True
        self._ended = np.zeros(count, np.bool_)
        self._lost: list[int] = []
        """Rows whose episode is dropped and still running."""
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
        """Start a new episode in every env; first observations into `out`, [E, *shape] per field.

        If episodes that begin with bad data are to be dropped, a few times more, without a seed.
        """
        phase, self.pulse.phase = self.pulse.phase, "env.reset"
        seeds, self._seeds = self._seeds, None
        self.fillers, self._filler_rows, self._lost = [], None, []
        self._total_rewards[:] = 0.0
        self._started[:] = self._clock
        tries = 1
        while bad := self._take_reset(out, self._first_reset(seeds)):
            self._refuse_reset(bad, tries)
            tries, seeds = tries + 1, None
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
        except USER_ERRORS as error:
            self._raised("step", error, actions)
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvFault(
                f"{self._where(actions)}: step returned {short(result)}, expected 5 values "
                f"(observations, rewards, terminated, truncated, infos; {SUPPORTED})"
            )
        observations, rewards, terminated, truncated, infos = result
        try:
            unfit = observations_into(out, observations, self._fields, self._ranges)
            given, unpaid = rewards_into(outcome.rewards, rewards, fillers)
            flags_into(outcome.terminated, "terminated", terminated)
            flags_into(outcome.truncated, "truncated", truncated)
        except Misfit as misfit:
            raise EnvFault(f"{self._where(actions)}: {misfit}") from None
        self._total_rewards += given
        if fillers is not None:
            self._fill_in(fillers, actions)
        np.logical_or(outcome.terminated, outcome.truncated, out=self._ended)
        lost = self._lost
        if unfit or unpaid or lost:
            self._leave_out(unfit, unpaid, fillers, actions)
        if np.count_nonzero(self._ended):
            self._end(out, infos, actions)
        if lost or outcome.dropped_envs:
            outcome.starting_envs = sorted({*outcome.starting_envs, *lost, *outcome.dropped_envs})
            outcome.lost_steps = len(lost) + len(outcome.dropped_envs)
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
        outcome.dropped_envs, outcome.lost_steps = [], 0
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
        self.fillers, self._filler_rows = [], None

    def _end(self, out: Mapping[str, Array], infos: Any, actions: Array) -> None:
        """Record the episodes, find their final observations, and start the next ones where the mode asks for it.

        Dropped episodes are over too, and their flags are no longer in the outcome: they leave no record.
        """
        outcome = self._outcome
        self._untouched = False
        over = np.flatnonzero(self._ended)
        cut = np.flatnonzero(outcome.truncated & ~outcome.terminated).tolist()
        match self.autoreset:
            case AutoresetMode.NEXT_STEP:
                self.fillers, self._filler_rows = over.tolist(), over
                outcome.deferred_envs = cut
            case AutoresetMode.SAME_STEP:
                outcome.starting_envs = over.tolist()
                self._take_final_observations(cut, infos, actions)
            case AutoresetMode.DISABLED:
                outcome.starting_envs = over.tolist()
                outcome.truncated_envs = cut
                for name, finals in outcome.final_observations.items():
                    finals[cut] = out[name][cut]
            case AutoresetMode.ACTOR:
                raise EnvFault(f"{self._who()}: autoreset actor is not a mode of vector envs")
        self._record(infos)
        if self.autoreset is AutoresetMode.DISABLED:
            self._reset_ended(out, over, actions)
        if self.autoreset is not AutoresetMode.NEXT_STEP:
            self._started[over] = self._clock
            self._total_rewards[over] = 0.0

    def _record(self, infos: Any) -> None:
        """The episodes that ended in this step."""
        outcome = self._outcome
        rows = np.flatnonzero(outcome.terminated | outcome.truncated)
        outcome.ended_envs = envs = rows.tolist()
        outcome.episodes = [
            FinishedEpisode(self.env_ids[e], total, length, success, not terminated)
            for e, total, length, success, terminated in zip(
                envs,
                self._total_rewards[rows].tolist(),
                (self._clock - self._started[rows]).tolist(),
                successes(infos, envs),
                outcome.terminated[rows].tolist(),
                strict=True,
            )
        ]
        self.bad_data.kept(envs)

    def _reset_ended(self, out: Mapping[str, Array], rows: Rows, actions: Array) -> None:
        phase, self.pulse.phase = self.pulse.phase, "env.reset"
        mask, tries = self._ended, 1
        while bad := self._take_reset(out, self._masked_reset(mask, actions), actions, rows):
            self._refuse_reset(bad, tries)
            rows, tries = np.array(sorted(bad)), tries + 1
            mask = np.isin(np.arange(len(self)), rows)
        self.pulse.phase = phase

    def _masked_reset(self, mask: NDArray[np.bool_], actions: Array) -> Any:
        try:
            # The mask and the dict are given away: vector envs take the mask out of the dict.
            return self._envs.reset(options={"reset_mask": mask.copy()})
        except USER_ERRORS as error:
            self._raised("reset with a reset_mask", error, actions)

    def _take_final_observations(self, rows: list[int], infos: Any, actions: Array) -> None:
        outcome = self._outcome
        for e in rows:
            final = final_observation(infos, e)
            if final is None:
                outcome.blind_envs.append(e)
            elif (bad := self._final(e, final)) is not None:
                self._drop(e, Bad.OBSERVATION, f"final observation: {bad}", actions)
            else:
                outcome.truncated_envs.append(e)
        if outcome.blind_envs and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._who()} truncates episodes and gives no final observation (infos {' or '.join(FINAL_KEYS)}); "
                "the value of the last observation before it stands in, counted as truncations_without_final_obs",
                RuntimeWarning,
                stacklevel=2,
            )

    def _final(self, e: int, final: Any) -> str | None:
        """Keep a final observation. Returns what is wrong with it, if anything."""
        finals = self._outcome.final_observations
        try:
            for of in self._fields:
                finals[of.name][e] = fitted(of.pick(final), of.leaf.shape, of)
        except Misfit as misfit:
            return str(misfit)
        return self._ranges.complaint(finals, e)

    # ------------------------------------------------------------------------------------------------------ bad data

    def _leave_out(self, unfit: Complaints, unpaid: Complaints, begun: Rows | None, actions: Array) -> None:
        """Take rows of dropped episodes out of this step. Raises EnvFault where none is to be dropped.

        unfit, unpaid: rows whose observation or reward is bad; begun: rows that this step has reset.
        """
        outcome, lost = self._outcome, self._lost
        ended, first = self._ended, set() if begun is None else set(begun.tolist())
        if self.autoreset is AutoresetMode.SAME_STEP:
            first.update(np.flatnonzero(ended).tolist())
        self._untouched = False
        running = [e for e in lost if not ended[e]]
        outcome.valid[lost] = outcome.terminated[lost] = outcome.truncated[lost] = False
        for e, complaint in unpaid.items():
            if e not in lost:
                self._drop(e, Bad.REWARD, complaint, actions)
        for e, complaint in unfit.items():
            if e in first:
                self.bad_data.refuse(Bad.OBSERVATION, f"{self._who(e)}, a new episode: {complaint}")
                self.bad_data.drop(e, self._who(e))
                running.append(e)
            elif e not in lost and not outcome.terminated[e]:  # nobody needs what follows a terminated row
                self._drop(e, Bad.OBSERVATION, complaint, actions)
        if self.autoreset is AutoresetMode.DISABLED:
            ended[outcome.dropped_envs] = True
        else:
            running += [e for e in outcome.dropped_envs if not ended[e]]
        self._lost = running

    def _drop(self, e: int, what: Bad, complaint: str, actions: Array) -> None:
        """Env e returned something bad: the episode of this step is dropped. Raises EnvFault if it is not to be."""
        outcome = self._outcome
        self.bad_data.refuse(what, f"{self._where(actions, e)}: {complaint}")
        if e not in outcome.dropped_envs:
            self.bad_data.drop(e, self._who(e))
            outcome.dropped_envs.append(e)
            outcome.valid[e] = outcome.terminated[e] = outcome.truncated[e] = False

    def _refuse_reset(self, bad: Complaints, tries: int) -> None:
        """These rows began an episode with a bad observation. Raises EnvFault if that has to be the last try."""
        for e, complaint in bad.items():
            story = f"{self._who(e)}, reset: {complaint}"
            if tries == RESETS_TRIED:
                raise EnvFault(f"{story}; so began {RESETS_TRIED} resets in a row")
            self.bad_data.refuse(Bad.OBSERVATION, story, "the env is reset again")

    # ---------------------------------------------------------------------------------------------------------- seeds

    def _first_reset(self, seeds: tuple[int, ...] | None) -> Any:
        try:
            return self._envs.reset() if seeds is None else self._reset_with(seeds)
        except USER_ERRORS as error:
            self._raised("reset", error, None)

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

    def _take_reset(
        self, out: Mapping[str, Array], result: Any, actions: Array | None = None, rows: Rows | None = None
    ) -> Complaints:
        """First observations into `out`, of all rows or some. Returns those that are bad."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvFault(
                f"{self._who()}: reset returned {short(result)}, expected 2 values (observations, infos; {SUPPORTED})"
            )
        try:
            return observations_into(out, result[0], self._fields, self._ranges, rows)
        except Misfit as misfit:
            raise EnvFault(f"{self._where(actions)}: {misfit}") from None

    # --------------------------------------------------------------------------------------------------------- errors

    def _raised(self, call: str, error: BaseException, actions: Array | None) -> NoReturn:
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
