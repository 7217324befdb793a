"""The recurrent cores: whole sequences against the step-by-step loop, and against torch's own LSTM."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from learner.crew import one_thread
from rollout_service.errors import ShapeError, StateMissing
from rollout_service.policy import recurrent
from rollout_service.policy.compiled import USABLE
from rollout_service.policy.recurrent import FeedForwardCore, LSTMCore, chrono_biases, one_block, plan_for

INPUTS, HIDDEN, STEPS, ROWS = 5, 6, 19, 7


@pytest.fixture(params=[6, 48], ids=["torch's kernel", "compiled kernel"], autouse=True)
def hidden_dim(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """All of it with both; where the compiled one cannot run, torch's takes its place."""
    hidden: int = request.param
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", hidden)
    with one_thread():
        yield hidden


def make_core(num_layers: int, seed: int = 0) -> LSTMCore:
    return LSTMCore(INPUTS, HIDDEN, num_layers, torch.Generator().manual_seed(seed))


def make_inputs(num_layers: int, *, share: float, seed: int = 1) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, STEPS, INPUTS, generator=generator, requires_grad=True)
    starts = (torch.rand(ROWS, STEPS, generator=generator) < share).float()
    shape = (num_layers, ROWS, HIDDEN)
    state = {name: torch.randn(shape, generator=generator, requires_grad=True) for name in ("hidden", "cell")}
    return x, starts, state


