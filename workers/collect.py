"""The actor's loop: fill one slot with T steps of E envs.

Writers: this actor, under its lease, into the slot and into its own live state. Per step, in this order: the state
ENTERING the step, then the action, then the env step, then what came of it. An observation is written once, by the env
into the slot's row, and read there by the policy; the one behind the slot's last row waits in the live state. Ended
envs start the next step from zero state; a truncated one first gets V(final observation, state EXITING the step).

Where a vector env resets its envs in the next step, that step is a filler row: not valid, its stored state is zero.
The policy still runs on it, from the state that exited the row before: what it sees there is the final observation, so
its value is that row's truncation value; everything else it says is ignored, and the row after starts from zeros. An
episode that ends on the lease's last row gets that value from the forward that computes last_values; its filler is row
0 of the next lease, with carry 1 and zero state.

A dropped episode takes its rows along: those that this slot holds of it are not valid, the row that brought the bad
value included. What an earlier slot holds of it was sound, and its bootstrap value is the policy's own: it stays.

Never: IO, logging. Leaves to others: which weights act and where row 0 starts (actor.py), what is bad (envs).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_service.envs.protocol import EnvRows, FinishedEpisode, StepOutcome
from rollout_service.memory.slots import SlotWriter
from rollout_service.recurrence import ended
from workers.inference import Policy
from workers.noise import ActionNoise

Array = NDArray[Any]


@dataclass
class LiveState:
    """Where an actor's envs stand between two steps, and so between two leases."""

    observations: Mapping[str, Array]
    """field -> [E, *shape]: between two leases, what the next action is chosen from."""
    state: Mapping[str, Array]
    """name -> [E, L, H], the policy's own: the state that the next forward starts from; between two leases the state
    entering the next step: zeros where the last row ended. Inside a lease a filler row's forward starts from the state
    that exited the row before."""
    carry: NDArray[np.float32]
    """[E]: 1.0 where the last row ended, or before any row."""

    def restart(self) -> None:
        """Zero state and carry 1 in every env."""
        self.begin_episodes(range(len(self.carry)))
        self.carry[...] = 1.0

    def begin_episodes(self, envs: Sequence[int]) -> None:
        """Zero state in these envs."""
        for rows in self.state.values():
            for e in envs:  # few: one by one they take a fifth of the time of an index array
                rows[e] = 0.0

    def settle(self, outcome: StepOutcome) -> None:
        """End a lease after this step: zero state and carry 1 where its row ended."""
        over = ended(outcome.terminated, outcome.truncated, outcome.valid)
        self.carry[...] = over
        self.begin_episodes(np.flatnonzero(over).tolist())


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
    dropped_env_steps: int = 0
    """Real transitions that are not valid, since their episode was dropped."""


def collect(
    slot: SlotWriter,
    envs: EnvRows,
    policy: Policy,
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
    last_values = np.full(len(envs), np.nan, np.float32)
    episodes: list[FinishedEpisode] = []
    starting: list[int] = []
    deferred: list[int] = []
    policy_seconds = 0.0
    t = blind = dropped = 0

    def enough() -> bool:
        return preempted is not None and preempted(t + 1)

    began = clock()
    envs.reset_owed(live.observations)
    env_seconds = clock() - began
    seen = copied(live.observations, slot.observation_rows(0))
    for t in range(slot.num_steps):
        live.begin_episodes(starting)
        row = slot.rows(t)
        for name, entering in live.state.items():
            row[name][...] = entering
            if envs.fillers:
                row[name][envs.fillers] = 0.0
        pulse.phase, before = "policy", clock()
        acted = policy.step(seen, noise.at(t))
        if deferred:
            slot.arrays["truncation_values"][deferred, t - 1] = acted.values[deferred]
        pulse.phase, between = "env.step", clock()
        seen = slot.observation_rows(t + 1) if t + 1 < slot.num_steps else live.observations
        outcome = envs.step(acted.actions, seen, enough)
        pulse.phase, after = "policy", clock()
        row["actions"][...] = acted.actions
        row["log_probs"][...] = acted.log_probs
        row["values"][...] = acted.values
        row["rewards"][...] = outcome.rewards
        row["valid"][...] = outcome.valid
        if outcome.ended_envs:
            write_ends(row, outcome, policy)
        episodes += outcome.episodes
        starting, deferred = outcome.starting_envs, outcome.deferred_envs
        blind += len(outcome.blind_envs)
        dropped += outcome.lost_steps
        for e in outcome.dropped_envs:
            dropped += drop_rows(slot, e, t)
        policy_seconds += between - before
        env_seconds += after - between
        if enough():
            break
    copied(seen, live.observations)
    exiting = {name: rows.copy() for name, rows in live.state.items()}
    live.begin_episodes(starting)
    policy.values(live.observations, range(len(envs)), last_values)
    slot.arrays["truncation_values"][deferred, t] = last_values[deferred]
    live.settle(outcome)
    if cut_at_end:
        running = live.carry == 0.0
        slot.arrays["truncated"][running, t] = True
        slot.arrays["truncation_values"][running, t] = last_values[running]
        live.restart()
    slot.close(t + 1, last_values=last_values, final_state=exiting)
    pulse.phase = ""
    valid = slot.arrays["valid"][:, : t + 1]
    if dropped:
        envs.bad_data.kept(np.flatnonzero(valid.any(axis=1)).tolist())
    return Collected(
        valid_steps=t + 1,
        env_steps=int(np.count_nonzero(valid)),
        episodes=episodes,
        seconds={"policy": policy_seconds, "env": env_seconds, "collect": clock() - began},
        blind_truncations=blind,
        dropped_env_steps=dropped,
    )


def write_ends(row: Mapping[str, Array], outcome: StepOutcome, policy: Policy) -> None:
    """Flags and truncation values of a step in which episodes ended; deferred values come later.

    The policy's state is the one that EXITS the step. Without a final observation V(s_t) stands in: the value of the
    state the episode was cut off after.
    """
    row["terminated"][...] = outcome.terminated
    row["truncated"][...] = outcome.truncated
    if outcome.truncated_envs:
        policy.values(outcome.final_observations, outcome.truncated_envs, row["truncation_values"])
    if outcome.blind_envs:
        row["truncation_values"][outcome.blind_envs] = row["values"][outcome.blind_envs]


def drop_rows(slot: SlotWriter, e: int, t: int) -> int:
    """Take back the rows before row t of the episode that env e was in. Returns how many there were."""
    over = ended(*(slot.arrays[name][e, :t] for name in ("terminated", "truncated", "valid")))
    first = int(np.flatnonzero(over)[-1]) + 1 if over.any() else 0
    slot.arrays["valid"][e, first:t] = False
    return t - first


def copied(rows: Mapping[str, Array], into: Mapping[str, Array]) -> Mapping[str, Array]:
    """Observations, [E, *shape] per field, to another place."""
    for name, place in into.items():
        place[...] = rows[name]
    return into
