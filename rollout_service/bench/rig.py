"""What several subjects are measured on: run specifications, rollouts with known contents, one thread.

Sizes are those of the peers' comparison: 64 floats of observation, 6 actions, MLP 64, LSTM 128. Torch only inside
`one_thread`, so that processes which need none start fast.

Axis letters: E envs of one slot, T steps, N envs of a rollout.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollout_service.memory.schema import rollout_fields
from rollout_service.memory.slots import RolloutMemory, SlotWriter
from rollout_service.runspec import Leaf, PolicySpec, RunSpec, SpaceKind, Spaces

OBSERVATION: Final = 64
ACTIONS: Final = 6
HIDDEN: Final = 128
ENCODER: Final = 64
SEED: Final = 1
POLICY: Final = PolicySpec(hidden_dim=HIDDEN, encoder_dim=ENCODER)
STATE: Final = {"hidden": (1, HIDDEN), "cell": (1, HIDDEN)}
NULL_ENV: Final = "rollout_service.bench.envs:NullEnv"
CARTPOLE: Final = "Memory/PositionCartPole-v0"

Array = NDArray[Any]


def null_spaces() -> Spaces:
    """The spaces of NullEnv."""
    observation = Leaf(kind=SpaceKind.BOX, shape=(OBSERVATION,), dtype="float32")
    return Spaces(
        observation=(observation,), action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=ACTIONS)
    )


def paper_spec(envs: int, steps: int) -> RunSpec:
    """A run of one actor on NullEnv that nobody builds a policy for: its parameters are not listed."""
    return RunSpec(
        env=NULL_ENV,
        spaces=null_spaces(),
        policy=POLICY,
        state=STATE,
        parameters=(),
        num_steps=steps,
        num_actors=1,
        envs_per_actor=envs,
        envs_per_forward=envs,
    )


def rollout_memory(spec: RunSpec) -> RolloutMemory:
    """The rollout segment of such a run. The caller closes it."""
    return RolloutMemory.create(
        rollout_fields(spec.spaces, spec.state),
        num_slots=spec.num_slots,
        envs_per_slot=spec.envs_per_actor,
        num_steps=spec.num_steps,
    )


def fill_slot(
    slot: SlotWriter,
    epoch: int,
    generator: np.random.Generator,
    *,
    version: int | None = None,
    end_probability: float = 0.02,
) -> None:
    """One whole rollout, at once: noise, every reward equal to `epoch`, a fifth of the ends truncations; closed.

    version: of the weights; by default `epoch`.
    """
    slot.open(epoch=epoch, actor=0, incarnation=0, version=epoch if version is None else version)
    arrays = slot.arrays
    for name in ("observations", "values", "log_probs", *STATE):
        arrays[name][...] = generator.standard_normal(arrays[name].shape, np.float32)
    shape = arrays["rewards"].shape
    arrays["actions"][...] = generator.integers(ACTIONS, size=shape)
    arrays["rewards"][...] = epoch
    ends = generator.random(shape) < end_probability
    truncated = ends & (generator.random(shape) < 0.2)
    arrays["terminated"][...], arrays["truncated"][...] = ends & ~truncated, truncated
    arrays["truncation_values"][...] = np.where(truncated, np.float32(0.5), np.float32(np.nan))
    arrays["valid"][...] = 1
    slot.close(
        slot.num_steps,
        last_values=generator.standard_normal(slot.num_envs, np.float32),
        final_state={name: arrays[name][:, -1] for name in STATE},
    )
