"""weights: one version into shared memory and out again, against copies of the same arrays within one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import count
from typing import Final

from rollout_service.bench.report import Report
from rollout_service.bench.rig import ENCODER, HIDDEN, SEED, null_spaces
from rollout_service.bench.timing import Figures, alternate
from rollout_service.launch.cpu import one_thread
from rollout_service.memory.weights import WeightsMemory
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import PolicySpec

REPETITIONS: Final = 25
SIZES: Final = (HIDDEN, 512)

NOTES: Final = (
    "publish: checks, copy, checksum; load: copy, checksum; copy: array.copy() of each array",
    "take: the policy's arrays out of torch; adopt: into an actor's policy",
)


def measure(repetitions: int = REPETITIONS, *, sizes: Sequence[int] = SIZES) -> Report:
    """One case per LSTM width."""
    with one_thread():
        cases = dict(one_case(repetitions, hidden_dim) for hidden_dim in sizes)
    return Report("weights", "hand one version of the policy to the actors", cases, NOTES)


def one_case(repetitions: int, hidden_dim: int) -> tuple[str, Figures]:
    """The case's name, which holds the size, and its figures."""
    policy = ActorCritic(null_spaces(), PolicySpec(hidden_dim=hidden_dim, encoder_dim=ENCODER), seed=SEED).eval()
    arrays = policy.to_arrays()
    versions = count()
    with closing(WeightsMemory.create(policy.parameter_specs())) as memory:
        samples = alternate(
            {
                "publish": lambda: memory.publish(next(versions), arrays),
                "load": memory.load,
                "copy": lambda: {name: array.copy() for name, array in arrays.items()},
                "take": policy.to_arrays,
                "adopt": lambda: policy.load_arrays(arrays),
            },
            repetitions=repetitions,
        )
    mebibytes = sum(array.nbytes for array in arrays.values()) / 2**20
    figures = samples.medians("us") | samples.ratio("publish", "copy") | samples.ratio("load", "copy")
    return f"LSTM {hidden_dim}, {mebibytes:.2f} MiB", figures
