"""A run without processes: the coordinator, a clock that tests move, and peers that remember what they were sent."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollout_service.control.coordinator import Coordinator, Effect, Notify, Send
from rollout_service.control.events import Event
from rollout_service.control.messages import (
    Batch,
    Commit,
    Grant,
    Heartbeat,
    Hello,
    Join,
    Message,
    Publish,
    Ready,
    Role,
    Welcome,
)
from rollout_service.control.scheduling import Scheduler
from rollout_service.runspec import (
    ArraySpec,
    AutoresetMode,
    Leaf,
    PolicySpec,
    RunSpec,
    SpaceKind,
    Spaces,
    StateStrategy,
)

OBSERVATION = Leaf(kind=SpaceKind.BOX, shape=(2,), dtype="float32")
ACTION = Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=2)
STEPS, ENVS = 8, 2
STEP_TIMEOUT_S = 5.0

M = TypeVar("M", bound=Message)
E = TypeVar("E")


def make_spec(num_actors: int = 2, **changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "env": "tests.fixtures.envs:TickEnv",
        "spaces": Spaces(observation=(OBSERVATION,), action=ACTION),
        "policy": PolicySpec(hidden_dim=4),
        "state": {"hidden": (1, 4), "cell": (1, 4)},
        "parameters": (ArraySpec(name="weight", shape=(3, 4), dtype="float32"),),
        "num_steps": STEPS,
        "num_actors": num_actors,
        "envs_per_actor": ENVS,
        "envs_per_forward": ENVS,
    }
    return RunSpec(**{**fields, **changes})


def make_join(spec: RunSpec, **changes: Any) -> Join:
    fields: dict[str, Any] = {
        "spaces": spec.spaces,
        "autoreset": AutoresetMode.ACTOR,
        "run_digest": spec.digest(),
        "state_strategy": spec.state_strategy,
    }
    return Join(**{**fields, **changes})


def make_coordinator(
    spec: RunSpec,
    total_updates: int = 100,
    scheduler: Scheduler | None = None,
    heartbeat_interval: float = 1.0,
    updates_done: int = 0,
    **changes: Any,
) -> Coordinator:
    return Coordinator(
        spec,
        run_id="run-1",
        config_json="{}",
        rollout_segment="rs-token-rollout",
        weights_segment="rs-token-weights",
        total_updates=total_updates,
        step_timeout=STEP_TIMEOUT_S,
        heartbeat_interval=heartbeat_interval,
        updates_done=updates_done,
        scheduler=scheduler,
        **changes,
    )


@dataclass
class Peer:
    """One main socket: what it was sent and has not taken yet."""

    world: World
    address: bytes
    pid: int
    inbox: list[Message] = field(default_factory=list)
    welcome: Welcome | None = None

    def tell(self, message: Message) -> None:
        self.world.tell(self.address, message)

    def take(self, kind: type[M]) -> M:
        """The only message of this kind in the inbox, which is empty of that kind afterwards."""
        found = [message for message in self.inbox if isinstance(message, kind)]
        assert len(found) == 1, f"expected one {kind.__name__} for {self.address!r}, got {self.inbox}"
        self.inbox = [message for message in self.inbox if not isinstance(message, kind)]
        return found[0]

    def got(self, kind: type[Message]) -> bool:
        return any(isinstance(message, kind) for message in self.inbox)

    def commit(self, grant: Grant, valid_steps: int = STEPS, **changes: Any) -> None:
        fields: dict[str, Any] = {"valid_steps": valid_steps, "version": grant.version}
        self.tell(Commit(slot=grant.slot, epoch=grant.epoch, **{**fields, **changes}))

    def publish(self, batch: Batch, seeded: tuple[int, ...] | None = None, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "version": (self.world.coordinator.version or 0) + 1,
            "seeded": tuple(slot for slot in batch.seed_into if slot is not None) if seeded is None else seeded,
        }
        self.tell(Publish(update=batch.update, **{**fields, **changes}))

    def beat(self, progress: int, phase: str) -> None:
        """A heartbeat, from this process's other socket."""
        assert self.welcome is not None
        role = Role.LEARNER if self.welcome.actor_id is None else Role.ACTOR
        beat = Heartbeat(
            role=role,
            pid=self.pid,
            actor_id=self.welcome.actor_id,
            incarnation=self.welcome.incarnation,
            progress=progress,
            phase=phase,
        )
        self.world.tell(self.address + b"-heart", beat)


class World:
    """The run. `now` is moved by hand."""

    def __init__(self, num_actors: int = 2, *, scheduler: Scheduler | None = None, **changes: Any) -> None:
        total_updates, updates_done = changes.pop("total_updates", 100), changes.pop("updates_done", 0)
        places = {name: changes.pop(name) for name in ("elastic", "kept_places") if name in changes}
        self.spec = make_spec(num_actors, **changes)
        self.coordinator = make_coordinator(self.spec, total_updates, scheduler, updates_done=updates_done, **places)
        self.now = 100.0
        self.events: list[Event] = []
        self.sent: dict[bytes, list[Message]] = defaultdict(list)
        self.peers: dict[bytes, Peer] = {}
        self._pids = 1000

    def tell(self, address: bytes, message: Message) -> None:
        self.carry_out(list(self.coordinator.handle(address, message, self.now)))

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self.sent[peer].append(message)
                    if peer in self.peers:
                        self.peers[peer].inbox.append(message)
                case Notify(event):
                    self.events.append(event)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.carry_out(self.coordinator.tick(self.now))

    def peer(self, name: str) -> Peer:
        self._pids += 1
        address = f"{name}-{self._pids}".encode()
        self.peers[address] = Peer(self, address, self._pids)
        return self.peers[address]

    def hello(self, actor_id: int | None = None, incarnation: int = 0, **changes: Any) -> Peer:
        """An actor up to WELCOME (or REFUSED)."""
        peer = self.peer("actor")
        peer.tell(Hello(role=Role.ACTOR, pid=peer.pid, requested_actor=actor_id, incarnation=incarnation, **changes))
        if peer.got(Welcome):
            peer.welcome = peer.take(Welcome)
        return peer

    def actor(self, actor_id: int | None = None, incarnation: int = 0) -> Peer:
        """An actor that has joined."""
        peer = self.hello(actor_id, incarnation)
        peer.tell(make_join(self.spec))
        return peer

    def actors(self) -> list[Peer]:
        return [self.actor(actor_id) for actor_id in range(self.spec.num_actors)]

    def learner(self, *, ready: bool = True, **progress: int) -> Peer:
        """A learner, with weights one version above the service's unless `version` says otherwise."""
        peer = self.peer("learner")
        peer.tell(Hello(role=Role.LEARNER, pid=peer.pid))
        peer.welcome = peer.take(Welcome)
        if ready:
            version = progress.pop("version", peer.welcome.version + 1)
            peer.tell(Ready(version=version, **progress))
        return peer

    def events_of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.coordinator.report(self.now)["counters"]
        return counters


def started(num_actors: int = 2, **changes: Any) -> tuple[World, Peer, list[Peer], list[Grant]]:
    """A run whose actors hold the first bank."""
    world = World(num_actors, **changes)
    learner = world.learner()
    actors = world.actors()
    return world, learner, actors, [actor.take(Grant) for actor in actors]


ZERO = StateStrategy.ZERO
