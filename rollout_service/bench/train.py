"""train: whole runs with real processes, as `rollout-service train` does them, from env step to new weights.

Each run is the real command in its own process; rates and time splits come from its own `metrics.jsonl`, without the
first updates, CPU time and memory from the system. Cases take turns, run by run. Settings are those of the peers'
comparison: MLP 64, LSTM 128, T = 128, 4 epochs of 4 minibatches, nothing normalised; lockstep and streaming.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rollout_service.bench.report import Report
from rollout_service.bench.rig import CARTPOLE, ENCODER, HIDDEN, NULL_ENV
from rollout_service.bench.timing import Figures
from rollout_service.bench.whole_run import POLL_S, Usage, WholeRun

REPETITIONS: Final = 3
WARM_UP: Final = 3
"""Updates that are not measured: caches fill, the allocator grows, actors start together."""
UNTIL_STOPPED: Final = 10**9
"""Env steps of a run that somebody else ends."""
SPLITS: Final = {"split_actor/": "actor", "split_learner/": "learner"}
EPOCHS: Final = 4


@dataclass(frozen=True)
class Case:
    """One configuration of a run."""

    name: str
    env: str
    num_envs: int
    updates: int | None
    """None: until it is stopped."""
    num_actors: int = 2
    max_policy_lag: int = 0
    """0: lockstep. 1: collecting and learning overlap."""
    num_steps: int = 128
    hidden_dim: int = HIDDEN
    encoder_dim: int = ENCODER
    minibatches: int = 4
    other: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of `train`; True: a switch."""

    def words(self) -> list[str]:
        """The command line after `rollout-service`, but for the run directory."""
        per_update = self.num_envs * self.num_steps
        settings = {
            "env": self.env,
            "num-actors": self.num_actors,
            "envs-per-actor": self.num_envs // self.num_actors,
            "num-steps": self.num_steps,
            "total-steps": UNTIL_STOPPED if self.updates is None else (WARM_UP + self.updates) * per_update,
            "hidden-dim": self.hidden_dim,
            "encoder-dim": self.encoder_dim,
            "epochs": EPOCHS,
            "envs-per-minibatch": self.num_envs // self.minibatches,
            "learning-rate": 2.5e-4,
            "learning-rate-schedule": "constant",
            "device": "cpu",
            **({"max-policy-lag": self.max_policy_lag} if self.max_policy_lag else {}),
            **self.other,
        }
        options = [
            word for name, value in settings.items() for word in (f"--{name}", *([] if value is True else [str(value)]))
        ]
        return ["train", *options, "--no-tensorboard", "--json"]

    def streaming(self, *, num_actors: int) -> Case:
        """The same with one update of lag, and so many actors."""
        return replace(self, name=f"{self.name}, streaming", num_actors=num_actors, max_policy_lag=1)


LOCKSTEP: Final = tuple(
    Case(f"{name}, {num_envs} envs", env, num_envs, updates)
    for name, env in (("cartpole", CARTPOLE), ("null", NULL_ENV))
    for num_envs, updates in ((16, 40), (64, 15))
)
STREAMING_ACTORS: Final = 2
"""Actors of the streaming cases."""
CASES: Final = tuple(
    case for lockstep in LOCKSTEP for case in (lockstep, lockstep.streaming(num_actors=STREAMING_ACTORS))
)

NOTES: Final = (
    "2 actors and 1 learner as processes; lockstep unless it says streaming (max_policy_lag 1); MLP 64, LSTM 128, "
    "T = 128, 4 epochs x 4 minibatches, on the CPU",
    "actor, learner shares: of the actors' and of the learner's time; wait: for the other side; first update s: from "
    "the start",
    "cpu shares: of all usable cores, after the warm-up; service: the parent process; idle: left over by all of them",
    "rss: resident memory of a process, with the pages of shared segments that it touched",
)


def measure(repetitions: int = REPETITIONS, *, cases: Sequence[Case] = CASES) -> Report:
    """Medians over the runs of each case. Raises RunFailed with the last words of a run that broke."""
    runs: dict[str, list[Figures]] = {case.name: [] for case in cases}
    for _ in range(repetitions):
        for case in cases:
            runs[case.name].append(one_run(case))
    return Report("train", "whole runs: actors, learner, service", medians(runs), NOTES)


def medians(runs: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    """Figure by figure, over the runs of each case; a figure that one of them lacks is left out."""
    return {
        name: {key: statistics.median(run[key] for run in done) for key in done[0] if all(key in run for run in done)}
        for name, done in runs.items()
    }


def one_run(case: Case) -> Figures:
    """Trains once. Returns env steps per second after the warm-up, the last time splits, CPU time and memory."""
    with tempfile.TemporaryDirectory(prefix="rs-bench-") as directory:
        before: Usage | None = None
        latest: Usage | None = None
        with WholeRun(case.words(), Path(directory) / "run") as run:
            while run.wait(POLL_S):
                if len(run.log) >= WARM_UP:
                    usage = run.usage()
                    before = before or usage
                    latest = usage if usage.pids("actors") and usage.pids("learner") else latest
        figures = figures_of(run.log)
    if before is None or latest is None or latest.time <= before.time:
        return figures
    return {**figures, **latest.cpu_shares(before), **resident_figures(latest)}


def resident_figures(usage: Usage) -> Figures:
    """`<role>_rss_mib`, of actors the mean of one."""
    return {
        f"{name}_rss_mib": statistics.mean(found)
        for role, name in (("actors", "actor"), ("learner", "learner"), ("service", "service"))
        if (found := usage.resident_mib(role))
    }


def figures_of(log: Sequence[dict[str, Any]]) -> Figures:
    """What the lines of a `metrics.jsonl` say, one line per update."""
    first, last = log[WARM_UP - 1], log[-1]
    rate = (last["env_steps"] - first["env_steps"]) / (last["wall_time"] - first["wall_time"])
    lag = {"policy_lag_mean": float(last["learner/policy_lag_mean"])} if "learner/policy_lag_mean" in last else {}
    return {"env_steps_per_s": rate, "first_update_s": float(log[0]["time/elapsed_s"]), **lag, **splits_of(last)}


def splits_of(line: Mapping[str, Any]) -> Figures:
    """`actor_<phase>_share` and `learner_<phase>_share`, as the last updates had them."""
    return {
        f"{side}_{tag.removeprefix(prefix)}_share": float(share)
        for prefix, side in SPLITS.items()
        for tag, share in line.items()
        if tag.startswith(prefix)
    }
