"""What the coordinator reports to the rest of its process: plain facts, in the order in which they became true.

Writer: the coordinator (and the server, for its own failure). Readers: supervisor, metrics, progress. Events carry no
decisions: whoever reads them may be slow or absent, and the run goes on the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout_service.control.messages import Episode, Role
from rollout_service.tally import TallyRecord


@dataclass(frozen=True)
class PeerWelcomed:
    """An actor or learner process has taken its place; it may still turn out not to fit."""

    role: Role
    actor_id: int | None
    incarnation: int
    pid: int


@dataclass(frozen=True)
class ActorJoined:
    """An actor's environment matches the run; it will be granted slots."""

    actor_id: int
    incarnation: int
    pid: int


@dataclass(frozen=True)
class ActorStuck:
    """An actor has not moved for `seconds`. phase: the working phase it is in, or SILENT_PHASE without heartbeats."""

    actor_id: int
    incarnation: int
    pid: int
    phase: str
    seconds: float


@dataclass(frozen=True)
class LearnerReady:
    """A learner's weights are out, and grants may go. updates, env_steps: where the run stands with it.

    restored: it went back, or another learner was lost before; the counts are what that has cost. unannounced_update:
    the lost one had saved an update without having said so.
    """

    pid: int
    version: int
    updates: int
    env_steps: int
    restored: bool = False
    unannounced_update: bool = False
    dropped_rollouts: int = 0
    dropped_env_steps: int = 0
    rolled_back_updates: int = 0
    rolled_back_env_steps: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    """The learner's, of the last update."""
    tally: TallyRecord = field(default_factory=TallyRecord)
    """As of that update."""


@dataclass(frozen=True)
class LearnerStuck:
    """The learner is at work and has not moved for `seconds`."""

    pid: int
    phase: str
    seconds: float


@dataclass(frozen=True)
class LearnerSilent:
    """The learner has sent no heartbeat for `seconds`."""

    pid: int
    seconds: float


@dataclass(frozen=True)
class OutputLost:
    """So many more writes to this process's own log were lost: its disk did not take them."""

    role: Role
    actor_id: int | None
    writes: int


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
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchFormed:
    """A batch went to the learner. wait_s: from its first filled slot to its last, which was `waited_for`'s.

    With a deadline it may go without somebody: `waited_for` is then the first of these, and wait_s lasts until now.
    """

    update: int
    env_steps: int
    waited_for: int
    wait_s: float
    partial: tuple[int, ...] = ()
    """Actors whose slot holds fewer steps than it has."""
    late: tuple[int, ...] = ()
    """Actors still at work, whose commit will be dropped."""
    unclaimed: tuple[int, ...] = ()
    """Places in which nobody has joined; from now on they are not waited for."""
    lags: tuple[int, ...] = ()
    """Policy lag of each rollout in it, in updates."""


@dataclass(frozen=True)
class RolloutTooOld:
    """A rollout was dropped: it is `lag` updates older than the newest weights, more than max_policy_lag."""

    actor_id: int
    lag: int
    env_steps: int


@dataclass(frozen=True)
class BatchOverdue:
    """A bank waits for longer than it should. awaited: for whom, in words."""

    update: int
    seconds: float
    committed: int
    needed: int
    awaited: tuple[str, ...]


@dataclass(frozen=True)
class UpdateFinished:
    """The learner published. env_steps: all that have been trained on so far."""

    update: int
    version: int
    env_steps: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    checkpoint: str | None
    checkpoint_failure: str | None = None
    """Why the one that was due could not be written."""


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
    PeerWelcomed
    | ActorJoined
    | ActorStuck
    | LearnerReady
    | LearnerStuck
    | LearnerSilent
    | OutputLost
    | PeerLeft
    | PeerRefused
    | RolloutCommitted
    | BatchFormed
    | BatchOverdue
    | RolloutTooOld
    | UpdateFinished
    | RunFinished
    | ServerFailed
)
