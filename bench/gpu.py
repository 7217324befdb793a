"""`make gpu`, or `python -m bench.gpu`: everything that only a GPU can show, in under four minutes; results are kept.

    numbers   estimators, recurrent core, ratio law, every kind of run, on the GPU against the CPU
    uploads   batches, pinning where it works, where it is refused, over and over
    runs      eight actors and a learner: one CUDA process, a restart, an evaluation
    timings   upload, advantages, batch, update; device memory
    speed     whole runs

Each group is a process of its own and each part is caught on its own, so one failure, crash or hang hides nothing but
the rest of its group, which is then named. Without a GPU nothing is measured: what was skipped is said, and the exit
code is 0. `--rehearse` tries the script itself out on a CPU, with small sizes, and keeps nothing.

Results: bench/results/gpu.json and gpu.md.    exit code: 1 if a part failed, else 0
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from bench import gpu_checks, gpu_runs, gpu_timings, gpu_uploads
from bench.gpu_checks import Figures
from rollout_service.bench.report import surroundings
from rollout_service.lifeline import follow_owner, owned

RESULTS: Final = Path(__file__).parent / "results"
ROOT: Final = Path(__file__).resolve().parents[1]
BUDGET_S: Final = 225.0
"""Of all groups; of the script's four minutes the rest is for its start and its end. What is later is skipped."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
INTERRUPT_S: Final = 12.0
"""A run that is told to stop needs up to 8 s. Kept back of the budget."""
LAST_WORDS: Final = 1500

Run = Callable[[torch.device], Figures]


@dataclass(frozen=True)
class Group:
    """Parts that share a process."""

    limit_s: float
    parts: Mapping[str, Run]


@dataclass(frozen=True)
class Result:
    """What came of one part."""

    group: str
    part: str
    status: str
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    reason: str = ""
    """Of a failure or a skip."""


def groups(*, small: bool = False) -> dict[str, Group]:
    """All there is to do. small: to try the script out."""
    envs, more, updates = (8, 16, 3) if small else (64, 256, 20)
    steps = 32 if small else 128
    actors = 2 if small else gpu_runs.ACTORS
    hosts = torch.device("cpu")
    return {
        "numbers": Group(
            60.0,
            {
                "GAE by the scan": partial(gpu_checks.gae_scan, envs=more, steps=steps),
                "V-trace by the scan": partial(gpu_checks.vtrace_scan, envs=more, steps=steps),
                "no launch per step": gpu_checks.scan_launches,
                "LSTM over sequences": partial(gpu_checks.lstm_sequence, rows=8 if small else 32, steps=steps),
                "ratio law, actors on the CPU": gpu_checks.ratio_law,
                "every kind of run": gpu_checks.kinds_of_runs,
                "the same run twice": gpu_checks.same_run_twice,
            },
        ),
        "uploads": Group(
            60.0,
            {
                "batch as on the CPU": gpu_uploads.device_batch,
                "pinned where it lies": gpu_uploads.registration,
                "copies beside the host": gpu_uploads.beside_the_host,
                "field without bytes": gpu_uploads.zero_length_field,
                "pages that are refused": gpu_uploads.refused_range,
                "20 reopenings": gpu_uploads.reopened,
                "64 KiB of locked memory": gpu_uploads.locked_memory_limit,
            },
        ),
        "runs": Group(
            100.0, {"one CUDA process, restart, eval": partial(gpu_runs.one_context_and_a_restart, actors=actors)}
        ),
        "timings": Group(
            60.0,
            {
                f"staging, {envs} envs": partial(gpu_timings.staging_times, envs=envs, steps=steps),
                f"staging, {more} envs": partial(gpu_timings.staging_times, envs=more, steps=steps),
                f"staging, {envs} envs, images": partial(
                    gpu_timings.staging_times, envs=envs, steps=steps, images=True
                ),
                f"update, {envs} envs": partial(gpu_timings.update_times, envs=envs, steps=steps),
                f"update, {more} envs": partial(gpu_timings.update_times, envs=more, steps=steps),
            },
        ),
        "speed": Group(
            110.0,
            {
                f"{envs} envs": partial(gpu_runs.whole_run, envs=envs, updates=updates, actors=actors),
                f"{more} envs": partial(gpu_runs.whole_run, envs=more, updates=updates, actors=actors),
                f"{envs} envs, lag 1": partial(gpu_runs.whole_run, envs=envs, updates=updates, lag=1, actors=actors),
                f"{more} envs, lag 1": partial(gpu_runs.whole_run, envs=more, updates=updates, lag=1, actors=actors),
                f"{envs} envs, learner on the CPU": lambda _: gpu_runs.whole_run(hosts, envs, updates, actors=actors),
            },
        ),
    }


# One group, in a process of its own


def do_group(name: str, device: torch.device, *, small: bool) -> None:
    """Prints one line of JSON per part, as soon as there is one."""
    for part, run in groups(small=small)[name].parts.items():
        print(json.dumps(asdict(do_part(name, part, run, device))), flush=True)


def do_part(group: str, part: str, run: Run, device: torch.device) -> Result:
    """Whatever it raises is its result."""
    begun = time.perf_counter()
    try:
        figures = run(device)
    except Exception as error:
        reason = "".join(traceback.format_exception(error)[-2:]).strip()[-LAST_WORDS:]
        return Result(group, part, FAILED, time.perf_counter() - begun, reason=reason)
    return Result(group, part, PASSED, time.perf_counter() - begun, figures)


