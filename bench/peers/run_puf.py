"""PufferLib's PuffeRL: serial envs in its own process, two threads, its best setting here. It never resets state."""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import version

from marks import Marks, hide_stub_compiler, introduce, runner_parser

hide_stub_compiler()

import numpy as np  # noqa: E402
import peer_envs  # noqa: E402
import pufferlib  # noqa: E402
import pufferlib.emulation  # noqa: E402
import pufferlib.models  # noqa: E402
import pufferlib.pytorch  # noqa: E402
import pufferlib.vector  # noqa: E402
import torch  # noqa: E402
from pufferlib import pufferl  # noqa: E402
from torch import nn  # noqa: E402

HIDDEN, ENCODER, STEPS = 128, 64, 128


class Policy(nn.Module):
    """PufferLib's default shape: Linear(64) + GELU, then the LSTM of LSTMWrapper, then heads."""

    def __init__(self, env) -> None:
        super().__init__()
        self.is_continuous = False
        self.hidden_size = HIDDEN
        size = int(np.prod(env.single_observation_space.shape))
        self.encoder = nn.Sequential(nn.Linear(size, ENCODER), nn.GELU())
        self.decoder = pufferlib.pytorch.layer_init(nn.Linear(HIDDEN, env.single_action_space.n), std=0.01)
        self.value = pufferlib.pytorch.layer_init(nn.Linear(HIDDEN, 1), std=1)

    def encode_observations(self, observations, state=None):  # noqa: ARG002
        return self.encoder(observations.view(observations.shape[0], -1).float())

    def decode_actions(self, hidden):
        return self.decoder(hidden), self.value(hidden)


def make_env(name, **keywords):
    passed = {key: value for key, value in keywords.items() if key in ("buf", "seed")}
    return pufferlib.emulation.GymnasiumPufferEnv(env=peer_envs.MAKERS[name](), **passed)


def settings(envs: int, seed: int) -> dict:
    return {
        "seed": seed, "torch_deterministic": True, "cpu_offload": False, "device": "cpu", "optimizer": "adam",
        "anneal_lr": False, "precision": "float32", "total_timesteps": 10**9, "learning_rate": 2.5e-4, "gamma": 0.99,
        "gae_lambda": 0.95, "update_epochs": 4, "clip_coef": 0.2, "vf_coef": 0.5, "vf_clip_coef": 0.2,
        "max_grad_norm": 0.5, "ent_coef": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-5,
        "data_dir": tempfile.mkdtemp(prefix="rs-peer-"), "checkpoint_interval": 10**9, "batch_size": STEPS * envs,
        "minibatch_size": STEPS * envs // 4, "max_minibatch_size": 10**6, "bptt_horizon": STEPS, "compile": False,
        "compile_mode": "default", "compile_fullgraph": False, "vtrace_rho_clip": 1.0, "vtrace_c_clip": 1.0,
        "prio_alpha": 0.8, "prio_beta0": 0.2, "use_rnn": True, "env": "x", "name": "x", "project": "x",
    }  # fmt: skip


def main() -> None:
    parser = runner_parser("PufferLib")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    envs = pufferlib.vector.make(
        make_env, env_kwargs={"name": chosen.env}, num_envs=chosen.envs, backend=pufferlib.vector.Serial
    )
    policy = pufferlib.models.LSTMWrapper(envs, Policy(envs), input_size=ENCODER, hidden_size=HIDDEN)
    pufferl.PuffeRL.print_dashboard = lambda *_, **__: None
    trainer = pufferl.PuffeRL(settings(chosen.envs, chosen.seed), envs, policy)
    introduce(f"pufferlib {version('pufferlib')}", f"serial envs, {chosen.threads} threads, never resets state")
    marks = Marks(chosen.seconds)
    while True:
        trainer.evaluate()
        trainer.train()
        if marks(trainer.global_step):
            break
    # Its monitor thread does not end by itself.
    os._exit(0)


if __name__ == "__main__":
    main()
