"""A deterministic run whose actors and learner are killed, and one that nothing happens to: the weights are the same.

Kills come once the run has reached points that are spread over it, so that it cannot end before the last one.
"""

from __future__ import annotations

import hashlib
import random
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.faults import ENVS, STEPS, settings
from bench.watched import PATIENCE_S, WatchedRun, elapse, say, until
from rollout_service import checkpoint

ACTORS: Final = 2
UPDATES_PER_KILL: Final = 30
EQUAL: Final = ("update", "env_steps", "counters", "generators", "figures")
"""What a manifest says, but for versions: those that were lost with a learner are not used again."""


def run_twice(directory: Path, *, kills: int, seed: int) -> dict[str, Any]:
    """Figures, and `checks`: what must hold."""
    total = UPDATES_PER_KILL * (kills + 1) * ACTORS * ENVS * STEPS
    words = (*settings("lockstep", ACTORS), "--seed", str(seed), "--deterministic", "--total-steps", str(total))
    ends = {}
    for name, count in (("undisturbed", 0), ("killed", kills)):
        place = directory / name
        place.mkdir(parents=True)
        ends[name] = _run(place, words, count, random.Random(seed))
        say(f"deterministic, {name}: {ends[name]['digest']}")
    one, other = ends["undisturbed"], ends["killed"]
    checks = {
        "both end with exit code 0": one["code"] == other["code"] == 0,
        "both accounts close": one["missing"] == other["missing"] == 0,
        "nothing is left": not one["left"] and not other["left"],
        "kills cost updates": kills == 0 or other["rolled_back"] > one["rolled_back"] == 0,
        "the weights and all else that is saved are the same": one["digest"] == other["digest"] is not None,
        "counters and figures are the same": one["said"] == other["said"],
    }
    return {
        "kills": kills,
        "updates": UPDATES_PER_KILL * (kills + 1),
        "updates_rolled_back": other["rolled_back"],
        "digests": {name: end["digest"] for name, end in ends.items()},
        "checks": checks,
        "right": all(checks.values()),
    }


def _run(directory: Path, words: tuple[str, ...], kills: int, rng: random.Random) -> dict[str, Any]:
    with WatchedRun(*words, directory=directory) as run:
        for number in range(kills):
            point = UPDATES_PER_KILL * (number + 1) + rng.randrange(UPDATES_PER_KILL // 2)
            until(partial(_reached, run, point), f"update {point}")
            elapse(rng.uniform(0.0, 0.05))
            role = "learner" if number % 3 == 2 else "workers"
            rng.choice(until(partial(run.roles, role), f"one of the {role} to kill")).kill()
        code = run.service.wait(PATIENCE_S)
        found = checkpoint.newest(run.run_dir).checkpoint
        return {
            "code": code,
            "missing": run.accounts()[-1]["missing"],
            "left": run.leftovers(),
            "rolled_back": int(run.records()[-1].get("count/rolled_back_updates", 0)),
            "digest": None if found is None else _digest(found.arrays),
            "said": None if found is None else {name: getattr(found.manifest, name) for name in EQUAL},
        }


def _reached(run: WatchedRun, update: int) -> bool:
    if run.over:
        raise SystemExit(f"the run has ended before its last kill:\n{run.service.stderr()[-3000:]}")
    return run.service.updates(run.run_dir) >= update


def _digest(arrays: dict[str, np.ndarray]) -> str:
    """Of names, shapes, dtypes and bytes."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}\n".encode())
        found.update(np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()
