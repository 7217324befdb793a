"""Faults at random moments in one run, and what has to hold of it all the same.

    killed       SIGKILL, whatever it is doing: starting, stepping, committing, learning, saving
    terminated   SIGTERM, as an operator would
    paused       SIGSTOP, and SIGCONT before anybody takes it for dead
    frozen       SIGSTOP, for good: the service has to find out and replace it

Actors and the learner are victims; the service itself is in `short_runs`. Moments, kinds and victims are drawn from a
seed beforehand, but for what the machine's own timing adds. What must never happen: a signal to a process that is not
of the run.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from bench.watched import Sample, Watch, WatchedRun, elapse, until
from rollout_service import checkpoint
from tests.fixtures.machine import run_command

ENVS, STEPS = 4, 32
SILENCE_S: Final = 4.0
OTHERS_PER_KILL: Final = {"terminated": 0.15, "paused": 0.2, "frozen": 0.04}
LEARNER_SHARE: Final = 0.2
"""Of the victims. It takes seconds to come back, and actors that nobody trains on only wait."""
LONGEST_PAUSE_S: Final = 1.5
RATE_WINDOW_S: Final = 0.5
BEFORE_S: Final = 3.0
"""A rate before a kill is that of so many seconds."""
BACK: Final = 0.8
"""A rate is back at this share of what it was."""
SURVIVORS_BAR_S: Final = 2.0
FULL_BAR_S: Final = 10.0
MORE_UPDATES: Final = 20
"""A stopped run is gone on with for so many."""
EXIT_CTRL_C: Final = 130


def settings(schedule: str, actors: int) -> tuple[str, ...]:
    """The words of a small memory task with `schedule` streaming or lockstep."""
    return (
        *("--env", "Memory/TMaze-v0", "--env-kwargs", "corridor=5", "--num-actors", str(actors)),
        *("--envs-per-actor", str(ENVS), "--num-steps", str(STEPS), "--hidden-dim", "32", "--epochs", "2"),
        *("--envs-per-minibatch", "4", "--checkpoint-interval", "20", "--json", "--learner-threads", "1"),
        *("--max-policy-lag", "1" if schedule == "streaming" else "0", "--silence-timeout", str(SILENCE_S)),
        # The back-off of the default window would be most of the time; what is looked at here is what comes out.
        *("--max-restarts", "100000", "--restart-window", "1", "--checksum-slots"),
    )


@dataclass(frozen=True)
class Fault:
    at: float
    """Seconds from the start of the faults."""
    kind: str
    learner: bool


def plan(rng: random.Random, seconds: float, kills: int) -> list[Fault]:
    """Exactly so many kills, and the share of other faults that goes with them."""
    kinds = ["killed"] * kills
    for kind, share in OTHERS_PER_KILL.items():
        kinds += [kind] * round(share * kills)
    return sorted(
        (Fault(rng.uniform(0.0, seconds), kind, rng.random() < LEARNER_SHARE) for kind in kinds),
        key=lambda fault: fault.at,
    )


def run_with_faults(
    directory: Path, *, schedule: str, actors: int, seconds: float, kills: int, measured: int, seed: int, resume: bool
) -> dict[str, Any]:
    """One run: faults, then `measured` kills of an actor in quiet, then the end. Figures, and `checks`: what must hold.

    resume: the run is stopped once the faults are through, and gone on with to a normal end.
    """
    rng = random.Random(seed)
    words = (*settings(schedule, actors), "--seed", str(seed))
    with WatchedRun(*words, "--total-steps", str(10**9), directory=directory) as run:
        with Watch(run.endpoint()) as watch:
            until(lambda: watch.last and watch.last.all_there and watch.last.updates >= 2, "a run that runs")
            done = _inject(run, plan(rng, seconds, kills), rng, seconds)
            _until_well(run, watch, updates=5)
            recoveries = [_recovery(run, watch, rng) for _ in range(measured)]
            run.service.signal_group(signal.SIGINT)
            code = run.service.wait(60.0)
        left = run.leftovers()
        figures = _figures(run, watch.samples, done, recoveries, actors, schedule)
        checks = {
            **_checks(run, watch.samples, lag=int(schedule == "streaming")),
            "Ctrl-C ends the run with its exit code": code == EXIT_CTRL_C,
            "nothing is left": not left,
            "all kills were made": done["actor killed"] + done["learner killed"] == kills,
        }
    if resume:
        checks |= _gone_on_with(directory, words, run.records(), actors)
    return figures | {"left": left, "exit_code": code, "checks": checks, "right": all(checks.values())}


def _inject(run: WatchedRun, faults: Sequence[Fault], rng: random.Random, seconds: float) -> Counter[str]:
    """What was done, by role and kind."""
    done: Counter[str] = Counter()
    start = time.monotonic()
    to_wake: list[tuple[float, int, psutil.Process]] = []

    def wake_until(moment: float) -> None:
        while to_wake and to_wake[0][0] <= moment:
            at, _, process = heapq.heappop(to_wake)
            elapse(at - time.monotonic())
            with contextlib.suppress(psutil.Error):
                process.resume()
        elapse(moment - time.monotonic())

    for number, fault in enumerate(faults):
        wake_until(start + fault.at)
        victim, role = until(
            lambda fault=fault: (run.over and (None, "")) or _victim(run, fault.learner, rng), "a victim"
        )
        if victim is None:
            raise SystemExit(f"the run has ended in the middle of its faults:\n{run.service.stderr()[-3000:]}")
        with contextlib.suppress(psutil.Error):
            match fault.kind:
                case "killed":
                    victim.kill()
                case "terminated":
                    victim.terminate()
                case "paused":
                    victim.suspend()
                    heapq.heappush(to_wake, (time.monotonic() + rng.uniform(0.05, LONGEST_PAUSE_S), number, victim))
                case "frozen":
                    victim.suspend()
            done[f"{role} {fault.kind}"] += 1
    wake_until(start + seconds)
    wake_until(time.monotonic() + LONGEST_PAUSE_S)
    return done


def _victim(run: WatchedRun, learner: bool, rng: random.Random) -> tuple[psutil.Process, str] | None:
    """Somebody who lives; the other role if none of this one does just now."""
    for is_learner in (learner, not learner):
        if found := run.roles("learner" if is_learner else "workers"):
            return rng.choice(found), "learner" if is_learner else "actor"
    return None


def _until_well(run: WatchedRun, watch: Watch, updates: int) -> None:
    """Everyone is there, nobody is stopped, and it goes on."""
    reached: list[int] = []

    def well() -> bool:
        last = watch.last
        if run.over:
            raise SystemExit(f"the run has ended:\n{run.service.stderr()[-3000:]}")
        if last is None or not last.all_there or any(p.status() == psutil.STATUS_STOPPED for p in run.processes()):
            reached.clear()
            return False
        reached.append(last.updates)
        return reached[-1] >= reached[0] + updates

    until(well, "a run that is well again")


def _recovery(run: WatchedRun, watch: Watch, rng: random.Random) -> dict[str, float | None]:
    """One actor is killed in a run that is well. Seconds until the survivors' rate and the whole rate are back."""
    _until_well(run, watch, updates=20)
    elapse(BEFORE_S + rng.random())
    victim = rng.choice(run.roles("workers"))
    at = time.monotonic()
    before = watch.rate(at - BEFORE_S, at)
    places = watch.samples[-1].actors
    victim.kill()
    survivors = BACK * before * (len(places) - 1) / len(places)
    found: dict[str, float | None] = {"rate_before": round(before, 1), "survivors_s": None, "full_s": None}

    def look() -> bool:
        now = time.monotonic()
        if (last := watch.last) is None or now - at < RATE_WINDOW_S:
            return False
        rate = watch.rate(max(at, now - RATE_WINDOW_S), now)
        if found["survivors_s"] is None and rate >= survivors:
            found["survivors_s"] = round(now - at, 2)
        replaced = last.all_there and last.actors != places
        if found["full_s"] is None and replaced and rate >= BACK * before:
            found["full_s"] = round(now - at, 2)
        return found["full_s"] is not None or now - at > 3 * FULL_BAR_S

    until(look, "the rate after a kill")
    return found


