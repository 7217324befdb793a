"""How a run ends, and how long each of its processes may take over it. Values only.

Who decides: the supervisor. Who reads: the command line, for its exit code and its last words.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from rollout_service.control.messages import Role

EXIT_FAILED: Final = 1


class How(Enum):
    """How a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True)
class Ending:
    """The first reason to stop wins; what follows from it is not another one."""

    how: How
    reason: str
    exit_code: int


def failed(reason: str) -> Ending:
    return Ending(How.FAILED, reason, EXIT_FAILED)


@dataclass(frozen=True)
class Patience:
    """Seconds from STOP to SIGTERM and to SIGKILL."""

    term_s: float
    kill_s: float


PATIENCE: Final = {
    # The learner wrote its last checkpoint before it published; what is left is to let go of memory.
    (How.FINISHED, Role.ACTOR): Patience(4.0, 6.0),
    (How.FINISHED, Role.LEARNER): Patience(8.0, 10.0),
    # Ctrl-C has to be through within 5 s; the learner needs most of that for its checkpoint.
    (How.INTERRUPTED, Role.ACTOR): Patience(1.5, 2.5),
    (How.INTERRUPTED, Role.LEARNER): Patience(3.0, 4.0),
    (How.FAILED, Role.ACTOR): Patience(1.0, 2.0),
    (How.FAILED, Role.LEARNER): Patience(3.0, 4.0),
}
