"""actors: collection alone by several actor processes: how 16 envs are best split, and what one more actor brings.

Real actors as processes of their own, real service and memory; the learner is a thread here that takes every batch and
publishes at once, so nobody ever waits for learning. Rates are taken between batches, behind a warm-up. Cases take
turns, run by run.

    slow    a step takes 2 ms and no CPU; envs of one actor are stepped one after another
    NxE     N actors of E envs

Axis letters: E envs of an actor, T steps.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from numpy.typing import NDArray

from rollout_service.bench.collect import acting_spec
from rollout_service.bench.handover import service
from rollout_service.bench.handover_role import next_message
from rollout_service.bench.report import Report
from rollout_service.bench.rig import CARTPOLE, rollout_memory
from rollout_service.bench.timing import Figures
from rollout_service.bench.waiting import connected
from rollout_service.control.client import Client
from rollout_service.control.messages import Batch, Publish, Ready, Role
from rollout_service.errors import RolloutServiceError, RunFailed
from rollout_service.launch.children import ONE_THREAD, start_interpreter
from rollout_service.memory.weights import WeightsMemory

Array = NDArray[Any]

REPETITIONS: Final = 2
SLOW: Final = "rollout_service.bench.envs:SleepingEnv"
"""Its default is a step of 2 ms."""
WARM_UP: Final = 2
"""Batches that are not measured."""
MEASURED_S: Final = 2.0
FEWEST_BATCHES: Final = 3
"""Measured however long they take."""
LAST_WORDS: Final = 4000
UNTIL_STOPPED: Final = 10**9

NOTES: Final = (
    "collection alone, MLP 64, LSTM 128: the learner takes a batch and publishes at once; over one: over one actor "
    "with as many envs as each has; over all in one: over one actor with all of these envs",
    "slow: a step of 2 ms without CPU, as of a simulator elsewhere. Its actors sleep side by side, so they add up on "
    "any number of cores; add them until the update takes longer than collecting",
    "cartpole: a step that computes. Actors beyond the usable cores bring nothing, and fewer envs each make a step of "
    "the policy dearer: one per core, in streaming one less, as the learner needs a core too",
)


@dataclass(frozen=True)
class Case:
    """So many actors with so many envs each, T steps a rollout."""

    env: str
    actors: int
    envs: int
    steps: int
    kind: str

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.actors}x{self.envs}"

    def same(self, actors: int, envs: int) -> Case:
        return Case(self.env, actors, envs, self.steps, self.kind)


CARTPOLES: Final = Case(CARTPOLE, 1, 16, 128, "cartpole")
SLOW_ONES: Final = Case(SLOW, 1, 16, 16, "slow")
SPLITS: Final = ((1, 16), (2, 8), (4, 4))
CASES: Final = (
    *(CARTPOLES.same(*split) for split in SPLITS),
    *(SLOW_ONES.same(*split) for split in SPLITS),
    SLOW_ONES.same(1, 4),
    SLOW_ONES.same(8, 4),
)


def measure(repetitions: int = REPETITIONS, *, cases: Sequence[Case] = CASES, measured_s: float = MEASURED_S) -> Report:
    """One case per split. Raises RunFailed if a process breaks."""
    rates: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(repetitions):
        for case, found in rates.items():
            found.append(collection_rate(case, measured_s))
    return Report("actors", "collection alone, by split into actors", compared(rates), NOTES)


def compared(rates: dict[Case, list[float]]) -> dict[str, Figures]:
    """Medians, and ratios taken within a repetition, against the one actor with as many, and with all, envs."""
    figures: dict[str, Figures] = {}
    for case, found in rates.items():
        figures[case.name] = {"env_steps_per_s": statistics.median(found)}
        for name, other in (
            ("rate_over_one", case.same(1, case.envs)),
            ("rate_over_all_in_one", case.same(1, case.actors * case.envs)),
        ):
            if other in rates and other != case:
                ratio = statistics.median(rate / one for rate, one in zip(found, rates[other], strict=True))
                figures[case.name][f"{name}_times"] = ratio
    return figures


def collection_rate(case: Case, measured_s: float) -> float:
    """Env steps per second over all actors, behind the warm-up."""
    spec, policy = acting_spec(case.env, case.envs, case.steps, case.actors, lag=1)
    with rollout_memory(spec) as memory, closing(WeightsMemory.create(spec.parameters)) as weights:
        weights.publish(1, policy.to_arrays())
        with (
            service(spec, memory, UNTIL_STOPPED, weights.name) as endpoint,
            closing(connected(endpoint, Role.LEARNER)) as client,
            workers(endpoint, case.actors),
        ):
            return spec.steps_per_rollout / seconds_of_a_batch(client, weights, policy.to_arrays(), measured_s)


def seconds_of_a_batch(client: Client, weights: WeightsMemory, arrays: Mapping[str, Array], measured_s: float) -> float:
    """Plays a learner that learns nothing for so long, and returns the mean time from one batch to the next."""
    version = 1
    client.send(Ready(version=version))
    moments: list[float] = []
    while len(moments) <= WARM_UP + FEWEST_BATCHES or moments[-1] - moments[WARM_UP] < measured_s:
        if not isinstance(batch := next_message(client), Batch):
            raise RunFailed("the service ended in the middle of a measurement")
        moments.append(time.perf_counter())
        version += 1
        weights.publish(version, arrays)
        client.send(Publish(update=batch.update, version=version))
    return (moments[-1] - moments[WARM_UP]) / (len(moments) - 1 - WARM_UP)


@contextmanager
def workers(endpoint: str, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many actors as processes, gone at the end. Raises RunFailed, with the words of all, for what broke inside."""
    with tempfile.TemporaryFile() as words, ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = start_interpreter(
                ["workers", "--connect", endpoint], ONE_THREAD, stdout=words, stderr=subprocess.STDOUT
            )
            processes.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)
        try:
            yield processes
        except RolloutServiceError as error:
            words.seek(0)
            raise RunFailed(f"{error}\n{words.read()[-LAST_WORDS:].decode('utf-8', 'replace')}") from error
