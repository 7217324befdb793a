"""reach: seconds to a mean return of 400 on CartPole with masked velocities, 16 envs, ours and Sample Factory in turns.

Each side runs with settings of its own choice (LSTM 128 for both). The envs themselves write down their first step and
each finished episode, so both sides are measured by the same code and clock, from two moments: the command's start, and
the first env step. The goal is reached with the episode that brings the mean over the last 100 finished ones to 400.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollout_service.bench.report import Report
from rollout_service.bench.runners import PEERS, RUNNERS, runner
from rollout_service.bench.timing import Figures
from rollout_service.bench.train import Case
from rollout_service.bench.whole_run import WholeRun

SEEDS: Final = (1, 2)
ENVS: Final = 16
GOAL: Final = 400.0
WINDOW: Final = 100
"""Finished episodes that the mean is over, as in both sides' own logs."""
DEADLINE_S: Final = 90.0
POLL_S: Final = 0.2
PEER: Final = "sf"
EPISODES_VARIABLE: Final = "PEER_EPISODES"
OURS_ONLY_IN_ACTORS: Final = {"PEER_EPISODES_WHERE": "ROLLOUT_SERVICE_ACTOR"}
"""Our probe steps the env too."""
ACTORS: Final = 1
"""On two cores: one collects, one learns, and one process less has to start."""
SETTINGS: Final[dict[str, Any]] = {
    "learning-rate": 2e-3,
    "epochs": 6,
    "normalize-observations": True,
    "normalize-returns": True,
}
"""Of ours, where they differ from those of the speed comparison. Of learning rates of 1e-3 to 3e-3, 4 to 8 epochs, 32
to 128 steps, entropy 0 and 0.01, these needed the fewest seconds, with the least spread between seeds."""


@dataclass(frozen=True)
class Reached:
    """One run. Times are of the monotonic clock; None: not in time."""

    command: float
    first_step: float | None
    goal: float | None
    env_steps: int
    """Of the finished episodes up to the goal, or to the deadline."""
    best: float
    """Highest mean on the way."""

    def figures(self, side: str) -> Figures:
        """What is known of it, with names that begin with `side`."""
        found: Figures = {f"{side}_env_steps": float(self.env_steps), f"{side}_best_return": self.best}
        if self.first_step is not None:
            found[f"{side}_start_s"] = self.first_step - self.command
            if self.goal is not None:
                found[f"{side}_training_s"] = self.goal - self.first_step
                found[f"{side}_whole_s"] = self.goal - self.command
        return found


def measure(*, seeds: Sequence[int] = SEEDS, with_peer: bool = True, goal: float = GOAL) -> Report:
    """A column per seed. Sides take turns."""
    sides: dict[str, Callable[[int, float], Reached]] = {"ours": run_ours}
    if with_peer:
        sides[PEERS[PEER].lower().replace(" ", "_")] = run_peer
    cases: dict[str, Figures] = {}
    for turn, seed in enumerate(seeds):
        found: Figures = {}
        for side in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
            print(f"measuring the time to a return of {goal:g}: {side}, seed {seed}", file=sys.stderr, flush=True)
            found |= sides[side](seed, goal).figures(side)
        cases[f"seed {seed}"] = {**ordered(found, list(sides)), **speedups(found, list(sides))}
    notes = (
        f"CartPole, velocities masked, {ENVS} envs, LSTM 128; goal: mean of the last {WINDOW} episodes >= {goal:g}",
        "start: command to first env step; training: first env step to goal; whole: command to goal",
        f"ours: {' '.join(our_case(seeds[0]).words())}",
        *([f"{PEERS[PEER]}: learning rate 1e-3, observations and returns normalised"] if with_peer
          else [f"not installed: {PEERS[PEER]}; bench/peers/install.sh {PEER}"]),
    )  # fmt: skip
    return Report("return", f"seconds to a mean return of {goal:g} on CartPole without velocities", cases, notes)


