"""Settings that are known to learn, one TOML file per task; keys are the field names of TrainConfig.

Read by the command line before anything else starts: no torch, no gymnasium here.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

from rollout_service.errors import ConfigError

_SUFFIX = ".toml"


def preset_names() -> tuple[str, ...]:
    """Names that `load_preset` knows, sorted."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX)))


def load_preset(name: str) -> dict[str, Any]:
    """The settings of one preset. Raises ConfigError for an unknown name, listing those there are."""
    names = preset_names()
    if name not in names:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(names)}")
    return tomllib.loads(resources.files(__name__).joinpath(name + _SUFFIX).read_text(encoding="utf-8"))
