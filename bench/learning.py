"""The learning suite: does memory matter, and does it come out as promised?

`make learning`, or `python -m bench.learning tmaze64` for one task.

Every arm is trained by the real command with real processes, then evaluated with `eval` over 100 episodes, sampled and
argmax; the better of the two counts, for each arm alike; the score of an arm is the median over its seeds.
Results: bench/results/learning.json (every run) and bench/results/learning.md (the table), rewritten after each run, so
that an interrupted suite keeps what it has. A run that is already in the file with the same command is not repeated.

`--max-policy-lag 1` trains every arm in streaming instead: learning_lag1.json, and a table learning_lag1.md that puts
each score beside the one of learning.json, which is lag 0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollout_service.lifeline import owned

RESULTS = Path(__file__).parent / "results"
EPISODES = 100
SEEDS = (1, 2, 3)
RUN_DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Arm:
    """One configuration to train, and the bar that its score is held to."""

    task: str
    name: str
    arguments: tuple[str, ...]
    bar: str = "reported"
    holds: Callable[[dict[str, float]], bool] = field(default=lambda _: True)


def at_least(bar: float, key: str) -> Callable[[dict[str, float]], bool]:
    return lambda score: score[key] >= bar


TMAZE_64 = ("--preset", "tmaze", "--env-kwargs", "corridor=64", "--num-steps", "128", "--total-steps", "500000")
FLICKERING = ("--preset", "flickering", "--total-steps", "500000")

ARMS = (
    Arm(
        "tmaze20", "stored", ("--preset", "tmaze", "--env-kwargs", "corridor=20", "--total-steps", "150000"),
        "eval success >= 0.98", at_least(0.98, "success"),
    ),
    Arm("tmaze64", "stored", TMAZE_64, "eval success >= 0.98", at_least(0.98, "success")),
    Arm(
        "tmaze64", "zero", (*TMAZE_64, "--state-strategy", "zero"),
        "training success within 0.65-0.85", lambda score: 0.65 <= score["training_success"] <= 0.85,
    ),
    Arm(
        "tmaze64", "feed-forward", (*TMAZE_64, "--core", "none"),
        "eval success < 0.6", lambda score: score["success"] < 0.6,
    ),
    Arm("flickering", "lstm", FLICKERING, "eval return >= 450 and >= 2x feed-forward", at_least(450.0, "return")),
    Arm("flickering", "feed-forward", (*FLICKERING, "--core", "none"), "at most half of lstm"),
    Arm(
        "flickering", "truncation-as-termination", (*FLICKERING, "--truncation-as-termination"),
        "sampled return below lstm, in eval and training",
    ),
    Arm(
        "position", "lstm", ("--preset", "position", "--total-steps", "200000"),
        "eval return >= 475", at_least(475.0, "return"),
    ),
    Arm(
        "recall32", "lstm", ("--preset", "recall", "--env-kwargs", "delay=32", "--total-steps", "300000"),
        "eval success >= 0.95", at_least(0.95, "success"),
    ),
    Arm(
        "tmaze100", "stored",
        ("--preset", "tmaze", "--env-kwargs", "corridor=100", "--chrono-max", "256", "--total-steps", "2000000"),
    ),
)  # fmt: skip


def last_json_line(arguments: list[str]) -> dict[str, Any]:
    """Runs the command and parses the last line of its standard output. Raises RuntimeError with its error output."""
    command = [sys.executable, "-m", "rollout_service", *arguments]
    finished = subprocess.run(command, env=owned(os.environ), capture_output=True, text=True, timeout=RUN_DEADLINE_S)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {finished.returncode}:\n{finished.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    return result


def train_words(arm: Arm, seed: int, lag: int) -> list[str]:
    """The command line after `rollout-service`, but for the run directory."""
    streaming = ["--max-policy-lag", str(lag)] if lag else []
    return ["train", *arm.arguments, "--seed", str(seed), "--num-actors", "2", *streaming, "--json"]


def run_arm(arm: Arm, seed: int, lag: int = 0) -> dict[str, Any]:
    """Trains one seed, evaluates it both ways; one JSON-able record."""
    with tempfile.TemporaryDirectory(prefix="learning-") as run_dir:
        train = train_words(arm, seed, lag)
        started = time.monotonic()
        training = last_json_line([*train, "--run-dir", run_dir])
        evaluate = ["eval", run_dir, "--episodes", str(EPISODES), "--json"]
        sampled = last_json_line(evaluate)
        greedy = last_json_line([*evaluate, "--argmax"])
        seconds = time.monotonic() - started
    del training["run_dir"]
    return {
        "task": arm.task,
        "arm": arm.name,
        "seed": seed,
        "command": " ".join(["rollout-service", *train]),
        "training": training,
        "sampled": sampled,
        "argmax": greedy,
        "wall_seconds": round(seconds, 1),
    }


def score_of(records: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the seeds; of sampled and argmax the better one counts."""

    def median(values: list[float | None]) -> float:
        return statistics.median(float("nan") if value is None else value for value in values)

    def better(sampled: float | None, greedy: float | None) -> float | None:
        return None if sampled is None or greedy is None else max(sampled, greedy)

    return {
        "return": median([max(r["sampled"]["return_mean"], r["argmax"]["return_mean"]) for r in records]),
        "success": median(
            [
                None
                if r["sampled"]["success_rate"] is None
                else max(r["sampled"]["success_rate"], r["argmax"]["success_rate"])
                for r in records
            ]
        ),
        "sampled_return": median([r["sampled"]["return_mean"] for r in records]),
        "training_return": median([r["training"]["return_mean"] for r in records]),
        "training_success": median([r["training"]["success_rate"] for r in records]),
        "steps_per_second": median([r["training"]["steps_per_second"] for r in records]),
    }


