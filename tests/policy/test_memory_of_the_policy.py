"""State through the policy: it is asked for, it follows its env, it is counted row by row, and it matters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout_service.errors import ShapeError, StateMissing
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import Core, Leaf, PolicySpec, SpaceKind, Spaces
from tests.fixtures.counter_lstm import TICK_SPACES, counter_policy
from tests.policy.acting import PLAIN, act

OBSERVATIONS = "observations"


def tick(n: int) -> dict[str, Tensor]:
    return {OBSERVATIONS: torch.zeros(n, 2)}


def test_a_recurrent_policy_without_a_state_is_an_error_in_every_path() -> None:
    policy = counter_policy()
    with pytest.raises(StateMissing, match="initial_state"):
        policy.step(tick(2), None)
    with pytest.raises(StateMissing, match="initial_state"):
        policy.value(tick(2), None)
    with pytest.raises(StateMissing, match="hidden"):
        policy.step(tick(2), {})
    ones = torch.ones(2, 3)
    with pytest.raises(StateMissing, match="initial_state"):
        policy.evaluate_sequences(torch.zeros(2, 3, 2), ones.long(), ones, {}, ones.bool())


def test_a_feed_forward_policy_asks_for_none() -> None:
    policy = ActorCritic(PLAIN, PolicySpec(core=Core.NONE), seed=0)
    assert policy.state_spec() == {}
    assert policy.initial_state(3) == {}
    assert policy.step({OBSERVATIONS: torch.zeros(3, 3)}, None).state == {}


def test_state_of_another_number_of_envs_is_an_error() -> None:
    policy = counter_policy()
    with pytest.raises(ShapeError, match=r"\(3, 1, 4\)"):
        policy.step(tick(3), policy.initial_state(2))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_two_histories_that_end_in_one_observation_give_different_logits(num_layers: int) -> None:
    policy = ActorCritic(PLAIN, PolicySpec(num_layers=num_layers), seed=1)
    with torch.no_grad():
        policy.policy.weight.mul_(100.0)
    histories = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    histories[:, 4] = 1.0
    state = policy.initial_state(2)
    for t in range(5):
        step = policy.step({OBSERVATIONS: histories[:, t]}, state)
        state = step.state
    by_steps = policy.policy(state["hidden"][:, -1])
    assert (by_steps[0] - by_steps[1]).abs().max().item() > 1e-3

    seen: list[Tensor] = []
    hook = policy.policy.register_forward_hook(lambda module, inputs, logits: seen.append(logits))
    zeros = {name: array.transpose(0, 1) for name, array in policy.initial_state(2).items()}
    flags = torch.zeros(2, 5)
    policy.evaluate_sequences(histories, flags.long(), flags, zeros, flags == 0)
    hook.remove()
    assert (seen[0][0, 4] - seen[0][1, 4]).abs().max().item() > 1e-3
    assert torch.allclose(seen[0][:, 4], by_steps, atol=1e-5)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_cell_entering_row_t_is_a_tenth_of_t(num_layers: int) -> None:
    policy = counter_policy(num_layers=num_layers)
    state = policy.initial_state(3)
    for t in range(30):
        assert torch.allclose(state["cell"], torch.full((3, num_layers, 4), 0.1 * t), atol=1e-5)
        state = policy.step(tick(3), state).state
        assert torch.allclose(state["hidden"], torch.tanh(state["cell"]), atol=1e-6)


def test_only_the_env_whose_episode_ended_starts_anew() -> None:
    policy = counter_policy()
    lengths = (3, 5, 7, 11)
    state = policy.initial_state(4)
    for t in range(40):
        expected = torch.tensor([0.1 * (t % length) for length in lengths])
        assert torch.allclose(state["cell"], expected[:, None, None].expand(4, 1, 4), atol=1e-5)
        state = policy.step(tick(4), state).state
        ended = torch.tensor([(t + 1) % length == 0 for length in lengths])
        state = {name: array.masked_fill(ended[:, None, None], 0.0) for name, array in state.items()}


def counted(policy: ActorCritic, starts: Tensor, cell: Tensor) -> Tensor:
    """What each row of the core's output says the cell was after it: [n, T, H]."""
    outputs: list[Tensor] = []
    core: Any = policy.core
    hook = core.register_forward_hook(lambda module, inputs, out: outputs.append(out))
    n, steps = starts.shape
    initial = {"hidden": torch.tanh(cell), "cell": cell}
    valid = torch.ones(n, steps, dtype=torch.bool)
    policy.evaluate_sequences(torch.zeros(n, steps, 2), torch.zeros(n, steps).long(), starts, initial, valid)
    hook.remove()
    return torch.atanh(outputs[0].double())


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_sequence_path_counts_the_same_rows_across_resets_and_carried_states(num_layers: int) -> None:
    policy = counter_policy(num_layers=num_layers)
    starts = torch.zeros(3, 12)
    starts[0, [0, 3, 6, 9]] = 1
    starts[1, 5] = 1
    cell = torch.full((num_layers, 3, 4), 0.4)
    rows = [
        [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3],
        [5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7],
        [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16],
    ]
    expected = 0.1 * torch.tensor(rows, dtype=torch.float64).unsqueeze(-1).expand(3, 12, 4)
    assert torch.allclose(counted(policy, starts, cell), expected, atol=1e-5)


