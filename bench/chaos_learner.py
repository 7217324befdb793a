"""Kills the learner of a real run again and again, and looks whether the run comes out as if nothing had happened.

`python -m bench.chaos_learner`, or `--kills 3` for a short one. Results: bench/results/learner_restart.json, and the
same on standard output. The exit code is 1 if the run did not come out right.

SIGKILL comes at random moments of two kinds: somewhere in an update, once the run has reached a point drawn beforehand
(the points are spread over the run, so that it cannot end before the last kill); or, half of the time, once more while
the next learner is still starting, loading or publishing. Seeded, but for what the machine's own timing adds.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil

from bench.watched import PATIENCE_S, elapse, take_signals, tensorboard_steps, until
from rollout_service import checkpoint
from rollout_service.bench.report import record
from rollout_service.lifeline import owned
from tests.fixtures.machine import Service

RESULTS = Path(__file__).parent / "results" / "learner_restart.json"
COMMAND = "python -m bench.chaos_learner"
ACTORS, ENVS, STEPS = 2, 4, 32
STEPS_PER_UPDATE = ACTORS * ENVS * STEPS
UPDATES_PER_KILL = 60
CHECKPOINT_INTERVAL = 10
LONGEST_START_S: Final = 3.0
"""A learner that is killed while it starts lives for at most so long: import, restore, first weights, and a bit."""
CONFIG = (
    *("--env", "Memory/TMaze-v0", "--env-kwargs", "corridor=5", "--num-actors", str(ACTORS)),
    *("--envs-per-actor", str(ENVS), "--num-steps", str(STEPS), "--hidden-dim", "32", "--epochs", "2"),
    *("--envs-per-minibatch", "2", "--checkpoint-interval", str(CHECKPOINT_INTERVAL), "--run-dir", "run", "--json"),
    # The back-off of the default window would be most of the time; what is looked at here is what comes out.
    *("--max-restarts", "1000", "--restart-window", "2"),
)


def chaos(directory: Path, *, kills: int, seed: int = 1) -> dict[str, Any]:
    """One run in `directory` under `kills` kills. Returns its figures, and `checks`: what must hold, and whether."""
    rng = random.Random(seed)
    updates = UPDATES_PER_KILL * (kills + 1)
    words = (*CONFIG, "--total-steps", str(updates * STEPS_PER_UPDATE), "--seed", str(seed))
    run_dir = directory / "run"
    with Service(*words, cwd=directory, **owned({})) as service:
        killed = _kill_all_along(service, run_dir, kills, rng)
        actors_then = _pids(service, "workers")
        code = service.wait(PATIENCE_S)
        said = service.stderr()
        result = service.result() if code == 0 else {}
    return _figures(run_dir, killed, said, result, code, updates, actors_then)


def _kill_all_along(service: Service, run_dir: Path, kills: int, rng: random.Random) -> list[dict[str, Any]]:
    """One entry per kill: what the run had reached, and how long that learner had lived."""
    killed: list[dict[str, Any]] = []
    actors: set[int] = set()
    while len(killed) < kills:
        point = UPDATES_PER_KILL * (len(killed) + 1) + rng.randrange(UPDATES_PER_KILL // 2)
        _await_updates(service, run_dir, point)
        actors = actors or _pids(service, "workers")
        elapse(rng.uniform(0.0, 0.05))
        killed.append(_kill(service, run_dir, killed, "learning", actors))
        if len(killed) < kills and rng.random() < 0.5:
            until(lambda: _learner(service, killed) is not None, "the next learner")
            elapse(rng.uniform(0.0, LONGEST_START_S))
            killed.append(_kill(service, run_dir, killed, "starting", actors))
    return killed


def _await_updates(service: Service, run_dir: Path, count: int) -> None:
    until(lambda: service.updates(run_dir) >= count or service.process.poll() is not None, f"{count} updates")


def _kill(
    service: Service, run_dir: Path, killed: list[dict[str, Any]], moment: str, actors: set[int]
) -> dict[str, Any]:
    victim: psutil.Process = until(lambda: _learner(service, killed), "a learner to kill")
    lived = time.time() - victim.create_time()
    victim.kill()
    return {
        "pid": victim.pid,
        "moment": moment,
        "lived_s": round(lived, 2),
        "at": time.time(),
        "logged_updates": service.updates(run_dir),
        "same_actors": _pids(service, "workers") == actors,
    }


def _figures(
    run_dir: Path,
    killed: list[dict[str, Any]],
    said: str,
    result: dict[str, Any],
    code: int,
    updates: int,
    actors_then: set[int],
) -> dict[str, Any]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    versions = [record["learner/version"] for record in records]
    restored = [int(n) for n in re.findall(r"rolled back: (\d+) updates", said)]
    dropped = [int(n) for n in re.findall(r"dropped: (\d+) rollouts", said)]
    logs = sorted(path.name for path in (run_dir / "logs").glob("actor*"))
    newest = checkpoint.newest(run_dir).checkpoint
    checks = {
        "exit code 0": code == 0,
        "the configured number of updates": result.get("updates") == updates,
        "the right number of env steps": result.get("env_steps") == updates * STEPS_PER_UPDATE,
        "every update logged once, in order": [r["update"] for r in records] == list(range(1, updates + 1)),
        "x never steps back": [r["env_steps"] for r in records]
        == list(range(STEPS_PER_UPDATE, (updates + 1) * STEPS_PER_UPDATE, STEPS_PER_UPDATE)),
        "versions only grow": versions == sorted(set(versions)),
        "TensorBoard shows the same x": tensorboard_steps(run_dir) == [r["env_steps"] for r in records],
        "no actor was restarted": logs == [f"actor-{a}.0.log" for a in range(ACTORS)]
        and all(kill["same_actors"] for kill in killed)
        and len(actors_then) == ACTORS,
        "each kill was named": all(f"learner (pid {k['pid']}) ended with signal 9 (SIGKILL)" in said for k in killed),
        "the last checkpoint loads and is whole": newest is not None and newest.manifest.update == updates,
    }
    downtimes = [_downtime(kill["at"], records) for kill in killed]
    known = [seconds for seconds in downtimes if seconds is not None]
    return {
        "kills": len(killed),
        "killed_while_starting": sum(kill["moment"] == "starting" for kill in killed),
        "updates": result.get("updates"),
        "env_steps": result.get("env_steps"),
        "return_mean": result.get("return_mean"),
        "success_rate": result.get("success_rate"),
        "updates_rolled_back": sum(restored),
        "most_updates_rolled_back_at_once": max(restored, default=0),
        "rollouts_dropped": sum(dropped),
        "last_version": versions[-1] if versions else None,
        "seconds_without_an_update": {
            "median": round(statistics.median(known), 2) if known else None,
            "longest": round(max(known), 2) if known else None,
        },
        "each": [
            {key: kill[key] for key in ("moment", "lived_s", "logged_updates")} | {"downtime_s": downtime}
            for kill, downtime in zip(killed, downtimes, strict=True)
        ],
        "checks": checks,
        "right": all(checks.values()),
    }


def _downtime(at: float, records: list[dict[str, Any]]) -> float | None:
    """From a kill to the next update in the log."""
    later = [record["wall_time"] for record in records if record["wall_time"] > at]
    return round(later[0] - at, 2) if later else None


def _learner(service: Service, killed: list[dict[str, Any]]) -> psutil.Process | None:
    found = service.child("-m", "learner")
    return found if found is not None and found.pid not in {kill["pid"] for kill in killed} else None


def _pids(service: Service, module: str) -> set[int]:
    found = set()
    for child in service.children():
        try:
            if module in child.cmdline():
                found.add(child.pid)
        except psutil.Error:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill the learner of a run again and again.")
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the moments and of the run (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="where the figures go")
    chosen = parser.parse_args()
    take_signals()
    with tempfile.TemporaryDirectory(prefix="rs-chaos-") as directory:
        figures = chaos(Path(directory), kills=chosen.kills, seed=chosen.seed)
    record(chosen.results, " ".join([COMMAND, *sys.argv[1:]]), figures)
    return 0 if figures["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
