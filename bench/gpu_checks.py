"""What has to hold on a GPU, as functions: each returns figures, and raises CheckFailed if something does not hold.

They run on any device, also on a CPU: there the tests and `--rehearse` try them out. Here are the estimators, the
network and the ratio law; `gpu_uploads` has pinning and batches, `gpu_runs` whole runs. Callers: `bench.gpu`, tests.

Axis letters: N envs, T steps, K valid_steps, n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from learner.gae import Estimator, advantages_and_returns
from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.scan import advantages_and_returns_on_device
from learner.staging import compute_exactly
from learner.trainer import RATIO_LIMIT_CPU, RATIO_LIMIT_CUDA, Trainer
from learner.vtrace import vtrace
from rollout_service.bench.rig import ENCODER, HIDDEN, NULL_ENV, STATE
from rollout_service.config import Device, GaeRule, TrainConfig
from rollout_service.launch.probe import build_run_spec
from rollout_service.launch.serial import SerialRun
from rollout_service.memory.slots import RolloutMemory
from rollout_service.policy.recurrent import LSTMCore

Figures = dict[str, float]

ESTIMATOR: Final = Estimator(0.99, 0.95)
BARS: Final = {"gamma": 0.99, "rho_bar": 1.0, "c_bar": 1.0}
FEW_AND_MANY_STEPS: Final = (64, 1024)
SUM_TOLERANCE: Final = 1e-9
"""Relative, float64 sums in another order."""
FORWARD_TOLERANCE: Final = 5e-5
GRADIENT_TOLERANCE: Final = 5e-4
"""Relative to the largest gradient; on a CPU it is 2e-5. A missed reset is off by a tenth and more."""


class CheckFailed(RuntimeError):
    """What was found, and what was expected."""


def require(holds: bool, complaint: str) -> None:
    """Raises CheckFailed."""
    if not holds:
        raise CheckFailed(complaint)


def require_healthy(device: torch.device) -> None:
    """No error of an earlier call is waiting on the device, and it computes."""
    ones = torch.ones(64, 64, device=device)
    total = float((ones @ ones).sum())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    require(total == 64.0**3, f"a product of ones adds up to {total}, not {64.0**3}")


# Estimators


def gae_scan(device: torch.device, envs: int = 256, steps: int = 128) -> Figures:
    """The scan against the reference, every rule, envs of every length."""
    rows, last_values, counts = estimator_rows(envs, steps)
    there = rows_on(device, envs, steps)
    worst = 0.0
    for rule in GaeRule:
        estimator = Estimator(0.99, 0.95, rule=rule, reward_scale=0.5)
        expected = advantages_and_returns(rows, last_values, counts, estimator)
        found = advantages_and_returns_on_device(*there, estimator)
        for ours, theirs in zip(found, expected, strict=True):
            worst = max(worst, relative(ours.cpu().numpy(), theirs))
    require(worst <= SUM_TOLERANCE, f"GAE differs from the reference by {worst:.3g} of its scale")
    return {"relative_error": worst}


def vtrace_scan(device: torch.device, envs: int = 256, steps: int = 128) -> Figures:
    """On the device as on the CPU, where the tests hold it to a loop over single rows."""
    here, there = (vtrace(*trace_rows(place, envs, steps), **BARS) for place in (torch.device("cpu"), device))
    worst = max(relative(found.cpu().numpy(), expected.numpy()) for found, expected in zip(there, here, strict=True))
    require(worst <= SUM_TOLERANCE, f"V-trace differs from the CPU's by {worst:.3g} of its scale")
    return {"relative_error": worst}


def scan_launches(device: torch.device, envs: int = 16) -> Figures:
    """How many kernels GAE and V-trace start: sixteen times the steps are fewer than twice as many."""
    figures: Figures = {}
    for name, work in (
        ("gae", lambda steps: partial(advantages_and_returns_on_device, *rows_on(device, envs, steps), ESTIMATOR)),
        ("vtrace", lambda steps: partial(vtrace, *trace_rows(device, envs, steps), **BARS)),
    ):
        few, many = counts = [launches(device, work(steps)) for steps in FEW_AND_MANY_STEPS]
        require(0 < few < many < 2 * few, f"{name} of {FEW_AND_MANY_STEPS} steps starts {few} and {many} kernels")
        figures |= {f"{name}_{steps}": float(n) for steps, n in zip(FEW_AND_MANY_STEPS, counts, strict=True)}
    return figures


def launches(device: torch.device, work: Callable[[], object]) -> int:
    """Kernels that it starts; on a CPU operations, inner ones too."""
    on_gpu = device.type == "cuda"
    work()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as seen:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    return sum(event.name.startswith("cudaLaunchKernel" if on_gpu else "aten::") for event in seen.events())


def rows_on(device: torch.device, envs: int, steps: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """`estimator_rows` as tensors."""
    rows, last_values, counts = estimator_rows(envs, steps)
    there = {name: torch.from_numpy(array).to(device) for name, array in rows.items()}
    return there, torch.from_numpy(last_values).to(device), torch.from_numpy(counts).to(device)


def trace_rows(device: torch.device, envs: int, steps: int) -> list[Tensor]:
    """What `vtrace` takes, of noise."""
    rng = np.random.default_rng(2)
    log_ratios, rewards, values, next_values = rng.standard_normal((4, envs, steps))
    ended = rng.random((envs, steps)) < 0.05
    ended[:, -1] = True
    arrays = (log_ratios * 0.3, rewards, values, next_values, ended)
    return [torch.from_numpy(array).to(device) for array in arrays]


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest expected value; inf where one is not a number."""
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    return float(difference) if np.isfinite(difference) else float("inf")


