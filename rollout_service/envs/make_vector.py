"""From a name to a gymnasium vector env of E envs, and from what it says of itself to its autoreset mode.

    vectorize            what is built
    sync, async          gymnasium's SyncVectorEnv or AsyncVectorEnv over the single envs that `make_env` makes of the
                         name; `vector_kwargs` among the env_kwargs go to it, e.g. {"autoreset_mode": "same_step"}
    vector_entry_point   `gymnasium.make_vec(id, num_envs=E, vectorization_mode="vector_entry_point", **env_kwargs)`
    factory              `module:factory` called with num_envs=E and env_kwargs; it returns a gymnasium VectorEnv
    envpool              `envpool.make_gymnasium(name, num_envs=E, seed=seeds, num_threads=1, **env_kwargs)`

The processes of async are fresh interpreters unless vector_kwargs name another `context`: an actor has threads, and a
fork would copy them half. A vector env that does not say its autoreset mode is refused: a wrong guess would train on
rows that never happened.

Leaves to others: stepping (vectorized.py).
"""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import gymnasium
import numpy as np

from rollout_service.envs import make
from rollout_service.envs.bad_data import reward_of
from rollout_service.envs.make import SUPPORTED, Env
from rollout_service.envs.reading import Misfit, fitted, observation_fields
from rollout_service.errors import ConfigError, EnvFault
from rollout_service.lifeline import die_with_parent
from rollout_service.runspec import AutoresetMode, Vectorize

VectorEnv: TypeAlias = "gymnasium.vector.VectorEnv[Any, Any, Any]"

VECTOR_KWARGS: Final = "vector_kwargs"
"""Key among the env_kwargs for arguments of gymnasium's own vector envs, as in `gymnasium.make_vec`."""
FRESH_INTERPRETERS: Final = "spawn"
LARGEST_POOL_SEED: Final = 2**31 - 1
"""envpool's seeds are C ints."""
_GYMNASIUM_NAMES: Final = {
    AutoresetMode.NEXT_STEP: "NextStep",
    AutoresetMode.SAME_STEP: "SameStep",
    AutoresetMode.DISABLED: "Disabled",
}


def make_vector_env(
    env: str, kwargs: Mapping[str, Any] | None, vectorize: Vectorize, num_envs: int, seeds: Sequence[int]
) -> VectorEnv:
    """A vector env by name. seeds: one per env, for global random generators while single envs are built.

    Raises ConfigError if the name leads nowhere, EnvFault if building it fails or gives something else.
    """
    arguments = dict(kwargs or {})
    module, name = make.find(env)
    with make.building(env, arguments):
        match vectorize:
            case Vectorize.NONE:
                raise ConfigError("vectorize is none: there is no vector env to make")
            case Vectorize.SYNC | Vectorize.ASYNC:
                options = _vector_options(arguments.pop(VECTOR_KWARGS, None), env)
                singles = [partial(_single, env, arguments, seed, e, os.getpid()) for e, seed in enumerate(seeds)]
                made: object = _vectorized(vectorize, singles, options)
            case Vectorize.VECTOR_ENTRY_POINT:
                if not make.is_id(module, name):
                    raise ConfigError(
                        f"env {env!r} is no gymnasium id; for a factory of vector envs set vectorize to factory"
                    )
                made = gymnasium.make_vec(
                    name, num_envs=num_envs, vectorization_mode=Vectorize.VECTOR_ENTRY_POINT.value, **arguments
                )
            case Vectorize.FACTORY:
                made = make.factory_of(module, name, env)(num_envs=num_envs, **arguments)
            case Vectorize.ENVPOOL:
                made = _pool(name, arguments, seeds)
    return _checked(made, env, num_envs)


def autoreset_of(envs: VectorEnv, name: str) -> AutoresetMode:
    """The mode that the vector env declares in `metadata["autoreset_mode"]`. Raises EnvFault if it declares none.

    gymnasium 1.0 knows no modes: there every vector env resets at the next step.
    """
    declared = (envs.metadata or {}).get("autoreset_mode")
    if declared is None and not hasattr(gymnasium.vector, "AutoresetMode"):
        return AutoresetMode.NEXT_STEP
    said = _plain(getattr(declared, "value", declared))
    for mode in _GYMNASIUM_NAMES:
        if said == _plain(mode.value):
            return mode
    raise EnvFault(
        f"env {name!r}: its metadata say autoreset_mode {declared!r}; a vector env has to declare one of "
        f"gymnasium.vector.AutoresetMode ({SUPPORTED}), or rows would be taken for what they are not"
    )


