"""waiting: what processes that have nothing to do cost, and how fast they are at work again.

A real run whose learner is paused (SIGSTOP), so that actors and service wait; then its actors are. CPU time is the
kernel's own account of each process, over a few seconds. Wake-ups: a learner and an actor, here threads, talk through
the real service and sleep between their words; a wake-up is the way from one's word to the other one's ear.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np

from rollout_service.bench.handover import service
from rollout_service.bench.handover_role import next_message
from rollout_service.bench.report import Report
from rollout_service.bench.rig import NULL_ENV, fill_slot, paper_spec, rollout_memory
from rollout_service.bench.timing import Figures
from rollout_service.bench.train import WARM_UP, Case, medians
from rollout_service.bench.whole_run import POLL_S, Usage, WholeRun
from rollout_service.control.client import Client
from rollout_service.control.messages import Batch, Commit, Grant, Hello, Join, Publish, Ready, Role
from rollout_service.errors import RunFailed
from rollout_service.memory.slots import RolloutMemory
from rollout_service.runspec import RunSpec

REPETITIONS: Final = 2
SETTLE_S: Final = 0.5
"""From a pause of one side to the moment from which the other one is sure to wait."""
WATCHED_S: Final = 3.0
SILENCE_S: Final = 60.0
"""Longer than any pause here: nobody is to be taken for dead."""
WAKE_UPS: Final = 20
ASLEEP_S: Final = 0.1
DEADLINE_S: Final = 20.0
MODES: Final = {"lockstep": 0, "streaming": 1}

NOTES: Final = (
    "of one core, by the busiest process of its kind; paused: stopped from outside for some seconds, while the others "
    "wait for it",
    f"wake: from one side's message through the service to the other side, which has slept for {ASLEEP_S:g} s",
)


def measure(
    repetitions: int = REPETITIONS,
    *,
    watched_s: float = WATCHED_S,
    wake_ups: int = WAKE_UPS,
    actors: int = 2,
    modes: Sequence[str] = tuple(MODES),
) -> Report:
    """One case per mode. Raises RunFailed if a run breaks."""
    runs: dict[str, list[Figures]] = {mode: [] for mode in modes}
    for _ in range(repetitions):
        for mode in modes:
            runs[mode].append({**paused_run(MODES[mode], watched_s, actors), **wake_figures(wake_ups)})
    return Report("waiting", "processes that wait for each other", medians(runs), NOTES)


def paused_run(lag: int, watched_s: float, actors: int) -> Figures:
    """CPU shares of those who wait, while the learner is paused and while the actors are."""
    case = Case(
        "waiting", NULL_ENV, 4 * actors, None, num_actors=actors, num_steps=32, max_policy_lag=lag,
        other={"silence-timeout": SILENCE_S},
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="rs-bench-") as directory,
        WholeRun(case.words(), Path(directory) / "run") as run,
    ):
        while run.wait(POLL_S) and len(run.log) < WARM_UP:
            pass
        usage = run.usage()
        learner, workers = usage.pids("learner"), usage.pids("actors")
        if not learner or len(workers) < actors:
            raise RunFailed(f"the run had no learner or too few actors\n{run.said()}")
        found: Figures = {}
        for name, paused in (("learner", learner), ("actors", workers)):
            try:
                busy = busiest(run, paused, watched_s)
            except ProcessLookupError:
                raise RunFailed(f"one of the {name} to pause was gone\n{run.said()}") from None
            found |= {f"{name}_paused_{role}_share": share for role, share in busy.items()}
            run.wait(POLL_S)
        return found


def busiest(run: WholeRun, paused: Sequence[int], watched_s: float) -> Figures:
    """Role -> share of one core that its busiest process uses while the `paused` ones are stopped."""
    with stopped(paused):
        elapse(SETTLE_S)
        before = run.usage()
        elapse(watched_s)
        after = run.usage()
    roles = {role for pid, role in after.roles.items() if pid not in paused}
    return {role: max(core_shares(before, after, role)) for role in sorted(roles)}


def core_shares(before: Usage, after: Usage, role: str) -> list[float]:
    """Of one core, per process of that role."""
    seconds = after.time - before.time
    return [(after.cpu_s[pid] - before.cpu_s.get(pid, 0.0)) / seconds for pid in after.pids(role)]


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Inside, these processes do not run at all."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def elapse(seconds: float) -> None:
    """CPU time needs a stretch of the clock: nothing that could be waited for marks its end."""
    threading.Event().wait(seconds)


class Moments:
    """When each side spoke, and when it heard the other; monotonic seconds."""

    def __init__(self) -> None:
        self.committed: list[float] = []
        self.batches: list[float] = []
        self.published: list[float] = []
        self.grants: list[float] = []

    def figures(self) -> Figures:
        """Medians: COMMIT to BATCH, which wakes the learner, and PUBLISH to GRANT, which wakes the actor."""
        to_learner = [heard - said for said, heard in zip(self.committed, self.batches, strict=False)]
        # The first GRANT came before anything was published.
        to_actor = [heard - said for said, heard in zip(self.published, self.grants[1:], strict=False)]
        return {
            "wake_learner_us": statistics.median(to_learner) * 1e6,
            "wake_actor_us": statistics.median(to_actor) * 1e6,
        }


def wake_figures(wake_ups: int) -> Figures:
    """Two threads play learner and actor over a real service."""
    spec = paper_spec(2, 4)
    moments = Moments()
    with rollout_memory(spec) as memory, service(spec, memory, wake_ups) as endpoint, ThreadPoolExecutor(1) as pool:
        acting = pool.submit(play_actor, endpoint, spec, memory, moments)
        play_learner(endpoint, moments)
        acting.result(DEADLINE_S)
    return moments.figures()


def play_actor(endpoint: str, spec: RunSpec, memory: RolloutMemory, moments: Moments) -> None:
    """Fills what is granted, and sleeps before it says so."""
    with closing(connected(endpoint, Role.ACTOR)) as client:
        client.send(
            Join(
                spaces=spec.spaces,
                autoreset=spec.autoreset,
                run_digest=spec.digest(),
                state_strategy=spec.state_strategy,
            )
        )
        generator = np.random.default_rng(0)
        while isinstance(grant := next_message(client), Grant):
            moments.grants.append(time.perf_counter())
            fill_slot(memory.writer(grant.slot), grant.epoch, generator)
            elapse(ASLEEP_S)
            commit = Commit(slot=grant.slot, epoch=grant.epoch, valid_steps=spec.num_steps, version=grant.version)
            moments.committed.append(time.perf_counter())
            client.send(commit)
        client.bye("finished")


def play_learner(endpoint: str, moments: Moments) -> None:
    """Takes batches, and sleeps before it publishes."""
    with closing(connected(endpoint, Role.LEARNER)) as client:
        version = 1
        client.send(Ready(version=version))
        while isinstance(batch := next_message(client), Batch):
            moments.batches.append(time.perf_counter())
            elapse(ASLEEP_S)
            version += 1
            moments.published.append(time.perf_counter())
            client.send(Publish(update=batch.update, version=version))
        client.bye("finished")


def connected(endpoint: str, role: Role) -> Client:
    """A client that the service knows. The caller closes it."""
    client = Client(endpoint, Hello(role=role, pid=os.getpid()), connect_deadline_s=DEADLINE_S)
    client.connect()
    return client
