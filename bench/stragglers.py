"""`python -m bench.stragglers`: what one actor with slow resets costs the others: waited for, preempted, in streaming.

Actors of four envs; a step takes 2 ms, an episode 100 steps, a rollout 128. In the slow runs a reset takes 200 ms in
the envs of one actor. Envs only sleep, so two cores are enough for all of them. `together`: all envs of an actor end
their episodes in the same step, so that it is away for four resets in a row; `spread`: a quarter of an episode apart.
Lockstep is measured with four actors, streaming (max_policy_lag 1) with eight, each against its own run without slow
resets. Each run is the real command; rates come from its own `metrics.jsonl`, without the first updates.

Results: bench/results/stragglers.json and stragglers.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import gymnasium
import numpy as np

from rollout_service.bench.report import Report, markdown, show, surroundings
from rollout_service.bench.train import figures_of, medians
from rollout_service.bench.whole_run import WholeRun

RESULTS: Final = Path(__file__).parent / "results"
ENVS_PER_ACTOR, NUM_STEPS, LENGTH = 4, 128, 100
LOCKSTEP, STREAMING = "lockstep", "streaming"
ACTORS: Final = {LOCKSTEP: 4, STREAMING: 8}
STEP_S, RESET_S = 0.002, 0.2
SLOW_ACTOR: Final = 2
SHARE: Final = 0.75
"""Of the actors: three of four."""
UPDATES, REPETITIONS = 20, 3
DEADLINE_S: Final = 300.0


class SleepyEnv(gymnasium.Env[np.ndarray, np.int64]):
    """A step takes step_s; a reset takes reset_s if this is an env of actor `slow_actor`, and no time otherwise."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    made: ClassVar[int] = 0

    def __init__(
        self, step_s: float = STEP_S, reset_s: float = 0.0, slow_actor: int = SLOW_ACTOR, spread: bool = False
    ) -> None:
        number, SleepyEnv.made = SleepyEnv.made, SleepyEnv.made + 1
        self.step_s = step_s
        self.reset_s = reset_s if os.environ.get("ROLLOUT_SERVICE_ACTOR") == str(slow_actor) else 0.0
        self.t = 0
        self.ahead = number % ENVS_PER_ACTOR * LENGTH // ENVS_PER_ACTOR if spread else 0
        """Steps by which the first episode is shorter."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed, options=options)
        time.sleep(self.reset_s)
        self.t, self.ahead = self.ahead, 0
        return np.zeros(4, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:  # noqa: ARG002 the same whatever it is
        time.sleep(self.step_s)
        self.t += 1
        return np.full(4, self.t / LENGTH, np.float32), 1.0, self.t >= LENGTH, False, {}


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    slow: bool
    spread: bool
    preempt: bool
    mode: str = LOCKSTEP

    def words(self, updates: int) -> list[str]:
        """The command line after `rollout-service`, but for the run directory."""
        kwargs = {"reset_s": RESET_S if self.slow else 0.0, "spread": self.spread}
        settings = {
            "env": "bench.stragglers:SleepyEnv",
            "num-actors": ACTORS[self.mode],
            "envs-per-actor": ENVS_PER_ACTOR,
            "num-steps": NUM_STEPS,
            "total-steps": updates * ACTORS[self.mode] * ENVS_PER_ACTOR * NUM_STEPS,
            "hidden-dim": 32,
            "encoder-dim": 32,
            "epochs": 1,
            "envs-per-minibatch": 16,
            "device": "cpu",
            "preempt-share": SHARE if self.preempt else 1.0,
            "max-policy-lag": int(self.mode == STREAMING),
        }
        options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        options += ["--env-kwargs", *(f"{name}={json.dumps(value)}" for name, value in kwargs.items())]
        return ["train", *options, "--no-tensorboard", "--json"]


CASES: Final = (
    Case("even", slow=False, spread=False, preempt=False),
    Case("slow, together", slow=True, spread=False, preempt=False),
    Case("slow, together, preempted", slow=True, spread=False, preempt=True),
    Case("slow, spread", slow=True, spread=True, preempt=False),
    Case("slow, spread, preempted", slow=True, spread=True, preempt=True),
    Case("even, streaming", slow=False, spread=False, preempt=False, mode=STREAMING),
    Case("slow, together, streaming", slow=True, spread=False, preempt=False, mode=STREAMING),
    Case("slow, spread, streaming", slow=True, spread=True, preempt=False, mode=STREAMING),
)


def one_run(case: Case, updates: int = UPDATES) -> dict[str, float]:
    """Trains once. Raises RunFailed with the last words of a run that broke."""
    with (
        tempfile.TemporaryDirectory(prefix="rs-bench-") as directory,
        WholeRun(case.words(updates), Path(directory) / "run", deadline_s=DEADLINE_S) as run,
    ):
        while run.wait():
            pass
        said = (run.run_dir / "run.log").read_text(encoding="utf-8")
        lines = run.log
    last = lines[-1]
    return {
        "env_steps_per_s": figures_of(lines)["env_steps_per_s"],
        "updates": float(last["update"]),
        "partial_slots": float(last.get("count/partial_rollouts", 0)),
        "slowest_actor": float(last.get("actors/slowest", -1)),
        "waited_for_it_share": float(last.get("actors/slowest_waited_share", 0)),
        "named_in_the_log": float(f"actor {SLOW_ACTOR} is the slowest" in said),
    }


def measure(repetitions: int = REPETITIONS, updates: int = UPDATES, cases: Sequence[Case] = CASES) -> Report:
    """Medians over the runs of each case; cases take turns."""
    runs: dict[str, list[dict[str, float]]] = {case.name: [] for case in cases}
    for _ in range(repetitions):
        for case in cases:
            print(f"measuring {case.name}", file=sys.stderr, flush=True)
            runs[case.name].append(one_run(case, updates))
    figures = medians(runs)
    for mode in ACTORS:
        same = [case for case in cases if case.mode == mode]
        even = next((figures[case.name]["env_steps_per_s"] for case in same if not case.slow), None)
        for case in same if even is not None else ():
            figures[case.name]["of_even_share"] = figures[case.name]["env_steps_per_s"] / even
    notes = (
        f"{ACTORS[LOCKSTEP]} actors, in streaming {ACTORS[STREAMING]}, x {ENVS_PER_ACTOR} envs, {STEP_S * 1000:g} ms a "
        f"step, episodes of {LENGTH}, T = {NUM_STEPS}; slow: {RESET_S * 1000:g} ms a reset in actor {SLOW_ACTOR}; "
        f"preempted: preempt_share {SHARE}",
        "together: four resets in a row, spread: one at a time; of even: steps/s against the run without slow resets, "
        "of the same mode; named in the log: share of the runs",
        f"medians of {repetitions} runs",
    )
    return Report("stragglers", "one actor with slow resets", figures, notes)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what a straggler costs, and keep the results.")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N", help="runs per case")
    parser.add_argument("--updates", type=int, default=UPDATES, metavar="N", help="full rollouts per run")
    parser.add_argument("--mode", choices=tuple(ACTORS), help="only these runs (default: both)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the two files go")
    chosen = parser.parse_args()
    cases = [case for case in CASES if chosen.mode in (None, case.mode)]
    report = measure(chosen.repetitions, chosen.updates, cases)
    show(report, sys.stdout)
    facts = {**surroundings(), "command": " ".join(["python -m bench.stragglers", *sys.argv[1:]])}
    chosen.results.mkdir(parents=True, exist_ok=True)
    document = json.dumps({**facts, **report.to_json()}, indent=1, allow_nan=False)
    (chosen.results / "stragglers.json").write_text(document + "\n")
    lines = ["# Stragglers", "", *(f"- {key}: {value}" for key, value in facts.items()), "", markdown(report)]
    (chosen.results / "stragglers.md").write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