class AsSingle(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A single env inside a vector env, driven as the actor drives its own single envs.

    A seeded reset seeds its spaces, and for envs that draw from them the global generators of Python and NumPy. The
    last observation of an episode is a copy: a vector env keeps it while it resets the env, which may reuse its array.
    An observation that does not fit its space is an EnvFault: the vector env would cast it, or fail without a name. A
    reward that is no number becomes NaN, for the actor to find.
    """

    def __init__(self, env: Env, name: str) -> None:
        super().__init__(env)
        self._name = name
        self._fields = observation_fields(env.observation_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
            self.env.action_space.seed(seed)
            self.env.observation_space.seed(seed)
        result = self.env.reset(seed=seed, options=options)
        make.check_reset(result, self._name)
        return self._fitted(result[0]), result[1]

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        result = self.env.step(action)
        if type(result) is not tuple or len(result) != 5:
            make.check_step(result, self._name)
        observation, reward, terminated, truncated, facts = result
        if type(reward) is not float:
            reward = math.nan if (number := reward_of(reward)) is None else number
        observation = self._fitted(observation)
        if terminated or truncated:
            observation = copy.deepcopy(observation)
        return observation, reward, terminated, truncated, facts

    def _fitted(self, observation: Any) -> Any:
        """The observation; one that is a single array as its space has it. Raises EnvFault."""
        for of in self._fields:
            try:
                value = fitted(of.pick(observation), of.leaf.shape, of)
            except Misfit as misfit:
                raise EnvFault(f"{self._name}: {misfit}") from None
            if not of.keys:
                return value
        return observation


class SeededWhenMade(gymnasium.vector.VectorWrapper[Any, Any, Any]):
    """A vector env whose seeds were given when it was made, and that takes none in a reset."""

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,  # noqa: ARG002
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(options=options)


def _pool(name: str, arguments: Mapping[str, Any], seeds: Sequence[int]) -> object:
    """All envs of one envpool, stepped on the actor's own core unless env_kwargs name another `num_threads`."""
    try:
        import envpool
    except ImportError as error:
        raise ConfigError(
            f"vectorize envpool: the package envpool cannot be imported ({error}); install rollout-service[envpool]"
        ) from error
    given = {"seed": [seed % LARGEST_POOL_SEED for seed in seeds], "num_threads": 1, **arguments}
    made = envpool.make_gymnasium(name, num_envs=len(seeds), **given)
    # Releases that are no gymnasium.vector.VectorEnv do not say their autoreset mode: refused like all that do not.
    return SeededWhenMade(made) if isinstance(made, gymnasium.vector.VectorEnv) else made


def _single(env: str, arguments: Mapping[str, Any], seed: int, e: int, owner: int) -> Env:
    """owner: pid of the process that has the vector env; one of its own for this env does not outlive it."""
    if os.getpid() != owner:
        die_with_parent()
    random.seed(seed)
    np.random.seed(seed)
    return AsSingle(make.make_env(env, arguments), f"env {e} ({env})")


def _vectorized(vectorize: Vectorize, singles: Sequence[Callable[[], Env]], options: Mapping[str, Any]) -> VectorEnv:
    if vectorize is Vectorize.SYNC:
        return gymnasium.vector.SyncVectorEnv(singles, **options)
    return gymnasium.vector.AsyncVectorEnv(singles, **{"context": FRESH_INTERPRETERS, **options})


def _vector_options(given: object, env: str) -> dict[str, Any]:
    """vector_kwargs with our name of an autoreset mode as gymnasium's."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"env {env!r}: {VECTOR_KWARGS} is {given!r}; it must be a table of arguments")
    options = dict(given)
    mode = options.get("autoreset_mode")
    for ours, theirs in _GYMNASIUM_NAMES.items():
        if mode is not None and _plain(getattr(mode, "value", mode)) == _plain(ours.value):
            options["autoreset_mode"] = theirs
    return options


def _plain(name: object) -> str:
    """NextStep and next_step alike."""
    return str(name).replace("_", "").replace("-", "").lower()


def _checked(made: object, env: str, num_envs: int) -> VectorEnv:
    if not isinstance(made, gymnasium.vector.VectorEnv):
        kind = type(made)
        hint = "set vectorize to none, sync or async" if isinstance(made, gymnasium.Env) else SUPPORTED
        raise EnvFault(
            f"env {env!r} is a {kind.__module__}.{kind.__qualname__}, not a gymnasium.vector.VectorEnv; {hint}"
        )
    if made.num_envs != num_envs:
        raise EnvFault(f"env {env!r} was called with num_envs={num_envs} and made {made.num_envs} envs")
    bare = made.unwrapped
    if isinstance(bare, gymnasium.vector.SyncVectorEnv) and not all(isinstance(one, AsSingle) for one in bare.envs):
        bare.envs = [AsSingle(one, f"env {e} ({env})") for e, one in enumerate(bare.envs)]
    return made
