"""Trying an env out before a run: what it turns out to be, and what looks wrong without being refusable.

`check_env` makes the env as an actor will, steps it, and says its spaces and its autoreset mode. What cannot be run is
refused, in one line. What can be run but is probably a mistake is a warning.

One mistake is looked for: an env that starts its episode anew inside a step and reports no end. Its last rows then run
on into the next episode, state and bootstrap included, and nothing downstream can notice. In general that cannot be
seen from outside; what can be seen is the env's own step counter jumping back. A step counter is a number that grew by
one in every step of two trial episodes and stood at the same value after both resets: an attribute of the unwrapped
env, per env in a vector env; where there is none, an entry of the infos or an element of the observation. (`TimeLimit`
counts outside the env, and so goes on.) If one counter jumps back while another goes on, the first one is a cycle
inside the episode. Only a warning: a lone counter may be a cycle too.

Writers: nobody; the env is used up. Leaves to others: what follows from a warning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rollout_service.envs.bad_data import LARGEST_REWARD, Bad, BadData, complaint_about, reward_of
from rollout_service.envs.make import Env, check_contract, make_env, spaces_from_gymnasium
from rollout_service.envs.make_vector import VECTOR_KWARGS, VectorEnv, autoreset_of, make_vector_env
from rollout_service.envs.protocol import EnvRows
from rollout_service.envs.reading import ObservationField, observation_fields
from rollout_service.envs.vectorized import VectorEnvBatch
from rollout_service.errors import USER_ERRORS
from rollout_service.memory.schema import OBSERVATIONS
from rollout_service.runspec import AutoresetMode, Spaces, Vectorize

CHECK_STEPS: Final = 1024
"""Steps over which a counter is watched: beyond the usual time limits."""
CHECK_SECONDS: Final = 1.0
"""A slow env is watched no longer than this."""
TRIAL_STEPS: Final = 4
"""Steps in which something has to grow by one each time to count as a step counter."""
FEWEST_STEPS: Final = 2
"""Fewer steps than this prove nothing, neither in a trial nor before a jump back."""
LARGEST_LEAF: Final = 64
"""Observations larger than this are pictures or scans; no step counter is looked for in them."""

Readings = dict[tuple["_Place", str], NDArray[np.float64]]
"""Where and by which name -> [E]: numbers that may be step counters."""


class _Place(Enum):
    """Where a number was read. The first place with a step counter is the one that is watched."""

    ATTRIBUTE = "attribute"
    INFO = "info"
    OBSERVATION = "observation element"


@dataclass(frozen=True)
class EnvFacts:
    """What an env turned out to be."""

    spaces: Spaces
    autoreset: AutoresetMode
    warnings: tuple[str, ...]


def check_env(
    env: str,
    kwargs: Mapping[str, Any] | None = None,
    vectorize: Vectorize = Vectorize.NONE,
    num_envs: int = 1,
    bad_data: BadData | None = None,
) -> EnvFacts:
    """Makes the env as an actor with `num_envs` of them will, tries it out and closes it.

    bad_data: what the run will do about observations and rewards that no transition can hold; by default they are
    refused, else they are warnings. Raises ConfigError, EnvFault or SpaceNotSupported, in one line, for what cannot be
    run.
    """
    arguments, bad = dict(kwargs or {}), bad_data or BadData()
    match vectorize:
        case Vectorize.NONE:
            return _check_single(env, arguments, AutoresetMode.ACTOR, bad)
        case Vectorize.SYNC | Vectorize.ASYNC:
            # One env is enough: all are alike. What happens inside an episode is looked at without the vector env.
            spaces, autoreset, _ = _check_vector(env, arguments, vectorize, 1, bad, watch=False)
            arguments.pop(VECTOR_KWARGS, None)
            single = _check_single(env, arguments, autoreset, bad)
            return EnvFacts(spaces, autoreset, single.warnings)
        case Vectorize.VECTOR_ENTRY_POINT | Vectorize.FACTORY | Vectorize.ENVPOOL:
            return EnvFacts(*_check_vector(env, arguments, vectorize, num_envs, bad, watch=True))


def check_env_advances(
    env: Env | VectorEnv,
    name: str,
    *,
    steps: int = CHECK_STEPS,
    seconds: float = CHECK_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> str | None:
    """A warning if the env's own step counter jumps back although no end was reported; None if nothing is seen.

    Random actions, at most `steps` of them and about `seconds`. An env that fails meanwhile is left to the run, which
    tells more about it.
    """
    watched: _Watched = _VectorEnv(env, name) if isinstance(env, gymnasium.vector.VectorEnv) else _SingleEnv(env)
    until = clock() + seconds
    try:
        counters = _step_counters(watched)
        return _watch(watched, counters, name, steps, lambda: clock() > until) if counters else None
    except USER_ERRORS:
        return None


def _check_single(env: str, arguments: dict[str, Any], autoreset: AutoresetMode, bad: BadData) -> EnvFacts:
    made = make_env(env, arguments)
    try:
        spaces = spaces_from_gymnasium(made.observation_space, made.action_space)
        first, result = check_contract(made, env)
        _check_data(made, env, first[0], result[0], result[1], bad)
        warning = check_env_advances(made, env)
    finally:
        made.close()
    return EnvFacts(spaces, autoreset, _warnings(bad, warning))


def _check_data(made: Env, env: str, first: Any, second: Any, reward: Any, bad: BadData) -> None:
    """What a reset and a step have returned, with the checks of an actor."""
    fields = observation_fields(made.observation_space)
    for call, observation in (("reset(seed=0)", first), ("its first step", second)):
        if (complaint := complaint_about(observation, fields, bad.obs_limit)) is not None:
            bad.refuse(Bad.OBSERVATION, f"env {env!r}, {call}: {complaint}", "such episodes are dropped")
    if (number := reward_of(reward)) is None or not -LARGEST_REWARD <= number <= LARGEST_REWARD:
        story = f"env {env!r}, its first step: reward is {reward!r}, expected one finite number"
        bad.refuse(Bad.REWARD, story, "such episodes are dropped")


def _warnings(bad: BadData, *others: str | None) -> tuple[str, ...]:
    return (*bad.take()[1], *(warning for warning in others if warning is not None))


def _check_vector(
    env: str, arguments: dict[str, Any], vectorize: Vectorize, num_envs: int, bad: BadData, *, watch: bool
) -> tuple[Spaces, AutoresetMode, tuple[str, ...]]:
    seeds = range(num_envs)
    made = make_vector_env(env, arguments, vectorize, num_envs, seeds)
    batch: VectorEnvBatch | None = None
    try:
        batch = VectorEnvBatch(made, env_ids=range(num_envs), seeds=seeds, name=env, bad_data=bad)
        _try_out(batch, made)
        warning = check_env_advances(made, env) if watch else None
        return batch.spaces, batch.autoreset, _warnings(bad, warning)
    finally:
        (made if batch is None else batch).close()


def _try_out(batch: EnvRows, made: VectorEnv) -> None:
    """Reset and one step, with all checks of an actor."""
    out = {
        OBSERVATIONS + leaf.path: np.zeros((len(batch), *leaf.shape), leaf.dtype) for leaf in batch.spaces.observation
    }
    batch.reset_all(out)
    made.single_action_space.seed(0)
    batch.step(np.array([made.single_action_space.sample() for _ in range(len(batch))]), out)


# ------------------------------------------------------------------------------------------------------- step counters


class _Watched(Protocol):
    """E envs with the numbers they show. `step` acts at random and starts ended episodes anew."""

    def start(self) -> Readings: ...

    def step(self) -> tuple[Readings, NDArray[np.bool_]]:
        """Readings after the step, and which envs reported an end in it, [E]."""
        ...


def _step_counters(watched: _Watched) -> Readings:
    """The readings that count steps, with their values right after a reset; {} if there are none or too few steps."""
    episodes = [list(_trial(watched)) for _ in range(2)]
    if min(len(episode) for episode in episodes) <= FEWEST_STEPS:
        return {}
    counters = {
        key: origin
        for key, origin in episodes[0][0].items()
        if all(
            key in readings and np.array_equal(readings[key], origin + step)
            for episode in episodes
            for step, readings in enumerate(episode)
        )
    }
    for place in _Place:
        if any(key[0] is place for key in counters):
            return {key: origin for key, origin in counters.items() if key[0] is place}
    return {}


def _trial(watched: _Watched) -> Iterator[Readings]:
    """Readings from a reset on, for a few steps without an end."""
    yield watched.start()
    for _ in range(TRIAL_STEPS):
        readings, ended = watched.step()
        if ended.any():
            return
        yield readings


def _watch(watched: _Watched, origins: Readings, name: str, steps: int, over: Callable[[], bool]) -> str | None:
    """The warning, once every counter that still counts has jumped back in one step of one env without an end."""
    counters = set(origins)
    before = watched.start()
    ended_before = np.zeros(len(next(iter(origins.values()))), np.bool_)
    for _ in range(steps):
        if over() or not counters:
            return None
        now, ended = watched.step()
        if not counters <= now.keys():
            return None
        # Around an end a counter may move as it likes: a vector env resets in this step or in the next.
        inside = ~(ended | ended_before)
        goes_on = {key: (now[key] == before[key] + 1) | ~inside for key in counters}
        stopped = ~np.any([goes_on[key] for key in counters], axis=0)
        for key in sorted(counters, key=lambda key: key[1]):
            back = (now[key] <= origins[key] + 1) & (before[key] >= origins[key] + FEWEST_STEPS)
            for e in np.flatnonzero(back & stopped):
                return _told(name, key, int(before[key][e]), int(now[key][e]), int(e))
        counters = {key for key in counters if goes_on[key].all()}
        before, ended_before = now, ended
    return None


def _told(name: str, key: tuple[_Place, str], before: int, now: int, e: int) -> str:
    return (
        f"env {name!r} looks as if it began episodes anew without reporting an end: its {key[0].value} {key[1]} counts "
        f"steps and went from {before} back to {now} (env {e}), and neither terminated nor truncated was set; such an "
        "end never reaches the learner, report truncated=True in that step"
    )


class _SingleEnv:
    """One env as [1]."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._fields = observation_fields(env.observation_space)
        env.action_space.seed(0)

    def start(self) -> Readings:
        return self._read(*self._env.reset(seed=0))

    def step(self) -> tuple[Readings, NDArray[np.bool_]]:
        observation, _, terminated, truncated, facts = self._env.step(self._env.action_space.sample())
        ended = bool(terminated or truncated)
        if ended:
            observation, facts = self._env.reset()
        return self._read(observation, facts), np.array([ended])

    def _read(self, observation: Any, facts: Mapping[str, Any]) -> Readings:
        own = getattr(self._env.unwrapped, "__dict__", {})
        return {
            **_numbers(_Place.ATTRIBUTE, own, 1),
            **_numbers(_Place.INFO, facts, 1),
            **_elements(self._fields, observation, 1),
        }


