"""TorchRL: two synchronous collector processes over vectorised envs, its best setting here."""

from __future__ import annotations

import functools

import gymnasium
import peer_envs
import torch
import torchrl
from marks import Marks, introduce, runner_parser
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import Compose, GymWrapper, InitTracker, TransformedEnv
from torchrl.modules import ActorValueOperator, LSTMModule, ProbabilisticActor, ValueOperator, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

HIDDEN, ENCODER, STEPS, WORKERS = 128, 64, 128, 2


def make_lstm() -> LSTMModule:
    return LSTMModule(input_size=ENCODER, hidden_size=HIDDEN, in_key="embed", out_key="embed", device="cpu")


def build(name: str, envs: int) -> TransformedEnv:
    """One collector's envs."""
    torch.set_num_threads(1)
    vector = gymnasium.vector.SyncVectorEnv(
        [peer_envs.MAKERS[name]] * envs, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )
    wrapped = GymWrapper(vector, categorical_action_encoding=True)
    return TransformedEnv(wrapped, Compose(InitTracker(), make_lstm().make_tensordict_primer()))


def operators(name: str):
    """Actor and critic over one encoder and LSTM."""
    env = GymWrapper(peer_envs.MAKERS[name](), categorical_action_encoding=True)
    inputs, actions = env.observation_spec["observation"].shape[-1], env.action_spec.n
    env.close()
    encoder = TensorDictModule(nn.Sequential(nn.Linear(inputs, ENCODER), nn.ReLU()), ["observation"], ["embed"])
    common = TensorDictSequential(encoder, make_lstm())
    policy = ProbabilisticActor(
        TensorDictModule(nn.Linear(HIDDEN, actions), ["embed"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    both = ActorValueOperator(common, policy, ValueOperator(nn.Linear(HIDDEN, 1), in_keys=["embed"]))
    return both.get_policy_operator(), both.get_value_operator()


def main() -> None:
    parser = runner_parser("TorchRL")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    torch.set_num_threads(chosen.threads)
    actor, critic = operators(chosen.env)
    collector = MultiSyncCollector(
        [functools.partial(build, chosen.env, chosen.envs // WORKERS)] * WORKERS,
        actor,
        frames_per_batch=STEPS * chosen.envs,
        total_frames=-1,
        trust_policy=True,
        num_sub_threads=1,
        num_threads=chosen.threads,
        cat_results=0,
    )
    torch.set_num_threads(chosen.threads)
    estimate = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=False, shifted=True)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01, critic_coeff=0.5, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss.parameters(), lr=2.5e-4, eps=1e-5)
    introduce(f"torchrl {torchrl.__version__}", f"{WORKERS} synchronous collectors, vectorised envs")
    marks, env_steps = Marks(chosen.seconds), 0
    for batch in collector:
        env_steps += batch.numel()
        with torch.no_grad(), set_recurrent_mode(True):
            rows = estimate(batch)
        for _ in range(4):
            for index in torch.randperm(rows.shape[0]).chunk(4):
                with set_recurrent_mode(True):
                    figures = loss(rows[index])
                (figures["loss_objective"] + figures["loss_critic"] + figures["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        collector.update_policy_weights_()
        if marks(env_steps):
            break
    collector.shutdown()


if __name__ == "__main__":
    main()
