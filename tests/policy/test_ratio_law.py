"""The ratio law, at its smallest: what an actor recorded is what the learner recomputes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import Core, PolicySpec, Spaces
from tests.policy.acting import MIXED, PLAIN, SYMBOLS, Acted, act, random_observations

TOLERANCE = 1e-5
ARMS = [
    pytest.param(PolicySpec(core=Core.LSTM, hidden_dim=24, encoder_dim=16), id="lstm"),
    pytest.param(PolicySpec(core=Core.LSTM, hidden_dim=24, encoder_dim=16, num_layers=2), id="two-layers"),
    pytest.param(
        PolicySpec(core=Core.LSTM, hidden_dim=24, encoder_dim=16, chrono_max=32.0, normalize_observations=True),
        id="chrono-normalised",
    ),
    pytest.param(
        PolicySpec(core=Core.LSTM, hidden_dim=8, encoder_dim=16, num_layers=3, normalize_observations=True),
        id="three-layers-normalised",
    ),
    pytest.param(PolicySpec(core=Core.NONE, hidden_dim=24, encoder_dim=16), id="feed-forward"),
    pytest.param(
        PolicySpec(core=Core.NONE, hidden_dim=24, encoder_dim=16, normalize_observations=True),
        id="feed-forward-normalised",
    ),
]
SPACES = [
    pytest.param(PLAIN, id="vector"),
    pytest.param(SYMBOLS, id="discrete-with-start"),
    pytest.param(MIXED, id="dict-with-image"),
]


def make_policy(spaces: Spaces, spec: PolicySpec) -> ActorCritic:
    """A policy with an opinion (the fresh action head is nearly uniform) and with statistics where it keeps them."""
    policy = ActorCritic(spaces, spec, seed=3).eval()
    with torch.no_grad():
        policy.policy.weight.mul_(100.0)
    rows = random_observations(spaces, np.random.default_rng(9), 6, 10)
    policy.update_normalizer(rows, torch.ones(6, 10, dtype=torch.bool))
    return policy


def deviation(policy: ActorCritic, acted: Acted, valid: torch.Tensor) -> tuple[float, float]:
    """Largest difference of log-probs and of values over the valid rows."""
    found = policy.evaluate_sequences(
        acted.observations, acted.actions, acted.episode_starts, acted.initial_state, valid
    )
    return (
        (found.log_probs - acted.log_probs)[valid].abs().max().item(),
        (found.values - acted.values)[valid].abs().max().item(),
    )


@pytest.mark.parametrize("spec", ARMS)
@pytest.mark.parametrize("spaces", SPACES)
@pytest.mark.parametrize("share_of_ends", [0.0, 0.1, 1.0])
def test_recomputed_log_probs_and_values_are_the_stored_ones(
    spaces: Spaces, spec: PolicySpec, share_of_ends: float
) -> None:
    policy = make_policy(spaces, spec)
    acted = act(policy, num_envs=5, num_steps=24, share_of_ends=share_of_ends)
    log_probs, values = deviation(policy, acted, torch.ones(5, 24, dtype=torch.bool))
    assert log_probs <= TOLERANCE
    assert values <= TOLERANCE


@pytest.mark.parametrize("spec", ARMS)
def test_the_law_holds_for_partial_rows_whatever_stands_behind_them(spec: PolicySpec) -> None:
    policy = make_policy(PLAIN, spec)
    acted = act(policy, num_envs=6, num_steps=20, share_of_ends=0.1)
    valid = torch.arange(20) < torch.tensor([20, 13, 1, 7, 20, 2]).unsqueeze(1)
    acted.observations["observations"][~valid] = torch.nan
    acted.actions[~valid] = 10**6
    acted.episode_starts[~valid] = 1.0
    assert max(deviation(policy, acted, valid)) <= TOLERANCE


def test_the_law_holds_across_filler_rows_in_the_middle() -> None:
    policy = make_policy(PLAIN, PolicySpec(core=Core.LSTM, hidden_dim=16, encoder_dim=16, num_layers=2))
    acted = act(policy, num_envs=4, num_steps=16, share_of_ends=0.2)
    valid = torch.ones(4, 16, dtype=torch.bool)
    for env, step in ((0, 5), (1, 0), (2, 14), (3, 7), (3, 9)):
        valid[env, step] = False
        # Nothing behind a filler depends on it: the row after it starts an episode, and so it did for the actor.
        acted.episode_starts[env, step + 1] = 1.0
    starts = acted.episode_starts
    replay = act_with_starts(policy, acted, starts)
    acted.observations["observations"][~valid] = torch.inf
    acted.log_probs, acted.values = replay
    acted.initial_state["cell"][:, 1] = torch.nan
    assert max(deviation(policy, acted, valid)) <= TOLERANCE


def act_with_starts(policy: ActorCritic, acted: Acted, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and values of the recorded actions, row by row with the given starts."""
    logits, values = [], []
    state = {name: array.transpose(0, 1) for name, array in acted.initial_state.items()}
    with torch.no_grad():
        for t in range(starts.shape[1]):
            fresh = starts[:, t].bool()[:, None, None]
            state = {name: array.masked_fill(fresh, 0.0) for name, array in state.items()}
            rows = {name: array[:, t] for name, array in acted.observations.items()}
            values.append(policy.value(rows, state))
            step = policy.step(rows, state, None)
            out = step.state["hidden"][:, -1]
            logits.append(policy.policy(out))
            state = step.state
        log_probs = policy.distribution.log_prob(torch.stack(logits, 1), acted.actions)
    return log_probs, torch.stack(values, 1)


def test_a_wrong_starting_state_is_visible_in_the_ratio() -> None:
    policy = make_policy(PLAIN, PolicySpec(core=Core.LSTM, hidden_dim=24, encoder_dim=16))
    acted = act(policy, num_envs=5, num_steps=12, share_of_ends=0.0)
    acted.initial_state = {name: torch.zeros_like(array) for name, array in acted.initial_state.items()}
    assert deviation(policy, acted, torch.ones(5, 12, dtype=torch.bool))[0] > 1e-3


def test_statistics_that_change_in_between_break_the_law() -> None:
    spec = PolicySpec(core=Core.LSTM, hidden_dim=24, encoder_dim=16, normalize_observations=True)
    policy = make_policy(PLAIN, spec)
    valid = torch.ones(5, 12, dtype=torch.bool)
    acted = act(policy, num_envs=5, num_steps=12, share_of_ends=0.1)
    assert max(deviation(policy, acted, valid)) <= TOLERANCE
    policy.update_normalizer({"observations": torch.full((5, 12, 3), 40.0)}, valid)
    assert deviation(policy, acted, valid)[0] > 1e-3


def test_forwards_leave_the_statistics_alone() -> None:
    spec = PolicySpec(core=Core.LSTM, hidden_dim=8, encoder_dim=8, normalize_observations=True)
    policy = make_policy(PLAIN, spec)
    before = {name: array.tobytes() for name, array in policy.to_arrays().items()}
    deviation(policy, act(policy, num_envs=3, num_steps=6, share_of_ends=0.2), torch.ones(3, 6, dtype=torch.bool))
    assert {name: array.tobytes() for name, array in policy.to_arrays().items()} == before
