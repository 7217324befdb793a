"""What the coordinator reports to the rest of its process: plain facts, in the order in which they became true.

Writer: the coordinator (and the server, for its own failure). Readers: supervisor, metrics, progress. Events carry no
decisions: whoever reads them may be slow or absent, and the run goes on the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout_service.control.messages import Episode, Role


@dataclass(frozen=True)
class ActorJoined:
    """An actor's environment matches the run; it will be granted slots."""

    actor_id: int
    incarnation: int
    pid: int


@dataclass(frozen=True)
class ActorStuck:
    """An actor has not moved for `seconds`. phase: the working phase it is in, or "silent" without heartbeats."""

    actor_id: int
    incarnation: int
    pid: int
    phase: str
    seconds: float


@dataclass(frozen=True)
class PeerLeft:
    """A peer said goodbye itself; `traceback` is not empty if an exception made it."""

    role: Role
    actor_id: int | None
    incarnation: int
    pid: int
    reason: str
    traceback: str


@dataclass(frozen=True)
class PeerRefused:
    """A peer was turned away; the reason names both values."""

    role: Role
    pid: int
    reason: str


@dataclass(frozen=True)
class RolloutCommitted:
    """A filled slot was accepted. env_steps: envs * valid_steps."""

    actor_id: int
    incarnation: int
    slot: int
    env_steps: int
    version: int
    episodes: tuple[Episode, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchFormed:
    """A bank went to the learner. wait_s: from its first filled slot to its last, which was `waited_for`'s."""

    update: int
    env_steps: int
    waited_for: int
    wait_s: float


@dataclass(frozen=True)
class UpdateFinished:
    """The learner published. env_steps: all that have been trained on so far."""

    update: int
    version: int
    env_steps: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    checkpoint: str | None


@dataclass(frozen=True)
class RunFinished:
    """No more grants. reason "finished": the last update was published."""

    reason: str


@dataclass(frozen=True)
class ServerFailed:
    """The service's loop raised; peers were told to stop."""

    error: str
    traceback: str


Event = (
    ActorJoined
    | ActorStuck
    | PeerLeft
    | PeerRefused
    | RolloutCommitted
    | BatchFormed
    | UpdateFinished
    | RunFinished
    | ServerFailed
)