def verdict(arm: Arm, scores: dict[tuple[str, str], dict[str, float]]) -> bool:
    """Whether the arm's bar holds; the flickering arms are compared with each other."""
    score = scores[arm.task, arm.name]
    lstm, blind = scores.get(("flickering", "lstm")), scores.get(("flickering", "feed-forward"))
    match arm.task, arm.name:
        case "flickering", "lstm":
            return arm.holds(score) and blind is not None and score["return"] >= 2 * blind["return"]
        case "flickering", "feed-forward":
            return lstm is not None and 2 * score["return"] <= lstm["return"]
        case "flickering", "truncation-as-termination":
            # Argmax reaches the cap of 500 in both arms and cannot tell them apart.
            return lstm is not None and all(score[key] < lstm[key] for key in ("sampled_return", "training_return"))
    return arm.holds(score)


def shown(value: float, digits: int = 3) -> str:
    return "-" if value != value else f"{value:.{digits}f}"


def by_arms(records: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The records of each arm that has any, in the order of ARMS."""
    return {
        (arm.task, arm.name): hits
        for arm in ARMS
        if (hits := [r for r in records if (r["task"], r["arm"]) == (arm.task, arm.name)])
    }


def beside_lag_0(records: list[dict[str, Any]], lag_0: list[dict[str, Any]]) -> list[str]:
    """A Markdown table: what each arm scores here, with lag 0, and the difference."""
    here = {key: score_of(hits) for key, hits in by_arms(records).items()}
    there = {key: score_of(hits) for key, hits in by_arms(lag_0).items()}
    lines = [
        "Beside lag 0 (learning.json), here / lag 0, and the difference:",
        "",
        "| task | arm | eval return | eval success | training return | training success | steps/s |",
        "|---|---|---|---|---|---|---|",
    ]
    digits = {"return": 1, "success": 3, "training_return": 1, "training_success": 3, "steps_per_second": 0}
    for (task, name), score in here.items():
        other = there.get((task, name))
        cells = [
            f"{shown(score[key], places)} / {shown(other[key], places)} ({shown(score[key] - other[key], places)})"
            if other is not None
            else f"{shown(score[key], places)} / -"
            for key, places in digits.items()
        ]
        lines.append(f"| {task} | {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def table(records: list[dict[str, Any]], header: dict[str, str], lag_0: list[dict[str, Any]] | None = None) -> str:
    """The Markdown report. lag_0: the records to compare with, if these are of another lag."""
    by_arm = by_arms(records)
    scores = {key: score_of(hits) for key, hits in by_arm.items()}
    lines = [
        "# Learning suite",
        "",
        *(f"- {key}: {value}" for key, value in header.items()),
        f"- score: `eval` of {EPISODES} episodes, the better of sampled and argmax, median over the seeds",
        "",
        "| task | arm | seeds | eval return | of it sampled | eval success | training return | training success "
        "| steps/s | bar | holds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        key = (arm.task, arm.name)
        if key not in scores:
            continue
        s = scores[key]
        lines.append(
            f"| {arm.task} | {arm.name} | {len(by_arm[key])} | {shown(s['return'], 1)} "
            f"| {shown(s['sampled_return'], 1)} | {shown(s['success'])} "
            f"| {shown(s['training_return'], 1)} | {shown(s['training_success'])} | {s['steps_per_second']:,.0f} "
            f"| {arm.bar} | {'yes' if verdict(arm, scores) else 'NO'} |"
        )
    if lag_0 is not None:
        lines += ["", *beside_lag_0(records, lag_0)]
    lines += ["", "Commands, one per arm (seeds " + ", ".join(map(str, SEEDS)) + "):", ""]
    lines += [f"    {hits[0]['command']}" for hits in by_arm.values()]
    return "\n".join(lines) + "\n"


def stored_runs(store: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(store.read_text())["runs"] if store.exists() else []
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description="Train and score the memory tasks and their comparison arms.")
    parser.add_argument("tasks", nargs="*", help="only these tasks, e.g. tmaze64; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--fresh", action="store_true", help="repeat runs that are already in the results")
    parser.add_argument("--max-policy-lag", type=int, default=0, metavar="K", help="0: lockstep (default)")
    options = parser.parse_args()
    lag = options.max_policy_lag
    RESULTS.mkdir(parents=True, exist_ok=True)
    store = RESULTS / (f"learning_lag{lag}.json" if lag else "learning.json")
    records = stored_runs(store)
    lag_0 = stored_runs(RESULTS / "learning.json") if lag else None
    header = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("rollout-service", "torch", "numpy", "gymnasium")),
        "command": "python -m bench.learning" + (f" --max-policy-lag {lag}" if lag else ""),
    }
    for arm in (arm for arm in ARMS if not options.tasks or arm.task in options.tasks):
        for seed in options.seeds:
            same = [r for r in records if (r["task"], r["arm"], r["seed"]) == (arm.task, arm.name, seed)]
            if any(f" {' '.join(arm.arguments)} " in r["command"] for r in same) and not options.fresh:
                continue
            record = run_arm(arm, seed, lag)
            records = [r for r in records if r not in same] + [record]
            store.write_text(json.dumps({**header, "runs": records}, indent=1) + "\n")
            store.with_suffix(".md").write_text(table(records, header, lag_0))
            print(f"{arm.task:11} {arm.name:26} seed {seed}: train {record['training']}, "
                  f"sampled {record['sampled']['return_mean']:.2f} / {record['sampled']['success_rate']}, "
                  f"argmax {record['argmax']['return_mean']:.2f} / {record['argmax']['success_rate']}, "
                  f"{record['wall_seconds']} s", flush=True)  # fmt: skip
    print(table(records, header, lag_0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
