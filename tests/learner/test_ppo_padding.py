"""Rows that are not valid: they dilute no mean, and no NaN of theirs reaches a loss or a gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.ppo import PpoSettings, masked_mean, normalize_advantages, ppo_loss
from learner.sequences import SequenceBatch
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import Leaf, PolicySpec, SpaceKind, Spaces

LENGTHS = (1, 2, 5)
SPACES = Spaces(
    observation=(Leaf(kind=SpaceKind.BOX, shape=(3,), dtype="float32"),),
    action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=3),
)
VALID = torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)


def make_policy() -> ActorCritic:
    policy = ActorCritic(SPACES, PolicySpec(hidden_dim=8, encoder_dim=8), seed=0)
    with torch.no_grad():
        policy.policy.weight.mul_(100.0)
    return policy


def padded_batch(filler: float) -> SequenceBatch:
    """Three sequences of lengths 1, 2 and 5 padded to 5; every float behind their ends is `filler`."""
    rng = np.random.default_rng(0)

    def column(*shape: int) -> Tensor:
        drawn = torch.from_numpy(rng.normal(size=(3, 5, *shape)).astype(np.float32))
        return drawn.masked_fill(~VALID.view(3, 5, *(1,) * len(shape)), filler)

    return SequenceBatch(
        obs_seq=column(3),
        actions=torch.from_numpy(rng.integers(0, 3, (3, 5))).masked_fill(~VALID, 0 if filler == 0 else 99),
        episode_starts=torch.zeros(3, 5).masked_fill(~VALID, 1.0),
        old_log_probs=column() - 1.0,
        old_values=column(),
        advantages=column(),
        returns=column(),
        initial_state={name: torch.full((1, 3, 8), 0.3) for name in ("hidden", "cell")},
        valid=VALID,
        env_ids=torch.arange(3),
    )


def losses_and_gradients(policy: ActorCritic, minibatches: list[SequenceBatch]) -> tuple[float, list[Tensor]]:
    """The loss over all minibatches, each weighted by its valid rows, and the gradients of the parameters."""
    policy.zero_grad()
    settings = PpoSettings(value_clip_range=0.2)
    total = torch.zeros(())
    rows = sum(int(minibatch.valid.sum()) for minibatch in minibatches)
    for minibatch in minibatches:
        evaluation = policy.evaluate_sequences(
            minibatch.obs_seq, minibatch.actions, minibatch.episode_starts, minibatch.initial_state, minibatch.valid
        )
        total = total + ppo_loss(evaluation, minibatch, settings)[0] * (int(minibatch.valid.sum()) / rows)
    total.backward()  # type: ignore[no-untyped-call]
    return total.item(), [torch.zeros(1) if p.grad is None else p.grad.clone() for p in policy.parameters()]


def cut(whole: SequenceBatch, env: int) -> SequenceBatch:
    """One env's sequence without its padding."""
    row = whole.take(torch.tensor([env]))
    assert isinstance(row.obs_seq, Tensor)
    names = ("actions", "episode_starts", "old_log_probs", "old_values", "advantages", "returns", "valid")
    columns = {name: getattr(row, name)[:, : LENGTHS[env]] for name in names}
    return replace(row, obs_seq=row.obs_seq[:, : LENGTHS[env]], **columns)


@pytest.mark.parametrize("filler", [0.0, 1.0, 1e9, math.nan, math.inf])
def test_a_per_step_loss_of_one_has_mean_one_whatever_the_padding_holds(filler: float) -> None:
    loss = torch.ones(3, 5).masked_fill(~VALID, filler)
    assert masked_mean(loss, VALID).item() == 1.0


@pytest.mark.parametrize("filler", [1e9, math.nan, math.inf])
def test_contents_of_the_padding_change_no_figure(filler: float) -> None:
    policy = make_policy()
    found = []
    for contents in (0.0, filler):
        minibatch = normalize_advantages(padded_batch(contents))
        evaluation = policy.evaluate_sequences(
            minibatch.obs_seq, minibatch.actions, minibatch.episode_starts, minibatch.initial_state, minibatch.valid
        )
        found.append(ppo_loss(evaluation, minibatch, PpoSettings(value_clip_range=0.2))[1])
    assert found[0] == found[1]


def test_loss_and_gradients_with_nan_padding_are_those_of_the_unpadded_sequences() -> None:
    policy = make_policy()
    loss, gradients = losses_and_gradients(policy, [padded_batch(math.nan)])
    expected_loss, expected = losses_and_gradients(policy, [cut(padded_batch(0.0), env) for env in range(3)])
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    for got, want in zip(gradients, expected, strict=True):
        assert torch.isfinite(got).all()
        assert torch.allclose(got, want, atol=1e-6)
    assert any(gradient.abs().max().item() > 1e-3 for gradient in gradients)


def test_huge_stored_numbers_in_the_padding_overflow_nothing() -> None:
    minibatch = replace(padded_batch(0.0), old_log_probs=torch.zeros(3, 5).masked_fill(~VALID, -1e9))
    loss, gradients = losses_and_gradients(make_policy(), [minibatch])
    assert math.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_a_minibatch_without_a_valid_row_gives_zero_loss_and_zero_gradients() -> None:
    empty = replace(padded_batch(math.nan), valid=torch.zeros(3, 5, dtype=torch.bool))
    loss, gradients = losses_and_gradients(make_policy(), [empty, padded_batch(0.0)])
    reference, expected = losses_and_gradients(make_policy(), [padded_batch(0.0)])
    assert loss == pytest.approx(reference, abs=1e-7)
    assert all(torch.allclose(got, want, atol=1e-7) for got, want in zip(gradients, expected, strict=True))