def gradients(core: LSTMCore, out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    found = torch.autograd.grad((out * weights).sum(), [*core.parameters(), *inputs], allow_unused=True)
    return [torch.zeros(1) if gradient is None else gradient for gradient in found]


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("share", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("rows_per_call", [32, 3])
def test_a_whole_sequence_equals_the_loop_over_cells(
    num_layers: int, share: float, rows_per_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "ROWS_PER_CALL", rows_per_call)
    core = make_core(num_layers)
    x, starts, state = make_inputs(num_layers, share=share)
    out, expected = core.sequence(x, starts, state), core.sequence_by_cells(x, starts, state)
    assert out.shape == (ROWS, STEPS, HIDDEN)
    assert torch.allclose(out, expected, atol=1e-6)
    inputs = [x, state["hidden"], state["cell"]]
    for got, want in zip(gradients(core, out, inputs), gradients(core, expected, inputs), strict=True):
        assert torch.allclose(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("starts_per_row", [0.0, 1.0])
def test_at_the_size_of_a_real_update_it_is_still_the_loop_over_cells(starts_per_row: float) -> None:
    rows, steps, width = 16, 128, 128
    generator = torch.Generator().manual_seed(3)
    core = LSTMCore(64, width, 1, generator)
    x = torch.randn(rows, steps, 64, generator=generator)
    starts = (torch.rand(rows, steps, generator=generator) < starts_per_row / steps).float()
    assert abs(starts.sum().item() - starts_per_row * rows) <= 0.5 * rows
    state = {name: torch.randn(1, rows, width, generator=generator) for name in ("hidden", "cell")}
    with torch.no_grad():
        difference = core.sequence(x, starts, state) - core.sequence_by_cells(x, starts, state)
    assert difference.abs().max() <= 1e-5


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_rows_that_are_laid_out_already_give_the_same(num_layers: int, share: float) -> None:
    core = make_core(num_layers)
    x, starts, state = make_inputs(num_layers, share=share)
    plan = plan_for(core, starts)
    entering = {name: array.masked_fill(starts[:, :1].ne(0), 0.0) for name, array in state.items()}
    padded = x.flatten(0, 1)[plan.source].view(plan.num_steps, ROWS, INPUTS)
    out = plan.gather(core.padded(padded, plan.flags if share else None, entering))
    expected = core.sequence_by_cells(x, starts, state)
    assert torch.allclose(out, expected, atol=1e-6)
    inputs = [x, state["hidden"], state["cell"]]
    for got, want in zip(gradients(core, out, inputs), gradients(core, expected, inputs), strict=True):
        assert torch.allclose(got, want, atol=2e-5, rtol=1e-4)


def test_the_compiled_kernel_takes_what_fits_its_vectors_and_needs_no_inserted_steps(hidden_dim: int) -> None:
    core, starts = make_core(1), torch.ones(ROWS, STEPS)
    assert core.resets_in_place is (USABLE and hidden_dim == 48)
    assert plan_for(core, starts).num_steps == (STEPS if core.resets_in_place else 2 * STEPS - 1)
    assert make_core(1).double().resets_in_place is False


def test_without_resets_it_is_torchs_own_lstm() -> None:
    core = make_core(2)
    theirs = nn.LSTM(INPUTS, HIDDEN, 2, batch_first=True)
    theirs.load_state_dict(dict(core.named_parameters()))
    x, _, state = make_inputs(2, share=0.0)
    expected, _ = theirs(x, (state["hidden"], state["cell"]))
    assert torch.allclose(core.sequence(x, torch.zeros(ROWS, STEPS), state), expected, atol=1e-6)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_single_steps_add_up_to_the_sequence(num_layers: int) -> None:
    core = make_core(num_layers)
    x, _, carried = make_inputs(num_layers, share=0.0)
    state = {name: array.transpose(0, 1) for name, array in carried.items()}
    outputs = []
    for t in range(STEPS):
        out, state = core.step(x[:, t], state)
        outputs.append(out)
    assert torch.allclose(torch.stack(outputs, 1), core.sequence(x, torch.zeros(ROWS, STEPS), carried), atol=1e-6)
    assert state["hidden"].shape == state["cell"].shape == (ROWS, num_layers, HIDDEN)


def test_nothing_of_an_episode_reaches_the_next_one() -> None:
    core = make_core(2)
    x, starts, state = make_inputs(2, share=0.0)
    starts[:, 8] = 1
    core.sequence(x, starts, state)[:, 8:].sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad[:, :8], torch.zeros(ROWS, 8, INPUTS))
    for array in state.values():
        assert array.grad is not None
        assert torch.equal(array.grad, torch.zeros_like(array))


def test_a_start_in_the_first_column_hides_even_a_state_of_nans() -> None:
    core = make_core(1)
    x, starts, state = make_inputs(1, share=0.0)
    starts[2, 0] = 1
    zeros = {name: array.detach().clone() for name, array in state.items()}
    broken = {name: array.detach().clone() for name, array in state.items()}
    for name in zeros:
        zeros[name][:, 2], broken[name][:, 2] = 0.0, math.nan
    out = core.sequence(x, starts, broken)
    assert torch.equal(out, core.sequence(x, torch.zeros(ROWS, STEPS), zeros))
    assert all(torch.isfinite(gradient).all() for gradient in gradients(core, out, [x]))


def test_saturated_gates_are_still_shut_exactly() -> None:
    core = make_core(1)
    with torch.no_grad():
        core.get_parameter("bias_ih_l0").fill_(50.0)
    x, starts, state = make_inputs(1, share=0.3)
    state["cell"].data.mul_(1e4)
    assert torch.allclose(core.sequence(x, starts, state), core.sequence_by_cells(x, starts, state), atol=1e-6)


@pytest.mark.parametrize(("rows", "steps"), [(0, 5), (3, 0), (0, 0)])
def test_no_rows_or_no_steps_give_an_empty_result(rows: int, steps: int) -> None:
    state = {name: torch.zeros(1, rows, HIDDEN) for name in ("hidden", "cell")}
    out = make_core(1).sequence(torch.zeros(rows, steps, INPUTS), torch.zeros(rows, steps), state)
    assert out.shape == (rows, steps, HIDDEN)


def test_parameters_are_named_and_shaped_as_torch_names_them() -> None:
    ours = {name: tuple(parameter.shape) for name, parameter in make_core(2).named_parameters()}
    theirs = {name: tuple(parameter.shape) for name, parameter in nn.LSTM(INPUTS, HIDDEN, 2).named_parameters()}
    assert ours == theirs
    assert set(make_core(2).state_dict()) == set(theirs)


def test_weights_are_orthogonal_and_only_the_forget_gate_has_a_bias() -> None:
    core = make_core(1)
    weight = core.get_parameter("weight_hh_l0")
    assert torch.allclose(weight.t() @ weight, torch.eye(HIDDEN), atol=1e-5)
    expected = torch.zeros(4 * HIDDEN)
    expected[HIDDEN : 2 * HIDDEN] = 1.0
    bias = core.get_parameter("bias_ih_l0") + core.get_parameter("bias_hh_l0")
    assert torch.equal(bias, expected)


def test_chrono_biases_are_logs_of_uniform_times_and_mirror_each_other() -> None:
    biases = chrono_biases(4000, 128.0, torch.Generator().manual_seed(0))
    input_bias, forget_bias = biases[:4000], biases[4000:]
    assert torch.equal(input_bias, -forget_bias)
    times = forget_bias.exp()
    assert 1.0 <= times.min().item() < 1.5
    assert 126.0 < times.max().item() <= 127.001
    assert times.mean().item() == pytest.approx(64.0, abs=2.5)


def test_chrono_initialisation_sets_input_and_forget_gates_of_every_layer_only() -> None:
    core = LSTMCore(INPUTS, HIDDEN, 2, torch.Generator().manual_seed(0), chrono_max=64.0)
    for layer in range(2):
        i, f, g, o = core.get_parameter(f"bias_ih_l{layer}").chunk(4)
        assert torch.equal(i, -f)
        assert (f >= 0).all()
        assert f.max() > 0
        assert torch.equal(torch.cat([g, o]), torch.zeros(2 * HIDDEN))
        assert torch.equal(core.get_parameter(f"bias_hh_l{layer}"), torch.zeros(4 * HIDDEN))


def test_weights_in_one_block_are_neighbours_and_pass_gradients_on() -> None:
    weights = make_core(1).layer_weights(0)
    block = one_block(weights)
    assert all(torch.equal(piece, weight) for piece, weight in zip(block, weights, strict=True))
    assert all(piece.is_contiguous() for piece in block)
    ends = [piece.storage_offset() + piece.numel() for piece in block]
    assert [piece.storage_offset() for piece in block] == [0, *ends[:-1]]
    assert block[0].untyped_storage().nbytes() == 4 * ends[-1]
    gradients_of_weights = torch.autograd.grad(sum((piece.sum() for piece in block), torch.zeros(())), weights)
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in gradients_of_weights)


def test_a_state_without_its_cell_is_an_error() -> None:
    core = make_core(1)
    with pytest.raises(StateMissing, match="'cell'"):
        core.step(torch.zeros(2, INPUTS), {"hidden": torch.zeros(2, 1, HIDDEN)})
    with pytest.raises(StateMissing, match="'cell'"):
        core.sequence(torch.zeros(2, 3, INPUTS), torch.zeros(2, 3), {"hidden": torch.zeros(1, 2, HIDDEN)})


def test_a_state_of_other_envs_or_with_swapped_axes_is_an_error() -> None:
    core = make_core(2)
    swapped = {name: torch.zeros(2, 3, HIDDEN) for name in ("hidden", "cell")}
    with pytest.raises(ShapeError, match=rf"\(3, 2, {HIDDEN}\)"):
        core.step(torch.zeros(3, INPUTS), swapped)
    with pytest.raises(ShapeError, match=rf"\(2, 4, {HIDDEN}\)"):
        core.sequence(torch.zeros(4, 3, INPUTS), torch.zeros(4, 3), swapped)


def test_the_feed_forward_core_gives_one_answer_per_row_and_has_no_state() -> None:
    core = FeedForwardCore(INPUTS, HIDDEN, torch.Generator().manual_seed(0))
    x, starts, _ = make_inputs(1, share=0.5)
    out = core.sequence(x, starts, {})
    assert core.state_spec() == {}
    assert out.shape == (ROWS, STEPS, HIDDEN)
    step, state = core.step(x[:, 3], {})
    assert state == {}
    assert torch.allclose(step, out[:, 3], atol=1e-6)
