"""EnvBatch: the E envs of one actor, stepped one after another in this process.

Writers: the owner of the batch, one thread. It writes observations straight into the rows it is given and everything
else into one StepOutcome that is reused: what it holds is valid until the next step.

An env whose episode ends is reset within the same step, after all envs have made theirs: the row then holds the first
observation of the next episode, and for a truncation the final observation is kept in the outcome. A step in a hurry
leaves resets for later (`reset_owed`), and zeros in these rows. Observations are copied before any further call of
their env, which may return one array for ever. Whatever a transition cannot hold (an exception, a NaN, a reward of two
numbers, an observation that does not fit its space) is an EnvFault that names env, step and last action.

Never: allocation of arrays, IO or logging per step. Leaves to others: values of final observations (the actor).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np

from rollout_service.envs.make import Env, check_reset, check_step, spaces_from_gymnasium
from rollout_service.envs.protocol import Array, FinishedEpisode, Pulse, Silent, StepOutcome
from rollout_service.envs.reading import Misfit, all_finite, fitted, observation_fields, short, success_of
from rollout_service.errors import EnvFault, OutOfOrder, SpaceNotSupported
from rollout_service.runspec import AutoresetMode, Spaces

__all__ = ["EnvBatch", "FinishedEpisode", "Pulse", "Silent", "StepOutcome"]

_LARGEST_REWARD: Final = float(np.finfo(np.float32).max)


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
    ) -> None:
        for env in envs:
            found = spaces_from_gymnasium(env.observation_space, env.action_space)
            if found != spaces:
                raise SpaceNotSupported(f"env {name!r} has the spaces {found}, the run has {spaces}; start all alike")
        self.pulse: Pulse = pulse or Silent()
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
        self._float_fields = [of.name for of in fields if of.dtype.kind == "f"]
        count = len(envs)
        self._outcome = StepOutcome.of(count, {of.name: (of.leaf.shape, of.dtype) for of in fields})
        self._outcome.starting_envs = self._outcome.ended_envs  # one list: what ended begins anew at once
        self._total_rewards = [0.0] * count
        self._owed: list[int] = []
        """Rows whose episode has ended and whose reset is still to come."""
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
        self._check_finite(out, range(len(self._envs)), None)

    def reset_owed(self, out: Mapping[str, Array]) -> None:
        """Make up for the resets that a hurried step left out; first observations into their rows of `out`."""
        rows = tuple(self._owed)
        while self._owed:
            self._reset(self._owed.pop(0), out, None)
        if rows:
            self._check_finite(out, rows, None)

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
        if outcome.ended_envs:
            outcome.ended_envs = outcome.starting_envs = []
            outcome.truncated_envs, outcome.episodes = [], []
            outcome.terminated[:] = outcome.truncated[:] = False
        self._clock += 1
        progress = pulse.progress + 1
        # The usual case, one array of the right kind, is looked at here: a call per env would take as long again.
        plain, dtype, shape = self._plain
        rows = out[plain] if plain else None
        # Numpy scalars, as action_space.sample() gives them: gymnasium's own checks take those faster than plain ints.
        for e, (step, action) in enumerate(zip(self._steps, actions, strict=True)):
            try:
                result = step(action)
            except Exception as error:
                self._raised("step", e, error, action)
            try:
                observation, reward, terminated, truncated, _ = result
            except (TypeError, ValueError):
                self._refuse_step(e, result, action)
            if type(reward) is not float:
                reward = self._scalar(e, "reward", reward, action)
            if not -_LARGEST_REWARD <= reward <= _LARGEST_REWARD:
                raise EnvFault(f"{self._where(e, action)}: reward is {reward}, which is not a finite float32")
            if type(terminated) is not bool:
                terminated = self._flag(e, "terminated", terminated, action)
            if type(truncated) is not bool:
                truncated = self._flag(e, "truncated", truncated, action)
            rewards[e] = reward
            totals[e] += reward
            if terminated or truncated:
                outcome.terminated[e], outcome.truncated[e] = terminated, truncated
                self._end(e, result, terminated, action)
            elif (
                rows is not None
                and type(observation) is np.ndarray
                and observation.dtype is dtype
                and observation.shape == shape
            ):
                rows[e] = observation
            else:
                store(e, out, observation, action)
            pulse.progress = progress + e
        if outcome.ended_envs:
            self._owed = outcome.ended_envs.copy()
            while self._owed and not (hurried is not None and hurried()):
                self._reset(self._owed.pop(0), out, None)
            if self._owed:
                for rows in out.values():
                    rows[self._owed] = 0
        self._check_finite(out, range(len(self)), actions)
        return outcome

    def close(self) -> None:
        """Close every env."""
        for env in self._envs:
            env.close()

    # ------------------------------------------------------------------------------------------- episode boundaries

    def _end(self, e: int, result: Any, terminated: bool, action: Any) -> None:
        """Record the episode, keep the final observation of a truncation."""
        outcome = self._outcome
        observation, info = result[0], result[4]
        outcome.ended_envs.append(e)
        if not terminated:
            self._store(e, outcome.final_observations, observation, action)
            self._check_finite(outcome.final_observations, (e,), None)
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

    def _reset(self, e: int, out: Mapping[str, Array], seed: int | None) -> None:
        phase = self.pulse.phase
        self.pulse.phase = "env.reset"
        try:
            result = self._envs[e].reset(seed=seed) if seed is not None else self._envs[e].reset()
        except Exception as error:
            self._raised("reset", e, error, None)
        check_reset(result, self._who(e))
        self._total_rewards[e] = 0.0
        self._started[e] = self._clock
        self._store(e, out, result[0], None)
        self.pulse.progress += 1
        self.pulse.phase = phase

    # ------------------------------------------------------------------------------- what the envs return, into rows

    def _store(self, e: int, out: Mapping[str, Array], observation: Any, action: Any) -> None:
        """Copy one observation into row e of its fields."""
        for name, keys, shape, dtype, of in self._leaves:
            try:
                value = of.pick(observation) if keys else observation
                if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
                    value = fitted(value, shape, of)
            except Misfit as misfit:
                raise EnvFault(f"{self._where(e, action)}: {misfit}") from None
            out[name][e] = value

    def _scalar(self, e: int, what: str, value: Any, action: Any) -> float:
        """A reward as a float: any real number, or an array of one."""
        given = np.asarray(value)
        if given.size != 1 or given.dtype.kind not in "fiub":
            raise EnvFault(f"{self._where(e, action)}: {what} is {value!r}, expected one number")
        return float(given.reshape(())[()])

    def _flag(self, e: int, what: str, value: Any, action: Any) -> bool:
        """A flag as a bool: a bool, 0 or 1, or an array of one of them."""
        given = np.asarray(value)
        if given.size != 1 or given.dtype.kind not in "fiub" or given.reshape(())[()] not in (0, 1):
            raise EnvFault(f"{self._where(e, action)}: {what} is {value!r}, expected True or False")
        return bool(given.reshape(())[()])

    def _check_finite(self, out: Mapping[str, Array], rows: Sequence[int], actions: Array | None) -> None:
        """Raise EnvFault if an observation holds NaN or an infinity. One sum over all rows says that none does."""
        for name in self._float_fields:
            values = out[name]
            if all_finite(values):
                continue
            for e in rows:
                if not np.isfinite(values[e]).all():
                    action = None if actions is None else actions[e]
                    raise EnvFault(f"{self._where(e, action)}: {name} is not finite: {short(values[e])}")

    # --------------------------------------------------------------------------------------------------------- errors

    def _raised(self, call: str, e: int, error: Exception, action: Any) -> NoReturn:
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
