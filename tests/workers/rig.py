"""An actor with real memory and a real policy, but without service and learner: the test grants the leases itself."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import torch

from rollout_service.control.messages import Commit, Grant, StartFrom
from rollout_service.envs.make import make_env, spaces_from_gymnasium
from rollout_service.envs.opening import open_envs
from rollout_service.memory.schema import rollout_fields
from rollout_service.memory.slots import RolloutMemory
from rollout_service.memory.weights import WeightsMemory
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import AutoresetMode, Core, OnBadData, PolicySpec, RunSpec, Vectorize
from tests.fixtures.counter_lstm import turn_into_counter
from workers.actor import Actor

Arrays = dict[str, np.ndarray]
COUNTER_STEP = 0.1
"""What one processed row adds to the cell state of a counter LSTM."""


@dataclass
class Rig:
    """A run's memory and actors. `fill` grants one lease to one actor."""

    spec: RunSpec
    memory: RolloutMemory
    weights: WeightsMemory
    policy: ActorCritic
    """The same weights as the actors have, for oracles."""
    actors: list[Actor] = field(default_factory=list)
    epochs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def fill(
        self,
        start: StartFrom = StartFrom.CARRY,
        *,
        actor: int = 0,
        bank: int = 0,
        update: int = 1,
        reset_envs: bool = False,
        barrier_after: bool = False,
        preempted: Callable[[int], bool] | None = None,
    ) -> Commit:
        grant = Grant(
            slot=self.spec.bank(bank)[actor],
            epoch=next(self.epochs),
            version=0,
            start=start,
            update=update,
            reset_envs=reset_envs,
            barrier_after=barrier_after,
        )
        return self.actors[actor].fill(grant, preempted=preempted)

    def fill_all(self, start: StartFrom = StartFrom.CARRY, **options: Any) -> tuple[list[Commit], Arrays]:
        """One lease of every actor, and a copy of the whole rollout, [N, T, *] and [N, *]."""
        commits = [self.fill(start, actor=actor, **options) for actor in range(self.spec.num_actors)]
        return commits, self.rollout(options.get("bank", 0))

    def rollout(self, bank: int = 0) -> Arrays:
        return {name: array.copy() for name, array in self.memory.rollout(self.spec.bank(bank)).items()}


@contextlib.contextmanager
def make_rig(
    env: str = "tests.fixtures.envs:TickEnv",
    kwargs: dict[str, Any] | None = None,
    *,
    envs: Sequence[gymnasium.Env[Any, Any]] | None = None,
    counter: bool = False,
    core: Core = Core.LSTM,
    num_actors: int = 1,
    envs_per_actor: int = 1,
    envs_per_forward: int | None = None,
    num_steps: int = 8,
    hidden_dim: int = 4,
    num_layers: int = 1,
    seed: int = 1,
    incarnation: int = 0,
    vectorize: Vectorize = Vectorize.NONE,
    on_bad_data: OnBadData = OnBadData.STOP,
    obs_limit: float | None = None,
) -> Iterator[Rig]:
    """envs: in place of env and kwargs, one for each of the run's envs in order."""
    torch.set_num_threads(1)
    pool = None if envs is None else iter(envs)
    autoreset = AutoresetMode.ACTOR
    if vectorize is Vectorize.NONE:
        sample = make_env(env, kwargs) if envs is None else envs[0]
        spaces = spaces_from_gymnasium(sample.observation_space, sample.action_space)
    else:
        rows = range(envs_per_actor)
        with contextlib.closing(open_envs(env, kwargs or {}, vectorize, env_ids=rows, seeds=rows)) as opened:
            spaces, autoreset = opened.spaces, opened.autoreset
    policy_spec = PolicySpec(core=core, hidden_dim=hidden_dim, num_layers=num_layers, encoder_dim=8)
    policy = ActorCritic(spaces, policy_spec, seed=seed).eval()
    if counter:
        turn_into_counter(policy)
    spec = RunSpec(
        env=env,
        env_kwargs=kwargs or {},
        vectorize=vectorize,
        spaces=spaces,
        autoreset=autoreset,
        policy=policy_spec,
        state=policy.state_spec(),
        parameters=policy.parameter_specs(),
        num_steps=num_steps,
        num_actors=num_actors,
        envs_per_actor=envs_per_actor,
        envs_per_forward=envs_per_forward or envs_per_actor,
        seed=seed,
        on_bad_data=on_bad_data,
        obs_limit=obs_limit,
    )
    with (
        RolloutMemory.create(
            rollout_fields(spaces, spec.state),
            num_slots=spec.num_slots,
            envs_per_slot=envs_per_actor,
            num_steps=num_steps,
        ) as memory,
        contextlib.closing(WeightsMemory.create(spec.parameters)) as weights,
    ):
        weights.publish(0, policy.to_arrays())
        rig = Rig(spec, memory, weights, policy)
        maker = make_env if pool is None else lambda *_: next(pool)
        with mock.patch("rollout_service.envs.opening.make_env", maker):
            rig.actors = [Actor(spec, memory, weights, actor, incarnation) for actor in range(num_actors)]
        yield rig
        for actor in rig.actors:
            actor.close()
