"""The policy as a whole: seeds, what crosses a border, fresh weights in the acting path, rows that do not count."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout_service.errors import OutOfRange, ShapeError, SpaceNotSupported
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import Core, Leaf, PolicySpec, SpaceKind, Spaces
from tests.policy.acting import MIXED, PLAIN, SYMBOLS, act, random_observations

OBSERVATIONS = "observations"
SMALL = PolicySpec(hidden_dim=8, encoder_dim=8)
NORMALISED = PolicySpec(hidden_dim=8, encoder_dim=8, normalize_observations=True)


def same(a: ActorCritic, b: ActorCritic) -> bool:
    left, right = a.to_arrays(), b.to_arrays()
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


# Seeds


def test_equal_seeds_give_equal_weights_and_others_do_not() -> None:
    assert same(ActorCritic(MIXED, SMALL, seed=5), ActorCritic(MIXED, SMALL, seed=5))
    assert not same(ActorCritic(MIXED, SMALL, seed=5), ActorCritic(MIXED, SMALL, seed=6))


def test_building_a_policy_neither_reads_nor_moves_the_global_random_state() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = ActorCritic(MIXED, PolicySpec(chrono_max=64.0), seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same(first, ActorCritic(MIXED, PolicySpec(chrono_max=64.0), seed=5))


def test_heads_start_orthogonal_the_action_head_nearly_uniform() -> None:
    policy = ActorCritic(PLAIN, PolicySpec(hidden_dim=32), seed=0)
    action, value = policy.policy.weight, policy.value_head.weight
    assert torch.allclose(action @ action.t(), 1e-4 * torch.eye(4), atol=1e-7)
    assert value.norm().item() == pytest.approx(1.0, abs=1e-5)
    encoder = policy.encoder.linear.weight
    assert torch.allclose(encoder.t() @ encoder, 2.0 * torch.eye(3), atol=1e-5)


def test_a_box_action_space_is_refused() -> None:
    spaces = Spaces(observation=PLAIN.observation, action=Leaf(kind=SpaceKind.BOX, shape=(2,), dtype="float32"))
    with pytest.raises(SpaceNotSupported, match="Discrete"):
        ActorCritic(spaces, SMALL, seed=0)


# Acting


def test_a_step_returns_the_envs_own_actions_one_per_row() -> None:
    policy = ActorCritic(SYMBOLS, SMALL, seed=0)
    acted = act(policy, num_envs=6, num_steps=30, share_of_ends=0.1)
    assert acted.actions.dtype == torch.int64
    assert set(acted.actions.flatten().tolist()) == {-1, 0, 1}
    assert acted.log_probs.dtype == acted.values.dtype == torch.float32


def test_the_same_noise_gives_the_same_action_in_any_company() -> None:
    policy = ActorCritic(PLAIN, SMALL, seed=0).eval()
    rng = np.random.default_rng(0)
    rows = random_observations(PLAIN, rng, 6)[OBSERVATIONS]
    noise = torch.from_numpy(policy.draw_noise(rng, 6))
    together = policy.step({OBSERVATIONS: rows}, policy.initial_state(6), noise)
    for row in range(6):
        alone = policy.step({OBSERVATIONS: rows[row : row + 1]}, policy.initial_state(1), noise[row : row + 1])
        assert alone.actions.item() == together.actions[row].item()
        assert alone.log_probs.item() == pytest.approx(together.log_probs[row].item(), abs=1e-6)


def test_rows_from_anywhere_in_memory_give_the_same_bits() -> None:
    policy = ActorCritic(PLAIN, SMALL, seed=0).eval()
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    expected = policy.step({OBSERVATIONS: rows}, policy.initial_state(8))
    for shift in range(1, 9):
        block = torch.zeros(64)
        shifted = block[shift : shift + 24].view(8, 3)
        shifted.copy_(rows)
        step = policy.step({OBSERVATIONS: shifted}, policy.initial_state(8))
        assert torch.equal(step.log_probs, expected.log_probs)
        assert torch.equal(step.values, expected.values)


def test_a_step_changes_none_of_its_arguments() -> None:
    policy = ActorCritic(PLAIN, NORMALISED, seed=0).eval()
    rows, state, noise = torch.randn(3, 3), policy.initial_state(3), torch.randn(3, 4)
    before = [rows.clone(), *(array.clone() for array in state.values()), noise.clone()]
    policy.step({OBSERVATIONS: rows}, state, noise)
    assert all(torch.equal(a, b) for a, b in zip(before, [rows, *state.values(), noise], strict=True))


# Fresh weights in the acting path


def answer(policy: ActorCritic) -> Tensor:
    n = 2
    return policy.value({OBSERVATIONS: torch.full((n, 3), 0.5)}, policy.initial_state(n)).clone()


@pytest.mark.parametrize("training", [True, False])
def test_a_step_of_the_optimiser_reaches_the_next_action(training: bool) -> None:
    policy = ActorCritic(PLAIN, SMALL, seed=0).train(training)
    for options in ({}, {"fused": True}, {"foreach": True}):
        before = answer(policy)
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.1, **options)  # type: ignore[arg-type]
        state = {name: array.transpose(0, 1) for name, array in policy.initial_state(2).items()}
        ones = torch.ones(2, 3)
        found = policy.evaluate_sequences(torch.ones(2, 3, 3), ones.long(), ones, state, ones.bool())
        (found.values.sum() + found.log_probs.sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert not torch.equal(answer(policy), before)
        assert torch.equal(answer(policy), answer(copy.deepcopy(policy)))


def fused_step(policy: ActorCritic) -> None:
    """One step of an optimiser that leaves no mark on the parameters, with gradients from nowhere."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1, fused=True)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_in_training_mode_every_step_reads_the_parameters_anew() -> None:
    policy = ActorCritic(PLAIN, SMALL, seed=0).train()
    answer(policy)
    fused_step(policy)
    assert torch.equal(answer(policy), answer(copy.deepcopy(policy)))