def _figures(
    run: WatchedRun,
    samples: Sequence[Sample],
    done: Counter[str],
    recoveries: Sequence[dict[str, float | None]],
    actors: int,
    schedule: str,
) -> dict[str, Any]:
    records, accounts = run.records(), run.accounts()
    newest = records[-1] if records else {}
    return {
        "schedule": schedule,
        "actors": actors,
        "kills": done["actor killed"] + done["learner killed"],
        "faults": dict(sorted(done.items())),
        "updates": len(records),
        "reports": len(samples),
        "account": accounts[-1] if accounts else None,
        "counted": {name.removeprefix("count/"): int(n) for name, n in newest.items() if name.startswith("count/")},
        "restarts": {name: int(newest.get(f"{name}/restarts", 0)) for name in ("actors", "learner")},
        "slots_checked": int(sum(record.get("learner/slots_checked", 0) for record in records)),
        "policy_lags": {name: int(n) for name, n in newest.items() if name.startswith("policy_lag/")},
        "recovery": {
            name: _spread([recovery[name] for recovery in recoveries], bar)
            for name, bar in (("survivors_s", SURVIVORS_BAR_S), ("full_s", FULL_BAR_S))
        },
        "recoveries": list(recoveries),
    }


def _spread(seconds: Sequence[float | None], bar: float) -> dict[str, Any]:
    known = [value for value in seconds if value is not None]
    return {
        "median": round(statistics.median(known), 2) if known else None,
        "longest": max(known) if known and len(known) == len(seconds) else None,
        "bar": bar,
        "within": sum(value <= bar for value in known),
        "of": len(seconds),
    }


