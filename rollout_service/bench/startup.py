"""startup: from the command to the first env step, to the last actor's first one, and to the first update.

Each run is the real command in its own process. The env notes when an actor steps it first, so "ready" means at work,
not merely joined. Cases, numbers of actors, take turns. What the processes hold in memory is measured at the end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rollout_service.bench.report import Report, usable_cores
from rollout_service.bench.timing import Figures
from rollout_service.bench.train import Case, medians, resident_figures
from rollout_service.bench.whole_run import POLL_S, WholeRun
from rollout_service.errors import RunFailed

REPETITIONS: Final = 3
ENVS_PER_ACTOR: Final = 4
ENV: Final = "rollout_service.bench.envs:NotingEnv"

NOTES: Final = (
    "first step, all ready: from the command to the first env step of the first actor, and of the last one",
    "slower than one actor: all ready, over the same with one; rss: resident memory of one process, with the pages of "
    "shared segments that it touched",
)


def measure(repetitions: int = REPETITIONS, *, actors: Sequence[int] | None = None) -> Report:
    """One case per number of actors; by default 1, as many as cores, and twice as many."""
    cores = usable_cores()
    numbers = sorted(set(actors or (1, cores, 2 * cores)))
    runs: dict[str, list[Figures]] = {name_of(number): [] for number in numbers}
    for _ in range(repetitions):
        alone: float | None = None
        for number in numbers:
            found = one_run(number)
            alone = found["all_ready_s"] if number == 1 else alone
            if alone is not None:
                found["slower_than_one_actor"] = found["all_ready_s"] / alone
            runs[name_of(number)].append(found)
    return Report("startup", "from the command to work", medians(runs), NOTES)


def name_of(number: int) -> str:
    return "1 actor" if number == 1 else f"{number} actors"


def one_run(actors: int) -> Figures:
    """Starts a run, and stops it after its first update. Raises RunFailed if it broke or ended before that."""
    with tempfile.TemporaryDirectory(prefix="rs-bench-") as directory:
        notes = Path(directory) / "notes"
        notes.mkdir()
        case = Case(
            "startup", ENV, actors * ENVS_PER_ACTOR, None, num_actors=actors, num_steps=32, hidden_dim=64,
            other={"env-kwargs": f"directory={notes}"},
        )  # fmt: skip
        with WholeRun(case.words(), Path(directory) / "run") as run:
            while run.wait(POLL_S):
                usage = run.usage()
                if run.log and len(usage.pids("actors")) == actors:
                    break
            else:
                raise RunFailed(f"the run ended before its first update\n{run.said()}")
            steps = [float(path.read_text()) - run.begun for path in notes.iterdir()]
            first_update = run.marks()[0].time - run.begun
    return {
        "first_step_s": min(steps),
        "all_ready_s": max(steps),
        "first_update_s": first_update,
        **resident_figures(usage),
    }