def ordered(found: Figures, sides: Sequence[str]) -> Figures:
    """Figure by figure, side by side."""
    kinds = ("start_s", "training_s", "whole_s", "env_steps", "best_return")
    names = [f"{side}_{kind}" for kind in kinds for side in sides]
    return {name: found[name] for name in names if name in found}


def speedups(found: Figures, sides: Sequence[str]) -> Figures:
    """`ours_sooner_<phase>_times`: the other side's seconds over ours."""
    if len(sides) < 2:
        return {}
    mine, theirs = sides
    return {
        f"{mine}_sooner_{phase}_times": found[f"{theirs}_{phase}_s"] / found[f"{mine}_{phase}_s"]
        for phase in ("training", "whole")
        if f"{theirs}_{phase}_s" in found and f"{mine}_{phase}_s" in found
    }


def our_case(seed: int) -> Case:
    """Our run; it is stopped once the goal is reached."""
    return Case(
        "return",
        "peer_envs:make_cartpole",
        ENVS,
        None,
        num_actors=ACTORS,
        max_policy_lag=1,
        other={"seed": seed, **SETTINGS},
    )


def run_ours(seed: int, goal: float = GOAL) -> Reached:
    """Raises RunFailed if the run breaks."""
    with tempfile.TemporaryDirectory(prefix="rs-bench-") as directory:
        episodes = Path(directory) / "episodes"
        episodes.mkdir()
        extra = {"PYTHONPATH": str(RUNNERS), EPISODES_VARIABLE: str(episodes), **OURS_ONLY_IN_ACTORS}
        with WholeRun(our_case(seed).words(), Path(directory) / "run", extra, deadline_s=2 * DEADLINE_S) as run:
            return watch(episodes, run.begun, run.wait, goal)


def run_peer(seed: int, goal: float = GOAL) -> Reached:
    """Sample Factory's."""
    with tempfile.TemporaryDirectory(prefix="rs-bench-") as directory:
        episodes = Path(directory)
        words = ["--env", "cartpole", "--envs", str(ENVS), "--seconds", "1e9", "--seed", str(seed), "--returns"]
        command = time.perf_counter()
        nowhere = subprocess.DEVNULL
        with runner(PEER, words, stdout=nowhere, extra={EPISODES_VARIABLE: directory}) as process:

            def going_on(seconds: float) -> bool:
                try:
                    process.wait(seconds)
                except subprocess.TimeoutExpired:
                    return True
                return False

            return watch(episodes, command, going_on, goal)


def watch(episodes: Path, command: float, going_on: Callable[[float], bool], goal: float) -> Reached:
    """Looks at the envs' own notes until the goal is reached, the run ends, or the deadline has passed."""
    while True:
        running = going_on(POLL_S)
        reached = outcome(notes_in(episodes), command, goal)
        if reached.goal is not None or not running or time.perf_counter() - command > DEADLINE_S:
            return reached


def notes_in(directory: Path) -> list[dict[str, float]]:
    """What the envs of all processes wrote so far; a line that is just being written is left out."""
    lines = (line for path in sorted(directory.glob("*.jsonl")) for line in path.read_text().splitlines(keepends=True))
    return [json.loads(line) for line in lines if line.endswith("\n")]


def outcome(notes: Sequence[dict[str, float]], command: float, goal: float) -> Reached:
    """Pure. notes: {"first_step": time} of each process that steps envs, {"time", "total", "length"} per episode."""
    first = min((note["first_step"] for note in notes if "first_step" in note), default=None)
    finished = sorted((note for note in notes if "total" in note), key=lambda note: note["time"])
    env_steps, window, best = 0, 0.0, 0.0
    for index, note in enumerate(finished):
        env_steps += int(note["length"])
        window += note["total"] - (finished[index - WINDOW]["total"] if index >= WINDOW else 0.0)
        if index + 1 >= WINDOW:
            best = max(best, window / WINDOW)
            if window / WINDOW >= goal:
                return Reached(command, first, note["time"], env_steps, best)
    return Reached(command, first, None, env_steps, best)
