"""EnvBatch: the E envs of one actor, stepped one after another in this process.

Writers: the owner of the batch, one thread. It writes observations straight into the rows it is given and everything
else into one StepOutcome that is reused: what it holds is valid until the next step.

An env whose episode ends is reset within the same step, after all envs have made theirs: the row then holds the first
observation of the next episode, and for a truncation the final observation is kept in the outcome. A step in a hurry
leaves resets for later (`reset_owed`), and zeros in these rows. Observations are copied before any further call of
their env, which may return one array for ever. A broken env (an exception, a step of four values) is an EnvFault that
names env, step and last action. So are bad data (a NaN, a reward of two numbers, an observation that does not fit its
space), unless the run drops their episode: the env is then reset like one that has ended, without a record of it.

Never: allocation of arrays, IO or logging per step. Leaves to others: values of final observations (the actor).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np

from rollout_service.envs.bad_data import LARGEST_REWARD, RESETS_TRIED, Bad, BadData, Ranges, reward_of
from rollout_service.envs.make import Env, check_reset, check_step, spaces_from_gymnasium
from rollout_service.envs.protocol import Array, FinishedEpisode, Pulse, Silent, StepOutcome
from rollout_service.envs.reading import Misfit, fitted, observation_fields, short, success_of
from rollout_service.errors import USER_ERRORS, EnvFault, OutOfOrder, SpaceNotSupported
from rollout_service.runspec import AutoresetMode, Spaces

__all__ = ["EnvBatch", "FinishedEpisode", "Pulse", "Silent", "StepOutcome"]


class EnvBatch:
    """E single envs as rows of [E, *] arrays.

    env_ids: global index of each env, for seeds, statistics and errors. seeds: one per env, used by `reset_all`.
    Raises SpaceNotSupported if an env's spaces are not `spaces`.
    """

    def __init__(
        self,
        envs: Sequence[Env],
        spaces: Spaces,
        *,
        env_ids: range,
        seeds: Sequence[int],
        name: str = "",
        actor_id: int | None = None,
        pulse: Pulse | None = None,
        bad_data: BadData | None = None,
    ) -> None:
        for env in envs:
            found = spaces_from_gymnasium(env.observation_space, env.action_space)
            if found != spaces:
                raise SpaceNotSupported(f"env {name!r} has the spaces {found}, the run has {spaces}; start all alike")
        self.pulse: Pulse = pulse or Silent()
        self.bad_data: BadData = bad_data or BadData()
        self.spaces = spaces
        self.autoreset: Final = AutoresetMode.ACTOR
        self.fillers: Final[Sequence[int]] = ()
        self.env_ids = env_ids
        self._envs = tuple(envs)
        self._steps = tuple(env.step for env in envs)
        self._seeds: tuple[int, ...] | None = tuple(seeds)
        self._name = name
        self._actor_id = actor_id
        fields = observation_fields(envs[0].observation_space)
        self._leaves = [(of.name, of.keys, of.leaf.shape, of.dtype, of) for of in fields]
        lone = fields[0] if len(fields) == 1 and not fields[0].keys and fields[0].leaf.size is None else None
        self._plain = (lone.name, lone.dtype, lone.leaf.shape) if lone else ("", None, ())
        """Field, dtype and shape of an observation that is one array and may be copied as it is."""
        self._ranges = Ranges(fields, self.bad_data.obs_limit)
        count = len(envs)
        self._outcome = StepOutcome.of(count, {of.name: (of.leaf.shape, of.dtype) for of in fields})
        self._total_rewards = [0.0] * count
        self._owed: list[int] = []
        """Rows whose episode has ended, or was dropped, and whose reset is still to come."""
        self._clock = 0
        self._started = [0] * count

    def __len__(self) -> int:
        return len(self._envs)

    def reseed(self, seeds: Sequence[int]) -> None:
        """Seeds for the next `reset_all`."""
        self._seeds = tuple(seeds)

    def reset_all(self, out: Mapping[str, Array]) -> None:
        """Start a new episode in every env; first observations into `out`, [E, *shape] per field.

        With seeds pending (after construction and after `reseed`) each env is seeded, its spaces too, and for envs
        that draw from them also the global generators of Python and NumPy.
        """
        self._owed = []
        for e, env in enumerate(self._envs):
            seed = None
            if self._seeds is not None:
                seed = self._seeds[e]
                random.seed(seed)
                np.random.seed(seed)
                env.action_space.seed(seed)
                env.observation_space.seed(seed)
            self._reset(e, out, seed)
        self._seeds = None
        if not self._ranges.hold(out):
            self._mend(out, range(len(self)))

    def reset_owed(self, out: Mapping[str, Array]) -> None:
        """Make up for the resets that a hurried step left out; first observations into their rows of `out`."""
        rows = tuple(self._owed)
        while self._owed:
            self._reset(self._owed.pop(0), out)
        if rows and not self._ranges.hold(out):
            self._mend(out, rows)

    def step(
        self, actions: Array, out: Mapping[str, Array], hurried: Callable[[], bool] | None = None, /
    ) -> StepOutcome:
        """One step of every env. actions [E, *]; observations that follow into `out`, [E, *shape] per field.

        hurried: asked before each reset; True leaves it, and those after it, to `reset_owed`.
        """
        if self._owed:
            raise OutOfOrder(
                f"envs {self._owed} have ended and are not reset yet; call reset_owed before the next step"
            )
        outcome = self._outcome
        rewards, totals, store, pulse = outcome.rewards, self._total_rewards, self._store, self.pulse
        if outcome.starting_envs:
            self._clear()
        self._clock += 1
        progress = pulse.progress + 1
        # The usual case, one array of the right kind, is looked at here: a call per env would take as long again.
        plain, dtype, shape = self._plain
        rows = out[plain] if plain else None
        # Numpy scalars, as action_space.sample() gives them: gymnasium's own checks take those faster than plain ints.
        for e, (step, action) in enumerate(zip(self._steps, actions, strict=True)):
            try:
                result = step(action)
            except USER_ERRORS as error:
                self._raised("step", e, error, action)
            try:
                observation, reward, terminated, truncated, _ = result
            except (TypeError, ValueError):
                self._refuse_step(e, result, action)
            if type(reward) is not float or not -LARGEST_REWARD <= reward <= LARGEST_REWARD:
                reward = self._plain_reward(e, reward, action)
            if type(terminated) is not bool:
                terminated = self._flag(e, "terminated", terminated, action)
            if type(truncated) is not bool:
                truncated = self._flag(e, "truncated", truncated, action)
            rewards[e] = reward
            totals[e] += reward
            if terminated or truncated:
                self._end(e, result, terminated, truncated, action)
            elif (
                rows is not None
                and type(observation) is np.ndarray
                and observation.dtype is dtype
                and observation.shape == shape
            ):
                rows[e] = observation
            elif (misfit := store(e, out, observation)) is not None:
                self._drop(e, Bad.OBSERVATION, misfit, action)
            pulse.progress = progress + e
        if outcome.ended_envs or outcome.dropped_envs:
            self._begin_anew(outcome.ended_envs + outcome.dropped_envs, out, hurried)
        if not self._ranges.hold(out):
            self._mend(out, outcome.starting_envs, actions, hurried)
        return outcome

    def close(self) -> None:
        """Close every env."""
        for env in self._envs:
            env.close()

    # ------------------------------------------------------------------------------------------- episode boundaries

    def _clear(self) -> None:
        outcome = self._outcome
        outcome.ended_envs, outcome.starting_envs, outcome.truncated_envs, outcome.episodes = [], [], [], []
        outcome.terminated[:] = outcome.truncated[:] = False
        if outcome.dropped_envs:
            outcome.valid[:] = True
            outcome.dropped_envs, outcome.lost_steps = [], 0

    def _end(self, e: int, result: Any, terminated: bool, truncated: bool, action: Any) -> None:
        """Record the episode, keep the final observation of a truncation. A dropped episode leaves no record."""
        outcome = self._outcome
        observation, info = result[0], result[4]
        if not terminated:
            finals = outcome.final_observations
            bad = self._store(e, finals, observation) or self._ranges.complaint(finals, e)
            if bad is not None:
                self._drop(e, Bad.OBSERVATION, bad, action)
        if e in outcome.dropped_envs:
            return
        outcome.terminated[e], outcome.truncated[e] = terminated, truncated
        outcome.ended_envs.append(e)
        if not terminated:
            outcome.truncated_envs.append(e)
        outcome.episodes.append(
            FinishedEpisode(
                env=self.env_ids[e],
                total_reward=self._total_rewards[e],
                length=self._clock - self._started[e],
                success=success_of(info),
                truncated=not terminated,
            )
        )
        self.bad_data.kept((e,))

    def _begin_anew(self, envs: list[int], out: Mapping[str, Array], hurried: Callable[[], bool] | None) -> None:
        """Reset envs, or owe them the reset."""
        self._outcome.starting_envs += envs
        self._owed += envs
        while self._owed and not (hurried is not None and hurried()):
            self._reset(self._owed.pop(0), out)
        if self._owed:
            for rows in out.values():
                rows[self._owed] = 0

    def _reset(self, e: int, out: Mapping[str, Array], seed: int | None = None) -> None:
        """Begin an episode; a look at its ranges is to follow."""
        if (bad := self._try_reset(e, out, seed)) is not None:
            self._reset_again(e, out, bad)

    def _try_reset(self, e: int, out: Mapping[str, Array], seed: int | None) -> str | None:
        """Begin an episode. Returns why its observation does not fit, if it does not."""
        phase = self.pulse.phase
        self.pulse.phase = "env.reset"
        try:
            result = self._envs[e].reset(seed=seed) if seed is not None else self._envs[e].reset()
        except USER_ERRORS as error:
            self._raised("reset", e, error, None)
        check_reset(result, self._who(e))
        self._total_rewards[e] = 0.0
        self._started[e] = self._clock
        misfit = self._store(e, out, result[0])
        self.pulse.progress += 1
        self.pulse.phase = phase
        return misfit

    # ------------------------------------------------------------------------------------------------------ bad data

    def _drop(self, e: int, what: Bad, complaint: str, action: Any) -> None:
        """Env e returned something bad: its episode is dropped. Raises EnvFault where that is not wanted."""
        outcome = self._outcome
        self.bad_data.refuse(what, f"{self._where(e, action)}: {complaint}")
        if e in outcome.dropped_envs:
            return
        self.bad_data.drop(e, self._who(e))
        outcome.dropped_envs.append(e)
        outcome.valid[e] = False
        outcome.lost_steps += 1

    def _mend(
        self,
        out: Mapping[str, Array],
        fresh: Sequence[int],
        actions: Array | None = None,
        hurried: Callable[[], bool] | None = None,
    ) -> None:
        """Make good what is out of range in `out`: a fresh episode begins again, any other one is dropped."""
        for e in range(len(self)):
            bad = self._ranges.complaint(out, e)
            if bad is not None and e not in fresh and actions is not None:
                self._drop(e, Bad.OBSERVATION, bad, actions[e])
                self._begin_anew([e], out, hurried)
                bad = self._ranges.complaint(out, e)
            if bad is not None:
                self._reset_again(e, out, bad)

    def _reset_again(self, e: int, out: Mapping[str, Array], bad: str | None) -> None:
        """The episode of env e began with bad data. Raises EnvFault if it does so again, or is not to be dropped."""
        tried = 1
        while bad is not None:
            story = f"{self._where(e, None)}: {bad}"
            if tried == RESETS_TRIED:
                raise EnvFault(f"{story}; so began {RESETS_TRIED} episodes in a row")
            self.bad_data.refuse(Bad.OBSERVATION, story, "the env is reset again")
            bad = self._try_reset(e, out, None) or self._ranges.complaint(out, e)
            tried += 1

    # ------------------------------------------------------------------------------- what the envs return, into rows

    def _store(self, e: int, out: Mapping[str, Array], observation: Any) -> str | None:
        """Copy one observation into row e of its fields. Returns why it does not fit, if it does not."""
        for name, keys, shape, dtype, of in self._leaves:
            try:
                value = of.pick(observation) if keys else observation
                if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
                    value = fitted(value, shape, of)
            except Misfit as misfit:
                return str(misfit)
            out[name][e] = value
        return None

    def _plain_reward(self, e: int, value: Any, action: Any) -> float:
        """A reward that is no finite float yet: its number, or 0 where it has none and the episode is dropped."""
        reward = reward_of(value)
        if reward is None:
            self._drop(e, Bad.REWARD, f"reward is {value!r}, expected one number", action)
        elif not -LARGEST_REWARD <= reward <= LARGEST_REWARD:
            self._drop(e, Bad.REWARD, f"reward is {reward}, which is not a finite float32", action)
        else:
            return reward
        return 0.0

    def _flag(self, e: int, what: str, value: Any, action: Any) -> bool:
        """A flag as a bool: a bool, 0 or 1, or an array of one of them."""
        given = np.asarray(value)
        if given.size != 1 or given.dtype.kind not in "fiub" or given.reshape(())[()] not in (0, 1):
            raise EnvFault(f"{self._where(e, action)}: {what} is {value!r}, expected True or False")
        return bool(given.reshape(())[()])

    # --------------------------------------------------------------------------------------------------------- errors

    def _raised(self, call: str, e: int, error: BaseException, action: Any) -> NoReturn:
        raise EnvFault(
            f"{self._where(e, action)}: {call} raised {type(error).__name__}: {short(error, 500)}"
        ) from error

    def _refuse_step(self, e: int, result: object, action: Any) -> NoReturn:
        check_step(result, self._where(e, action))
        raise EnvFault(f"{self._where(e, action)}: step returned {short(result)}, expected a tuple of 5")

    def _who(self, e: int) -> str:
        of_actor = "" if self._actor_id is None else f" of actor {self._actor_id}"
        return f"env {e}{of_actor} ({self._name or 'env'}, global index {self.env_ids[e]})"

    def _where(self, e: int, action: Any) -> str:
        last = "" if action is None else f", last action {short(action)}"
        return f"{self._who(e)}, step {self._clock - self._started[e]} of its episode{last}"