def test_the_state_after_three_valid_rows_has_seen_three_rows() -> None:
    policy = counter_policy()
    state = policy.initial_state(1)
    for _ in range(3):
        state = policy.step(tick(1), state).state
    assert torch.allclose(state["cell"], torch.full((1, 1, 4), 0.3), atol=1e-5)

    outputs: list[Tensor] = []
    core: Any = policy.core
    core.register_forward_hook(lambda module, inputs, out: outputs.append(out))
    padded = torch.full((1, 8, 2), torch.nan)
    padded[:, :3] = 0.0
    valid = torch.arange(8).unsqueeze(0) < 3
    zeros = {name: array.transpose(0, 1) for name, array in policy.initial_state(1).items()}
    policy.evaluate_sequences(padded, torch.zeros(1, 8).long(), torch.zeros(1, 8), zeros, valid)
    assert torch.allclose(torch.atanh(outputs[0][:, 2]), torch.full((1, 4), 0.3), atol=1e-5)


def test_state_follows_its_env_through_subsets_and_permutations() -> None:
    policy = counter_policy(num_layers=2)
    live = policy.initial_state(4)
    for _ in range(2):
        live = policy.step(tick(4), live).state
    order = torch.tensor([3, 0, 2])
    with torch.no_grad():
        live["cell"][3] += 1.0
    for _ in range(5):
        step = policy.step(tick(3), {name: array[order] for name, array in live.items()})
        for name, array in step.state.items():
            live[name][order] = array
    expected = torch.tensor([0.7, 0.2, 0.7, 1.7])[:, None, None].expand(4, 2, 4)
    assert torch.allclose(live["cell"], expected, atol=1e-5)


def test_value_reads_the_state_and_leaves_it_alone() -> None:
    policy = ActorCritic(PLAIN, PolicySpec(hidden_dim=8), seed=0).eval()
    state = {name: torch.randn(2, 1, 8) for name in ("hidden", "cell")}
    before = {name: array.clone() for name, array in state.items()}
    rows = {OBSERVATIONS: torch.randn(2, 3)}
    assert torch.equal(policy.value(rows, state), policy.step(rows, state).values)
    assert all(torch.equal(state[name], before[name]) for name in state)
    assert not torch.equal(policy.value(rows, state), policy.value(rows, policy.initial_state(2)))


class Passing(nn.Module):
    """An encoder that hands its lone vector leaf on."""

    def forward(self, vectors: list[Tensor], images: list[Tensor]) -> Tensor:
        return vectors[0]


@pytest.mark.parametrize("resets", [False, True])
def test_each_sequence_the_lstm_receives_is_one_env_in_step_order(
    resets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = Spaces(observation=(Leaf(kind=SpaceKind.BOX, shape=(1,), dtype="float32"),), action=TICK_SPACES.action)
    policy = ActorCritic(spaces, PolicySpec(hidden_dim=2, encoder_dim=1), seed=0)
    policy.encoder = Passing()  # type: ignore[assignment]
    received: list[Tensor] = []
    kernel = torch.lstm

    def spy(x: Tensor, *arguments: Any) -> Any:
        received.append(x.detach().clone())
        return kernel(x, *arguments)

    monkeypatch.setattr(torch, "lstm", spy)
    names = (100.0 * torch.arange(3).unsqueeze(1) + torch.arange(4)).unsqueeze(-1)
    starts = torch.zeros(3, 4)
    if resets:
        starts[1, 2] = 1
    zeros = {name: array.transpose(0, 1) for name, array in policy.initial_state(3).items()}
    policy.evaluate_sequences(names, torch.zeros(3, 4).long(), starts, zeros, torch.ones(3, 4, dtype=torch.bool))
    columns = [column[..., 0].tolist() for column in received[0].unbind(1)]
    if resets:
        assert columns == [[0, 1, 2, 3, 0], [100, 101, 0, 102, 103], [200, 201, 202, 203, 0]]
        assert received[0][..., 1].t().tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]
    else:
        assert columns == [[0, 1, 2, 3], [100, 101, 102, 103], [200, 201, 202, 203]]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_smallest_shapes_keep_all_their_axes(num_layers: int) -> None:
    spaces = Spaces(
        observation=(Leaf(kind=SpaceKind.BOX, shape=(1,), dtype="float32"),),
        action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=1),
    )
    policy = ActorCritic(spaces, PolicySpec(hidden_dim=1, encoder_dim=1, num_layers=num_layers), seed=0)
    optimizer = torch.optim.Adam(policy.parameters())
    for seed in range(3):
        acted = act(policy, num_envs=1, num_steps=1, share_of_ends=0.5, seed=seed)
        assert acted.actions.shape == acted.log_probs.shape == acted.values.shape == (1, 1)
        assert all(array.shape == (1, 1, num_layers, 1) for array in acted.entering.values())
        found = policy.evaluate_sequences(
            acted.observations,
            acted.actions,
            acted.episode_starts,
            acted.initial_state,
            torch.ones(1, 1, dtype=torch.bool),
        )
        assert found.log_probs.shape == found.values.shape == found.entropy.shape == (1, 1)
        optimizer.zero_grad()
        (found.values.square().sum() - found.log_probs.sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    state = policy.step({OBSERVATIONS: torch.zeros(1, 1)}, policy.initial_state(1)).state
    assert {name: tuple(array.shape) for name, array in state.items()} == {
        "hidden": (1, num_layers, 1),
        "cell": (1, num_layers, 1),
    }
