"""Every random stream of a run, by name: seeds that depend on what is seeded, never on who happens to run it.

A stream belongs to (run seed, purpose, global env index, incarnation, update). Neither the split of envs over actors
nor the order of arrival enters, so 1 x 8 and 4 x 2 envs draw the same numbers. `update` is 0 but where envs are reset
on request: at deterministic barriers, and at an actor's first lease in a resumed run. An incarnation is one life of an
actor: a replacement must not replay the streams of the dead.

Leaves to others: who draws from a stream, and when.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a stream is for. The numbers are part of a run's reproducibility: never reuse or renumber one."""

    ENV = 0
    """Seed of an env's first reset, and of its spaces."""
    ACTION = 1
    """Action noise of one env."""
    MINIBATCH = 2
    """Order of env rows in the learner."""
    EVALUATION_ENV = 3
    EVALUATION_ACTION = 4


def seed_sequence(
    seed: int, purpose: Purpose, env: int = 0, incarnation: int = 0, update: int = 0
) -> np.random.SeedSequence:
    """The root of one stream. Different arguments give independent streams."""
    return np.random.SeedSequence(seed, spawn_key=(int(purpose), env, incarnation, update))


def generator(seed: int, purpose: Purpose, env: int = 0, incarnation: int = 0, update: int = 0) -> np.random.Generator:
    """A numpy generator at the start of one stream."""
    return np.random.Generator(np.random.PCG64(seed_sequence(seed, purpose, env, incarnation, update)))


def reset_seed(seed: int, purpose: Purpose = Purpose.ENV, env: int = 0, incarnation: int = 0, update: int = 0) -> int:
    """A plain int for `env.reset(seed=...)`, in [0, 2**31): simulators keep seeds in signed 32-bit words."""
    return int(seed_sequence(seed, purpose, env, incarnation, update).generate_state(1, np.uint32)[0] >> 1)
