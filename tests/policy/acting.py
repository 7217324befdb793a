"""The actor's side in miniature: episodes of random length through `policy.step`, kept as a rollout would keep them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout_service.memory.schema import observation_fields
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import Leaf, SpaceKind, Spaces

VECTOR = Leaf(kind=SpaceKind.BOX, shape=(3,), dtype="float32")
TWO_ACTIONS = Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=2)
PLAIN = Spaces(observation=(VECTOR,), action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=4))
SYMBOLS = Spaces(
    observation=(Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=5, start=2),),
    action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=3, start=-1),
)
MIXED = Spaces(
    observation=(
        Leaf(path=".camera", kind=SpaceKind.BOX, shape=(6, 5, 3), dtype="uint8"),
        Leaf(path=".speed", kind=SpaceKind.BOX, shape=(2,), dtype="float32"),
        Leaf(path=".task", kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=3),
    ),
    action=TWO_ACTIONS,
)


def random_observations(spaces: Spaces, rng: np.random.Generator, *shape: int) -> dict[str, Tensor]:
    """Field name -> [*shape, *leaf]: floats around 5 with deviation 3, any pixel, any symbol."""
    found = {}
    for name, leaf in zip(observation_fields(spaces), spaces.observation, strict=True):
        size = (*shape, *leaf.shape)
        if leaf.kind is SpaceKind.DISCRETE:
            drawn = leaf.start + rng.integers(0, leaf.size or 1, size)
        elif leaf.is_image:
            drawn = rng.integers(0, 256, size).astype(np.uint8)
        else:
            drawn = rng.normal(5.0, 3.0, size).astype(np.float32)
        found[name] = torch.from_numpy(np.asarray(drawn))
    return found


@dataclass
class Acted:
    """What a rollout holds after T steps of n envs: [n, T, *], and the state entering column 0, [L, n, H]."""

    observations: dict[str, Tensor]
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    episode_starts: Tensor
    initial_state: dict[str, Tensor]
    entering: dict[str, Tensor]
    """Name -> [n, T, L, H]: the state each step started from."""


def act(
    policy: ActorCritic,
    *,
    num_envs: int,
    num_steps: int,
    share_of_ends: float,
    seed: int = 0,
    observations: dict[str, Tensor] | None = None,
) -> Acted:
    """Run the acting path; each row ends an episode with probability `share_of_ends`, and its env's state is zeroed."""
    rng = np.random.default_rng(seed)
    if observations is None:
        observations = random_observations(policy.spaces, rng, num_envs, num_steps)
    starts = torch.from_numpy(rng.random((num_envs, num_steps)) < share_of_ends).float()
    noise = torch.from_numpy(np.stack([policy.draw_noise(rng, num_steps) for _ in range(num_envs)]))
    carried = {
        name: torch.from_numpy(rng.normal(0, 0.5, (num_envs, *shape)).astype(np.float32))
        for name, shape in policy.state_spec().items()
    }
    state, columns = carried, []
    entering: dict[str, list[Tensor]] = {name: [] for name in carried}
    with torch.inference_mode():
        for t in range(num_steps):
            fresh = starts[:, t].bool()[:, None, None]
            state = {name: array.masked_fill(fresh, 0.0) for name, array in state.items()}
            for name, array in state.items():
                entering[name].append(array)
            step = policy.step({name: rows[:, t] for name, rows in observations.items()}, state, noise[:, t])
            columns.append((step.actions, step.log_probs, step.values))
            state = step.state
    actions, log_probs, values = (torch.stack(column, 1).clone() for column in zip(*columns, strict=True))
    return Acted(
        observations=observations,
        actions=actions,
        log_probs=log_probs,
        values=values,
        episode_starts=starts,
        initial_state={name: array.transpose(0, 1).contiguous() for name, array in carried.items()},
        entering={name: torch.stack(arrays, 1).clone() for name, arrays in entering.items()},
    )
