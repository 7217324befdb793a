"""gae: our advantages against the usual step loop over time-major float32 arrays, and against a compiled peer.

Ours refuses rows that are not finite, keeps three rules apart and sums in float64; the loop does none of that and
gets its time limits already folded into the rewards. tianshou's numba function runs in its own environment where it is
installed (bench/peers/install.sh tianshou) and does even less. Axis letters: N envs, T steps.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from learner import single_pass
from learner.gae import Estimator, advantages_and_returns, bootstrap, generalized_advantages
from rollout_service.bench.report import Report
from rollout_service.bench.rig import Array
from rollout_service.bench.runners import RUNNERS, installed, interpreter
from rollout_service.bench.timing import Figures, Samples, Side, alternate
from rollout_service.errors import RunFailed

REPETITIONS: Final = 15
SIZES: Final = ((1024, 512), (16, 128))
END_PROBABILITY: Final = 0.01
TRUNCATED_SHARE: Final = 0.2
GAMMA, LAMBDA = 0.99, 0.95

BY: Final = "by the compiled pass" if single_pass.BUILT else "by numpy: the compiled pass is not built"
NOTES: Final = (
    f"whole: from flags to advantages and returns in the slots, all checks, {BY}",
    "reference: the same by numpy, float64; recursion: its inner part alone, float32",
    "naive: numpy step loop over [T, N] float32 with truncation values already added to the rewards",
)
PEER: Final = "tianshou"
PEER_NOTE: Final = "tianshou {version}: its numba loop alone, next values ready-made, memory kept by the allocator"
PEER_START_S: Final = 120.0
"""Importing torch and compiling, at most."""
KEPT: Final = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}
"""glibc then gives arrays of megabytes from memory it already has; else the peer mostly waits for fresh pages."""
F32 = NDArray[np.float32]


def measure(
    repetitions: int = REPETITIONS, *, sizes: Sequence[tuple[int, int]] = SIZES, peer: bool | None = None
) -> Report:
    """One case per (N, T). peer: whether tianshou takes part; None: if it is installed."""
    cases: dict[str, Figures] = {}
    notes: tuple[str, ...] = NOTES
    for envs, steps in sizes:
        name = f"[{envs}, {steps}]"
        cases[name] = one_case(repetitions, envs, steps)
        if peer if peer is not None else installed(PEER):
            figures, version = against_peer(repetitions, envs, steps)
            cases[name] |= figures
            notes = (*NOTES, PEER_NOTE.format(version=version))
    return Report("gae", "advantages and returns of a rollout [envs, steps]", cases, notes)


def one_case(repetitions: int, envs: int, steps: int) -> Figures:
    rows, last_values = rollout(envs, steps)
    counts = np.full(envs, steps)
    estimator = Estimator(GAMMA, LAMBDA)
    terminated, truncated = rows["terminated"].astype(np.bool_), rows["truncated"].astype(np.bool_)
    next_values, cut = bootstrap(
        estimator.rule,
        values=rows["values"],
        last_values=last_values,
        truncation_values=rows["truncation_values"],
        terminated=terminated,
        truncated=truncated,
        valid=np.ones_like(terminated),
        valid_steps=counts,
    )
    naive = time_major(rows, last_values)
    samples = alternate(
        {
            "whole": whole(rows, last_values),
            "reference": lambda: advantages_and_returns(rows, last_values.astype(np.float64), counts, estimator),
            "recursion": lambda: generalized_advantages(
                rows["rewards"], rows["values"], next_values, cut, gamma=GAMMA, lam=LAMBDA
            ),
            "naive": lambda: naive_advantages(*naive),
        },
        repetitions=repetitions,
    )
    return samples.medians("us") | samples.ratio("whole", "naive") | samples.ratio("whole", "reference")


def whole(rows: dict[str, Array], last_values: F32) -> Side:
    """What the learner does once the rows are known to be there."""
    counts, estimator = np.full(len(last_values), rows["valid"].shape[1]), Estimator(GAMMA, LAMBDA)
    return lambda: single_pass.write_advantages(rows, last_values.astype(np.float64), counts, estimator)


def against_peer(repetitions: int, envs: int, steps: int) -> tuple[Figures, str]:
    """Ours and tianshou's in turns; its figures, and its version. Raises RunFailed if it does not answer."""
    ours = whole(*rollout(envs, steps))
    seconds: dict[str, list[float]] = {"whole": [], PEER: []}
    with peer_process(envs, steps) as process:
        version = json.loads(answer(process).removeprefix("READY"))["version"]
        for _ in range(repetitions):
            seconds["whole"] += alternate({"whole": ours}, repetitions=1).seconds["whole"]
            seconds[PEER].append(float(answer(process, "go")))
    samples = Samples(seconds)
    return {f"{PEER}_us": samples.median(PEER) * 1e6} | samples.ratio("whole", PEER), version