def test_a_change_of_mode_drops_the_laid_out_weights() -> None:
    policy = ActorCritic(PLAIN, SMALL, seed=0).eval()
    answer(policy)
    policy.train()
    fused_step(policy)
    assert torch.equal(answer(policy.eval()), answer(copy.deepcopy(policy)))


@pytest.mark.parametrize("inference", [True, False])
def test_loaded_weights_reach_the_next_action(inference: bool) -> None:
    policy, other = ActorCritic(PLAIN, SMALL, seed=0).eval(), ActorCritic(PLAIN, SMALL, seed=1).eval()
    with torch.inference_mode(inference):
        assert not torch.equal(answer(policy), answer(other))
        policy.load_arrays(other.to_arrays())
        assert torch.equal(answer(policy), answer(other))
        policy.load_state_dict(ActorCritic(PLAIN, SMALL, seed=0).state_dict())
        assert not torch.equal(answer(policy), answer(other))


def test_new_statistics_reach_the_next_action() -> None:
    policy = ActorCritic(PLAIN, NORMALISED, seed=0).eval()
    before = answer(policy)
    policy.update_normalizer(torch.randn(4, 5, 3), torch.ones(4, 5, dtype=torch.bool))
    assert not torch.equal(answer(policy), before)


def test_a_copy_of_a_policy_does_not_keep_the_laid_out_weights_of_its_origin() -> None:
    policy = ActorCritic(PLAIN, SMALL, seed=0).eval()
    before = answer(policy)
    for writes in range(60):
        twin = copy.deepcopy(policy)
        with torch.no_grad():
            for _ in range(writes):
                twin.value_head.bias.add_(1.0)
        assert torch.allclose(answer(twin), before + writes, atol=1e-4)
    assert torch.equal(answer(policy), before)


def test_a_policy_built_in_inference_mode_can_still_be_trained() -> None:
    with torch.inference_mode():
        policy = ActorCritic(PLAIN, SMALL, seed=0)
        answer(policy.eval())
    ones = torch.ones(2, 3)
    state = {name: array.transpose(0, 1) for name, array in policy.initial_state(2).items()}
    found = policy.evaluate_sequences(torch.randn(2, 3, 3), ones.long(), ones, state, ones.bool())
    found.values.sum().backward()  # type: ignore[no-untyped-call]
    assert policy.encoder.linear.weight.grad is not None


# Weights across a border


def test_specs_name_every_parameter_and_the_statistics_and_no_constant() -> None:
    policy = ActorCritic(PLAIN, NORMALISED, seed=0)
    specs = {spec.name: spec for spec in policy.parameter_specs()}
    arrays = policy.to_arrays()
    assert list(specs) == list(arrays)
    assert {name: (spec.shape, spec.dtype) for name, spec in specs.items()} == {
        name: (array.shape, str(array.dtype)) for name, array in arrays.items()
    }
    assert {name for name, _ in policy.named_parameters()} < set(specs)
    assert set(specs) - {name for name, _ in policy.named_parameters()} == {
        f"normalizers.0.{name}" for name in ("mean", "variance", "count")
    }
    assert specs["core.weight_ih_l0"].shape == (32, 8)


def test_arrays_go_from_one_policy_to_another_bit_for_bit() -> None:
    source, target = ActorCritic(MIXED, NORMALISED, seed=0), ActorCritic(MIXED, NORMALISED, seed=1)
    rows = random_observations(MIXED, np.random.default_rng(0), 3, 4)
    source.update_normalizer(rows, torch.ones(3, 4, dtype=torch.bool))
    arrays = source.to_arrays()
    target.load_arrays(arrays)
    assert same(source, target)
    for array in arrays.values():
        array[...] = 0
    assert not np.array_equal(target.to_arrays()["core.weight_hh_l0"], arrays["core.weight_hh_l0"])


def test_arrays_of_another_policy_are_refused_and_change_nothing() -> None:
    policy, other = ActorCritic(PLAIN, SMALL, seed=0), ActorCritic(PLAIN, SMALL, seed=1).to_arrays()
    before = policy.to_arrays()
    with pytest.raises(OutOfRange, match=r"value_head\.bias"):
        policy.load_arrays({name: array for name, array in other.items() if name != "value_head.bias"})
    with pytest.raises(OutOfRange, match="extra"):
        policy.load_arrays({**other, "extra": np.zeros(1)})
    with pytest.raises(ShapeError, match=r"value_head\.bias has shape \(2,\)"):
        policy.load_arrays({**other, "value_head.bias": np.zeros(2, np.float32)})
    assert all(np.array_equal(before[name], array) for name, array in policy.to_arrays().items())


