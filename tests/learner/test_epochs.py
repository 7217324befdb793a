"""The epochs loop: the same bits for any number of threads, and the same numbers as PPO written down plainly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.blocks import PaddedBatch, num_blocks
from learner.epochs import Epochs, Outcome, deviations
from learner.ppo import PpoSettings, ppo_loss
from learner.sequences import SequenceBatch
from learner.staging import thread_count, usable_cores
from rollout_service.config import TrainConfig
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import Core, Leaf, PolicySpec, SpaceKind, Spaces

VECTOR = Leaf(kind=SpaceKind.BOX, shape=(3,), dtype="float32")
ACTION = Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=3, start=-1)
PLAIN = Spaces(observation=(VECTOR,), action=ACTION)
MIXED = Spaces(
    observation=(
        Leaf(path="/choice", kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=4),
        Leaf(path="/picture", kind=SpaceKind.BOX, shape=(8, 8, 3), dtype="uint8"),
        Leaf(path="/vector", kind=SpaceKind.BOX, shape=(3,), dtype="float32"),
    ),
    action=ACTION,
)
LSTM = PolicySpec(hidden_dim=8, encoder_dim=6, normalize_observations=True)
CASES = {
    "lstm": (PLAIN, LSTM),
    "wide lstm": (PLAIN, LSTM.model_copy(update={"hidden_dim": 32})),
    "two layers": (PLAIN, LSTM.model_copy(update={"num_layers": 2})),
    "no memory": (PLAIN, LSTM.model_copy(update={"core": Core.NONE})),
    "pictures": (MIXED, LSTM),
}
ENVS, STEPS = 20, 11


def config(**settings: Any) -> TrainConfig:
    defaults: dict[str, Any] = {"env": "CartPole-v1", "envs_per_minibatch": 20, "epochs": 1, "max_grad_norm": 1e9}
    return TrainConfig(**{**defaults, **settings})


def make_policy(spaces: Spaces = PLAIN, spec: PolicySpec = LSTM) -> ActorCritic:
    policy = ActorCritic(spaces, spec, seed=0)
    with torch.no_grad():
        policy.policy.weight.mul_(50.0)
    return policy


def make_batch(policy: ActorCritic, *, whole: bool = False) -> SequenceBatch:
    """Rows of many lengths, with episode starts; old figures are near the policy's own. NaN where not valid."""
    draw = torch.Generator().manual_seed(5)
    shape = (ENVS, STEPS)
    lengths = torch.full((ENVS,), STEPS) if whole else torch.randint(1, STEPS + 1, (ENVS,), generator=draw)
    valid = torch.arange(STEPS) < lengths.unsqueeze(1)
    leaves = {}
    for name, leaf in policy.leaves:
        rows = torch.randn(*shape, *leaf.shape, generator=draw).masked_fill(
            ~valid.view(*shape, *(1,) * len(leaf.shape)), math.nan
        )
        if leaf.dtype != "float32":
            rows = torch.randint(0, leaf.size or 256, (*shape, *leaf.shape), generator=draw)
        leaves[name] = rows.to(getattr(torch, leaf.dtype))
    obs_seq: Any = leaves["observations"] if list(leaves) == ["observations"] else leaves
    actions = torch.randint(-1, 2, shape, generator=draw)
    starts = (torch.rand(shape, generator=draw) < 0.2).float()
    state = {name: torch.randn(size[0], ENVS, size[1], generator=draw) for name, size in policy.state_spec().items()}
    with torch.no_grad():
        now = policy.evaluate_sequences(obs_seq, actions, starts, state, valid)

    def column(centre: Tensor | float, spread: float) -> Tensor:
        return (centre + spread * torch.randn(shape, generator=draw)).masked_fill(~valid, math.nan)

    return SequenceBatch(
        obs_seq=obs_seq,
        actions=actions.masked_fill(~valid, 99),
        episode_starts=starts,
        old_log_probs=column(now.log_probs, 0.2),
        old_values=column(now.values, 0.2),
        advantages=column(0.0, 1.0),
        returns=column(now.values, 1.0),
        initial_state=state,
        valid=valid,
        env_ids=torch.arange(100, 100 + ENVS),
    )


def shuffle() -> np.random.Generator:
    return np.random.default_rng(3)


def arrays_of(epochs: Epochs) -> dict[str, np.ndarray]:
    return {**epochs.policy.to_arrays(), **epochs.to_arrays()}


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_threads_gives_the_same_bits(case: str) -> None:
    found = []
    for threads in (1, 2, 3):
        epochs = Epochs(make_policy(*CASES[case]), config(learner_threads=threads, epochs=3, envs_per_minibatch=17))
        batch = make_batch(epochs.policy)
        outcome, figures = epochs.run(batch, learning_rate=1e-2, shuffle=shuffle())
        assert outcome is Outcome.COMPLETE
        found.append((figures, arrays_of(epochs), epochs.evaluate(batch)))
    for figures, arrays, view in found[1:]:
        assert figures == found[0][0]
        for name, array in found[0][1].items():
            np.testing.assert_array_equal(arrays[name], array, err_msg=name)
        assert torch.equal(view.log_probs[batch.valid], found[0][2].log_probs[batch.valid])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("value_clip_range", [None, 0.1])
