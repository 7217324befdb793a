"""Whole runs of the real command on a GPU: who holds a context, what a restart and an evaluation do, how fast it is.

A process that holds a context has the driver's memory device open; unlike the driver's own list this works in any pid
namespace. Callers: `bench.gpu`, tests/gpu. What must never happen: a run that outlives its function.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil
import torch

from bench.gpu_checks import Figures, require
from rollout_service.bench.rig import CARTPOLE, NULL_ENV
from rollout_service.bench.train import WARM_UP, Case, figures_of
from rollout_service.bench.whole_run import POLL_S, ROOT, WholeRun, environment

CONTEXT_DEVICE: Final = "/dev/nvidia-uvm"
MAPPED_DEVICE: Final = "/dev/nvidia"
"""In the list of mappings, where a sandbox hides open devices."""
ACTORS: Final = 8
DEADLINE_S: Final = 70.0
"""Of one run."""
EVAL_S: Final = 60
COMPLAINTS: Final = re.compile(r"Cannot re-initialize CUDA|CUDA error|cudaError|CUBLAS_STATUS|CUDNN_STATUS|Traceback")


def contexts(run: WholeRun) -> list[psutil.Process]:
    """Processes of the run, its parent included, that hold a CUDA context."""
    return [process for process in (run.tree, *run.children()) if holds_context(process)]


def holds_context(process: psutil.Process) -> bool:
    own = Path("/proc") / str(process.pid)
    with suppress(OSError):  # it is just leaving
        open_files = {str(link.readlink()) for link in (own / "fd").iterdir() if link.is_symlink()}
        return CONTEXT_DEVICE in open_files or MAPPED_DEVICE in (own / "maps").read_text()
    return False


def compute_processes() -> int:
    """As many as the driver lists on this machine; -1 where it cannot be asked, or cannot see this pid namespace."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return -1
    listed = subprocess.run(
        [command, "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return len(listed.stdout.split()) if listed.returncode == 0 else -1


def one_context_and_a_restart(device: torch.device, actors: int = ACTORS) -> Figures:
    """Eight actors and a learner: exactly one CUDA process, also after an actor was killed and came back, while the
    newest checkpoint is evaluated beside the run; nobody complains about CUDA."""
    case = Case(
        f"{actors} actors", CARTPOLE, 4 * actors, None, num_actors=actors, num_steps=64,
        other={"device": device.type, "checkpoint-interval": 1, "self-check": 1},
    )  # fmt: skip
    expected = 1 if device.type == "cuda" else 0
    with running(case) as run:
        await_until(run, lambda: len(run.log) >= 2, "two updates")
        require_contexts(run, expected)
        listed = compute_processes()
        victim = actor(run, actors - 1)
        victim.kill()
        await_until(run, lambda: actor_returned(run, actors - 1, victim.pid), "the killed actor's successor")
        seen = len(run.log)
        evaluation = subprocess.run(
            [sys.executable, "-m", "rollout_service", "eval", str(run.run_dir), "--episodes", "8", "--json"],
            cwd=ROOT, env=environment({}), capture_output=True, text=True, timeout=EVAL_S, check=False,
        )  # fmt: skip
        require(evaluation.returncode == 0, f"eval ended with exit code {evaluation.returncode}: {evaluation.stderr}")
        await_until(run, lambda: len(run.log) >= seen + 2, "two updates after the restart")
        require_contexts(run, expected)
        words = [line for log in sorted((run.run_dir / "logs").iterdir()) for line in log.read_text().splitlines()]
        complaints = [line for line in words if COMPLAINTS.search(line)]
        require(not complaints, f"the logs complain: {complaints[:3]}")
        deviation = max(line.get("learner/self_check_deviation", 0.0) for line in run.log)
    return {
        "cuda_processes": float(expected),
        "listed_by_the_driver": float(listed),
        "updates": float(len(run.log)),
        "ratio_deviation": float(deviation),
        "evaluated_return": float(json.loads(evaluation.stdout.splitlines()[-1])["return_mean"]),
    }


def require_contexts(run: WholeRun, expected: int) -> None:
    found = contexts(run)
    names = [" ".join(process.cmdline()[1:5]) for process in found]
    require(len(found) == expected, f"{len(found)} processes hold a CUDA context, not {expected}: {names}")
    require(all("learner" in process.cmdline() for process in found), f"not the learner: {names}")


def actor(run: WholeRun, number: int) -> psutil.Process:
    found = actors_of(run, number)
    require(len(found) == 1, f"{len(found)} processes are actor {number}")
    return found[0]


def actors_of(run: WholeRun, number: int) -> list[psutil.Process]:
    found = []
    for process in run.children():
        with suppress(psutil.Error):
            words = process.cmdline()
            if "workers" in words and words[words.index("--actor") + 1] == str(number):
                found.append(process)
    return found


def actor_returned(run: WholeRun, number: int, before: int) -> bool:
    return any(process.pid != before for process in actors_of(run, number))


@contextmanager
def running(case: Case) -> Iterator[WholeRun]:
    """The run of a case, in a directory of its own; over afterwards."""
    with tempfile.TemporaryDirectory(prefix="rs-bench-") as directory:
        run = WholeRun(case.words(), Path(directory) / "run", deadline_s=DEADLINE_S)
        with run:
            yield run


def await_until(run: WholeRun, holds: Callable[[], bool], what: str) -> None:
    """Raises CheckFailed if the run ends first, RunFailed at its deadline."""
    while not holds():
        require(run.wait(POLL_S), f"the run ended before {what}: {run.said()}")


def whole_run(device: torch.device, envs: int, updates: int, *, lag: int = 0, actors: int = ACTORS) -> Figures:
    """Env steps per second and time shares of one run on NullEnv, T = 128, after a warm-up."""
    case = Case(
        f"null, {envs} envs", NULL_ENV, envs, updates, num_actors=actors, max_policy_lag=lag,
        other={"device": device.type},
    )  # fmt: skip
    begun = time.perf_counter()
    with running(replace(case, updates=updates)) as run:
        while run.wait(POLL_S):
            pass
        require(len(run.log) == WARM_UP + updates, f"{len(run.log)} updates instead of {WARM_UP + updates}")
        figures = figures_of(run.log)
    kept = {name: value for name, value in figures.items() if not name.startswith("actor_") or "wait" in name}
    return {**kept, "whole_s": time.perf_counter() - begun}
