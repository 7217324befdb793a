"""Where a run's settings come from: defaults < preset < TOML file < command line, merged before anything is checked.

    rollout-service train --preset tmaze --config mine.toml --num-steps 64

Who calls: the command line. The options are the fields of TrainConfig, and the few that say where settings come from or
where to listen, so a new setting is one line in `config.py`. What must never happen: a check that fails on a value
which a stronger source replaces, or torch imported for `--help`. Left to others: what the values mean and which limits
they have (config).
"""

from __future__ import annotations

import contextlib
import io
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import tyro
from pydantic import ConfigDict, TypeAdapter, ValidationError

from rollout_service.config import TrainConfig
from rollout_service.envs.presets import load_preset
from rollout_service.errors import ConfigError
from rollout_service.launch.prepare import validated
from rollout_service.launch.rundir import CONFIG_FILE

if TYPE_CHECKING:
    from rollout_service.launch.run import Door

PROGRAM: Final = "rollout-service"
USAGE: Final = 2
"""What tyro leaves with when it cannot read the words."""
BORDER: Final = "│"


def key_values(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words as a dict. Values are JSON where they are JSON (`3`, `0.5`, `true`, `[1,2]`), else text."""
    found = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ValueError(f"{word!r} is not key=value")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


_KEY_VALUES: Final = tyro.constructors.PrimitiveConstructorSpec[dict[str, Any]](
    nargs="*",
    metavar="KEY=VALUE",
    instance_from_str=key_values,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [f"{key}={json.dumps(entry)}" for key, entry in value.items()],
)


class TrainArguments(TrainConfig):
    """Train: actors collect in their own processes, the learner updates, until total_steps."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    env_kwargs: Annotated[dict[str, Any], _KEY_VALUES] = {}
    """Arguments of the env. Added to those of a preset or file for the same env; the same key wins."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one last line with the result on standard output."""
    preset: str | None = None
    """Settings that are known to learn a task; `rollout-service envs` lists them."""
    config: Path | None = None
    """TOML file with settings by these names, e.g. the config.toml of an earlier run."""


class ServeArguments(TrainArguments):
    """Serve: a run whose learner and actors are started by hand, before this or after it."""

    endpoint: str | None = None
    """Where to listen: ipc:///DIRECTORY/NAME, in a directory in which nobody else may write. Default: one made for this
    run. It is printed as the first line on standard output."""
    allow_tcp: bool = False
    """Allow an endpoint tcp://127.0.0.1:PORT, which every user of this machine can connect to; with a key file also
    others than this machine's, for holders of a key."""
    key_file: Path | None = None
    """The service's key file, for tcp; `rollout-service keygen` makes it. Whoever has no key it names is refused."""
    share_with_group: str | None = None
    """Let the members of this group take part: socket and shared memory get mode 0660. Default: this user alone."""


COMMANDS: Final[dict[type[TrainArguments], str]] = {TrainArguments: "train", ServeArguments: "serve"}


def parse_train(words: Sequence[str]) -> TrainConfig:
    """The settings of `rollout-service train <words>`.

    Raises ConfigError in one line for anything that is wrong; SystemExit(0) after printing `--help`.
    """
    return _parse(words, TrainArguments)[0]


def parse_serve(words: Sequence[str]) -> tuple[TrainConfig, Door]:
    """The settings of `rollout-service serve <words>`, and where it is to listen. Raises as `parse_train` does."""
    from rollout_service.launch.run import Door

    config, beyond = _parse(words, ServeArguments)
    return config, Door(beyond["endpoint"], beyond["allow_tcp"], beyond["key_file"], beyond["share_with_group"])


def _parse(words: Sequence[str], kind: type[TrainArguments]) -> tuple[TrainConfig, dict[str, Any]]:
    """The settings of a run, and what the command line says besides."""
    given = _options(words, TrainConfig().model_dump(), kind)
    base, origin = _sources(given)
    if origin:
        # Once more, with the weaker sources as defaults: what the line does not say comes from them.
        given = _options(words, TrainConfig().model_dump() | base, kind)
    settings = {name: value for name, value in given.items() if name in TrainConfig.model_fields}
    weaker = base.get("env_kwargs", {}) if settings["env"] == base.get("env", settings["env"]) else {}
    settings["env_kwargs"] = weaker | settings["env_kwargs"]
    return validated(settings), given


def _sources(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Preset and file, merged; and their names. A resumed run starts from the settings it saved."""
    base: dict[str, Any] = {}
    origin: list[str] = []
    if given["preset"] is not None:
        base = _merged(base, load_preset(given["preset"]))
        origin.append(given["preset"])
    path: Path | None = given["config"]
    if path is None and given["resume"] and given["run_dir"] is not None:
        saved = Path(given["run_dir"]) / CONFIG_FILE
        path = saved if saved.is_file() else None
    if path is not None:
        base = _merged(base, _read_toml(path))
        origin.append(str(path))
    return {name: _field_value(name, value, origin[-1]) for name, value in base.items()}, origin


def _field_value(name: str, value: Any, origin: str) -> Any:
    """A value of a preset or file as its field's own type. Limits are checked later, on the merged settings."""
    kind: Any = TrainConfig.model_fields[name].annotation
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {name} is {value!r}: {error.errors()[0]['msg']}") from None


def _merged(weaker: dict[str, Any], stronger: dict[str, Any]) -> dict[str, Any]:
    """Setting by setting; env_kwargs key by key as long as the env stays the same."""
    same_env = stronger.get("env", weaker.get("env")) == weaker.get("env")
    kwargs = (weaker.get("env_kwargs", {}) if same_env else {}) | stronger.get("env_kwargs", {})
    return weaker | stronger | {"env_kwargs": kwargs}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from None
    if unknown := sorted(set(settings) - set(TrainConfig.model_fields)):
        raise ConfigError(
            f"config file {path} has settings that do not exist: {', '.join(unknown)}; see {PROGRAM} train --help"
        )
    if not isinstance(settings.get("env_kwargs", {}), dict):
        raise ConfigError(f"config file {path}: env_kwargs must be a table, e.g. env_kwargs = {{ corridor = 20 }}")
    return settings


def _options(words: Sequence[str], defaults: Mapping[str, Any], kind: type[TrainArguments]) -> dict[str, Any]:
    """The command line over `defaults`, unchecked beyond types. Raises ConfigError in one line."""
    start = kind.model_construct(**{**defaults, "env_kwargs": {}})
    program = f"{PROGRAM} {COMMANDS[kind]}"
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            chosen = tyro.cli(
                kind,
                prog=program,
                default=start,
                args=list(words),
                registry=_registry(kind),
                config=(tyro.conf.EnumChoicesFromValues,),
            )
    except SystemExit as leaving:
        if leaving.code != USAGE:  # help was printed
            raise
        raise ConfigError(f"{_first_words(complaint.getvalue())}; see {program} --help") from None
    return dict(vars(chosen) if not isinstance(chosen, dict) else chosen)


def _registry(kind: type[TrainArguments]) -> tyro.constructors.ConstructorRegistry:
    """Makes the parser hand back a plain dict, so that checks run once, on the merged settings, with our own words."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.struct_rule
    def unchecked(info: tyro.constructors.StructTypeInfo) -> tyro.constructors.StructConstructorSpec | None:
        if info.type is not kind:
            return None
        hints = get_type_hints(kind, include_extras=True)
        fields = tuple(
            tyro.constructors.StructFieldSpec(
                name=name, type=hints[name], default=getattr(info.default, name), helptext=field.description
            )
            for name, field in kind.model_fields.items()
        )
        return tyro.constructors.StructConstructorSpec(instantiate=dict, fields=fields)

    return registry


def _first_words(box: str) -> str:
    """The first paragraph of what the parser drew into a box, as one line."""
    words: list[str] = []
    for line in box.splitlines():
        inner = line.strip(f" {BORDER}")
        if inner.startswith("───"):
            break
        if line.startswith(BORDER) and inner:
            words.append(inner)
    text = " ".join(words).partition(" Got errors:")[0]
    return text or " ".join(box.split()) or "the command line cannot be read"
