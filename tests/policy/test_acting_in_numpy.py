"""The actors' step in numpy against the learner's module: the same actions, log-probs, values and states."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from rollout_service.errors import OutOfRange
from rollout_service.policy.acting import ActingPolicy, acts_in_numpy
from rollout_service.policy.actor_critic import ActorCritic
from rollout_service.runspec import Core, Leaf, PolicySpec, SpaceKind, Spaces
from tests.policy.acting import MIXED, PLAIN, SYMBOLS, TWO_ACTIONS, random_observations

SEVERAL = Spaces(
    observation=(
        Leaf(path=".grid", kind=SpaceKind.BOX, shape=(2, 3), dtype="float32"),
        Leaf(path=".speed", kind=SpaceKind.BOX, shape=(), dtype="int16"),
        Leaf(path=".task", kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=3, start=-1),
    ),
    action=TWO_ACTIONS,
)
ROUNDING = 2e-6


def both(spaces: Spaces, spec: PolicySpec, rows: int, seed: int = 3) -> tuple[ActorCritic, ActingPolicy]:
    """The same policy twice, with weights and statistics unlike fresh ones."""
    module = ActorCritic(spaces, spec, seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in module.named_buffers():
            if name.startswith("normalizers."):
                buffer += torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype)
    acting = ActingPolicy(spaces, spec, rows)
    acting.load_arrays(module.to_arrays())
    return module, acting


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("spaces", [PLAIN, SYMBOLS, SEVERAL])
@pytest.mark.parametrize(
    "spec",
    [
        PolicySpec(hidden_dim=16, encoder_dim=8),
        PolicySpec(hidden_dim=8, num_layers=3, normalize_observations=True),
        PolicySpec(core=Core.NONE, hidden_dim=12, normalize_observations=True),
    ],
    ids=["lstm", "three layers, normalised", "no memory"],
)
def test_many_steps_are_those_of_the_module(spaces: Spaces, spec: PolicySpec, rows: int) -> None:
    module, acting = both(spaces, spec, rows)
    rng = np.random.default_rng(rows)
    state = module.initial_state(rows)
    for t in range(12):
        observations = random_observations(spaces, rng, rows)
        noise = np.stack([acting.draw_noise(rng, 1)[0] for _ in range(rows)]) if t % 3 else None
        arrays = {name: tensor.numpy() for name, tensor in observations.items()}
        entering = {name: tensor.numpy() for name, tensor in state.items()}
        acted = acting.step(arrays, entering, noise)
        expected = module.step(observations, state, None if noise is None else torch.from_numpy(noise))
        assert acted.actions.tolist() == expected.actions.tolist()
        np.testing.assert_allclose(acted.log_probs, expected.log_probs.numpy(), atol=ROUNDING)
        np.testing.assert_allclose(acted.values, expected.values.numpy(), atol=ROUNDING)
        assert acted.state.keys() == expected.state.keys()
        for name, exiting in expected.state.items():
            np.testing.assert_allclose(acted.state[name], exiting.numpy(), atol=ROUNDING)
        values = acting.value(arrays, entering).copy()
        np.testing.assert_allclose(values, module.value(observations, state).numpy(), atol=ROUNDING)
        state = {name: exiting.clone() for name, exiting in expected.state.items()}


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    _, acting = both(PLAIN, PolicySpec(hidden_dim=16), rows=4)
    rng = np.random.default_rng(0)
    observations = {name: tensor.numpy() for name, tensor in random_observations(PLAIN, rng, 4).items()}
    state = {name: rng.standard_normal((4, 1, 16)).astype(np.float32) for name in ("hidden", "cell")}
    before = acting.step(observations, state, None)
    kept = before.log_probs[1], before.state["hidden"][1].copy()
    observations["observations"][[0, 2, 3]] = 7.0
    after = acting.step(observations, state, None)
    assert after.log_probs[1] == kept[0]
    assert (after.state["hidden"][1] == kept[1]).all()


def test_neither_arguments_nor_a_scalar_type_are_touched() -> None:
    _, acting = both(SYMBOLS, PolicySpec(hidden_dim=8), rows=2)
    observations = {"observations": np.array([2, 6])}
    state = {name: np.ones((2, 1, 8), np.float32) for name in ("hidden", "cell")}
    noise = np.zeros((2, 3), np.float32)
    acted = acting.step(observations, state, noise)
    assert (state["hidden"] == 1).all()
    assert (state["cell"] == 1).all()
    assert not noise.any()
    assert acted.actions.dtype == np.int64
    assert set(acted.actions.tolist()) <= {-1, 0, 1}


def test_a_missing_array_is_named() -> None:
    module, acting = both(PLAIN, PolicySpec(hidden_dim=8), rows=2)
    arrays = module.to_arrays()
    del arrays["core.bias_hh_l0"]
    with pytest.raises(OutOfRange, match=r"core\.bias_hh_l0. is missing"):
        acting.load_arrays(arrays)


def test_images_are_left_to_the_module() -> None:
    assert not acts_in_numpy(MIXED)
    assert acts_in_numpy(SEVERAL)


def test_an_actor_without_images_never_imports_torch() -> None:
    code = "import sys, workers.session, workers.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
