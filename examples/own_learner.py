"""A learner of your own around the rollout buffer: one process, no service, a memory task learned in seconds.

    python -m examples.own_learner --corridor 8

The buffer takes care of what is easy to get wrong: the state that entered each step, where episodes begin, and what one
rollout hands on to the next. The update is yours; here it is a clipped policy gradient.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from learner import RecurrentRolloutBuffer, SequenceBatch
from rollout_service.envs.make import spaces_from_gymnasium
from rollout_service.envs.memory_tasks import TMaze
from rollout_service.envs.vector import EnvBatch, StepOutcome
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import PolicySpec

NUM_STEPS, NUM_ENVS, HIDDEN_DIM = 32, 16, 32
GAMMA, LAMBDA, CLIP, EPOCHS, ENVS_PER_MINIBATCH = 0.99, 0.95, 0.2, 4, 4
ALL = range(NUM_ENVS)


class OwnLearner:
    """Envs, policy and optimiser; `state` is what the policy carries from step to step and from rollout to rollout."""

    def __init__(self, updates: int, corridor: int, seed: int) -> None:
        mazes = [TMaze(corridor) for _ in ALL]
        spaces = spaces_from_gymnasium(mazes[0].observation_space, mazes[0].action_space)
        self.envs = EnvBatch(mazes, spaces, env_ids=ALL, seeds=[seed + env for env in ALL])
        self.policy = ActorCritic(spaces, PolicySpec(hidden_dim=HIDDEN_DIM, encoder_dim=HIDDEN_DIM), seed=seed)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3, eps=1e-5)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.05, updates)
        self.random = np.random.default_rng(seed)
        self.rollout = RecurrentRolloutBuffer(
            NUM_STEPS,
            NUM_ENVS,
            observation_space=mazes[0].observation_space,
            action_space=mazes[0].action_space,
            hidden_dim=HIDDEN_DIM,
        )
        self.observations = {"observations": np.zeros((NUM_ENVS, 3), np.float32)}
        self.seen = {name: torch.from_numpy(rows) for name, rows in self.observations.items()}  # the same memory
        self.envs.reset_all(self.observations)
        self.state = self.exiting = self.policy.initial_state(NUM_ENVS)

    def collect(self) -> float:
        """Fills one rollout; returns the share of right turns in it."""
        turns: list[bool] = []
        self.policy.eval()
        for step in range(NUM_STEPS):
            self.rollout.add_recurrent_state(step, ALL, *self.state.values())  # the state that ENTERS the step
            observation = self.observations["observations"].copy()
            noise = torch.from_numpy(self.policy.draw_noise(self.random, NUM_ENVS))
            acted = self.policy.step(self.seen, self.state, noise)
            outcome = self.envs.step(acted.actions.numpy(), self.observations)
            self.rollout.add(
                step,
                ALL,
                observation,
                acted.actions.numpy(),
                outcome.rewards,
                acted.values.numpy(),
                acted.log_probs.numpy(),
                outcome.terminated,
                outcome.truncated,
                truncation_value=self.final_values(outcome, acted.state),
            )
            ended = torch.from_numpy(outcome.terminated | outcome.truncated)[:, None, None]
            self.exiting = acted.state
            self.state = {name: torch.where(ended, 0.0, rows) for name, rows in acted.state.items()}
            turns += [bool(episode.success) for episode in outcome.episodes]
        return float(np.mean(turns))

    def final_values(self, outcome: StepOutcome, exiting: dict[str, torch.Tensor]) -> np.ndarray | None:
        """V(final observation, state that left the step) for all envs; read only where an episode was cut off."""
        if not outcome.truncated_envs:  # a T-maze always ends by itself; an env with a time limit comes further
            return None
        final = {name: torch.from_numpy(rows) for name, rows in outcome.final_observations.items()}
        return self.policy.value(final, exiting).numpy()

    def update(self) -> None:
        """Advantages, some passes over whole sequences, then the seed of the next rollout."""
        last_values = self.policy.value(self.seen, self.state).numpy()
        self.rollout.compute_advantages(last_values, GAMMA, LAMBDA)
        self.policy.train()
        for _ in range(EPOCHS):
            for minibatch in self.rollout.to_minibatches(ENVS_PER_MINIBATCH, generator=self.random):
                self.optimizer.zero_grad()
                torch.autograd.backward(self.loss(minibatch))
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
                self.optimizer.step()
        self.schedule.step()
        self.rollout.seed_warm_start(NUM_STEPS - 1, *self.exiting.values())

    def loss(self, batch: SequenceBatch) -> torch.Tensor:
        """Clipped policy gradient, squared value error, entropy bonus; all rows of these rollouts are valid."""
        now = self.policy.evaluate_sequences(
            batch.obs_seq, batch.actions, batch.episode_starts, batch.initial_state, batch.valid
        )
        advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
        ratio = torch.exp(now.log_probs - batch.old_log_probs)
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        return (0.5 * (now.values - batch.returns).square() - gain - 0.01 * now.entropy).mean()


def main(updates: int = 40, corridor: int = 8, seed: int = 1) -> float:
    """Trains and shows how it goes; returns the share of right turns in the last four rollouts."""
    learner = OwnLearner(updates, corridor, seed)
    right: list[float] = []
    with learner.rollout:
        for update in range(1, updates + 1):
            right.append(learner.collect())
            learner.update()
            if update % 4 == 0:
                recent = float(np.mean(right[-4:]))
                print(f"update {update:3d}   right turns {recent:6.1%}   {'#' * round(40 * recent)}", flush=True)
    return float(np.mean(right[-4:]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learns a T-maze with a learner of its own.")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--corridor", type=int, default=8, help="steps between the cue and the turn it tells of")
    parser.add_argument("--seed", type=int, default=1)
    torch.set_num_threads(1)  # minibatches this small gain nothing from a second one
    main(**vars(parser.parse_args()))
