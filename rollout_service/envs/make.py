"""From a name on the command line to a single gymnasium env, and from its spaces to ours.

Accepted names: a gymnasium id (`CartPole-v1`, `Memory/TMaze-v0`), an id behind the module that registers it
(`package.module:Name-v0`), or a factory (`package.module:make_env`, a function or class called with env_kwargs).
Modules are found from the current directory too.

Everything that can be refused is refused here, in one line, before a segment or a process exists: an old gymnasium,
envs of the old gym API, vector envs, spaces without a class here. Never: repairs an env silently.
Leaves to others: vector envs (make_vector.py), stepping (vector.py), networks for the leaves (policy).
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces as gym_spaces

from rollout_service.envs import memory_tasks
from rollout_service.errors import USER_ERRORS, ConfigError, EnvFault, RolloutServiceError, SpaceNotSupported
from rollout_service.runspec import Leaf, SpaceKind, Spaces

Env = gymnasium.Env[Any, Any]
Keys = tuple[str | int, ...]
"""Where a leaf sits inside an observation: the keys of nested dicts, the indices of nested tuples."""

OLDEST_GYMNASIUM: Final = (1, 0)
SUPPORTED: Final = "supported: gymnasium 1.0 and newer"
"""Said in every refusal of an API. The API of envs dates from 0.26, that of vector envs from 1.0."""

_GYMNASIUM_ID: Final = re.compile(r"^(?:[\w:-]+/)?[\w:.-]+-v\d+$")
_STORED_AS: Final = {"float64": "float32"}
"""Box dtypes that are stored in another one. Everything else keeps the space's own dtype."""
_BOX_DTYPES: Final = frozenset(
    {"float16", "float32", "float64", "uint8", "uint16", "uint32", "int8", "int16", "int32", "int64"}
)


def make_env(env: str, kwargs: Mapping[str, Any] | None = None) -> Env:
    """One single env by name. Raises ConfigError if the name leads nowhere, EnvFault if building it fails."""
    arguments = dict(kwargs or {})
    module, name = find(env)
    with building(env, arguments):
        if is_id(module, name):
            made: object = gymnasium.make(name, disable_env_checker=True, **arguments)
        else:
            made = factory_of(module, name, env)(**arguments)
    return _checked(made, env)


def find(env: str) -> tuple[object | None, str]:
    """The module that registers or makes the env, imported (None: gymnasium's own), and the name in it.

    Raises ConfigError for a gymnasium that is too old or a module that is not there, EnvFault if importing it fails.
    """
    check_gymnasium()
    if "" not in sys.path:
        sys.path.insert(0, "")
    memory_tasks.register()
    module_name, _, name = env.rpartition(":")
    return (_import(module_name, env) if module_name else None), name


def is_id(module: object | None, name: str) -> bool:
    """Whether the name is a gymnasium id rather than a callable of the module."""
    return module is None or (_GYMNASIUM_ID.match(name) is not None and not hasattr(module, name))


def factory_of(module: object | None, name: str, env: str) -> Any:
    """The callable of that name. Raises ConfigError."""
    if module is None:
        raise ConfigError(f"env {env!r} names no module; a factory is module:factory")
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ConfigError(f"env {env!r}: {getattr(module, '__name__', module)} has no callable {name!r}")
    return factory


@contextmanager
def building(env: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Whatever goes wrong inside while an env is built, as one line: ConfigError from gymnasium, EnvFault otherwise."""
    try:
        yield
    except RolloutServiceError:
        raise
    except gymnasium.error.Error as error:
        raise ConfigError(
            f"env {env!r} cannot be made: {_one_line(error)} (an env of your own: module:Name-v0 or module:factory)"
        ) from error
    except USER_ERRORS as error:
        raise EnvFault(f"env {env!r} with arguments {arguments} could not be built: {described(error)}") from error


def check_gymnasium() -> None:
    """Raise ConfigError if the installed gymnasium is older than what is supported."""
    numbers = re.findall(r"\d+", gymnasium.__version__)[:2]
    if tuple(int(number) for number in numbers) < OLDEST_GYMNASIUM:
        raise ConfigError(f"gymnasium {gymnasium.__version__} is installed; {SUPPORTED}; upgrade it")


def check_contract(env: Env, name: str) -> tuple[Any, Any]:
    """Reset and step once, to refuse an env of another API before a run starts. Returns what the two have returned.

    The env is used up: close it. Raises EnvFault: reset must return (observation, info), step (observation, reward,
    terminated, truncated, info).
    """
    try:
        first = env.reset(seed=0)
    except USER_ERRORS as error:
        raise EnvFault(f"env {name!r}: reset(seed=0) raised {described(error)}") from error
    check_reset(first, name)
    env.action_space.seed(0)
    action = env.action_space.sample()
    try:
        result = env.step(action)
    except USER_ERRORS as error:
        raise EnvFault(f"env {name!r}: step({action!r}) raised {described(error)}") from error
    check_step(result, name)
    return first, result


def check_reset(result: object, name: str) -> None:
    """Raise EnvFault unless `result` is what a gymnasium reset returns: (observation, info)."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EnvFault(
            f"{name}: reset returned {_counted(result)}, expected 2 values (observation, info); "
            f"that is the API before gymnasium 0.26: port the env to gymnasium.Env ({SUPPORTED})"
        )