class _VectorEnv:
    """A vector env of E."""

    def __init__(self, envs: VectorEnv, name: str) -> None:
        self._envs = envs
        self._autoreset = autoreset_of(envs, name)
        self._fields = observation_fields(envs.single_observation_space)
        envs.action_space.seed(0)

    def start(self) -> Readings:
        return self._read(*self._envs.reset(seed=0))

    def step(self) -> tuple[Readings, NDArray[np.bool_]]:
        observations, _, terminated, truncated, facts = self._envs.step(self._envs.action_space.sample())
        ended = np.asarray(terminated, np.bool_) | np.asarray(truncated, np.bool_)
        if self._autoreset is AutoresetMode.DISABLED and ended.any():
            observations, facts = self._envs.reset(options={"reset_mask": ended.copy()})
        return self._read(observations, facts), ended

    def _read(self, observations: Any, facts: Mapping[str, Any]) -> Readings:
        count, bare = self._envs.num_envs, self._envs.unwrapped
        own: Mapping[str, Any] = vars(bare)
        if isinstance(bare, gymnasium.vector.SyncVectorEnv):
            singles = [vars(one.unwrapped) for one in bare.envs]
            own = {name: [single.get(name) for single in singles] for name in singles[0]}
        return {
            **_numbers(_Place.ATTRIBUTE, own, count),
            **_numbers(_Place.INFO, facts, count),
            **_elements(self._fields, observations, count),
        }


def _numbers(place: _Place, values: Mapping[str, Any], count: int) -> Readings:
    """What of the values is one number per env, as copies."""
    found: Readings = {}
    for name, value in values.items():
        if isinstance(value, int | float | np.number | np.ndarray | list) and not isinstance(value, bool):
            try:
                array = np.array(value, np.float64)
            except (TypeError, ValueError):
                continue
            if array.size == count and array.ndim < 2:
                found[place, name] = array.reshape(count)
    return found


def _elements(fields: tuple[ObservationField, ...], observations: Any, count: int) -> Readings:
    """Each element of small observations, [E]."""
    found: Readings = {}
    for of in fields:
        if of.leaf.size is None and np.prod(of.leaf.shape, dtype=np.int64) <= LARGEST_LEAF:
            columns = np.array(of.pick(observations), np.float64).reshape(count, -1).T
            found |= {(_Place.OBSERVATION, f"{of.name}[{i}]"): column for i, column in enumerate(columns)}
    return found
