"""What a run is predicted to do, by hand: overlap, sleep, cores, and the choice between plans."""

from __future__ import annotations

import pytest

from rollout_service.bench.prediction import HAND_OVER_S, Costs, StepCost, best, plans, predict, reasons, recommend

BUSY = Costs({4: StepCost(0.001, 0.001), 16: StepCost(0.002, 0.002)}, {1: 0.01, 2: 0.008}, 2.0, 100)
ASLEEP = Costs({2: StepCost(0.01, 0.0005), 8: StepCost(0.04, 0.002)}, {1: 0.001}, 2.0, 100)


def test_the_cost_of_a_step_lies_on_the_line_between_what_was_measured() -> None:
    assert BUSY.step(10).wall == pytest.approx(0.0015)
    assert BUSY.step(28).wall == pytest.approx(0.003)
    assert Costs({4: StepCost(0.002, 0.001)}, {1: 0.1}, 1.0, 8).step(8) == StepCost(0.004, 0.002)


def test_lockstep_adds_up_and_streaming_overlaps() -> None:
    lockstep = predict(BUSY, 2, 4, threads=1, lag=0)
    assert lockstep.iteration_s == pytest.approx(0.1 + 0.08 + HAND_OVER_S)
    # One core collects for 0.1 s twice over, one learns for 0.08 s: two cores carry 0.14 s each.
    streaming = predict(BUSY, 2, 4, threads=1, lag=1)
    assert streaming.iteration_s == pytest.approx((2 * 0.1 + 0.08) / 2 + HAND_OVER_S)
    assert streaming.steps_per_s == pytest.approx(8 * 100 / streaming.iteration_s)


def test_more_actors_than_cores_take_turns_unless_they_sleep() -> None:
    assert predict(BUSY, 4, 4, 1, 0).collect_s == pytest.approx(0.2)
    assert predict(ASLEEP, 8, 2, 1, 0).collect_s == pytest.approx(1.0)


def test_envs_that_sleep_get_many_actors_and_busy_ones_few() -> None:
    assert best(plans(ASLEEP, 16)).num_actors == 16
    assert best(plans(BUSY, 16)).num_actors <= 2


def test_a_simpler_plan_is_taken_where_the_fastest_gains_little() -> None:
    alike = Costs({1: StepCost(1e-6, 1e-6), 64: StepCost(1e-6, 1e-6)}, {1: 0.01, 2: 0.0099}, 2.0, 100)
    plan = best(plans(alike, 16))
    assert (plan.num_actors, plan.learner_threads, plan.max_policy_lag) == (1, 1, 0)


def test_the_fewest_envs_that_are_nearly_as_fast_are_recommended() -> None:
    plan, each = recommend(BUSY, (64, 16, 32))
    assert [other.num_envs for other in each] == [16, 32, 64]
    assert plan.steps_per_s >= 0.9 * max(other.steps_per_s for other in each)
    assert all(other.steps_per_s < 0.9 * plan.steps_per_s / 0.9 for other in each if other.num_envs < plan.num_envs)


def test_every_part_of_a_plan_has_its_reason() -> None:
    plan, _ = recommend(ASLEEP, (16,))
    said = reasons(plan, ASLEEP, fixed_envs=True)
    assert "asleep" in said[0]
    assert said[1].startswith("learner threads 1")
    assert said[2].startswith(f"lag {plan.max_policy_lag}")
    assert len(said) == 3
    assert "fewer updates" in reasons(plan, ASLEEP, fixed_envs=False)[3]
