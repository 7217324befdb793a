"""One step of an actor: what it writes where, and that the learner finds the same log-probs and values in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout_service import recurrence
from rollout_service.control.messages import StartFrom
from rollout_service.policy.acting import acts_in_numpy
from rollout_service.runspec import Core
from tests.fixtures.envs import RandomTickEnv, TickEnv, TreeEnv
from tests.workers.rig import Rig, make_rig

LIMIT = 1e-4


def recomputed(rig: Rig, rollout: dict[str, np.ndarray]) -> Any:
    """What the learner's forward makes of a rollout's rows."""
    ended = recurrence.ended(rollout["terminated"], rollout["truncated"], rollout["valid"])
    starts = recurrence.episode_starts(ended, rollout["episode_start_carry"])
    names = [name for name in rollout if name.startswith("observations")]
    return rig.policy.evaluate_sequences(
        {name: torch.from_numpy(rollout[name]) for name in names},
        torch.from_numpy(rollout["actions"]),
        torch.from_numpy(starts),
        {name: torch.from_numpy(np.ascontiguousarray(rollout[name][:, 0].swapaxes(0, 1))) for name in rig.spec.state},
        torch.from_numpy(rollout["valid"] == 1),
    )


@pytest.mark.parametrize(("core", "num_layers"), [(Core.LSTM, 1), (Core.LSTM, 3), (Core.NONE, 1)])
@pytest.mark.parametrize("env", [RandomTickEnv, TreeEnv])
def test_the_learner_recomputes_what_an_actor_stored(env: type[Any], core: Core, num_layers: int) -> None:
    options = {"core": core, "num_layers": num_layers, "hidden_dim": 24, "envs_per_actor": 4, "envs_per_forward": 2}
    with make_rig(envs=[env() for _ in range(4)], num_steps=60, **options) as rig, torch.no_grad():
        for parameter in rig.policy.parameters():
            parameter *= 2.0  # farther from the linear middle of every tanh than fresh weights are
        rig.weights.publish(1, rig.policy.to_arrays())
        for bank, start in enumerate((StartFrom.FRESH, StartFrom.CARRY)):
            _, rollout = rig.fill_all(start, bank=bank)
            found = recomputed(rig, rollout)
            np.testing.assert_allclose(found.log_probs.numpy(), rollout["log_probs"], atol=LIMIT)
            np.testing.assert_allclose(found.values.numpy(), rollout["values"], atol=LIMIT)
            assert np.ptp(rollout["values"]) > 100 * LIMIT


def test_both_ways_of_acting_are_tried_above() -> None:
    found = set()
    for env in (RandomTickEnv(), TreeEnv()):
        with make_rig(envs=[env]) as rig:
            found.add(acts_in_numpy(rig.spec.spaces))
    assert found == {True, False}


def test_an_env_writes_its_observation_where_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_rig(envs=[TickEnv(3), TickEnv(5)], envs_per_actor=2, num_steps=4) as rig:
        envs, places = rig.actors[0]._envs, []
        step = envs.step

        def noted(actions: Any, out: Any, *hurried: Any) -> Any:
            places.append(out["observations"])
            return step(actions, out, *hurried)

        monkeypatch.setattr(envs, "step", noted)
        rig.fill(StartFrom.FRESH)
        stored = rig.memory.array("observations")[0]
        for t, place in enumerate(places[:-1]):
            assert place.shape == stored[:, t + 1].shape
            assert place.ctypes.data == stored[:, t + 1].ctypes.data
        assert not np.shares_memory(places[-1], stored)
        assert places[-1] is rig.actors[0].live.observations["observations"]


def test_a_lease_cut_short_goes_on_from_the_observation_after_its_last_row() -> None:
    with make_rig(envs=[TickEnv(50)], num_steps=8) as rig:
        rig.fill(StartFrom.FRESH, preempted=lambda steps: steps >= 3)
        assert rig.actors[0].live.observations["observations"].tolist() == [[0.0, 3.0]]
        _, rollout = rig.fill_all(bank=1)
    assert rollout["observations"][0, :2].tolist() == [[0.0, 3.0], [0.0, 4.0]]
