"""rollout-service: rollouts of recurrent policies from many processes, through shared memory, and PPO that learns from
them.

Public names: `train` runs what `rollout-service train` runs; `TrainConfig` are its settings, `Outcome` is what came of
it, `RolloutServiceError` is the base of every error raised on purpose. They are loaded on first use: importing this
package imports nothing. The learner's public names are in `learner`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_service.config import TrainConfig
    from rollout_service.errors import RolloutServiceError
    from rollout_service.launch.train import Outcome, train

__all__ = ["Outcome", "RolloutServiceError", "TrainConfig", "train"]

_HOMES = {
    "Outcome": "rollout_service.launch.train",
    "RolloutServiceError": "rollout_service.errors",
    "TrainConfig": "rollout_service.config",
    "train": "rollout_service.launch.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
