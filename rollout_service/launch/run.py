"""What a run consists of besides its roles: the composition of everything the service's process owns.

    settings -> leftovers swept -> probe -> directory locked -> segments -> settings saved -> service -> logs   open_run
    the roles: as children (train), or started by hand (serve)                                             the caller
    STOP told, roles gone -> service thread ended -> unmapped -> unlinked                                  the way back

One ExitStack holds what has to be undone, in the order in which it was made; whichever way the run ends, it unwinds.
What must never happen: torch in this process, something made before the step that takes it back, or memory unlinked
before the roles were told. Left to others: who starts the roles (train), and the loop until the end (supervisor).
"""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, TextIO, cast

from rollout_service.config import TrainConfig, check_fits_one_rollout
from rollout_service.control import descriptors
from rollout_service.control.coordinator import Coordinator
from rollout_service.control.endpoints import (
    SocketAccess,
    group_id,
    prepare_endpoint,
    remove_socket,
    remove_socket_directory,
    socket_endpoint,
)
from rollout_service.control.events import Event
from rollout_service.control.keys import Keys
from rollout_service.control.scheduling import scheduler_for
from rollout_service.control.server import Server
from rollout_service.control.transport import Router
from rollout_service.errors import ConfigError, WaitTimedOut
from rollout_service.launch import prepare
from rollout_service.launch.cleanup import clean_up
from rollout_service.launch.rundir import RunDirectory, default_run_directory
from rollout_service.launch.signals import interruptions
from rollout_service.memory.schema import rollout_fields
from rollout_service.memory.segment import new_run_token
from rollout_service.memory.slots import RolloutMemory
from rollout_service.memory.weights import WeightsMemory
from rollout_service.observe.journal import Journal
from rollout_service.observe.logs import RunLogs
from rollout_service.observe.losses import LostWrites
from rollout_service.observe.metrics import RunMetrics
from rollout_service.observe.progress import Progress, open_progress

SERVER_JOIN_S: Final = 2.0
"""How long the service's thread may take to end; it is woken, so this is a bound and not a wait."""
HEARTBEAT_S: Final = 1.0
BEATS_PER_SILENCE: Final = 5
"""A role whose silence_timeout is short has to be heard this often within it."""


@dataclass(frozen=True)
class Door:
    """Where the service listens. endpoint None: an ipc endpoint made for this run, and removed with it."""

    endpoint: str | None = None
    allow_tcp: bool = False
    key_file: Path | None = None
    """The service's keys, for tcp (control/keys)."""
    group: str | None = None
    """Name or number of a group whose members may take part."""


@dataclass(frozen=True)
class Run:
    """An open run, waiting for its roles. Its service listens at `endpoint`."""

    config: TrainConfig
    """As used: num_actors a number, paths absolute."""
    path: Path
    """The run directory as the user named it."""
    endpoint: str
    segment: str
    """Name of the rollout segment."""
    inbox: queue.SimpleQueue[object]
    """Events of the coordinator, Interruption, and whatever the caller wants to hear of here."""
    server: Server
    metrics: RunMetrics
    journal: Journal
    logs: RunLogs
    progress: Progress

    @property
    def num_actors(self) -> int:
        return int(self.config.num_actors)


