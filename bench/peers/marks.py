"""What a runner says on standard output: who it is, and how many env steps are done when. Standard library only.

SIDE {"version": ..., "settings": ...}
MARK {"time": seconds of the system's monotonic clock, "env_steps": n}         after each whole iteration
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings

WARM_UP_ITERATIONS = 2
WARM_UP_S = 1.0
"""Neither is measured: caches fill, pools start, the first episodes are short. Ours has the same (rollout_service)."""


def runner_parser(description: str) -> argparse.ArgumentParser:
    """The words that every runner understands."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--env", choices=("cartpole", "null"), default="cartpole")
    parser.add_argument("--envs", type=int, default=16, help="parallel envs")
    parser.add_argument("--seconds", type=float, default=15.0, help="measured, after the warm-up")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def introduce(version: str, settings: str) -> None:
    """Once, before the first mark."""
    print("SIDE " + json.dumps({"version": version, "settings": settings}), flush=True)


class Marks:
    """Called with the env steps so far after each iteration; True once `seconds` are measured."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls = 0
        self.first = 0.0
        self.begin: float | None = None

    def __call__(self, env_steps: int) -> bool:
        now = time.perf_counter()
        print("MARK " + json.dumps({"time": now, "env_steps": env_steps}), flush=True)
        self.calls += 1
        self.first = self.first or now
        if self.begin is None and self.calls > WARM_UP_ITERATIONS and now - self.first >= WARM_UP_S:
            self.begin = now
        return self.begin is not None and now - self.begin >= self.seconds


def hide_stub_compiler() -> None:
    """An `nvcc` in /usr/local/bin without CUDA_HOME breaks PufferLib's import."""
    kept = [entry for entry in os.environ["PATH"].split(":") if entry != "/usr/local/bin"]
    os.environ["PATH"] = ":".join(kept)
