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
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final, TextIO

from rollout_service.config import TrainConfig, check_fits_one_rollout
from rollout_service.errors import CheckpointError, ConfigError, ProtocolError, WaitTimedOut
from rollout_service.launch import prepare
from rollout_service.launch.children import Launcher
from rollout_service.launch.cpu import cores_in_turn
from rollout_service.launch.ending import Ending, How, failed
from rollout_service.launch.run import Door, Run, open_run
from rollout_service.launch.rundir import BestCheckpoint, RunDirectory, best_checkpoint, default_run_directory, unsaved
from rollout_service.launch.signals import Interrupted, StopRequest, interruptions
from rollout_service.launch.supervisor import Supervisor
from rollout_service.memory.segment import new_run_token
from rollout_service.observe.journal import Journal
from rollout_service.observe.logs import RunLogs
from rollout_service.observe.losses import LostWrites
from rollout_service.observe.metrics import LOG_WRITE_FAILURES, Summary, log_record
from rollout_service.observe.progress import open_progress
from rollout_service.runspec import RunSpec

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
        best = self.best
        return {
            "env_steps": self.summary.env_steps,
            "updates": self.summary.updates,
            "return_mean": self.summary.return_mean,
            "success_rate": self.summary.success_rate,
            "steps_per_second": self.summary.steps_per_second,
            "counters": dict(self.summary.counters),
            "checkpoint_missing_since": self.summary.checkpoint_missing_since,
            "best_checkpoint": None if best is None else str(best.path),
            "best_return_mean": None if best is None else best.return_mean,
            "run_dir": str(self.run_dir),
        }

    @property
    def best(self) -> BestCheckpoint | None:
        """The checkpoint with the highest return_mean."""
        return best_checkpoint(self.run_dir)


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
        if (more := (config.max_actors or 0) - run.num_actors) > 0:
            run.journal.say(f"  up to {more} more may join   python -m workers --connect {run.endpoint}")
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
            up_to = f" to {config.max_actors}" if module == "workers" and config.max_actors else ""
            run.journal.say(f"  start {count}{up_to} x   python -m {module} --connect {run.endpoint}")
        return _conduct(run, None)


def _print_line(text: str) -> None:
    print(text, flush=True)


def _conduct(run: Run, launcher: Launcher | None) -> Outcome:
    ending = Supervisor(run, launcher).run()
    with suppress(WaitTimedOut, ProtocolError):  # of a service that has failed; the run's end says so
        run.journal.note(f"{ACCOUNT_NOTE}{json.dumps(run.server.report()['account'])}")
    if run.config.deterministic and ending.how is not How.FINISHED:
        run.journal.say(unsaved(run.path, run.metrics.updates))
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
        path = path.absolute()  # an env in this process may change its directory
        config = config.model_copy(update={"run_dir": path})
        run_dir = stack.enter_context(RunDirectory(path, resume=config.resume))
        lost = LostWrites()
        progress = open_progress(f"{config.env}  {path}", stream, lost)
        stack.callback(progress.close)
        journal = stack.enter_context(Journal(path / "run.log", progress, lost))
        logs = stack.enter_context(
            RunLogs(path, tensorboard=config.tensorboard, resume_at=run_dir.resume_point.env_steps, lost=lost)
        )
        last: list[Summary] = []

        def begin(spec: RunSpec) -> None:
            run_dir.begin(config, spec)
            if run_dir.moved_aside is not None:
                journal.say(f"an earlier run's files were moved to {run_dir.moved_aside}")
            journal.say(f"{sizing}, all in this process  {path}")
            logs.open()

        def note(update: SerialUpdate) -> None:
            summary = _with_losses(update.summary, lost)
            last[:] = [summary]
            for line in update.remarks:
                journal.say(line)
            logs.write(summary.env_steps, summary.updates, log_record(summary))
            journal.tell_losses()
            progress.show(summary)

        saved, failure = "with a checkpoint", ""
        try:
            run_serial(config, note, stop, begin)
        except KeyboardInterrupt:
            if stop.first is None:
                raise
            saved = "at once, without another checkpoint"
        except CheckpointError as error:
            if not last:
                raise
            saved = failure = f"but the last is not saved: {error}"
        finally:
            stop.close()
        if stop.first is not None:
            if not last:
                raise Interrupted(stop.first)
            if config.deterministic and not failure:
                saved = unsaved(path, last[0].updates)
            journal.say(f"{stop.first.name}: stopped after update {last[0].updates}, {saved}")
            reason = f"interrupted by {stop.first.name}"
            return Outcome(Ending(How.INTERRUPTED, reason, stop.first.exit_code), _with_losses(last[0], lost), path)
        if not last:
            raise ConfigError(f"nothing left to train: {path} has all its updates; raise total_steps")
        if failure:
            reason = f"all {last[0].updates} updates were made, {failure}"
            return Outcome(failed(reason), _with_losses(last[0], lost), path)
        return Outcome(Ending(How.FINISHED, "finished", 0), _with_losses(last[0], lost), path)


def _with_losses(summary: Summary, lost: LostWrites) -> Summary:
    """The figures of a serial run and what its logs, which it does not see, have lost."""
    return replace(summary, counters={**summary.counters, **({LOG_WRITE_FAILURES: lost.total} if lost.total else {})})
