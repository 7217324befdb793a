"""The three ways to run a training: with children (train), for roles started by hand (serve), all in here (serially).

Who calls: `rollout-service train` and `serve`, and programs that train from Python. The first two are the same run
(run.py) under the same supervisor, which starts the roles or waits for them. What must never happen: torch in this
process, but for the serial way.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, TextIO

from rollout_service.config import TrainConfig, check_fits_one_rollout
from rollout_service.errors import ConfigError, ProtocolError, WaitTimedOut
from rollout_service.launch import prepare
from rollout_service.launch.children import Launcher
from rollout_service.launch.cpu import cores_in_turn
from rollout_service.launch.ending import Ending, How
from rollout_service.launch.run import Door, Run, open_run
from rollout_service.launch.rundir import RunDirectory, default_run_directory
from rollout_service.launch.signals import Interrupted, StopRequest, interruptions
from rollout_service.launch.supervisor import Supervisor
from rollout_service.memory.segment import new_run_token
from rollout_service.observe.journal import Journal
from rollout_service.observe.logs import RunLogs
from rollout_service.observe.metrics import Summary, log_record
from rollout_service.observe.progress import open_progress

ACCOUNT_NOTE: Final = "account of env steps: "
"""Begins the line of run.log that says, at a run's end, where every committed env step went (control/account)."""


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
    cores = cores_in_turn() if config.pin_actors else ()
    with open_run(config, stream=stream) as run:
        launcher = Launcher(run.inbox, run.endpoint, run.path, config.resume, cores)
        if config.pin_actors:
            pinned = ", ".join(str(launcher.core_of(actor_id)) for actor_id in range(run.num_actors))
            run.journal.say(f"actors keep to cores {pinned}, one each; the learner is not bound")
        return _conduct(run, launcher)


def serve(
    config: TrainConfig, door: Door, *, announce: Callable[[str], None] | None = None, stream: TextIO | None = None
) -> Outcome:
    """`train` for actors and a learner that are started by hand, before it or after: it owns the run, and no process.

    `announce` gets the endpoint once the service listens there; by default it is a line on standard output. Ends as
    `train` does; a role that dies does not end it: its place is free for the next one. Raises as `train` does.
    """
    if config.serial:
        raise ConfigError("serve has no roles in its own process; use `train --serial`")
    if config.pin_actors:
        raise ConfigError("pin_actors is for actors that `train` starts; start those of serve with `taskset -c CORE`")
    with open_run(config, stream=stream, door=door) as run:
        (announce or _print_line)(run.endpoint)
        for module, count in (("learner", 1), ("workers", run.num_actors)):
            run.journal.say(f"  start {count} x   python -m {module} --connect {run.endpoint}")
        return _conduct(run, None)


def _print_line(text: str) -> None:
    print(text, flush=True)


def _conduct(run: Run, launcher: Launcher | None) -> Outcome:
    ending = Supervisor(run, launcher).run()
    with suppress(WaitTimedOut, ProtocolError):  # of a service that has failed; the run's end says so
        run.journal.note(f"{ACCOUNT_NOTE}{json.dumps(run.server.report()['account'])}")
    run.journal.note(f"{ending.how.value}: {ending.reason}")
    return Outcome(ending, run.metrics.summary(time.monotonic()), run.path)


def train_serially(config: TrainConfig, *, stream: TextIO | None = None) -> Outcome:
    """`train` with all roles in this process and thread, for a debugger.

    A stop signal is noticed after the step in hand and ends the run as in `train`; a second one is an immediate
    KeyboardInterrupt, which ends it without another checkpoint.
    The one path of this module that imports torch. Raises what a role raises, with its own traceback, and Interrupted
    if a stop signal came before the first update was through.
    """
    from rollout_service.launch.serial import SerialUpdate, require_lockstep, run_serial

    require_lockstep(config)
    prepare.require_platform()
    with ExitStack() as stack:
        stack.enter_context(prepare.outside_of_other_runs())
        stop = StopRequest()
        stack.enter_context(interruptions(stop))
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

        saved = "with a checkpoint"
        try:
            run_serial(config, note, stop)
        except KeyboardInterrupt:
            if stop.first is None:
                raise
            saved = "at once, without another checkpoint"
        finally:
            stop.close()
        if stop.first is not None:
            if not last:
                raise Interrupted(stop.first)
            journal.say(f"{stop.first.name}: stopped after update {last[0].updates}, {saved}")
            reason = f"interrupted by {stop.first.name}"
            return Outcome(Ending(How.INTERRUPTED, reason, stop.first.exit_code), last[0], path)
        if not last:
            raise ConfigError(f"nothing left to train: {path} has all its updates; raise total_steps")
        return Outcome(Ending(How.FINISHED, "finished", 0), last[0], path)
