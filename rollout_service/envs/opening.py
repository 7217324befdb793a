"""The E envs of one actor, as the run wants them: single envs or one vector env.

Who calls: actors, evaluation, and the probe, with the seeds of their own streams. Leaves to others: stepping.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_service.envs.bad_data import BadData
from rollout_service.envs.make import make_env, spaces_from_gymnasium
from rollout_service.envs.make_vector import make_vector_env
from rollout_service.envs.protocol import EnvRows
from rollout_service.envs.vector import EnvBatch
from rollout_service.envs.vectorized import VectorEnvBatch
from rollout_service.errors import RolloutServiceError
from rollout_service.runspec import Vectorize


def open_envs(
    env: str,
    kwargs: Mapping[str, Any],
    vectorize: Vectorize,
    *,
    env_ids: range,
    seeds: Sequence[int],
    actor_id: int | None = None,
    bad_data: BadData | None = None,
) -> EnvRows:
    """As many envs as there are env_ids, not reset yet; seeds: one per env. bad_data: by default an EnvFault each.

    Raises ConfigError, EnvFault or SpaceNotSupported if there is nothing to be had by that name.
    """
    if vectorize is not Vectorize.NONE:
        vector_env = make_vector_env(env, kwargs, vectorize, len(env_ids), seeds)
        try:
            return VectorEnvBatch(
                vector_env, env_ids=env_ids, seeds=seeds, name=env, actor_id=actor_id, bad_data=bad_data
            )
        except RolloutServiceError:
            vector_env.close()
            raise
    singles = []
    for seed in seeds:
        # For envs that draw from the global generators while they are built.
        random.seed(seed)
        np.random.seed(seed)
        singles.append(make_env(env, kwargs))
    spaces = spaces_from_gymnasium(singles[0].observation_space, singles[0].action_space)
    return EnvBatch(singles, spaces, env_ids=env_ids, seeds=seeds, name=env, actor_id=actor_id, bad_data=bad_data)
