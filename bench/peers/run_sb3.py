"""sb3-contrib's RecurrentPPO: envs in its own process, one LSTM for policy and value, one thread, its best setting."""

from __future__ import annotations

import functools

import peer_envs
import sb3_contrib
import torch
from marks import Marks, introduce, runner_parser
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

STEPS = 128


def make_env(name: str) -> Monitor:
    return Monitor(peer_envs.MAKERS[name]())


def main() -> None:
    parser = runner_parser("sb3-contrib")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    model = RecurrentPPO(
        "MlpLstmPolicy",
        DummyVecEnv([functools.partial(make_env, chosen.env)] * chosen.envs),
        n_steps=STEPS,
        batch_size=STEPS * chosen.envs // 4,
        n_epochs=4,
        learning_rate=2.5e-4,
        gamma=0.99,
        gae_lambda=0.95,
        policy_kwargs={
            "lstm_hidden_size": 128,
            "net_arch": {"pi": [64], "vf": [64]},
            "shared_lstm": True,
            "enable_critic_lstm": False,
        },
        device="cpu",
        seed=chosen.seed,
        verbose=0,
    )
    total, callback = model._setup_learn(10**9, None, True, "x", False)
    introduce(f"sb3-contrib {sb3_contrib.__version__}", f"shared LSTM, {chosen.threads} thread")
    marks = Marks(chosen.seconds)
    while True:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=STEPS)
        model._update_current_progress_remaining(model.num_timesteps, total)
        model.train()
        if marks(model.num_timesteps):
            break


if __name__ == "__main__":
    main()
