"""The compiled layers: every shape of tile and panel against the loop over cells and torch, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.crew import one_thread
from rollout_service.policy import actor_critic, kernels
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.policy.compiled import USABLE
from rollout_service.policy.recurrent import LSTMCore
from rollout_service.runspec import Leaf, PolicySpec, SpaceKind, Spaces

_layers = pytest.importorskip("rollout_service.policy._layers", reason="it was not built")
pytestmark = pytest.mark.skipif(not USABLE, reason="no AVX-512 here")


@pytest.fixture(autouse=True)
def torch_on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def make(inputs: int, hidden: int, rows: int, steps: int) -> tuple[LSTMCore, Tensor, Tensor, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, steps, inputs, generator=draw).requires_grad_()
    starts = (torch.rand(rows, steps, generator=draw) < 0.1).float()
    state = {name: torch.randn(1, rows, hidden, generator=draw).requires_grad_() for name in ("hidden", "cell")}
    return LSTMCore(inputs, hidden, 1, draw), x, starts, state


@pytest.mark.parametrize("steps", [1, 16, 17, 33])
@pytest.mark.parametrize(("inputs", "hidden"), [(1, 16), (16, 32), (33, 48), (64, 128)])
def test_any_number_of_rows_equals_the_loop_over_cells(inputs: int, hidden: int, steps: int) -> None:
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 19):
        core, x, starts, state = make(inputs, hidden, rows, steps)
        out, expected = core.sequence(x, starts, state), core.sequence_by_cells(x, starts, state)
        assert torch.allclose(out, expected, atol=1e-6), rows
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
        wanted = [*core.parameters(), x, *state.values()]
        got = torch.autograd.grad((out * weights).sum(), wanted)
        for found, want in zip(got, torch.autograd.grad((expected * weights).sum(), wanted), strict=True):
            assert torch.allclose(found, want, atol=1e-5 * max(1.0, float(want.abs().max()))), rows


def test_a_row_is_the_same_in_any_company_with_gradients_or_without() -> None:
    core, x, starts, state = make(5, 32, 11, 20)
    whole = core.sequence(x, starts, state)
    with torch.no_grad():
        for rows in ([3], [10, 3], [8, 9, 3, 1, 0]):
            part = core.sequence(x[rows], starts[rows], {name: array[:, rows] for name, array in state.items()})
            assert torch.equal(part, whole[rows])


def test_gates_saturate_and_a_nan_stays_visible() -> None:
    core, x, starts, state = make(3, 16, 4, 6)
    for scale in (1e2, 1e4, 1e30):
        wild = x.detach() * scale
        out, expected = core.sequence(wild, starts, state), core.sequence_by_cells(wild, starts, state)
        assert torch.allclose(out, expected, atol=1e-6)
    broken = x.detach().clone()
    broken[2, 3] = math.nan
    out = core.sequence(broken, torch.zeros_like(starts), state)
    assert torch.equal(out.isnan().all(2).nonzero(), torch.tensor([[2, 3], [2, 4], [2, 5]]))


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (2, 64), (33, 31), (64, 48), (70, 100)])
@pytest.mark.parametrize("rows", [1, 7, 129, 300])
def test_a_dense_layer_is_torchs(inputs: int, outputs: int, rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, inputs, generator=draw), torch.randn(outputs, inputs, generator=draw) / inputs**0.5
    x, weight, bias = (array.requires_grad_() for array in (x, weight, torch.randn(outputs, generator=draw)))
    out, expected = kernels.tanh_linear(x, weight, bias), torch.tanh(x @ weight.t() + bias)
    assert torch.allclose(out, expected, atol=1e-6)
    assert torch.equal(kernels.tanh_linear(x[-1:], weight, bias), out[-1:])
    slopes = torch.randn(rows, outputs, generator=draw)
    for wanted in ([x, weight, bias], [weight, bias]):
        got = torch.autograd.grad(out, wanted, slopes, retain_graph=True)
        for found, want in zip(got, torch.autograd.grad(expected, wanted, slopes, retain_graph=True), strict=True):
            assert torch.allclose(found, want, atol=2e-6 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize(("choices", "start"), [(1, 0), (2, 0), (6, -2), (40, 3)])
@pytest.mark.parametrize("rows", [1, 8, 13, 16, 100])
def test_heads_are_those_of_the_plain_policy(
    choices: int, start: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(rows)
    vector = Leaf(kind=SpaceKind.BOX, shape=(3,), dtype="float32")
    action = Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=choices, start=start)
    policy = ActorCritic(Spaces(observation=(vector,), action=action), PolicySpec(hidden_dim=48), seed=0)
    with torch.no_grad():
        for parameter in policy.head_parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    features = torch.randn(rows, 48, generator=draw)
    actions = torch.randint(start, start + choices, (rows,), generator=draw)
    slopes = torch.randn(3, rows, generator=draw)
    found = policy.evaluate_heads(features, actions)
    assert isinstance(found, kernels.CategoricalHeads)
    monkeypatch.setattr(actor_critic, "takes", lambda _: False)
    expected = policy.evaluate_heads(features, actions)
    assert not isinstance(expected, kernels.CategoricalHeads)
    for name in ("values", "log_probs", "entropy"):
        assert torch.allclose(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5), name
    back, gradients = found.gradients(*slopes)
    plain_back, plain_gradients = expected.gradients(*slopes)
    for got, want in zip((back, *gradients), (plain_back, *plain_gradients), strict=True):
        assert got.shape == want.shape
        assert torch.allclose(got, want, atol=2e-5 * max(1.0, float(want.abs().max())))


def test_arrays_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    def arrays(*sizes: int) -> tuple[np.ndarray, ...]:
        return tuple(np.zeros(size, np.float32) for size in sizes)

    fitting = [6 * 5, 6, 64 * 5, 64 * 16, 64, 64, 3 * 128, 2 * 4 * 32, 96]
    _layers.lstm_forward(3, 2, 5, 16, True, arrays(*fitting))
    for position in range(len(fitting)):
        for change in (-1, 1):
            wrong = list(fitting)
            wrong[position] += change
            with pytest.raises(ValueError, match=f"array {position} has {4 * wrong[position]} bytes"):
                _layers.lstm_forward(3, 2, 5, 16, True, arrays(*wrong))
    with pytest.raises(ValueError, match="8 arrays were given, 9 are needed"):
        _layers.lstm_forward(3, 2, 5, 16, True, arrays(*fitting[:-1]))
    with pytest.raises(ValueError, match="multiple of 16"):
        _layers.lstm_forward(3, 2, 5, 17, True, arrays(*fitting))
    constant = arrays(*fitting)
    constant[-1].setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        _layers.lstm_forward(3, 2, 5, 16, True, constant)
