"""The learner's house: rollout buffer, estimators, sequence batches, PPO, and the process that trains.

Public names: `RecurrentRolloutBuffer`, `GaeRule`, `SequenceBatch`. They are loaded on first use, because the buffer
brings torch with it and `import learner` should not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learner.rollout_buffer import RecurrentRolloutBuffer
    from learner.sequences import SequenceBatch
    from rollout_service.config import GaeRule

__all__ = ["GaeRule", "RecurrentRolloutBuffer", "SequenceBatch"]

_HOMES = {
    "GaeRule": "rollout_service.config",
    "RecurrentRolloutBuffer": "learner.rollout_buffer",
    "SequenceBatch": "learner.sequences",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