def test_one_step_is_that_of_the_plain_loss_and_torchs_adam(case: str, value_clip_range: float | None) -> None:
    chosen = config(value_clip_range=value_clip_range, learner_threads=2, max_grad_norm=0.3, entropy_coefficient=0.2)
    policy, plain = make_policy(*CASES[case]), make_policy(*CASES[case])
    batch = make_batch(policy)
    settings = PpoSettings.from_config(chosen)

    evaluation = plain.evaluate_sequences(
        batch.obs_seq, batch.actions, batch.episode_starts, batch.initial_state, batch.valid
    )
    loss, expected = ppo_loss(evaluation, batch, settings)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), chosen.max_grad_norm)
    torch.optim.Adam(plain.parameters(), lr=1e-3, eps=chosen.adam_epsilon).step()

    epochs = Epochs(policy, chosen)
    _, figures = epochs.run(batch, learning_rate=1e-3, shuffle=shuffle())
    assert figures["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name
    assert figures["ratio_deviation"] == pytest.approx(deviations(evaluation, batch).max().item(), rel=1e-4)
    for (name, got), want in zip(policy.named_parameters(), plain.parameters(), strict=True):
        assert want.grad is not None
        # Adam's first step is the sign of the gradient where that is not tiny.
        clear = want.grad.abs() > 1e-4
        assert torch.allclose(got[clear], want[clear], atol=2e-5), name


def test_blocks_cover_each_row_once_whatever_their_number() -> None:
    policy = make_policy()
    padded = PaddedBatch(make_batch(policy), policy, PpoSettings())
    rows = np.array([3, 1, 19, 7, 4, 0, 11, 12, 18, 2, 6, 5, 9, 8, 17, 10, 13])
    blocks = padded.split(rows)
    assert [len(block) for block in blocks] == [6, 6, 5]
    assert sorted(np.concatenate(blocks)) == sorted(rows)
    longest = [padded.lengths[block].max() for block in blocks]
    assert longest == sorted(longest), "rows with as many inserted steps come together"
    assert sum(padded.take(block).live.sum().item() for block in blocks) == padded.counts[rows].sum()
    assert [num_blocks(rows) for rows in (1, 4, 7, 8, 16, 17, 64)] == [1, 1, 1, 2, 2, 3, 8]


def test_a_block_holds_no_contents_of_rows_that_are_not_valid() -> None:
    policy = make_policy(*CASES["pictures"])
    padded = PaddedBatch(make_batch(policy), policy, PpoSettings())
    block = padded.take(np.arange(ENVS))
    dead = block.live == 0
    assert dead.any()
    for column in (block.old_log_probs, block.advantages, block.returns, block.value_weights, block.entropy_weights):
        assert torch.isfinite(column).all()
        assert torch.equal(column[dead], torch.zeros_like(column[dead]))
    assert block.inputs.vectors is not None
    assert torch.isfinite(block.inputs.vectors).all()
    assert set(block.actions.tolist()) <= {-1, 0, 1}


def test_only_checked_rows_count_for_the_ratio_deviation() -> None:
    policy = make_policy()
    batch = make_batch(policy, whole=True)
    with torch.no_grad():
        now = policy.evaluate_sequences(
            batch.obs_seq, batch.actions, batch.episode_starts, batch.initial_state, batch.valid
        )
    old = now.log_probs.clone()
    old[4] -= 0.5
    batch = replace(batch, old_log_probs=old)
    checked = torch.ones(ENVS, dtype=torch.bool)
    for checks_it, least, most in ((True, 0.6, 0.7), (False, 0.0, 1e-5)):
        checked[4] = checks_it
        epochs = Epochs(make_policy(), config(learner_threads=2))
        _, figures = epochs.run(batch, learning_rate=1e-3, shuffle=shuffle(), checked=checked)
        assert least <= figures["ratio_deviation"] <= most


@pytest.mark.parametrize("threads", [1, 2])
def test_a_stop_ends_between_minibatches_and_too_much_kl_before_a_step(threads: int) -> None:
    epochs = Epochs(make_policy(), config(learner_threads=threads, envs_per_minibatch=10, target_kl=1e-9))
    batch = make_batch(epochs.policy)
    before = arrays_of(epochs)
    outcome, figures = epochs.run(batch, learning_rate=1e-2, shuffle=shuffle())
    assert (outcome, figures["optimizer_steps"], figures["grad_norm"]) == (Outcome.STOPPED_BY_KL, 0.0, 0.0)
    assert figures["approx_kl"] > 1e-9
    outcome, figures = epochs.run(batch, learning_rate=1e-2, shuffle=shuffle(), should_stop=lambda: True)
    assert (outcome, figures) == (Outcome.ABANDONED, {})
    for name, array in arrays_of(epochs).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_the_policy_acts_on_the_weights_that_were_trained_last() -> None:
    epochs = Epochs(make_policy().eval(), config())
    policy = epochs.policy
    rows, state = {"observations": torch.randn(2, 3)}, policy.initial_state(2)
    before = policy.value(rows, state)
    epochs.run(make_batch(policy), learning_rate=0.1, shuffle=shuffle())
    fresh = make_policy().eval()
    fresh.load_arrays(policy.to_arrays())
    assert not torch.equal(policy.value(rows, state), before)
    assert torch.equal(policy.value(rows, state), fresh.value(rows, state))


def test_auto_takes_a_core_for_each_block_as_far_as_there_are_cores() -> None:
    assert thread_count(config(learner_threads=3), 1) == 3
    assert thread_count(config(learner_threads="auto"), 1) == 1
    assert thread_count(config(learner_threads="auto"), 10**6) == usable_cores()
