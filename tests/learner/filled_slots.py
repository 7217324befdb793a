"""Slots filled as an actor fills them, with data that names itself."""

from __future__ import annotations

import numpy as np

from rollout_service.memory.schema import rollout_fields
from rollout_service.memory.slots import RolloutMemory
from rollout_service.runspec import Leaf, SpaceKind, Spaces

SPACES = Spaces(
    observation=(Leaf(kind=SpaceKind.BOX, shape=(1,), dtype="float32"),),
    action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=2),
)
FIELDS = rollout_fields(SPACES, {"hidden": (1, 2), "cell": (1, 2)})


def commit(
    memory: RolloutMemory,
    slot: int,
    *,
    epoch: int,
    valid_steps: int | None = None,
    ended_envs: tuple[int, ...] = (),
    actor: int = 0,
    incarnation: int = 0,
) -> None:
    """Fill one slot: observations 1000 * slot + 100 * env + step, rewards 1, states slot + step / 10.

    ended_envs terminate on the last valid row. valid_steps: all by default.
    """
    writer = memory.writer(slot)
    steps = writer.num_steps if valid_steps is None else valid_steps
    writer.open(epoch=epoch, actor=actor, incarnation=incarnation, version=epoch)
    count = writer.num_envs
    envs = np.arange(count)
    for t in range(steps):
        writer.observation_rows(t)["observations"][:, 0] = 1000 * slot + 100 * envs + t
        state = np.full((count, 1, 2), slot + 0.1 * t, np.float32)
        writer.write_state(t, {"hidden": state, "cell": state})
        writer.write_transition(
            t,
            actions=np.ones(count, np.int64),
            rewards=np.ones(count),
            values=np.zeros(count),
            log_probs=np.full(count, -0.7),
            terminated=np.isin(envs, ended_envs) & (t == steps - 1),
            truncated=np.zeros(count, bool),
        )
    final = np.full((count, 1, 2), 10.0 * slot + epoch, np.float32) + envs[:, None, None]
    writer.close(steps, last_values=np.full(count, float(slot)), final_state={"hidden": final, "cell": -final})