@contextmanager
def open_run(config: TrainConfig, *, stream: TextIO | None, door: Door | None = None) -> Iterator[Run]:
    """A run from its settings to its last trace. Progress goes to `stream` (stderr by default).

    door: where it listens for roles that are started by hand; without one the caller starts its actors.
    Raises ConfigError, SpaceNotSupported, SegmentError or CheckpointError before anything of the run exists,
    Interrupted if a stop signal came that early, RunFailed if the env could not be tried out.
    """
    prepare.require_platform()
    by_hand = door is not None
    door = door if door is not None else Door()
    keys = None if door.key_file is None else Keys.read(door.key_file)
    access = SocketAccess(None if door.group is None else group_id(door.group))
    if door.endpoint is not None:
        prepare_endpoint(door.endpoint, allow_tcp=door.allow_tcp, authenticated=keys is not None)
    elif keys is not None:
        raise ConfigError("keys are for tcp: add --endpoint tcp://HOST:PORT --allow-tcp, or leave the key file out")
    started = time.monotonic()
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    with ExitStack() as stack:
        stack.enter_context(prepare.outside_of_other_runs())
        stack.enter_context(interruptions(inbox))
        config, sizing = prepare.resolve(config)
        total_updates = check_fits_one_rollout(config, int(config.num_actors))
        descriptors.require(config.max_actors or int(config.num_actors))
        token = new_run_token()
        path = config.run_dir or default_run_directory(config.env, token, datetime.now().astimezone())
        # The learner may run in another directory than this process.
        config = config.model_copy(update={"run_dir": path.absolute()})
        leftovers = clean_up()
        # A run that resumes has its directory already; a new one makes it only once its settings are known to work.
        opened = stack.enter_context(RunDirectory(path, resume=True)) if config.resume else None
        probed = prepare.probe(config, inbox)
        spec = probed.spec
        run_dir = opened or stack.enter_context(RunDirectory(path, resume=False))

        lost = LostWrites()
        progress = open_progress(f"{config.env}  {path}", stream, lost)
        stack.callback(progress.close)
        journal = stack.enter_context(Journal(path / "run.log", progress, lost))
        endpoint = socket_endpoint(token, access) if door.endpoint is None else door.endpoint
        stack.callback(remove_socket_directory if door.endpoint is None else remove_socket, endpoint)
        # Bound before anything else is written down: a port that the system chose is known only now.
        router = Router(endpoint, allow_tcp=door.allow_tcp, keys=keys, access=access)
        stack.callback(router.close)
        endpoint = router.endpoint
        header = {
            "run_id": token,
            "endpoint": endpoint,
            "run_dir": str(path.absolute()),
            "pid": os.getpid(),
            "run_spec": spec.model_dump(mode="json"),
        }
        memory = stack.enter_context(
            RolloutMemory.create(
                rollout_fields(spec.spaces, spec.state),
                num_slots=spec.num_slots,
                envs_per_slot=spec.envs_per_actor,
                num_steps=spec.num_steps,
                token=token,
                spec=json.dumps(header).encode(),
            )
        )
        brief = {key: header[key] for key in ("run_id", "endpoint", "run_dir", "pid")}
        weights = stack.enter_context(
            WeightsMemory.create(spec.parameters, token=token, spec=json.dumps(brief).encode())
        )
        if access.group is not None:
            memory.share_with_group(access.group)
            weights.share_with_group(access.group)
        # Nothing refuses this run any more.
        run_dir.begin(config, spec)
        for line in leftovers.lines():
            journal.say(f"removed, left by a run that is dead: {line}")
        if run_dir.moved_aside is not None:
            journal.say(f"an earlier run's files were moved to {run_dir.moved_aside}")
        for warning in (*run_dir.resume_point.warnings, *probed.warnings):
            journal.say(warning)
        size = f"{memory.nbytes / 2**20:.1f} MiB"
        journal.say(f"{sizing}, {spec.num_steps} steps, {total_updates} updates, {size}  {path}")

        resume_point = run_dir.resume_point
        coordinator = Coordinator(
            spec,
            run_id=token,
            config_json=config.to_json(),
            rollout_segment=memory.name,
            weights_segment=weights.name,
            total_updates=total_updates,
            step_timeout=config.step_timeout,
            learner_timeout=config.learner_timeout,
            heartbeat_interval=min(HEARTBEAT_S, config.silence_timeout / BEATS_PER_SILENCE),
            silence_timeout=config.silence_timeout,
            updates_done=resume_point.updates,
            env_steps_done=resume_point.env_steps,
            scheduler=scheduler_for(config, spec.num_places),
            elastic=config.elastic,
            kept_places=0 if by_hand else spec.num_actors,
        )
        server = Server(router, coordinator)
        server.events = cast("queue.SimpleQueue[Event]", inbox)
        server.start()
        stack.callback(_end_service, server)

        metrics = RunMetrics(
            total_steps=total_updates * spec.steps_per_rollout,
            total_updates=total_updates,
            num_actors=spec.num_actors,
            max_actors=spec.num_places,
            started=started,
            streaming=config.max_policy_lag > 0,
            env_steps=resume_point.env_steps,
            updates=resume_point.updates,
        )
        logs = stack.enter_context(
            RunLogs(path, tensorboard=config.tensorboard, resume_at=resume_point.env_steps, lost=lost)
        )
        yield Run(config, path, endpoint, memory.name, inbox, server, metrics, journal, logs, progress)


def _end_service(server: Server) -> None:
    server.stop()
    # A loop that hangs must not keep the rest from being taken down; its thread dies with this process.
    with suppress(WaitTimedOut):
        server.join(SERVER_JOIN_S)
