"""Faults at random moments in one run, and what has to hold of it all the same.

    killed       SIGKILL, whatever it is doing: starting, stepping, committing, learning, saving
    terminated   SIGTERM, as an operator would
    paused       SIGSTOP, and SIGCONT before anybody takes it for dead
    frozen       SIGSTOP, for good: the service has to find out and replace it
    joined       a guest comes, where the run has places for guests

Actors, guests and the learner are victims; the service itself is in `short_runs`. A guest is never frozen: the
service kills nobody else's child, and would wait. Meanwhile the env returns bad data now and then, and takes its
time. Moments, kinds and victims are drawn from a seed beforehand, but for what the machine's own timing adds. What must
never happen: a signal to a process that is not of the run.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from bench import unsteady
from bench.watched import Sample, Watch, WatchedRun, elapse, say, tensorboard_steps, until
from rollout_service import checkpoint
from tests.fixtures.machine import run_command

ENVS, STEPS = 4, 32
SILENCE_S: Final = 4.0
OTHERS_PER_KILL: Final = {"terminated": 0.15, "paused": 0.2, "frozen": 0.04}
GUESTS_PER_KILL: Final = 0.5
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
GUEST_CODES: Final = {0, -signal.SIGKILL, -signal.SIGTERM}
"""It was told to leave, was killed, or was terminated before it could hear it."""
PROGRESS_EVERY_S: Final = 15.0


def settings(schedule: str, actors: int) -> tuple[str, ...]:
    """The words of a small memory task with `schedule` streaming or lockstep."""
    return (
        *("--env", unsteady.NAME, "--env-kwargs", "corridor=5", "--num-actors", str(actors)),
        *("--on-bad-data", "drop", "--obs-limit", str(unsteady.LIMIT)),
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


def plan(rng: random.Random, seconds: float, kills: int, *, guests: bool = False) -> list[Fault]:
    """Exactly so many kills, and the share of other faults that goes with them; guests: they come, too."""
    kinds = ["killed"] * kills
    for kind, share in (OTHERS_PER_KILL | ({"joined": GUESTS_PER_KILL} if guests else {})).items():
        kinds += [kind] * round(share * kills)
    return sorted(
        (Fault(rng.uniform(0.0, seconds), kind, rng.random() < LEARNER_SHARE) for kind in kinds),
        key=lambda fault: fault.at,
    )


def run_with_faults(
    directory: Path,
    *,
    schedule: str,
    actors: int,
    guests: int = 0,
    seconds: float,
    kills: int,
    measured: int,
    seed: int,
    resume: bool,
) -> dict[str, Any]:
    """One run: faults, then `measured` kills of an actor in quiet, then the end. Figures, and `checks`: what must hold.

    guests: places for them. resume: the run is stopped once the faults are through, and gone on with to a normal end.
    """
    rng = random.Random(seed)
    words = (*settings(schedule, actors), "--seed", str(seed))
    words += ("--max-actors", str(actors + guests)) if guests else ()
    with WatchedRun(*words, "--total-steps", str(10**9), directory=directory) as run:
        with Watch(run.endpoint(), actors) as watch:
            _until_well(run, watch, updates=5)
            before = run.holdings()
            done = _inject(run, watch, plan(rng, seconds, kills, guests=guests > 0), rng, seconds, guests)
            run.dismiss_guests()
            _until_well(run, watch, updates=5)
            after = run.holdings()
            recoveries = [_recovery(run, watch, rng) for _ in range(measured)]
            run.service.signal_group(signal.SIGINT)
            code = run.service.wait(60.0)
        left = run.leftovers()
        figures = _figures(run, watch.samples, done, recoveries, actors, schedule)
        checks = {
            **_checks(run, watch.samples, lag=int(schedule == "streaming")),
            **_bars(recoveries),
            "Ctrl-C ends the run with its exit code": code == EXIT_CTRL_C,
            "nothing is left": not left,
            "the service holds what it held before the faults": after == before,
            "all kills were made": _kills(done) == kills,
        }
        if guests:
            checks |= _of_guests(run, watch.samples, done)
    if resume:
        checks |= _gone_on_with(directory, words, run.records(), actors)
    figures |= {"held_before": before, "held_after": after, "left": left, "exit_code": code}
    return figures | {"checks": checks, "right": all(checks.values())}


def _inject(
    run: WatchedRun, watch: Watch, faults: Sequence[Fault], rng: random.Random, seconds: float, guests: int
) -> Counter[str]:
    """What was done, by role and kind."""
    done: Counter[str] = Counter()
    endpoint = run.endpoint()
    start = said = time.monotonic()
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
        if fault.kind == "joined":
            if len(run.guests()) < guests:
                run.invite(endpoint)
                done["guest joined"] += 1
            continue
        victim, role = until(partial(_struck, run, fault, rng), "a victim")
        done[f"{role} {fault.kind}"] += 1
        if fault.kind == "paused":
            heapq.heappush(to_wake, (time.monotonic() + rng.uniform(0.05, LONGEST_PAUSE_S), number, victim))
        if time.monotonic() - said > PROGRESS_EVERY_S and (last := watch.last):
            said = time.monotonic()
            say(
                f"{said - start:.0f} of {seconds:g} s, {_kills(done)} kills, {last.updates} updates, "
                f"{last.guests} guests, {last.missing} env steps missing"
            )
    wake_until(start + seconds)
    wake_until(time.monotonic() + LONGEST_PAUSE_S)
    return done


def _struck(run: WatchedRun, fault: Fault, rng: random.Random) -> tuple[psutil.Process, str] | None:
    """Somebody to whom it was done; None if nobody was there for it just now."""
    if run.over:
        raise SystemExit(f"the run has ended in the middle of its faults:\n{run.service.stderr()[-3000:]}")
    found = _victim(run, fault, rng)
    if found is None:
        return None
    victim, _ = found
    try:
        match fault.kind:
            case "killed":
                victim.kill()
            case "terminated":
                victim.terminate()
            case "paused" | "frozen":
                victim.suspend()
    except psutil.Error:  # it was gone before
        return None
    return found


def _victim(run: WatchedRun, fault: Fault, rng: random.Random) -> tuple[psutil.Process, str] | None:
    """Somebody who lives; the other role if none of this one does just now."""
    learners = [(process, "learner") for process in run.roles("learner")]
    actors = [(process, "actor") for process in run.roles("workers")]
    if fault.kind != "frozen":
        actors += [(process, "guest") for process in run.guests()]
    found = (learners or actors) if fault.learner else (actors or learners)
    return rng.choice(found) if found else None


def _kills(done: Counter[str]) -> int:
    return sum(count for what, count in done.items() if what.endswith(" killed"))


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
    """One actor is killed in a run that is well. Seconds until the survivors' rate and the whole rate are back.

    load: of the machine, this run included. Where others take the cores, rates say little.
    """
    _until_well(run, watch, updates=20)
    elapse(BEFORE_S + rng.random())
    victim = rng.choice(run.roles("workers"))
    at = time.monotonic()
    before = watch.rate(at - BEFORE_S, at)
    places = watch.samples[-1].actors
    victim.kill()
    survivors = BACK * before * (len(places) - 1) / len(places)
    found: dict[str, float | None] = {"rate_before": round(before, 1), "survivors_s": None, "full_s": None}
    found["load"] = round(os.getloadavg()[0], 1)

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
    say(f"an actor killed in quiet: {found}")
    return found


def _bars(recoveries: Sequence[dict[str, float | None]]) -> dict[str, bool]:
    def within(name: str, bar: float) -> bool:
        return all((seconds := recovery[name]) is not None and seconds <= bar for recovery in recoveries)

    return {
        f"the survivors' rate is back within {SURVIVORS_BAR_S:g} s": within("survivors_s", SURVIVORS_BAR_S),
        f"the whole rate is back within {FULL_BAR_S:g} s": within("full_s", FULL_BAR_S),
    }


def _of_guests(run: WatchedRun, samples: Sequence[Sample], done: Counter[str]) -> dict[str, bool]:
    """A guest whose predecessor is not proven to be dead yet may be refused."""
    ends = run.ends_of_guests()
    return {
        "guests took part": any(sample.guests for sample in samples),
        "all guests are accounted for": len(ends) == done["guest joined"],
        "guests end without an error": all(
            "Traceback" not in words and (code in GUEST_CODES or "no place is free" in words) for code, words in ends
        ),
    }


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
        "kills": _kills(done),
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
        "each update trained on the rows it counts": [b - a for a, b in pairwise([0, *env_steps])]
        == [record["learner/valid_rows"] for record in records],
        "each bad step cost one episode": bool(records)
        and _bad(records[-1], "dropped_episodes") == _bad(records[-1], "bad_observations", "bad_rewards"),
        "TensorBoard shows the same x": tensorboard_steps(run.run_dir) == env_steps,
        "no rollout was too old": all(sample.furthest_lag <= lag for sample in samples)
        and all(record["learner/policy_lag_max"] <= lag for record in records),
        "every slot was checked, none was torn": all(record.get("learner/slots_checked", 0) > 0 for record in records)
        and "TornSlot" not in run.service.stderr(),
        "the newest checkpoint is of the last update": newest is not None
        and not found.damaged
        and newest.manifest.update == len(records),
        "all of it is finite": newest is not None and all(np.isfinite(array).all() for array in newest.arrays.values()),
    }


def _bad(record: dict[str, float], *counts: str) -> int:
    return int(sum(record.get(f"count/{name}", 0) for name in counts))


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