@contextmanager
def peer_process(envs: int, steps: int) -> Iterator[subprocess.Popen[str]]:
    command = [str(interpreter(PEER)), str(RUNNERS / "gae_peers.py"), str(envs), str(steps)]
    process = subprocess.Popen(
        ["timeout", f"{PEER_START_S:g}", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | KEPT,
    )
    with process:
        try:
            yield process
        finally:
            process.terminate()


def answer(process: subprocess.Popen[str], question: str | None = None) -> str:
    """Its next line. Raises RunFailed if it has left."""
    if process.stdin is None or process.stdout is None:
        raise RunFailed("the peer was started without pipes")
    if question is not None:
        print(question, file=process.stdin, flush=True)
    if not (line := process.stdout.readline()):
        raise RunFailed(f"{PEER} left without an answer; install it anew (bench/peers/install.sh {PEER})")
    return line


def rollout(envs: int, steps: int) -> tuple[dict[str, Array], F32]:
    """Rows [N, T] as a rollout holds them, and last values [N]."""
    generator = np.random.default_rng(0)
    shape = (envs, steps)
    ends = generator.random(shape) < END_PROBABILITY
    truncated = ends & (generator.random(shape) < TRUNCATED_SHARE)
    floats = {name: generator.standard_normal(shape, np.float32) for name in ("rewards", "values", "log_probs")}
    final_values = generator.standard_normal(shape, np.float32)
    return {
        **floats,
        "terminated": (ends & ~truncated).astype(np.uint8),
        "truncated": truncated.astype(np.uint8),
        "valid": np.ones(shape, np.uint8),
        "truncation_values": np.where(truncated, final_values, np.float32(np.nan)),
        "advantages": np.zeros(shape, np.float32),
        "returns": np.zeros(shape, np.float32),
    }, generator.standard_normal(envs, np.float32)


def time_major(rows: dict[str, Array], last_values: F32) -> tuple[F32, F32, F32, F32]:
    """What `naive_advantages` takes: rewards, values and ends as float32 [T, N], last values [N]."""
    truncated = rows["truncated"].astype(np.bool_)
    rewards = rows["rewards"] + np.where(truncated, np.float32(GAMMA) * rows["truncation_values"], np.float32(0.0))
    ends = (truncated | rows["terminated"].astype(np.bool_)).astype(np.float32)
    values = rows["values"]
    return (
        np.ascontiguousarray(rewards.T),
        np.ascontiguousarray(values.T),
        np.ascontiguousarray(ends.T),
        last_values,
    )


def naive_advantages(rewards: F32, values: F32, ends: F32, last_values: F32) -> tuple[F32, F32]:
    """GAE as it is usually written: advantages and returns, float32 [T, N]."""
    advantages = np.zeros_like(rewards)
    following = np.zeros_like(last_values)
    next_values = last_values
    for t in reversed(range(len(rewards))):
        going_on = 1.0 - ends[t]
        delta = rewards[t] + GAMMA * next_values * going_on - values[t]
        following = delta + GAMMA * LAMBDA * going_on * following
        advantages[t] = following
        next_values = values[t]
    return advantages, advantages + values
