"""One run from settings to result: the composition of everything the parent process owns.

    settings -> leftovers swept -> probe -> segments -> service thread -> children -> supervisor's loop -> teardown

Who calls: `rollout-service train`, and programs that train from Python. One ExitStack holds what has to be undone, in
the order in which it was made; whichever way the run ends, it unwinds. What must never happen: torch in this process,
or something made before the step that takes it back.
"""

from __future__ import annotations

import json
import os
import queue
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, TextIO, cast

from rollout_service.config import TrainConfig, check_fits_one_rollout
from rollout_service.control.coordinator import Coordinator
from rollout_service.control.events import Event
from rollout_service.control.server import Server
from rollout_service.control.transport import Router, remove_socket_directory, socket_endpoint
from rollout_service.errors import ConfigError, WaitTimedOut
from rollout_service.launch import prepare
from rollout_service.launch.children import Launcher
from rollout_service.launch.cleanup import clean_up
from rollout_service.launch.rundir import RunDirectory, default_run_directory
from rollout_service.launch.signals import interruptions
from rollout_service.launch.supervisor import Ending, How, Supervisor
from rollout_service.memory.schema import rollout_fields
from rollout_service.memory.segment import new_run_token
from rollout_service.memory.slots import RolloutMemory
from rollout_service.memory.weights import WeightsMemory
from rollout_service.observe.journal import Journal
from rollout_service.observe.logs import RunLogs
from rollout_service.observe.metrics import RunMetrics, Summary, log_record
from rollout_service.observe.progress import open_progress

SERVER_JOIN_S: Final = 2.0
"""How long the service's thread may take to end; it is woken, so this is a bound and not a wait."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and its figures."""

    ending: Ending
    summary: Summary
    run_dir: Path

    def result(self) -> dict[str, object]:
        """The last line of `--json`."""
        return {
            "env_steps": self.summary.env_steps,
            "updates": self.summary.updates,
            "return_mean": self.summary.return_mean,
            "success_rate": self.summary.success_rate,
            "steps_per_second": self.summary.steps_per_second,
            "run_dir": str(self.run_dir),
        }


def train(config: TrainConfig, *, stream: TextIO | None = None) -> Outcome:
    """Runs a training to its end, to a stop signal, or to its failure. Progress goes to `stream` (stderr by default).

    Raises ConfigError, SpaceNotSupported, SegmentError or CheckpointError before any process of the run exists,
    Interrupted if a stop signal came that early, RunFailed if the env could not be tried out.
    """
    prepare.require_platform()
    started = time.monotonic()
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    with ExitStack() as stack:
        stack.enter_context(interruptions(inbox))
        config, sizing = prepare.resolve(config)
        num_actors = int(config.num_actors)
        total_updates = check_fits_one_rollout(config, num_actors)
        token = new_run_token()
        path = config.run_dir or default_run_directory(config.env, token, datetime.now().astimezone())
        config = config.model_copy(update={"run_dir": path})
        leftovers = clean_up()
        # A run that resumes has its directory already; a new one makes it only once its settings are known to work.
        opened = stack.enter_context(RunDirectory(path, resume=True)) if config.resume else None
        spec = prepare.probe(config, inbox)
        run_dir = opened or stack.enter_context(RunDirectory(path, resume=False))

        progress = open_progress(f"{config.env}  {path}", stream)
        stack.callback(progress.close)
        journal = stack.enter_context(Journal(path / "run.log", progress))
        for line in leftovers.lines():
            journal.say(f"removed, left by a run that is dead: {line}")
        if run_dir.moved_aside is not None:
            journal.say(f"an earlier run's files were moved to {run_dir.moved_aside}")

        endpoint = socket_endpoint(token)
        stack.callback(remove_socket_directory, endpoint)
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
        run_dir.save(config)
        size = f"{memory.nbytes / 2**20:.1f} MiB"
        journal.say(f"{sizing}, {spec.num_steps} steps, {total_updates} updates, {size}  {path}")

        resume_point = run_dir.resume_point
        router = Router(endpoint)
        stack.callback(router.close)
        coordinator = Coordinator(
            spec,
            run_id=token,
            config_json=config.to_json(),
            rollout_segment=memory.name,
            weights_segment=weights.name,
            total_updates=total_updates,
            step_timeout=config.step_timeout,
            updates_done=resume_point.updates,
            env_steps_done=resume_point.env_steps,
        )
        server = Server(router, coordinator)
        server.events = cast("queue.SimpleQueue[Event]", inbox)
        server.start()
        stack.callback(_end_service, server)

        metrics = RunMetrics(
            total_steps=total_updates * spec.steps_per_rollout,
            total_updates=total_updates,
            num_actors=num_actors,
            started=started,
            env_steps=resume_point.env_steps,
            updates=resume_point.updates,
        )
        logs = stack.enter_context(RunLogs(path, tensorboard=config.tensorboard, resume_at=resume_point.env_steps))
        supervisor = Supervisor(
            config,
            num_actors=num_actors,
            launcher=Launcher(inbox, endpoint, path, config.resume),
            server=server,
            inbox=inbox,
            metrics=metrics,
            journal=journal,
            logs=logs,
            progress=progress,
        )
        ending = supervisor.run()
        journal.note(f"{ending.how.value}: {ending.reason}")
        return Outcome(ending, metrics.summary(time.monotonic()), path)


def train_serially(config: TrainConfig, *, stream: TextIO | None = None) -> Outcome:
    """`train` with all roles in this process and thread, for a debugger; Ctrl-C is a plain KeyboardInterrupt.

    The one path of this module that imports torch. Raises what a role raises, with its own traceback.
    """
    from rollout_service.launch.serial import SerialUpdate, run_serial

    prepare.require_platform()
    with ExitStack() as stack:
        config, sizing = prepare.resolve(config)
        check_fits_one_rollout(config, int(config.num_actors))
        path = config.run_dir or default_run_directory(config.env, new_run_token(), datetime.now().astimezone())
        config = config.model_copy(update={"run_dir": path})
        run_dir = stack.enter_context(RunDirectory(path, resume=config.resume))
        progress = open_progress(f"{config.env}  {path}", stream)
        stack.callback(progress.close)
        journal = stack.enter_context(Journal(path / "run.log", progress))
        if run_dir.moved_aside is not None:
            journal.say(f"an earlier run's files were moved to {run_dir.moved_aside}")
        run_dir.save(config)
        journal.say(f"{sizing}, all in this process  {path}")
        logs = stack.enter_context(
            RunLogs(path, tensorboard=config.tensorboard, resume_at=run_dir.resume_point.env_steps)
        )
        logs.open()
        last: list[Summary] = []

        def note(update: SerialUpdate) -> None:
            last[:] = [update.summary]
            logs.write(update.summary.env_steps, update.summary.updates, log_record(update.summary))
            progress.show(update.summary)

        run_serial(config, note)
        if not last:
            raise ConfigError(f"nothing left to train: {path} has all its updates; raise total_steps")
        return Outcome(Ending(How.FINISHED, "finished", 0), last[0], path)


def _end_service(server: Server) -> None:
    server.stop()
    # A loop that hangs must not keep the rest from being taken down; its thread dies with this process.
    with suppress(WaitTimedOut):
        server.join(SERVER_JOIN_S)
