"""RLlib's PPO with a local env runner, its best setting here."""

from __future__ import annotations

import logging
import os

HERE = os.path.dirname(os.path.abspath(__file__))
os.environ |= {"PYTHONPATH": HERE, "RAY_DEDUP_LOGS": "0", "RAY_usage_stats_enabled": "0"}

import peer_envs  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
from marks import Marks, introduce, runner_parser  # noqa: E402
from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig  # noqa: E402
from ray.tune.registry import register_env  # noqa: E402

STEPS = 128
OBJECT_STORE_BYTES = 128 << 20


def main() -> None:
    chosen = runner_parser("RLlib").parse_args()
    torch.set_num_threads(1)
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
    )
    register_env("peer", lambda cfg: peer_envs.MAKERS[cfg["name"]]())
    config = (
        PPOConfig()
        .environment("peer", env_config={"name": chosen.env})
        .env_runners(num_env_runners=0, num_envs_per_env_runner=chosen.envs, rollout_fragment_length=STEPS)
        .learners(num_learners=0)
        .training(
            lr=2.5e-4,
            gamma=0.99,
            lambda_=0.95,
            train_batch_size_per_learner=STEPS * chosen.envs,
            minibatch_size=STEPS * chosen.envs // 4,
            num_epochs=4,
            clip_param=0.2,
            entropy_coeff=0.01,
            vf_loss_coeff=0.5,
            grad_clip=0.5,
        )
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=[64], use_lstm=True, lstm_cell_size=128, max_seq_len=STEPS)
        )
        .framework("torch")
        .debugging(seed=chosen.seed)
    )
    algorithm = config.build_algo()
    introduce(f"rllib {ray.__version__}", "local env runner, 1 thread")
    marks, env_steps = Marks(chosen.seconds), 0
    while True:
        env_steps = algorithm.train().get("num_env_steps_sampled_lifetime", env_steps)
        if marks(env_steps):
            break
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
