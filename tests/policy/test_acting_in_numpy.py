"""The actors' step in numpy against the learner's module: the same actions, log-probs, values and states."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from rollout_service.errors import ConfigError, OutOfRange
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
    acting = ActingPolicy(spaces, spec, rows, rows)
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
        noise = acting.draw_noise([rng] * rows, 1)[0] if t % 3 else None
        arrays = {name: tensor.numpy() for name, tensor in observations.items()}
        if t == 6:  # what the owner writes is what the next step starts from
            for name, tensor in state.items():
                tensor[0] = 0
                acting.state[name][0] = 0
        values = np.zeros(rows, np.float32)
        acting.values(arrays, range(rows), values)
        acted = acting.step(arrays, noise)
        assert acted.values.tobytes() == values.tobytes()
        expected = module.step(observations, state, None if noise is None else torch.from_numpy(noise))
        assert acted.actions.tolist() == expected.actions.tolist()
        np.testing.assert_allclose(acted.log_probs, expected.log_probs.numpy(), atol=ROUNDING)
        np.testing.assert_allclose(acted.values, expected.values.numpy(), atol=ROUNDING)
        assert acting.state.keys() == expected.state.keys()
        for name, exiting in expected.state.items():
            np.testing.assert_allclose(acting.state[name], exiting.numpy(), atol=ROUNDING)
        state = {name: exiting.clone() for name, exiting in expected.state.items()}


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    results = []
    for others in (0.5, 7.0):
        _, acting = both(PLAIN, PolicySpec(hidden_dim=16), rows=4)
        rng = np.random.default_rng(0)
        observations = {name: tensor.numpy() for name, tensor in random_observations(PLAIN, rng, 4).items()}
        observations["observations"][[0, 2, 3]] = others
        for rows in acting.state.values():
            rows[...] = rng.standard_normal(rows.shape)
        acted = acting.step(observations, None)
        results.append((acted.log_probs[1], acted.values[1], acting.state["hidden"][1].tobytes()))
    assert results[0] == results[1]


@pytest.mark.parametrize("spec", [PolicySpec(hidden_dim=20, num_layers=2), PolicySpec(core=Core.NONE)])
def test_chunks_give_the_bits_of_policies_of_their_own(spec: PolicySpec) -> None:
    module, _ = both(SEVERAL, spec, rows=6)
    parts = [ActingPolicy(SEVERAL, spec, 2, 2) for _ in range(3)]
    whole = ActingPolicy(SEVERAL, spec, 6, 2)
    for acting in (whole, *parts):
        acting.load_arrays(module.to_arrays())
    rng = np.random.default_rng(5)
    for _ in range(5):
        observations = {name: tensor.numpy() for name, tensor in random_observations(SEVERAL, rng, 6).items()}
        noise = whole.draw_noise([rng], 6)[:, 0]
        acted = whole.step(observations, noise)
        for k, part in enumerate(parts):
            rows = slice(2 * k, 2 * k + 2)
            alone = part.step({name: array[rows] for name, array in observations.items()}, noise[rows])
            for name in ("actions", "log_probs", "values"):
                assert getattr(alone, name).tobytes() == getattr(acted, name)[rows].tobytes()
            for name, state in part.state.items():
                assert state.tobytes() == whole.state[name][rows].tobytes()


def test_rows_per_call_have_to_divide_the_envs() -> None:
    with pytest.raises(ConfigError, match="envs_per_forward 4 does not divide the actor's 6 envs"):
        ActingPolicy(PLAIN, PolicySpec(), 6, 4)


def test_arguments_are_not_touched_and_actions_are_the_envs_own() -> None:
    _, acting = both(SYMBOLS, PolicySpec(hidden_dim=8), rows=2)
    observations = {"observations": np.array([2, 6])}
    noise = np.zeros((2, 3), np.float32)
    acted = acting.step(observations, noise)
    assert observations["observations"].tolist() == [2, 6]
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
