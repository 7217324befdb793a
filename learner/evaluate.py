"""Evaluation: fresh episodes under the weights of a checkpoint, recurrent state carried and reset per env.

Reads checkpoints, writes nothing, prints nothing. Statistics of the normaliser stay as they were saved. Each env
plays a quota fixed beforehand: taking the first episodes that finish anywhere would favour short ones. What must
never happen: an episode that starts from another state than zeros, or a state that is not fed back.

Axis letters: E envs that are played at once, L recurrent layers, H hidden_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from rollout_service import checkpoint as checkpoints
from rollout_service.checkpoint import POLICY_PREFIX
from rollout_service.envs.bad_data import BadData
from rollout_service.envs.opening import open_envs
from rollout_service.envs.protocol import EnvRows, FinishedEpisode
from rollout_service.envs.seeding import Purpose, generator, reset_seed
from rollout_service.errors import CheckpointError, ConfigError, EnvFault, SpaceNotSupported
from rollout_service.memory.schema import OBSERVATIONS
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import RunSpec

LONGEST_EPISODE: Final = 1_000_000
"""Env steps after which an episode counts as never ending: an env without a time limit may wait for a better policy
forever."""
NOISE_BLOCK: Final = 256
"""Steps of action noise drawn at once per env."""


@dataclass(frozen=True)
class EvaluationResult:
    """Figures over all episodes; rewards raw. success_rate is None where the env does not report success."""

    checkpoint: Path
    episodes: int
    return_mean: float
    return_std: float
    success_rate: float | None
    length_mean: float
    warnings: tuple[str, ...] = ()


def evaluate(
    run_dir: Path, *, episodes: int = 100, best: bool = False, argmax: bool = False, num_envs: int = 8, seed: int = 1
) -> EvaluationResult:
    """Plays `episodes` episodes and returns their figures.

    run_dir: a run, of which the newest usable checkpoint is taken, or one checkpoint. best: of a run the one with the
    highest return_mean instead. argmax: the most probable action instead of a sample. num_envs: E. Raises
    CheckpointError without a usable checkpoint, ConfigError for counts below 1, EnvFault for an env that fails or whose
    episode does not end.
    """
    for name, count in (("episodes", episodes), ("num_envs", num_envs)):
        if count < 1:
            raise ConfigError(f"{name} is {count}, it must be at least 1")
    usable = checkpoints.require(Path(run_dir), by_score=best)
    checkpoint = usable.checkpoint
    spec = checkpoint.manifest.run_spec
    bad_data = BadData(spec.on_bad_data, spec.obs_limit)
    finished = play(
        load_policy(spec, checkpoint.arrays),
        spec,
        quotas(episodes, min(num_envs, episodes)),
        argmax=argmax,
        seed=seed,
        bad_data=bad_data,
    )
    returns = np.array([episode.total_reward for episode in finished], np.float64)
    successes = [episode.success for episode in finished if episode.success is not None]
    return EvaluationResult(
        checkpoint=checkpoint.path,
        episodes=len(finished),
        return_mean=float(returns.mean()),
        return_std=float(returns.std()),
        success_rate=float(np.mean(successes)) if successes else None,
        length_mean=float(np.mean([episode.length for episode in finished])),
        warnings=(*usable.warnings, *bad_data.take()[1]),
    )


def quotas(episodes: int, num_envs: int) -> list[int]:
    """Episodes of each env: as even as can be, the first ones play one more."""
    whole, extra = divmod(episodes, num_envs)
    return [whole + (env < extra) for env in range(num_envs)]


def load_policy(spec: RunSpec, arrays: Mapping[str, np.ndarray]) -> ActorCritic:
    """The policy of a checkpoint, on the CPU. Raises CheckpointError if an array is missing."""
    policy = ActorCritic(spec.spaces, spec.policy, seed=spec.seed)
    missing = [each.name for each in spec.parameters if POLICY_PREFIX + each.name not in arrays]
    if missing:
        raise CheckpointError(f"the checkpoint lacks the policy arrays {missing}; it is of another release")
    policy.load_arrays({each.name: np.array(arrays[POLICY_PREFIX + each.name]) for each in spec.parameters})
    policy.eval()
    return policy


def play(
    policy: ActorCritic,
    spec: RunSpec,
    quota: list[int],
    *,
    argmax: bool,
    seed: int,
    bad_data: BadData | None = None,
) -> list[FinishedEpisode]:
    """Plays quota[e] episodes in env e, all envs side by side; returns them in the order in which they ended.

    bad_data: what to do about episodes that cannot be played to their end; by default they raise EnvFault.
    """
    rows = range(len(quota))
    seeds = [reset_seed(seed, Purpose.EVALUATION_ENV, env) for env in rows]
    envs = open_envs(spec.env, spec.env_kwargs, spec.vectorize, env_ids=rows, seeds=seeds, bad_data=bad_data)
    if envs.spaces != spec.spaces:
        envs.close()
        raise SpaceNotSupported(f"env {spec.env!r} has {envs.spaces}, the checkpoint's policy is for {spec.spaces}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a few rows per call: more threads only wait for each other
    try:
        return _play(policy, spec, envs, quota, None if argmax else ActionNoise(policy, len(quota), seed))
    finally:
        torch.set_num_threads(threads)
        envs.close()


class ActionNoise:
    """Action noise of E envs, each from its own stream, drawn in blocks."""

    def __init__(self, policy: ActorCritic, num_envs: int, seed: int) -> None:
        self._policy = policy
        self._streams = [generator(seed, Purpose.EVALUATION_ACTION, env) for env in range(num_envs)]
        self._next = NOISE_BLOCK

    def draw(self) -> torch.Tensor:
        """[E, *] for one step."""
        if self._next == NOISE_BLOCK:
            drawn = [self._policy.draw_noise(stream, NOISE_BLOCK) for stream in self._streams]
            self._block = torch.from_numpy(np.stack(drawn, axis=1))
            self._next = 0
        self._next += 1
        return self._block[self._next - 1]


def _play(
    policy: ActorCritic, spec: RunSpec, envs: EnvRows, quota: list[int], noise: ActionNoise | None
) -> list[FinishedEpisode]:
    left = list(quota)
    last_end = [0] * len(left)
    clock = 0
    finished: list[FinishedEpisode] = []
    observations = {
        OBSERVATIONS + leaf.path: np.zeros((len(left), *leaf.shape), leaf.dtype) for leaf in spec.spaces.observation
    }
    seen = {name: torch.from_numpy(array) for name, array in observations.items()}
    envs.reset_all(observations)
    with torch.inference_mode():
        state = policy.initial_state(len(left))
        while any(left):
            step = policy.step(seen, state, None if noise is None else noise.draw())
            outcome = envs.step(step.actions.numpy(), observations)
            state = step.state
            clock += 1
            for row, episode in zip(outcome.ended_envs, outcome.episodes, strict=True):
                last_end[row] = clock
                if left[row] > 0:
                    left[row] -= 1
                    finished.append(episode)
            for row in outcome.starting_envs:
                for array in state.values():
                    array[row] = 0.0
            if clock - min(last_end) >= LONGEST_EPISODE:
                raise EnvFault(
                    f"env {spec.env!r}: no end of an episode within {LONGEST_EPISODE} steps; give the env a time limit"
                )
    return finished
