"""How envs are split over actors must not matter: same seeds, same noise, same rows per forward, same bits."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_service.control.messages import Episode, StartFrom
from rollout_service.runspec import Core
from tests.workers.rig import Arrays, make_rig

LEASES = (StartFrom.FRESH, StartFrom.CARRY, StartFrom.CARRY)


def collected(num_actors: int, envs_per_actor: int, **options: object) -> tuple[list[Arrays], list[Episode]]:
    """Three rollouts of 8 envs, two rows per forward."""
    with make_rig(
        "tests.fixtures.envs:RandomTickEnv",
        num_actors=num_actors,
        envs_per_actor=envs_per_actor,
        envs_per_forward=2,
        num_steps=12,
        hidden_dim=32,
        **options,  # type: ignore[arg-type]
    ) as rig:
        rollouts, episodes = [], []
        for lease, start in enumerate(LEASES):
            commits, rollout = rig.fill_all(start, bank=lease % 2)
            rollouts.append(rollout)
            episodes += [episode for commit in commits for episode in commit.episodes]
        return rollouts, sorted(episodes, key=lambda episode: episode.env)


@pytest.mark.parametrize("core", [Core.LSTM, Core.NONE])
def test_one_two_and_four_actors_collect_the_same_bits(core: Core) -> None:
    rollouts, episodes = collected(1, 8, core=core)
    assert len(episodes) > 20
    for num_actors in (2, 4):
        others, other_episodes = collected(num_actors, 8 // num_actors, core=core)
        assert other_episodes == episodes
        for rollout, other in zip(rollouts, others, strict=True):
            for name, rows in rollout.items():
                assert rows.tobytes() == other[name].tobytes(), f"{name} with {num_actors} actors"


def test_the_order_in_which_actors_are_granted_does_not_matter() -> None:
    rollouts = []
    for order in ((0, 1), (1, 0)):
        with make_rig(
            "tests.fixtures.envs:RandomTickEnv", num_actors=2, envs_per_actor=2, envs_per_forward=2, num_steps=9
        ) as rig:
            for start in LEASES:
                for actor in order:
                    rig.fill(start, actor=actor)
            rollouts.append(rig.rollout(0))
    for name, rows in rollouts[0].items():
        assert rows.tobytes() == rollouts[1][name].tobytes(), name


def first_observations(env: str, num_actors: int, envs_per_actor: int, incarnation: int = 0) -> list[tuple[float, ...]]:
    with make_rig(
        env, num_actors=num_actors, envs_per_actor=envs_per_actor, num_steps=1, incarnation=incarnation
    ) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
        return [tuple(row) for row in rollout["observations"][:, 0].tolist()]


@pytest.mark.parametrize("env", ["tests.fixtures.envs:RandomTickEnv", "tests.fixtures.envs:GlobalRandomEnv"])
def test_sixteen_envs_begin_differently_and_alike_in_every_layout(env: str) -> None:
    four_by_four = first_observations(env, 4, 4)
    assert len(set(four_by_four)) == 16
    assert first_observations(env, 2, 8) == four_by_four
    assert first_observations(env, 4, 4) == four_by_four


def test_a_replacement_has_seeds_of_its_own() -> None:
    env = "tests.fixtures.envs:RandomTickEnv"
    assert not set(first_observations(env, 2, 2, incarnation=0)) & set(first_observations(env, 2, 2, incarnation=1))


def test_envs_draw_different_action_noise() -> None:
    with make_rig(kwargs={"length": 100}, envs_per_actor=8, num_steps=64) as rig:
        _, rollout = rig.fill_all(StartFrom.FRESH)
    actions = rollout["actions"]
    assert len({row.tobytes() for row in actions}) == 8
    assert 0.3 < np.mean(actions) < 0.7