# All groups


def measure(device: torch.device, *, small: bool, budget_s: float = BUDGET_S) -> list[Result]:
    """Every group in turn, each result shown when it is there."""
    ends = time.perf_counter() + budget_s
    results: list[Result] = []
    for name, group in groups(small=small).items():
        left = ends - time.perf_counter() - INTERRUPT_S
        if left <= 0:
            new = [Result(name, part, SKIPPED, reason=f"the {budget_s:g} s were over") for part in group.parts]
        else:
            new = in_a_process(name, group, device, small=small, left_s=left)
        for result in new:
            print(line(result), flush=True)
        results += new
    return results


def in_a_process(name: str, group: Group, device: torch.device, *, small: bool, left_s: float) -> list[Result]:
    """The group's results. What it did not get to has failed, and how it ended is the reason; where the script's time
    ended before the group's it was skipped."""
    limit_s, status = min(group.limit_s, left_s), FAILED
    words = ["--group", name, "--device", device.type, *(["--rehearse"] if small else [])]
    command = [sys.executable, "-m", "bench.gpu", *words]
    with subprocess.Popen(
        command, cwd=ROOT, env=owned(os.environ),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        try:
            said, complained = child.communicate(timeout=limit_s)
            ending = f"its process ended with exit code {child.returncode}"
        except subprocess.TimeoutExpired:
            said, complained = interrupted(child)
            ending = f"its process took longer than {limit_s:.0f} s"
            status = FAILED if limit_s == group.limit_s else SKIPPED
    found = [Result(**json.loads(text)) for text in said.splitlines() if text.startswith('{"group"')]
    missing = [part for part in group.parts if part not in {result.part for result in found}]
    reason = f"{ending}: {complained.strip()[-LAST_WORDS:]}"
    return [*found, *(Result(name, part, status, reason=reason) for part in missing)]


def interrupted(child: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a group's process: asked first, so that it ends the run it has started. Returns what it printed."""
    child.send_signal(signal.SIGINT)
    try:
        return child.communicate(timeout=INTERRUPT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.communicate()


# Showing


def line(result: Result) -> str:
    """One part, readable without the JSON."""
    head = f"{result.status:<8}{result.group:<9}{result.part:<34}{result.seconds:6.1f} s"
    figures = "  ".join(f"{name} {value:.4g}" for name, value in shown(result.figures).items())
    return "\n".join([f"{head}  {figures}".rstrip(), *(f"        {text}" for text in result.reason.splitlines())])


def shown(figures: Figures) -> Figures:
    """Without the quartiles, which the JSON has."""
    return {name: value for name, value in figures.items() if not ("_to_" in name and name.endswith(("_low", "_high")))}


def machine(device: torch.device) -> dict[str, str]:
    facts = dict(surroundings())
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts["gpu"] = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, capability {found.major}.{found.minor}"
        facts["cuda"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return facts


def page(results: Sequence[Result], facts: Mapping[str, str]) -> str:
    """The Markdown report."""
    lines = ["# On a GPU", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| | group | part | s | figures |", "|---|---|---|---:|---|"]
    for result in results:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in shown(result.figures).items())
        reason = result.reason.replace("\n", " ").replace("|", "/")
        lines.append(f"| {result.status} | {result.group} | {result.part} | {result.seconds:.1f} | {figures}{reason} |")
    return "\n".join([*lines, ""])


def why_not() -> str | None:
    """Why nothing can be measured here; None if it can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for the CPU only"
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no device on this machine"


def skip(reason: str) -> None:
    """Says what was not done, and why."""
    print(f"no GPU here: {reason}; `python -m bench.gpu --rehearse` tries the script itself out")
    for name, group in groups().items():
        for part in group.parts:
            print(line(Result(name, part, SKIPPED)))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks and timings that need a GPU.")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where gpu.json and gpu.md go")
    parser.add_argument("--rehearse", action="store_true", help="small sizes on the CPU, to try the script out")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    chosen = parser.parse_args(words)
    if chosen.group is not None:
        follow_owner()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # of what runs in the background it is ignored
        do_group(chosen.group, torch.device(chosen.device), small=chosen.rehearse)
        return 0
    reason = None if chosen.rehearse else why_not()
    if reason is not None:
        skip(reason)
        return 0
    device = torch.device("cpu" if chosen.rehearse else "cuda")
    begun = time.perf_counter()
    results = measure(device, small=chosen.rehearse)
    seconds = time.perf_counter() - begun
    counts = {status: sum(result.status == status for result in results) for status in (PASSED, FAILED, SKIPPED)}
    print(f"{', '.join(f'{count} {status}' for status, count in counts.items())} in {seconds:.0f} s")
    if not chosen.rehearse:
        keep(results, machine(device), chosen.results)
    return 1 if counts[FAILED] else 0


def keep(results: Sequence[Result], facts: Mapping[str, str], directory: Path) -> None:
    document: dict[str, Any] = {"machine": dict(facts), "parts": [asdict(result) for result in results]}
    directory.mkdir(parents=True, exist_ok=True)
    # NaN is no JSON; a figure that is none has failed its part already.
    (directory / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / "gpu.md").write_text(page(results, facts))


if __name__ == "__main__":
    sys.exit(main())
