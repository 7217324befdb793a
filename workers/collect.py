"""The actor's loop: fill one slot with T steps of E envs.

Writers: this actor, under its lease, into the slot and into its own live state. Per step, in this order: the state
ENTERING the step and the observation it was fed with, then the env step, then what came of it. Ended envs start the
next step from zero state; a truncated one first gets V(final observation, state EXITING the step).

Where a vector env resets its envs in the next step, that step is a filler row: not valid, its stored state is zero.
The policy still runs on it, from the state that exited the row before: what it sees there is the final observation, so
its value is that row's truncation value; everything else it says is ignored, and the row after starts from zeros. An
episode that ends on the lease's last row gets that value from the forward that computes last_values; its filler is row
0 of the next lease, with carry 1 and zero state.

Never: IO, logging. Leaves to others: which weights act and where row 0 starts (actor.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_service.envs.protocol import EnvRows, FinishedEpisode, StepOutcome
from rollout_service.memory.slots import SlotWriter
from rollout_service.recurrence import ended, enter_state
from workers.inference import Acted, Inference
from workers.noise import ActionNoise

Array = NDArray[Any]


@dataclass
class LiveState:
    """Where an actor's envs stand between two steps, and so between two leases."""

    observations: dict[str, Array]
    """field -> [E, *shape]: what the next action is chosen from."""
    state: dict[str, Array]
    """name -> [E, L, H]: the state that the next forward starts from; between two leases the state entering the next
    step: zeros where the last row ended. Inside a lease a filler row's forward starts from the state that exited the
    row before."""
    carry: NDArray[np.float32]
    """[E]: 1.0 where the last row ended, or before any row."""

    def restart(self) -> None:
        """Zero state and carry 1 in every env."""
        for rows in self.state.values():
            rows[...] = 0.0
        self.carry[...] = 1.0

    def advance(self, exiting: Mapping[str, Array], outcome: StepOutcome) -> None:
        """Move on by one step: the exiting state enters the next one, except where that begins an episode."""
        if outcome.starting_envs:
            starts = np.zeros(len(self.carry), np.bool_)
            starts[outcome.starting_envs] = True
            enter_state(exiting, starts, out=self.state)
        else:
            for name, rows in self.state.items():
                rows[...] = exiting[name]

    def settle(self, outcome: StepOutcome) -> None:
        """End a lease after this step: zero state and carry 1 where its row ended."""
        self.carry[...] = ended(outcome.terminated, outcome.truncated, outcome.valid)
        enter_state(self.state, self.carry, out=self.state)


@dataclass(frozen=True)
class Collected:
    """What one lease brought, besides the slot's arrays."""

    valid_steps: int
    env_steps: int
    """Real transitions: rows that are no fillers."""
    episodes: list[FinishedEpisode]
    seconds: dict[str, float]
    blind_truncations: int = 0
    """Truncations without a final observation."""


def collect(
    slot: SlotWriter,
    envs: EnvRows,
    inference: Inference,
    live: LiveState,
    noise: ActionNoise,
    *,
    preempted: Callable[[int], bool] | None = None,
    cut_at_end: bool = False,
) -> Collected:
    """Fill one slot, T steps or fewer, and close it. Raises EnvFault if an env fails.

    preempted: whether so many steps are enough, asked after every step and before every reset; once True, it stays so.
    cut_at_end: end every episode that is still running as truncated on the last row, with its truncation value.
    """
    pulse, clock = envs.pulse, time.perf_counter
    truncation_values, last_values = (np.full(len(envs), np.nan, np.float32) for _ in range(2))
    episodes: list[FinishedEpisode] = []
    deferred: list[int] = []
    policy_seconds = 0.0
    t = blind = 0

    def enough() -> bool:
        return preempted is not None and preempted(t + 1)

    began = clock()
    envs.reset_owed(live.observations)
    env_seconds = clock() - began
    for t in range(slot.num_steps):
        slot.write_state(t, live.state)
        for name in live.state if envs.fillers else ():
            slot.arrays[name][envs.fillers, t] = 0.0
        for name, rows in slot.observation_rows(t).items():
            rows[...] = live.observations[name]
        pulse.phase, before = "policy", clock()
        acted = inference.step(live.observations, live.state, noise.at(t))
        if deferred:
            slot.arrays["truncation_values"][deferred, t - 1] = acted.values[deferred]
        pulse.phase, between = "env.step", clock()
        outcome = envs.step(acted.actions, live.observations, enough)
        pulse.phase, after = "policy", clock()
        cut = final_values(outcome, acted, inference, truncation_values) if outcome.ended_envs else None
        slot.write_transition(
            t,
            actions=acted.actions,
            rewards=outcome.rewards,
            values=acted.values,
            log_probs=acted.log_probs,
            terminated=outcome.terminated,
            truncated=outcome.truncated,
            truncation_values=cut,
            valid=outcome.valid,
        )
        live.advance(acted.state, outcome)
        episodes += outcome.episodes
        deferred = outcome.deferred_envs
        blind += len(outcome.blind_envs)
        policy_seconds += between - before
        env_seconds += after - between
        if enough():
            break
    inference.values(live.observations, live.state, range(len(envs)), last_values)
    slot.arrays["truncation_values"][deferred, t] = last_values[deferred]
    live.settle(outcome)
    if cut_at_end:
        running = live.carry == 0.0
        slot.arrays["truncated"][running, t] = True
        slot.arrays["truncation_values"][running, t] = last_values[running]
        live.restart()
    slot.close(t + 1, last_values=last_values, final_state=acted.state)
    pulse.phase = ""
    return Collected(
        valid_steps=t + 1,
        env_steps=int(np.count_nonzero(slot.arrays["valid"][:, : t + 1])),
        episodes=episodes,
        seconds={"policy": policy_seconds, "env": env_seconds, "collect": clock() - began},
        blind_truncations=blind,
    )


def final_values(outcome: StepOutcome, acted: Acted, inference: Inference, out: Array) -> Array:
    """Truncation values of this step's ended rows into out [E], NaN elsewhere and where they come later (deferred).

    Without a final observation V(s_t) stands in: the value of the state the episode was cut off after.
    """
    out[...] = np.nan
    if outcome.truncated_envs:
        inference.values(outcome.final_observations, acted.state, outcome.truncated_envs, out)
    if outcome.blind_envs:
        out[outcome.blind_envs] = acted.values[outcome.blind_envs]
    return out
