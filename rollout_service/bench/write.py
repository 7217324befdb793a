"""write: what an actor pays per step to put a transition into its slot, against plain numpy arrays of its own.

Both sides write the same fields of the same E envs, observation to recurrent state. Axis letters: E envs, T steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from rollout_service.bench.report import Report
from rollout_service.bench.rig import ACTIONS, OBSERVATION, STATE, Array, paper_spec, rollout_memory
from rollout_service.bench.timing import Figures, alternate
from rollout_service.memory.slots import SlotWriter

REPETITIONS: Final = 15
ENVS: Final = (8, 16, 64)
STEPS: Final = 128

NOTES: Final = (
    f"per step of all envs: {OBSERVATION} floats, LSTM state of 2 x 128, eight scalars; T = {STEPS}",
    "slot: SlotWriter's calls; plain: assignments into time-major arrays; lease: slot with open and close, all checks",
)


def measure(repetitions: int = REPETITIONS, *, envs: Sequence[int] = ENVS, steps: int = STEPS) -> Report:
    """One case per number of envs."""
    cases = {f"{count} envs": one_case(repetitions, count, steps) for count in envs}
    return Report("write", "one step of an actor into its slot", cases, NOTES)


def one_case(repetitions: int, envs: int, steps: int) -> Figures:
    """Microseconds per step."""
    step = transition(envs)
    with rollout_memory(paper_spec(envs, steps)) as memory:
        slot = memory.writer(0)
        arrays = {name: np.zeros((steps, *value.shape), value.dtype) for name, value in step.items()}

        def lease() -> None:
            slot.open(epoch=1, actor=0, incarnation=0, version=0)
            write_slot(slot, step)
            slot.close(steps, last_values=step["values"], final_state={name: step[name] for name in STATE})

        sides = {"slot": lambda: write_slot(slot, step), "plain": lambda: write_plain(arrays, step), "lease": lease}
        samples = alternate(sides, repetitions=repetitions)
    return samples.medians("us", per=steps) | samples.ratio("slot", "plain") | samples.ratio("lease", "plain")


def transition(envs: int) -> dict[str, Array]:
    """One step's contents, [E, *] per field."""
    generator = np.random.default_rng(0)
    scalars = {name: generator.standard_normal(envs, np.float32) for name in ("rewards", "values", "log_probs")}
    flags = {name: np.zeros(envs, np.bool_) for name in ("terminated", "truncated")}
    return {
        "observations": generator.standard_normal((envs, OBSERVATION), np.float32),
        "actions": generator.integers(ACTIONS, size=envs),
        **scalars,
        **flags,
        "truncation_values": np.full(envs, np.nan, np.float32),
        "valid": np.ones(envs, np.bool_),
        **{name: generator.standard_normal((envs, *shape), np.float32) for name, shape in STATE.items()},
    }


def write_slot(slot: SlotWriter, step: dict[str, Array]) -> None:
    """A whole rollout as the actor's loop writes it."""
    state = {name: step[name] for name in STATE}
    for t in range(slot.num_steps):
        slot.write_state(t, state)
        for name, rows in slot.observation_rows(t).items():
            rows[...] = step[name]
        slot.write_transition(
            t,
            actions=step["actions"],
            rewards=step["rewards"],
            values=step["values"],
            log_probs=step["log_probs"],
            terminated=step["terminated"],
            truncated=step["truncated"],
        )


def write_plain(arrays: dict[str, Array], step: dict[str, Array]) -> None:
    """The same rollout into [T, E, *] arrays of this process."""
    for t in range(len(arrays["rewards"])):
        for name, value in step.items():
            arrays[name][t] = value
