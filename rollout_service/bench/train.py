"""train: whole runs with real processes, as `rollout-service train` does them, from env step to new weights.

Each run is the real command in its own process; rates and time splits come from its own `metrics.jsonl`, without the
first updates. Cases take turns, run by run. Settings are those of the peers' comparison: MLP 64, LSTM 128, T = 128,
4 epochs of 4 minibatches, nothing normalised. What must never happen: a wait for a run without a deadline.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollout_service.bench.report import Report
from rollout_service.bench.rig import CARTPOLE, ENCODER, HIDDEN, NULL_ENV
from rollout_service.bench.timing import Figures
from rollout_service.errors import RunFailed

REPETITIONS: Final = 3
WARM_UP: Final = 3
"""Updates that are not measured: caches fill, the allocator grows, actors start together."""
DEADLINE_S: Final = 300.0
SPLITS: Final = {"split_actor/": "actor", "split_learner/": "learner"}


@dataclass(frozen=True)
class Case:
    """One configuration of a run."""

    name: str
    env: str
    num_envs: int
    updates: int
    num_actors: int = 2
    num_steps: int = 128
    hidden_dim: int = HIDDEN
    encoder_dim: int = ENCODER
    minibatches: int = 4

    def words(self) -> list[str]:
        """The command line after `rollout-service`, but for the run directory."""
        settings = {
            "env": self.env,
            "num-actors": self.num_actors,
            "envs-per-actor": self.num_envs // self.num_actors,
            "num-steps": self.num_steps,
            "total-steps": (WARM_UP + self.updates) * self.num_envs * self.num_steps,
            "hidden-dim": self.hidden_dim,
            "encoder-dim": self.encoder_dim,
            "epochs": 4,
            "envs-per-minibatch": self.num_envs // self.minibatches,
            "learning-rate": 2.5e-4,
            "learning-rate-schedule": "constant",
            "device": "cpu",
        }
        options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        return ["train", *options, "--no-tensorboard", "--json"]


CASES: Final = tuple(
    Case(f"{name}, {num_envs} envs", env, num_envs, updates)
    for name, env in (("cartpole", CARTPOLE), ("null", NULL_ENV))
    for num_envs, updates in ((16, 40), (64, 15))
)

NOTES: Final = (
    "2 actors and 1 learner as processes, lockstep; MLP 64, LSTM 128, T = 128, 4 epochs x 4 minibatches, on the CPU",
    "shares: of the actors' and of the learner's time; wait: for the other side; first update s: from the start",
)


def measure(repetitions: int = REPETITIONS, *, cases: Sequence[Case] = CASES) -> Report:
    """Medians over the runs of each case. Raises RunFailed with the last words of a run that broke."""
    runs: dict[str, list[Figures]] = {case.name: [] for case in cases}
    for _ in range(repetitions):
        for case in cases:
            runs[case.name].append(one_run(case))
    figures = {
        name: {key: statistics.median(run[key] for run in done) for key in done[0]} for name, done in runs.items()
    }
    return Report("train", "whole runs: actors, learner, service", figures, NOTES)


def one_run(case: Case) -> Figures:
    """Trains once. Returns env steps per second after the warm-up, and the last time splits."""
    with tempfile.TemporaryDirectory(prefix="rs-bench-") as run_dir:
        command = [sys.executable, "-m", "rollout_service", *case.words(), "--run-dir", run_dir]
        try:
            finished = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"the run {' '.join(case.words())} did not end within {DEADLINE_S:g} s") from None
        if finished.returncode:
            words = finished.stderr[-4000:].strip()
            raise RunFailed(f"the run {' '.join(case.words())} ended with exit code {finished.returncode}\n{words}")
        lines = (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return figures_of([json.loads(line) for line in lines])


def figures_of(log: Sequence[dict[str, Any]]) -> Figures:
    """What the lines of a `metrics.jsonl` say, one line per update."""
    first, last = log[WARM_UP - 1], log[-1]
    rate = (last["env_steps"] - first["env_steps"]) / (last["wall_time"] - first["wall_time"])
    splits = {
        f"{side}_{tag.removeprefix(prefix)}_share": float(share)
        for prefix, side in SPLITS.items()
        for tag, share in last.items()
        if tag.startswith(prefix)
    }
    return {"env_steps_per_s": rate, "first_update_s": float(log[0]["time/elapsed_s"]), **splits}
