"""The rollout buffer with numpy alone: fill it, estimate advantages, take minibatches of whole sequences.

    python -m examples.buffer_only

No service, no env, no network: random numbers stand where they would be. Time limits are told apart from real ends: a
row that was `truncated` brings V(final observation) with it.
"""

from __future__ import annotations

import numpy as np

from learner import RecurrentRolloutBuffer

NUM_STEPS, NUM_ENVS, OBS_DIM, HIDDEN_DIM = 16, 4, 3, 8


def main() -> list[tuple[int, ...]]:
    """Shows what comes out; returns the shapes of the minibatches, [envs, steps]."""
    random = np.random.default_rng(1)
    hidden = cell = np.zeros((NUM_ENVS, 1, HIDDEN_DIM), np.float32)  # [envs, layers, width]
    with RecurrentRolloutBuffer(NUM_STEPS, NUM_ENVS, obs_dim=OBS_DIM, hidden_dim=HIDDEN_DIM) as buffer:
        for step in range(NUM_STEPS):
            buffer.add_recurrent_state(step, slice(None), hidden, cell)  # the state that ENTERS the step
            observation = random.normal(size=(NUM_ENVS, OBS_DIM)).astype(np.float32)
            action = random.integers(2, size=NUM_ENVS)
            reward, value, final_value = random.normal(size=(3, NUM_ENVS))
            log_prob = np.full(NUM_ENVS, np.log(0.5))
            terminated, truncated = random.random((2, NUM_ENVS)) < 0.1
            buffer.add(
                step, slice(None), observation, action, reward, value, log_prob, terminated, truncated,
                truncation_value=np.where(truncated & ~terminated, final_value, np.nan),
            )  # fmt: skip
            exiting = random.normal(size=hidden.shape).astype(np.float32)
            hidden = cell = np.where((terminated | truncated)[:, None, None], 0.0, exiting)

        buffer.compute_advantages(random.normal(size=NUM_ENVS), gamma=0.99, gae_lambda=0.95)
        print("advantages [step, env]", buffer.advantages().shape, "episodes ended", int(buffer.terminated().sum()))
        shapes = []
        for batch in buffer.to_minibatches(2, generator=random):
            shapes.append(tuple(batch.advantages.shape))
            print("minibatch of envs", batch.env_ids.tolist(), "advantages [env, step]", shapes[-1])
        buffer.seed_warm_start(NUM_STEPS - 1, exiting, exiting)  # the next rollout goes on from here
        print("next rollout begins a new episode in env", buffer.episode_start_carry().astype(bool).tolist())
    return shapes


if __name__ == "__main__":
    main()