def estimator_rows(envs: int, steps: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Rows [N, T] with ends of every kind and fillers, last values [N], K [N]; NaN where nothing may be read."""
    rng = np.random.default_rng(1)
    counts = rng.integers(0, steps + 1, envs)
    counts[0] = steps
    shape = (envs, steps)
    truncated = rng.random(shape) < 0.05
    rows: dict[str, np.ndarray] = {
        **{name: rng.standard_normal(shape).astype(np.float32) for name in ("rewards", "values", "log_probs")},
        "terminated": (rng.random(shape) < 0.05).astype(np.uint8),
        "truncated": truncated.astype(np.uint8),
        "valid": (rng.random(shape) < 0.95).astype(np.uint8),
        "truncation_values": np.where(truncated, rng.standard_normal(shape), np.nan).astype(np.float32),
    }
    for column, count in zip(rows["values"], counts, strict=True):
        column[count:] = np.nan
    return rows, rng.standard_normal(envs), counts.astype(np.int64)


# The network


def lstm_sequence(device: torch.device, rows: int = 32, steps: int = 128, hidden_dim: int = 128) -> Figures:
    """Whole sequences with resets against the loop over cells: outputs and gradients, one and two layers."""
    compute_exactly(device)
    forward = backward = 0.0
    for layers in (1, 2):
        core = LSTMCore(64, hidden_dim, layers, torch.Generator().manual_seed(0)).to(device)
        generator = torch.Generator().manual_seed(layers)
        x = torch.randn(rows, steps, 64, generator=generator).to(device).requires_grad_()
        for share in (0.0, 0.02, 1.0):
            starts = (torch.rand(rows, steps, generator=generator) < share).float().to(device)
            state = {name: torch.randn(layers, rows, hidden_dim, generator=generator).to(device) for name in STATE}
            outs = [way(x, starts, state) for way in (core.sequence, core.sequence_by_cells)]
            forward = max(forward, float((outs[0] - outs[1]).detach().abs().max()))
            slopes = torch.linspace(-1, 1, outs[0].numel(), device=device).view(outs[0].shape)
            found, expected = (
                torch.autograd.grad((out * slopes).sum(), [*core.parameters(), x], allow_unused=True) for out in outs
            )
            backward = max(backward, *(scaled_difference(*pair) for pair in zip(found, expected, strict=True)))
    require(forward <= FORWARD_TOLERANCE, f"outputs differ from the loop over cells by {forward:.3g}")
    require(backward <= GRADIENT_TOLERANCE, f"gradients differ from the loop over cells by {backward:.3g}")
    return {"forward_error": forward, "gradient_error": backward}


def scaled_difference(found: Tensor | None, expected: Tensor | None) -> float:
    """Largest difference over the largest expected value."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def ratio_law(device: torch.device, updates: int = 4) -> Figures:
    """Actors on the CPU, the learner on the device, statistics of observations moving: ratios are 1 at every update."""
    config = small_run(
        device, env="Memory/PositionCartPole-v0", hidden_dim=128, normalize_observations=True, num_steps=64
    )
    limit = RATIO_LIMIT_CUDA if device.type == "cuda" else RATIO_LIMIT_CPU
    worst = 0.0
    with serial_run(config) as run:
        # A fresh policy is nearly uniform, and would hide a wrong state.
        with torch.no_grad():
            run.trainer.policy.policy.weight.mul_(100.0)
        run.publish()
        for _ in range(updates):
            worst = max(worst, run.one_update().report.metrics["self_check_deviation"])
    require(worst <= limit, f"|ratio - 1| is {worst:.3g} before the first step, the limit is {limit:g}")
    return {"ratio_deviation": worst}


def kinds_of_runs(device: torch.device) -> Figures:
    """Two updates of every kind of run: V-trace, value clipping, zero state, no memory; weights stay finite."""
    kinds: tuple[dict[str, Any], ...] = (
        {"advantage_estimator": "vtrace"},
        {"num_layers": 2, "value_clip_range": 0.2, "normalize_returns": True},
        {"state_strategy": "zero", "target_kl": 0.01},
        {"core": "none"},
    )
    for settings in kinds:
        with serial_run(small_run(device, **settings)) as run:
            for _ in range(2):
                run.one_update()
            finite = all(np.isfinite(array).all() for array in run.trainer.weights().values())
            require(finite, f"weights are not finite after two updates with {settings}")
    return {"runs": float(len(kinds))}


def same_run_twice(device: torch.device) -> Figures:
    """A deterministic run has a kernel for all it does. Whether it repeats itself is a figure: 0 where it does."""
    seen = []
    try:
        for _ in range(2):
            with serial_run(small_run(device, deterministic=True, advantage_estimator="vtrace", num_layers=2)) as run:
                for _ in range(2):
                    run.one_update()
                seen.append(run.trainer.weights())
    finally:
        torch.use_deterministic_algorithms(False)
    return {"largest_difference": max(float(np.abs(seen[0][name] - seen[1][name]).max()) for name in seen[0])}


def trainer(device: Device, envs: int, steps: int) -> Trainer:
    """Of one actor on NullEnv with the sizes of `rollout_service.bench.rig`; each update is the same work."""
    config = TrainConfig(
        env=NULL_ENV,
        num_actors=1,
        envs_per_actor=envs,
        num_steps=steps,
        total_steps=10**9,
        max_policy_lag=1,
        hidden_dim=HIDDEN,
        encoder_dim=ENCODER,
        envs_per_minibatch=max(1, envs // 4),
        learning_rate=1e-9,
        device=device,
    )
    return Trainer(config, build_run_spec(config), total_updates=1000)


def one_update(learner: Trainer, memory: RolloutMemory) -> Callable[[], object]:
    """From slot 0, over and over: as in streaming nothing is seeded."""
    rollout = RecurrentRolloutBuffer.over(memory, (0,))
    return lambda: learner.update(rollout, valid_steps=memory.num_steps, update=learner.updates_done + 1)


def small_run(device: torch.device, **settings: Any) -> TrainConfig:
    """Two actors of eight envs; any setting can be given."""
    defaults: dict[str, Any] = {
        "env": "Memory/TMaze-v0",
        "num_actors": 2,
        "envs_per_actor": 8,
        "num_steps": 32,
        "total_steps": 10**6,
        "hidden_dim": 32,
        "self_check": 1,
        "device": Device(device.type),
    }
    return TrainConfig(**{**defaults, **settings})


@contextmanager
def serial_run(config: TrainConfig) -> Iterator[SerialRun]:
    threads = torch.get_num_threads()
    spec = build_run_spec(config)
    try:
        with SerialRun(config, spec, Trainer(config, spec, total_updates=1000)) as run:
            yield run
    finally:
        torch.set_num_threads(threads)