def check_step(result: object, name: str) -> None:
    """Raise EnvFault unless `result` has the five values of a gymnasium step."""
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvFault(
            f"{name}: step returned {_counted(result)}, expected 5 (observation, reward, terminated, truncated, info); "
            f"4 values are the API before gymnasium 0.26: port the env to gymnasium.Env ({SUPPORTED})"
        )


def spaces_from_gymnasium(observation_space: gym_spaces.Space[Any], action_space: gym_spaces.Space[Any]) -> Spaces:
    """The spaces of one single env. Raises SpaceNotSupported, naming the space.

    Observations: Box, Discrete, and Dict and Tuple of these, nested as deep as you like. Actions: Discrete.
    Boxes keep their dtype, but float64 is stored as float32.
    """
    if not isinstance(action_space, gym_spaces.Discrete):
        raise SpaceNotSupported(f"action space {action_space} is not supported; supported: Discrete")
    leaves = tuple(leaf for _, leaf in observation_leaves(observation_space))
    if len({leaf.path for leaf in leaves}) < len(leaves):
        raise SpaceNotSupported(f"observation space {observation_space} has two leaves of one name; rename its keys")
    return Spaces(observation=leaves, action=_discrete("", action_space))


def observation_leaves(space: gym_spaces.Space[Any], keys: Keys = ()) -> Iterator[tuple[Keys, Leaf]]:
    """The arrays an observation consists of, in a fixed order, each with the keys that lead to it."""
    path = "".join(f"/{key}" for key in keys)
    if isinstance(space, gym_spaces.Dict):
        for key, child in space.spaces.items():
            yield from observation_leaves(child, (*keys, key))
    elif isinstance(space, gym_spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from observation_leaves(child, (*keys, index))
    elif isinstance(space, gym_spaces.Discrete):
        yield keys, _discrete(path, space)
    elif isinstance(space, gym_spaces.Box) and space.dtype is not None and str(space.dtype) in _BOX_DTYPES:
        if 0 in space.shape:
            raise SpaceNotSupported(f"observation space {path or 'root'}: {space} has no elements")
        dtype = str(space.dtype)
        yield keys, Leaf(path=path, kind=SpaceKind.BOX, shape=space.shape, dtype=_STORED_AS.get(dtype, dtype))
    else:
        raise SpaceNotSupported(
            f"observation space {path or 'root'}: {space} is not supported; "
            f"supported: Box of {', '.join(sorted(_BOX_DTYPES))}, Discrete, and Dict and Tuple of these"
        )


def _discrete(path: str, space: gym_spaces.Discrete) -> Leaf:
    return Leaf(
        path=path, kind=SpaceKind.DISCRETE, shape=(), dtype=str(np.dtype(space.dtype)), size=int(space.n),
        start=int(space.start),
    )  # fmt: skip


def _import(module_name: str, env: str) -> object:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"env {env!r}: {_one_line(error)}; modules are found on sys.path and in the current directory"
        ) from error
    except USER_ERRORS as error:
        raise EnvFault(f"env {env!r}: importing {module_name} raised {described(error)}") from error


def _checked(made: object, env: str) -> Env:
    if isinstance(made, gymnasium.vector.VectorEnv):
        raise EnvFault(f"env {env!r} is a vector env; set vectorize to factory, or give the single env")
    if not isinstance(made, gymnasium.Env):
        kind = type(made)
        raise EnvFault(
            f"env {env!r} is a {kind.__module__}.{kind.__qualname__}, not a gymnasium.Env; port it ({SUPPORTED})"
        )
    return made


def _counted(result: object) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"one {type(result).__name__}"


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