# Statistics


def test_statistics_take_the_valid_rows_only() -> None:
    policy = ActorCritic(PLAIN, NORMALISED, seed=0)
    rows = torch.arange(12.0).view(2, 2, 3)
    rows[0, 1] = math.nan
    policy.update_normalizer(rows, torch.tensor([[True, False], [True, True]]))
    arrays = policy.to_arrays()
    assert arrays["normalizers.0.count"].tolist() == [3.0]
    assert arrays["normalizers.0.mean"].tolist() == pytest.approx([5.0, 6.0, 7.0])
    assert arrays["normalizers.0.variance"].tolist() == pytest.approx([14.0] * 3)


def test_images_and_symbols_are_never_normalised() -> None:
    policy = ActorCritic(MIXED, NORMALISED, seed=0)
    assert [name for name in policy.to_arrays() if name.startswith("normalizers")] == [
        "normalizers.1.mean",
        "normalizers.1.variance",
        "normalizers.1.count",
    ]
    assert not any("normalizers" in name for name in ActorCritic(MIXED, SMALL, seed=0).to_arrays())


# Rows that do not count


@pytest.mark.parametrize("core", [Core.LSTM, Core.NONE])
@pytest.mark.parametrize("spaces", [pytest.param(PLAIN, id="vector"), pytest.param(SYMBOLS, id="discrete-with-start")])
def test_contents_of_rows_that_are_not_valid_reach_neither_results_nor_gradients(core: Core, spaces: Spaces) -> None:
    policy = ActorCritic(spaces, PolicySpec(core=core, hidden_dim=8, encoder_dim=8), seed=0)
    acted = act(policy, num_envs=3, num_steps=5, share_of_ends=0.2)
    valid = torch.arange(5) < torch.tensor([1, 2, 5]).unsqueeze(1)

    def run(observations: Tensor, actions: Tensor, columns: Tensor | None = None) -> list[Tensor]:
        policy.zero_grad()
        found = policy.evaluate_sequences(observations, actions, acted.episode_starts, acted.initial_state, valid)
        total = sum(getattr(found, name)[valid].sum() for name in ("log_probs", "values", "entropy"))
        assert isinstance(total, Tensor)
        total.backward()  # type: ignore[no-untyped-call]
        assert all(torch.isfinite(getattr(found, name)).all() for name in ("log_probs", "values", "entropy"))
        return [total.detach(), *(p.grad.clone() for p in policy.parameters() if p.grad is not None)]

    clean = run(acted.observations[OBSERVATIONS], acted.actions)
    dirty_rows, dirty_actions = acted.observations[OBSERVATIONS].clone(), acted.actions.clone()
    dirty_rows[~valid] = math.nan if dirty_rows.is_floating_point() else 10**9
    dirty_actions[~valid] = -(10**9)
    for got, want in zip(run(dirty_rows, dirty_actions), clean, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "float32"])
def test_rows_that_are_not_valid_are_zeros_in_every_dtype_of_a_box(dtype: str) -> None:
    leaf = Leaf(kind=SpaceKind.BOX, shape=(2,), dtype=dtype)
    policy = ActorCritic(Spaces(observation=(leaf,), action=PLAIN.action), SMALL, seed=0)
    rows, valid = torch.tensor([[[7, 8], [5, 6], [3, 4]]]), torch.tensor([[True, False, True]])
    found = policy.network_rows(rows.to(getattr(torch, dtype)), valid).vectors
    assert found is not None
    assert found.tolist() == [[7, 8], [0, 0], [3, 4]]


def test_rows_past_the_end_do_not_lengthen_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ActorCritic(PLAIN, SMALL, seed=0)
    lengths: list[int] = []
    kernel = torch.lstm

    def spy(x: Tensor, *arguments: Any) -> Any:
        lengths.append(x.shape[0])
        return kernel(x, *arguments)

    monkeypatch.setattr(torch, "lstm", spy)
    valid = torch.arange(20) < torch.tensor([20, 3]).unsqueeze(1)
    starts = (~valid).float()
    state = {name: array.transpose(0, 1) for name, array in policy.initial_state(2).items()}
    policy.evaluate_sequences(torch.zeros(2, 20, 3), torch.zeros(2, 20).long(), starts, state, valid)
    assert lengths == [20]


def test_a_batch_without_columns_gives_empty_results() -> None:
    policy = ActorCritic(PLAIN, SMALL, seed=0)
    state = {name: array.transpose(0, 1) for name, array in policy.initial_state(2).items()}
    empty = torch.zeros(2, 0)
    found = policy.evaluate_sequences(torch.zeros(2, 0, 3), empty.long(), empty, state, empty.bool())
    assert found.log_probs.shape == found.values.shape == found.entropy.shape == (2, 0)
