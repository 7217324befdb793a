"""The actor's loop: fill one slot with T steps of E envs.

Writers: this actor, under its lease, into the slot and into its own live state. Per step, in this order: the state
ENTERING the step and the observation it was fed with, then the env step, then what came of it. Ended envs start the
next step from zero state; a truncated one first gets V(final observation, state EXITING the step).
Never: IO, logging. Leaves to others: which weights act and where row 0 starts (actor.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_service.envs.vector import EnvBatch, FinishedEpisode, StepOutcome
from rollout_service.memory.slots import SlotWriter
from rollout_service.recurrence import enter_state
from workers.inference import Inference
from workers.noise import ActionNoise

Array = NDArray[Any]


@dataclass
class LiveState:
    """Where an actor's envs stand between two steps, and so between two leases."""

    observations: dict[str, Array]
    """field -> [E, *shape]: what the next action is chosen from."""
    state: dict[str, Array]
    """name -> [E, L, H]: the state entering the next step; zeros where the last row ended."""
    carry: NDArray[np.float32]
    """[E]: 1.0 where the last row ended, or before any row."""

    def restart(self) -> None:
        """Zero state and carry 1 in every env."""
        for rows in self.state.values():
            rows[...] = 0.0
        self.carry[...] = 1.0

    def advance(self, exiting: Mapping[str, Array], outcome: StepOutcome) -> None:
        """Move on by one step: the exiting state enters the next one, except where the episode ended."""
        if outcome.ended_envs:
            enter_state(exiting, outcome.terminated | outcome.truncated, out=self.state)
        else:
            for name, rows in self.state.items():
                rows[...] = exiting[name]


@dataclass(frozen=True)
class Collected:
    """What one lease brought, besides the slot's arrays."""

    valid_steps: int
    episodes: list[FinishedEpisode]
    seconds: dict[str, float]


def collect(
    slot: SlotWriter,
    envs: EnvBatch,
    inference: Inference,
    live: LiveState,
    noise: ActionNoise,
    *,
    preempted: Callable[[], bool] | None = None,
    cut_at_end: bool = False,
) -> Collected:
    """Fill one slot, T steps or fewer if `preempted` says so, and close it. Raises EnvFault if an env fails.

    cut_at_end: end every episode that is still running as truncated on the last row, with its truncation value.
    """
    pulse, clock = envs.pulse, time.perf_counter
    truncation_values, last_values = (np.full(len(envs), np.nan, np.float32) for _ in range(2))
    episodes: list[FinishedEpisode] = []
    policy_seconds = env_seconds = 0.0
    began = clock()
    with torch.inference_mode():
        for t in range(slot.num_steps):
            slot.write_state(t, live.state)
            for name, rows in slot.observation_rows(t).items():
                rows[...] = live.observations[name]
            pulse.phase, before = "policy", clock()
            acted = inference.step(live.observations, live.state, noise.at(t))
            pulse.phase, between = "env.step", clock()
            outcome = envs.step(acted.actions, live.observations)
            pulse.phase, after = "policy", clock()
            if outcome.truncated_envs:
                truncation_values[...] = np.nan
                inference.values(outcome.final_observations, acted.state, outcome.truncated_envs, truncation_values)
            slot.write_transition(
                t,
                actions=acted.actions,
                rewards=outcome.rewards,
                values=acted.values,
                log_probs=acted.log_probs,
                terminated=outcome.terminated,
                truncated=outcome.truncated,
                truncation_values=truncation_values if outcome.truncated_envs else None,
            )
            live.advance(acted.state, outcome)
            episodes += outcome.episodes
            policy_seconds += between - before
            env_seconds += after - between
            if preempted is not None and preempted():
                break
        inference.values(live.observations, live.state, range(len(envs)), last_values)
    live.carry[...] = outcome.terminated | outcome.truncated
    if cut_at_end:
        running = live.carry == 0.0
        slot.arrays["truncated"][running, t] = True
        slot.arrays["truncation_values"][running, t] = last_values[running]
        live.restart()
    slot.close(t + 1, last_values=last_values, final_state=acted.state)
    pulse.phase = ""
    return Collected(t + 1, episodes, {"policy": policy_seconds, "env": env_seconds, "collect": clock() - began})
