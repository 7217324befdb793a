"""An actor without its sockets: envs, policy and live state; fills slots on request.

Used by the process shell (`python -m workers`) and by the serial runner alike, so both give the same numbers.
Writers: the slot of the lease in hand, nothing else. Weights are loaded at lease start only: one slot, one version.
Never: messages, processes, a state invented where one was promised.
Leaves to others: when to fill what (service), how a step goes (collect.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from rollout_service.control.messages import Commit, Grant, Join, StartFrom
from rollout_service.envs.bad_data import BadData
from rollout_service.envs.opening import open_envs
from rollout_service.envs.protocol import FinishedEpisode, Pulse, Silent
from rollout_service.envs.seeding import Purpose, reset_seed
from rollout_service.errors import HandshakeRefused, ProtocolError
from rollout_service.memory.schema import OBSERVATIONS
from rollout_service.memory.slots import RolloutMemory, SlotWriter
from rollout_service.memory.weights import WeightsMemory
from rollout_service.runspec import RunSpec
from workers.collect import LiveState, collect
from workers.inference import policy_for
from workers.noise import ActionNoise

CARRY: Final = "episode_start_carry"
EPISODES_PER_COMMIT: Final = 2048
"""Newest episodes that one COMMIT reports, far below the message limit; the others are counted."""


class Actor:
    """One incarnation of actor `actor_id`: its E envs have the global indices actor_id * E + e."""

    def __init__(
        self, spec: RunSpec, memory: RolloutMemory, weights: WeightsMemory, actor_id: int, incarnation: int = 0
    ) -> None:
        count = spec.envs_per_actor
        self.actor_id = actor_id
        self.incarnation = incarnation
        self._life = 0 if spec.barrier_interval else incarnation
        """Of its random streams: with barriers, whoever takes a lost actor's place does what that one did."""
        self._spec = spec
        self._memory = memory
        self._weights = weights
        self._env_ids = range(actor_id * count, (actor_id + 1) * count)
        seeds = self._env_seeds(update=0)
        self._bad_data = BadData(spec.on_bad_data, spec.obs_limit)
        self._envs = open_envs(
            spec.env,
            spec.env_kwargs,
            spec.vectorize,
            env_ids=self._env_ids,
            seeds=seeds,
            actor_id=actor_id,
            bad_data=self._bad_data,
        )
        self.spaces = self._envs.spaces
        self._policy = policy_for(spec)
        self._noise = ActionNoise(
            self._policy.draw_noise,
            seed=spec.seed,
            env_ids=self._env_ids,
            incarnation=self._life,
            num_steps=spec.num_steps,
        )
        self.live = LiveState(
            observations={
                OBSERVATIONS + leaf.path: np.zeros((count, *leaf.shape), leaf.dtype) for leaf in self.spaces.observation
            },
            state=self._policy.state,
            carry=np.ones(count, np.float32),
        )
        self._writers: dict[int, SlotWriter] = {}
        self._version = -1
        self._must_reset = True

    def join_facts(self) -> Join:
        """What this actor's own env turned out to be, for the service to compare."""
        return Join(
            spaces=self.spaces,
            autoreset=self._envs.autoreset,
            run_digest=self._spec.digest(),
            state_strategy=self._spec.state_strategy,
        )

    def fill(
        self, grant: Grant, *, pulse: Pulse | None = None, preempted: Callable[[int], bool] | None = None
    ) -> Commit:
        """Fill the granted slot and say what is in it.

        preempted: asked after every step, with the steps so far; True ends the lease early, with a partial rollout.
        Raises EnvFault if an env fails: the slot is then not closed, and this actor should not go on.
        """
        if self.spaces != self._spec.spaces:
            raise HandshakeRefused(f"this actor's env has {self.spaces}, the run has {self._spec.spaces}")
        if self._envs.autoreset is not self._spec.autoreset:
            raise HandshakeRefused(
                f"this actor's envs have autoreset {self._envs.autoreset}, the run has {self._spec.autoreset}"
            )
        self._envs.pulse = pulse or Silent()
        began = time.perf_counter()
        version = self._load_weights(grant.version)
        slot = self._writer(grant.slot)
        slot.open(epoch=grant.epoch, actor=self.actor_id, incarnation=self.incarnation, version=version)
        counters: Counter[str] = Counter()
        self._start(grant, slot, counters)
        self._noise.next_block()
        prepared = time.perf_counter()
        collected = collect(
            slot,
            self._envs,
            self._policy,
            self.live,
            self._noise,
            preempted=preempted,
            cut_at_end=grant.barrier_after,
        )
        self._must_reset = grant.barrier_after
        reported = collected.episodes[-EPISODES_PER_COMMIT:]
        counters["episodes_not_reported"] = len(collected.episodes) - len(reported)
        counters["truncations_without_final_obs"] = collected.blind_truncations
        counters["dropped_bad_env_steps"] = collected.dropped_env_steps
        bad, remarks = self._bad_data.take()
        counters.update(bad)
        # As plain values, which are validated all at once: Episode by Episode takes twice as long.
        return Commit.model_validate(
            {
                "slot": grant.slot,
                "epoch": grant.epoch,
                "valid_steps": collected.valid_steps,
                "version": version,
                "env_steps": collected.env_steps,
                "episodes": tuple(map(_plain, reported)),
                "seconds": {"prepare": prepared - began, **collected.seconds},
                "counters": {name: count for name, count in counters.items() if count},
                "remarks": remarks,
            }
        )

    def close(self) -> None:
        """Close the envs."""
        self._envs.close()

    def _writer(self, slot: int) -> SlotWriter:
        """Made once per slot: it holds a view for every step."""
        if slot not in self._writers:
            self._writers[slot] = self._memory.writer(slot, checksummed=self._spec.checksum_slots)
        return self._writers[slot]

    def _load_weights(self, at_least: int) -> int:
        if self._version < at_least or self._weights.newest_version() != self._version:
            loaded = self._weights.load(at_least)
            self._policy.load_arrays(loaded.arrays)
            self._version = loaded.version
        return self._version

    def _start(self, grant: Grant, slot: SlotWriter, counters: Counter[str]) -> None:
        """Bring envs, live state and the slot's carry flags to where the lease's row 0 starts."""
        if grant.reset_envs:
            if grant.start is not StartFrom.FRESH:
                raise ProtocolError(f"slot {grant.slot}: reset_envs with start={grant.start}; reset envs start fresh")
            self._envs.reseed(self._env_seeds(grant.update))
            self._noise.reseed(grant.update)
        if grant.reset_envs or self._must_reset:
            self._envs.reset_all(self.live.observations)
            self.live.restart()
            self._must_reset = False
        match grant.start:
            case StartFrom.SEEDED:
                counters["seed_mismatches"] += self._adopt_seed(slot)
            case StartFrom.FRESH:
                self.live.restart()
            case StartFrom.CARRY:
                pass
        slot.arrays[CARRY][...] = self.live.carry

    def _adopt_seed(self, slot: SlotWriter) -> int:
        """Take over row 0 as the learner seeded it. Returns in how many envs a bit of it is not the live state's."""
        differs = slot.arrays[CARRY] != self.live.carry
        for name, own in self.live.state.items():
            seeded = slot.arrays[name][:, 0]
            rows = (np.ascontiguousarray(seeded).view(np.uint32) != own.view(np.uint32)).reshape(len(own), -1)
            differs |= rows.any(axis=1)
            own[...] = seeded
        self.live.carry[...] = slot.arrays[CARRY]
        return int(np.count_nonzero(differs))

    def _env_seeds(self, update: int) -> list[int]:
        return [reset_seed(self._spec.seed, Purpose.ENV, env, self._life, update) for env in self._env_ids]


def _plain(episode: FinishedEpisode) -> dict[str, Any]:
    """The fields of an Episode."""
    return {
        "env": episode.env,
        "total_reward": episode.total_reward,
        "length": episode.length,
        "success": episode.success,
        "truncated": episode.truncated,
    }
