"""collect: how fast one actor fills slots, and what it spends its time on: policy, env, the rest.

A real Actor with real memory in this process, without service and learner. Cases take turns, lease by lease. The rest
is writing the slot, loading nothing (weights stay), noise, and checks. Axis letters: E envs, T steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import count
from typing import Final

from rollout_service.bench.report import Report
from rollout_service.bench.rig import CARTPOLE, NULL_ENV, POLICY, SEED, rollout_memory
from rollout_service.bench.timing import Figures
from rollout_service.control.messages import Grant, StartFrom
from rollout_service.envs.make import make_env, spaces_from_gymnasium
from rollout_service.launch.cpu import one_thread
from rollout_service.memory.slots import RolloutMemory
from rollout_service.memory.weights import WeightsMemory
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import RunSpec
from workers.actor import Actor

REPETITIONS: Final = 15
WARM_UP: Final = 2
"""Leases before measuring."""
ENVS: Final = (8, 16, 64)
STEPS: Final = 128
TASKS: Final = {"cartpole": CARTPOLE, "null": NULL_ENV}

NOTES: Final = (
    f"one actor, one thread, MLP 64, LSTM 128, T = {STEPS}; us: per step of all envs; rest: slot, noise, checks",
    "the policy is a fresh one, so CartPole ends about every 22 steps; null: 64 floats, episodes of 200",
)


def measure(repetitions: int = REPETITIONS, *, envs: Sequence[int] = ENVS, steps: int = STEPS) -> Report:
    """One case per env and number of them."""
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        leases = {
            f"{name}, {number} envs": Leases(env, number, steps, stack)
            for name, env in TASKS.items()
            for number in envs
        }
        for repetition in range(WARM_UP + repetitions):
            for case in leases.values():
                case.fill(keep=repetition >= WARM_UP)
        return Report(
            "collect", "one actor fills slots", {name: case.figures() for name, case in leases.items()}, NOTES
        )


class Leases:
    """One actor, and the time split of its leases so far."""

    def __init__(self, env: str, envs: int, steps: int, stack: ExitStack) -> None:
        """What it opens is closed by `stack`."""
        spec, policy = acting_spec(env, envs, steps)
        memory: RolloutMemory = stack.enter_context(rollout_memory(spec))
        weights = stack.enter_context(closing(WeightsMemory.create(spec.parameters)))
        weights.publish(0, policy.to_arrays())
        self._actor = stack.enter_context(closing(Actor(spec, memory, weights, 0)))
        self._spec = spec
        self._epochs = count(1)
        self._splits: list[Figures] = []

    def fill(self, *, keep: bool) -> None:
        """One lease; its times count if `keep`."""
        epoch = next(self._epochs)
        grant = Grant(slot=epoch % self._spec.num_slots, epoch=epoch, version=0, start=StartFrom.CARRY, update=epoch)
        begun = time.perf_counter()
        commit = self._actor.fill(grant)
        whole = time.perf_counter() - begun
        policy, env = commit.seconds["policy"], commit.seconds["env"]
        if keep:
            self._splits.append({"whole": whole, "policy": policy, "env": env, "rest": whole - policy - env})

    def figures(self) -> Figures:
        """Medians over the leases; shares are taken within a lease."""
        steps = self._spec.num_steps
        rate = statistics.median(self._spec.steps_per_rollout / split["whole"] for split in self._splits)
        phases = ("policy", "env", "rest")
        return {
            "env_steps_per_s": rate,
            **{f"{name}_us": statistics.median(s[name] for s in self._splits) / steps * 1e6 for name in phases},
            **{f"{name}_share": statistics.median(s[name] / s["whole"] for s in self._splits) for name in phases},
        }


def acting_spec(env: str, envs: int, steps: int, actors: int = 1, lag: int = 0) -> tuple[RunSpec, ActorCritic]:
    """A run on this env, `envs` for each actor, and the policy that its parameters are of."""
    sample = make_env(env)
    spaces = spaces_from_gymnasium(sample.observation_space, sample.action_space)
    sample.close()
    policy = ActorCritic(spaces, POLICY, seed=SEED)
    spec = RunSpec(
        env=env,
        spaces=spaces,
        policy=POLICY,
        state=policy.state_spec(),
        parameters=policy.parameter_specs(),
        num_steps=steps,
        max_policy_lag=lag,
        num_actors=actors,
        envs_per_actor=envs,
        envs_per_forward=envs,
    )
    return spec, policy
