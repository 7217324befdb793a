"""Play episodes with the policy of a checkpoint, one step at a time: what `rollout-service eval` does, by hand.

    python -m examples.evaluate_policy runs/<run> --episodes 20

The one rule of a recurrent policy: what a step returns as state goes into the next step, and a new episode starts from
`initial_state`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from learner.evaluate import load_policy
from rollout_service.checkpoint import require
from rollout_service.envs.make import make_env
from rollout_service.policy.actor_critic import ActorCritic


def play_episode(policy: ActorCritic, env, seed: int) -> tuple[float, int]: ...
