"""Random streams by name: different names, different streams; same name, same stream."""

from __future__ import annotations

import itertools

from rollout_service.envs.seeding import Purpose, generator, reset_seed


def test_every_part_of_a_name_makes_another_stream() -> None:
    names = itertools.product((1, 2), Purpose, (0, 1), (0, 1), (0, 1))
    draws = [generator(*name).random() for name in names]
    assert len(set(draws)) == len(draws) == 2 * len(Purpose) * 8


def test_a_name_gives_the_same_stream_each_time() -> None:
    assert (
        generator(3, Purpose.ACTION, 7, 1, 0).random(5).tolist()
        == generator(3, Purpose.ACTION, 7, 1, 0).random(5).tolist()
    )


def test_reset_seeds_are_plain_ints_that_any_simulator_takes() -> None:
    seeds = [reset_seed(1, Purpose.ENV, env) for env in range(2000)]
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == 2000


def test_seeds_are_part_of_what_a_run_promises_to_repeat() -> None:
    assert [reset_seed(1, Purpose.ENV, env) for env in range(3)] == [1258706705, 1927277239, 39584586]
    assert {purpose.name: purpose.value for purpose in Purpose} == {
        "ENV": 0,
        "ACTION": 1,
        "MINIBATCH": 2,
        "EVALUATION_ENV": 3,
        "EVALUATION_ACTION": 4,
    }
