"""Play episodes with the policy of a checkpoint, step by step: what `rollout-service eval` does, in your own loop.

    python -m examples.evaluate_policy runs/<run> --episodes 20

The one rule of a recurrent policy: what a step returns as `state` goes into the next step, and each episode starts from
`initial_state`. Written for envs whose observation is one array.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.evaluate import load_policy
from rollout_service.checkpoint import require
from rollout_service.envs.make import make_env


def play(run_dir: Path, episodes: int, seed: int) -> list[float]:
    """Returns of the episodes, most probable actions. run_dir: a run (its newest checkpoint), or one checkpoint."""
    checkpoint = require(run_dir).checkpoint
    spec = checkpoint.manifest.run_spec
    policy = load_policy(spec, checkpoint.arrays)
    env = make_env(spec.env, spec.env_kwargs)
    dtype = spec.spaces.observation[0].dtype

    def row(observation: Any) -> dict[str, torch.Tensor]:
        return {"observations": torch.from_numpy(np.asarray(observation, dtype)[None])}

    returns = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed + episode)
        state, total, ended = policy.initial_state(1), 0.0, False
        while not ended:
            step = policy.step(row(observation), state)  # with noise from policy.draw_noise it would sample
            observation, reward, terminated, truncated, _ = env.step(step.actions[0].item())
            state, total, ended = step.state, total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return returns


def main(run_dir: Path, episodes: int = 20, seed: int = 1) -> float:
    """Plays and prints; returns the mean."""
    returns = play(run_dir, episodes, seed)
    print(f"{episodes} episodes: mean return {np.mean(returns):.3f}, lowest {min(returns):.3f}")
    return float(np.mean(returns))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plays episodes with the policy of a checkpoint.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    main(**vars(parser.parse_args()))
