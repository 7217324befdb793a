"""RunSpec: the one document that says what a run is.

A probe child builds it before any segment exists; it stands in the segment's header and in WELCOME, and its digest is
what handshakes compare. Torch-free and gymnasium-free: every process, the parent included, can read it.

Axis letters: T num_steps, N num_envs, E envs of one actor, A places, S slots, L recurrent layers, H hidden_dim.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

PROTOCOL_VERSION = 3
NUM_BANKS = 2
"""Lockstep fills one bank while the learner seeds the other."""


class Core(StrEnum):
    """The recurrent core of the policy."""

    LSTM = "lstm"
    NONE = "none"


class StateStrategy(StrEnum):
    """Where actors and training start their recurrent state from."""

    STORED = "stored"
    ZERO = "zero"


class AutoresetMode(StrEnum):
    """Who resets an env after its episode ended. ACTOR: single envs, reset by the actor's own vectorizer."""

    ACTOR = "actor"
    NEXT_STEP = "next_step"
    SAME_STEP = "same_step"
    DISABLED = "disabled"


class Vectorize(StrEnum):
    """How the envs of one actor are stepped together.

    NONE: single envs, one after another, reset by the actor. SYNC, ASYNC: the same single envs inside gymnasium's
    SyncVectorEnv or AsyncVectorEnv. VECTOR_ENTRY_POINT: the vector env that a gymnasium id registers. FACTORY: what
    `module:factory` returns when it is called with num_envs and env_kwargs. ENVPOOL: the task of that name in the
    package envpool.
    """

    NONE = "none"
    SYNC = "sync"
    ASYNC = "async"
    VECTOR_ENTRY_POINT = "vector_entry_point"
    FACTORY = "factory"
    ENVPOOL = "envpool"


class OnBadData(StrEnum):
    """What follows when an env returns an observation or a reward that no transition can hold."""

    STOP = "stop"
    DROP = "drop"


class SpaceKind(StrEnum):
    BOX = "box"
    DISCRETE = "discrete"


class Frozen(BaseModel):
    """Base of the documents that cross a process border: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Leaf(Frozen):
    """One array of a space. `path` is "" for the root of a plain space."""

    path: str = ""
    kind: SpaceKind
    shape: tuple[int, ...]
    dtype: str
    size: int | None = None
    """Discrete: the number of choices n; None for Box."""
    start: int = 0
    """Discrete: the value of the first choice as the env counts; the buffer stores the env's own values."""

    @property
    def is_image(self) -> bool:
        """uint8 arrays of rank 3 are images: stored as they are, scaled to [0, 1] at the network's input."""
        return self.kind is SpaceKind.BOX and self.dtype == "uint8" and len(self.shape) == 3


class Spaces(Frozen):
    """Observation leaves and the action space of one single env."""

    observation: tuple[Leaf, ...]
    action: Leaf


class ArraySpec(Frozen):
    """One named array: a parameter or buffer of the policy, in publication order."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


class PolicySpec(Frozen):
    """What a policy is built from, besides the spaces."""

    core: Core = Core.LSTM
    hidden_dim: Annotated[int, Field(ge=1)] = 64
    num_layers: Annotated[int, Field(ge=1)] = 1
    encoder_dim: Annotated[int, Field(ge=1)] = 64
    chrono_max: Annotated[float, Field(gt=2.0)] | None = None
    """Chrono initialisation: forget bias log U(1, chrono_max - 1), input bias its negative. None: plain biases."""
    normalize_observations: bool = False


class RunSpec(Frozen):
    """Everything on which an actor, the service and a learner have to agree."""

    protocol_version: int = PROTOCOL_VERSION
    env: str
    env_kwargs: dict[str, Any] = {}
    vectorize: Vectorize = Vectorize.NONE
    spaces: Spaces
    autoreset: AutoresetMode = AutoresetMode.ACTOR
    """What the env turned out to do, not a wish."""
    policy: PolicySpec
    state: dict[str, tuple[int, ...]]
    """Recurrent state of one env: array name -> shape, e.g. {"hidden": (L, H), "cell": (L, H)}; {} without a core."""
    parameters: tuple[ArraySpec, ...]
    state_strategy: StateStrategy = StateStrategy.STORED
    num_steps: Annotated[int, Field(ge=1)]
    max_policy_lag: Annotated[int, Field(ge=0)] = 0
    """Updates by which a rollout may be older than the weights it is trained with; 0: lockstep."""
    num_actors: Annotated[int, Field(ge=1)]
    """Actors that the run begins with, and that a full rollout is of."""
    max_actors: Annotated[int, Field(ge=1)] | None = None
    """Actors that may be there at once, since others may join; None: num_actors."""
    envs_per_actor: Annotated[int, Field(ge=1)]
    envs_per_forward: Annotated[int, Field(ge=1)]
    seed: int = 1
    obs_limit: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Largest magnitude of a number in an observation; None: any finite one."""
    on_bad_data: OnBadData = OnBadData.STOP
    barrier_interval: Annotated[int, Field(ge=0)] = 0
    """Updates between two barriers, behind which episodes, states and random streams begin anew; 0: there are none.
    With them no stream depends on the incarnation that draws from it."""
    checksum_slots: bool = False
    """Actors stamp a checksum of what they commit."""

    @property
    def num_places(self) -> int:
        """A: places for actors. Those from num_actors on are empty until somebody joins."""
        return self.max_actors or self.num_actors

    @property
    def num_envs(self) -> int:
        """Envs of all places."""
        return self.num_places * self.envs_per_actor

    @property
    def num_slots(self) -> int:
        """Two banks in lockstep; beyond a lag of 1 one more per update that collection may be ahead."""
        return max(NUM_BANKS, 1 + self.max_policy_lag) * self.num_places

    @property
    def steps_per_rollout(self) -> int:
        """Rows of one full rollout of num_actors: its env steps, unless the envs insert filler rows."""
        return self.num_actors * self.envs_per_actor * self.num_steps

    def rollouts_that_fit(self, env_steps: int, total_updates: int) -> int:
        """How many whole rollouts are still to come in a run of total_updates full ones, behind so many env steps.

        At none it ends. Partial rollouts, filler rows and missing actors leave steps for more updates than
        total_updates, further actors for fewer.
        """
        return max(0, total_updates * self.steps_per_rollout - env_steps) // self.steps_per_rollout

    def bank(self, index: int) -> range:
        """The adjacent slots of bank `index`; slot bank * A + a belongs to actor a."""
        return range(index * self.num_places, (index + 1) * self.num_places)

    def to_json(self) -> str:
        """Canonical JSON: equal documents give equal bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> RunSpec:
        return cls.model_validate_json(text)

    def digest(self) -> str:
        """What handshakes compare: 32 hex digits over the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]
