"""The categorical head: sampling by given noise, log-probs, entropy, the start of a Discrete space."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rollout_service.errors import SpaceNotSupported
from rollout_service.policy.distributions import Categorical, distribution_for
from rollout_service.runspec import Leaf, SpaceKind

LOGITS = torch.log(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]))


def test_log_probs_and_entropy_are_those_of_the_probabilities() -> None:
    head = Categorical(3)
    log_probs, entropy = head.evaluate(LOGITS, torch.tensor([1, 2]))
    assert log_probs.tolist() == pytest.approx([math.log(0.2), math.log(0.6)])
    expected = [-sum(p * math.log(p) for p in row) for row in ((0.7, 0.2, 0.1), (0.1, 0.3, 0.6))]
    assert entropy.tolist() == pytest.approx(expected)
    assert torch.equal(head.log_prob(LOGITS, torch.tensor([1, 2])), log_probs)
    assert torch.equal(head.entropy(LOGITS), entropy)


def test_without_noise_the_most_probable_action_is_taken() -> None:
    actions, log_probs = Categorical(3).act(LOGITS, None)
    assert actions.tolist() == [0, 2]
    assert log_probs.tolist() == pytest.approx([math.log(0.7), math.log(0.6)])
    assert Categorical(3).mode(LOGITS).tolist() == [0, 2]


def test_noise_decides_the_action_and_the_log_prob_stays_that_of_the_policy() -> None:
    noise = torch.tensor([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0]])
    actions, log_probs = Categorical(3).act(LOGITS, noise)
    assert actions.tolist() == [1, 0]
    assert log_probs.tolist() == pytest.approx([math.log(0.2), math.log(0.1)])


def test_samples_follow_the_probabilities() -> None:
    head = Categorical(3)
    noise = torch.from_numpy(head.draw_noise(np.random.default_rng(0), 40_000))
    actions = head.sample(LOGITS[:1].expand(40_000, 3), noise)
    shares = torch.bincount(actions, minlength=3) / 40_000
    assert shares.tolist() == pytest.approx([0.7, 0.2, 0.1], abs=0.01)


def test_noise_is_reproducible_float32_and_finite() -> None:
    head = Categorical(4)
    first = head.draw_noise(np.random.default_rng(7), 10)
    assert first.shape == (10, 4)
    assert first.dtype == np.float32
    assert np.isfinite(first).all()
    assert np.array_equal(first, head.draw_noise(np.random.default_rng(7), 10))


def test_a_block_of_noise_is_the_same_rows_drawn_one_by_one() -> None:
    head, one = Categorical(2), np.random.default_rng(5)
    rows = np.concatenate([head.draw_noise(one, 1) for _ in range(6)])
    assert np.array_equal(rows, head.draw_noise(np.random.default_rng(5), 6))


def test_actions_are_the_envs_own_values() -> None:
    head = Categorical(3, start=-1)
    actions, log_probs = head.act(LOGITS, None)
    assert actions.tolist() == [-1, 1]
    assert actions.dtype == torch.int64
    assert torch.equal(head.log_prob(LOGITS, actions), log_probs)


def test_very_unlikely_actions_keep_finite_log_probs() -> None:
    log_probs, entropy = Categorical(2).evaluate(torch.tensor([[200.0, -200.0]]), torch.tensor([1]))
    assert log_probs.tolist() == [-400.0]
    assert entropy.item() == 0.0


def test_a_box_action_space_is_refused_with_its_shape() -> None:
    with pytest.raises(SpaceNotSupported, match=r"\(3,\)"):
        distribution_for(Leaf(kind=SpaceKind.BOX, shape=(3,), dtype="float32"))


@pytest.mark.parametrize(("choices", "start"), [(1, 0), (2, 0), (6, -2)])
def test_the_way_back_by_hand_is_autograds(choices: int, start: int) -> None:
    head, draw = Categorical(choices, start), torch.Generator().manual_seed(choices)
    logits = torch.randn(50, choices, generator=draw, requires_grad=True)
    actions = torch.randint(start, start + choices, (50,), generator=draw)
    by_log_prob, by_entropy = torch.randn(50, generator=draw), torch.randn(50, generator=draw)
    log_probs, entropy = head.evaluate(logits, actions)
    (expected,) = torch.autograd.grad((log_probs * by_log_prob + entropy * by_entropy).sum(), logits)
    found = head.evaluate_columns(logits.detach().t().contiguous(), actions)
    assert torch.allclose(found.log_probs, log_probs)
    assert torch.allclose(found.entropy, entropy, atol=1e-6)
    assert torch.allclose(found.gradient(by_log_prob, by_entropy).t(), expected, atol=1e-6)