def _checks(run: WatchedRun, samples: Sequence[Sample], lag: int) -> dict[str, bool]:
    """What must hold of a run that has ended, however it went."""
    records, accounts, directory = run.records(), run.accounts(), run.run_dir
    account = accounts[-1] if accounts else {"missing": -1}
    env_steps = [record["env_steps"] for record in records]
    versions = [record["learner/version"] for record in records]
    found = checkpoint.newest(directory)
    newest = found.checkpoint
    entries = sum(account.get(name, 0) for name in ("trained", "rolled_back", "dropped", "outdated", "in_hand"))
    return {
        "the account closes": account["missing"] == 0 and account.get("committed") == entries,
        "what was trained is what the log says": bool(records) and account.get("trained") == env_steps[-1],
        "the account closed all along": bool(samples) and all(sample.missing == 0 for sample in samples),
        "each update logged once, in order": [r["update"] for r in records] == list(range(1, len(records) + 1)),
        "env steps only grow": all(a < b for a, b in pairwise(env_steps)),
        "versions only grow": all(a < b for a, b in pairwise(versions))
        and all(a.version <= b.version for a, b in pairwise(samples)),
        "TensorBoard shows the same x": _tensorboard_steps(directory) == env_steps,
        "no rollout was too old": all(sample.furthest_lag <= lag for sample in samples),
        "every slot was checked, none was torn": all(record.get("learner/slots_checked", 0) > 0 for record in records)
        and "TornSlot" not in run.service.stderr(),
        "the newest checkpoint is of the last update": newest is not None
        and not found.damaged
        and newest.manifest.update == len(records),
    }


def _gone_on_with(
    directory: Path, words: Sequence[str], before: Sequence[dict[str, float]], actors: int
) -> dict[str, bool]:
    """The stopped run, resumed and brought to its end."""
    per_update = actors * ENVS * STEPS
    total = int(before[-1]["env_steps"]) + MORE_UPDATES * per_update
    with WatchedRun(*words, "--resume", "--total-steps", str(total), directory=directory) as run:
        code = run.service.wait(60.0)
        left, records = run.leftovers(), run.records()
        account = run.accounts()[-1]
    return {
        "resumed, it ends with exit code 0": code == 0,
        "resumed, it goes on where it was": records[: len(before)] == list(before)
        and [r["update"] for r in records] == list(range(1, len(records) + 1))
        and len(records) > len(before),
        "resumed, its account closes": account["missing"] == 0
        and account["trained"] == records[-1]["env_steps"] - before[-1]["env_steps"],
        "resumed, it leaves nothing": not left,
        "its last checkpoint can be played": run_command("eval", "run", "--episodes", "2", cwd=directory).returncode
        == 0,
    }


def _tensorboard_steps(run_dir: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    # It says at each restart that it drops the events beyond; that is what is asked for here.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={SCALARS: 0})
    events.Reload()
    return [event.step for event in events.Scalars("learner/version")]
