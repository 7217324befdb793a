"""Figures of a run: windows, rates from the first step to the last update, time split."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rollout_service.observe.metrics import RunMetrics, log_record


@dataclass
class Episode:
    total_reward: float
    length: int = 4
    success: bool | None = None


def metrics(**changes: int) -> RunMetrics:
    return RunMetrics(**{"total_steps": 1000, "total_updates": 10, "num_actors": 2, "started": 0.0, **changes})


def rollout(run: RunMetrics, episodes: list[Episode], now: float = 1.0, **seconds: float) -> None:
    run.rollout(episodes=episodes, seconds=seconds, counters={}, now=now)


def test_the_return_is_over_the_last_hundred_episodes():
    run = metrics()
    rollout(run, [Episode(float(value)) for value in range(150)])
    summary = run.summary(2.0)
    assert (summary.return_mean, summary.episodes) == (sum(range(50, 150)) / 100, 150)


def test_the_means_do_not_depend_on_which_slot_was_filled_first():
    def run_of(*slots: int) -> RunMetrics:
        run = metrics()
        for slot in slots:
            episodes = [Episode(slot + step / 7, length=slot + 1, success=slot == 0) for step in range(80)]
            run.rollout(episodes=episodes, seconds={}, counters={}, now=1.0, actor_id=slot, slot=slot)
        assert run.summary(1.0).episodes == 0
        run.batch(waited_for=0, wait_s=0.0, now=1.0)
        return run

    first, second = (run_of(*slots).summary(2.0) for slots in ((0, 1), (1, 0)))
    assert first.episodes == 160
    assert first.return_mean == sum([step / 7 for step in range(60, 80)] + [1 + step / 7 for step in range(80)]) / 100
    assert first == second


def test_success_is_over_the_last_thousand_and_unknown_if_no_episode_reports_it():
    run = metrics()
    rollout(run, [Episode(1.0)] * 3)
    assert run.summary(2.0).success_rate is None
    rollout(run, [Episode(1.0, success=False)] * 600 + [Episode(1.0, success=True)] * 900)
    assert run.summary(2.0).success_rate == 0.9


def test_speed_counts_from_the_first_env_step_to_the_last_update():
    run = metrics()
    rollout(run, [], now=12.0, env=2.0)
    rollout(run, [], now=12.5, env=1.0)
    run.update(update=1, env_steps=100, figures={}, seconds={}, now=14.0)
    run.update(update=2, env_steps=200, figures={}, seconds={}, now=15.0)
    summary = run.summary(99.0)
    assert summary.steps_per_second == 200 / 5
    assert summary.eta_s == pytest.approx(800 / 40)


def test_a_resumed_run_counts_its_own_steps_for_the_speed_only():
    run = metrics(env_steps=500, updates=5)
    rollout(run, [], now=1.0, env=1.0)
    run.update(update=6, env_steps=600, figures={}, seconds={}, now=2.0)
    summary = run.summary(3.0)
    assert (summary.env_steps, summary.updates, summary.steps_per_second) == (600, 6, 50.0)


def test_nothing_is_claimed_before_anything_is_known():
    summary = metrics().summary(1.0)
    unknown = (summary.return_mean, summary.success_rate, summary.length_mean, summary.steps_per_second, summary.eta_s)
    assert unknown == (None,) * 5
    assert summary.slowest_actor is None


def test_time_is_split_by_phase():
    run = metrics()
    rollout(run, [], env=1.0, policy=3.0)
    run.update(update=1, env_steps=100, figures={"entropy": 0.5}, seconds={"update": 2.0}, now=2.0)
    summary = run.summary(2.0)
    assert (summary.actor_split, summary.learner_split) == ({"env": 0.25, "policy": 0.75}, {"update": 1.0})
    assert log_record(summary)["learner/entropy"] == 0.5


def test_waiting_is_what_the_phases_leave_of_the_time_between_two_commits_or_updates():
    run = metrics()
    for now in (10.0, 14.0):
        phases = {"prepare": 0.25, "collect": 0.75, "policy": 0.25, "env": 0.25}
        run.rollout(episodes=[], seconds=phases, counters={}, now=now, actor_id=0)
        run.update(update=1, env_steps=100, figures={}, seconds={"update": 1.0}, now=now)
    summary = run.summary(15.0)
    assert summary.actor_split == {"prepare": 0.1, "policy": 0.1, "env": 0.1, "write": 0.1, "wait": 0.6}
    assert summary.learner_split == {"update": 0.4, "wait": 0.6}


def test_the_slowest_actor_is_the_one_the_others_waited_for_longest():
    run = metrics()
    for at, actor, wait_s in ((10.0, 0, 9.0), (12.0, 1, 1.0), (13.0, 0, 0.25), (14.0, 1, 0.5), (15.0, 0, 0.25)):
        run.batch(waited_for=actor, wait_s=wait_s, now=at)
    summary = run.summary(15.0)
    assert (summary.slowest_actor, summary.slowest_share) == (1, 1.5 / 5.0)
    assert log_record(summary)["actors/slowest_waited_share"] == 0.3


def test_cut_and_missing_slots_are_counted_and_leave_room_for_more_updates():
    run = metrics()
    run.batch(waited_for=1, wait_s=1.0, partial=2, late=1, now=1.0)
    run.update(update=1, env_steps=60, figures={}, seconds={}, now=2.0)
    summary = run.summary(2.0)
    assert summary.counters == {"partial_rollouts": 2, "late_actors": 1}
    assert (summary.updates, summary.total_updates) == (1, 10)
    run.update(update=2, env_steps=100, figures={}, seconds={}, now=3.0)
    assert run.summary(3.0).total_updates == 11


def test_actors_are_counted_while_they_live():
    run = metrics()
    run.actor_joined(0)
    run.actor_joined(1)
    run.actor_left(0)
    assert run.summary(1.0).actors_alive == 1


def test_numbers_go_back_to_a_checkpoint_and_the_rate_begins_anew():
    run = metrics()
    rollout(run, [], now=1.0, env=1.0)
    for update in range(1, 6):
        run.update(update=update, env_steps=100 * update, figures={}, seconds={}, now=float(update), version=update + 1)
    run.go_back(update=2, env_steps=200, now=8.0)
    run.learner_restarts += 1
    summary = run.summary(8.0)
    assert (summary.updates, summary.env_steps, summary.recent_steps_per_second) == (2, 200, None)
    run.update(update=3, env_steps=300, figures={}, seconds={}, now=9.0, version=9)
    summary = run.summary(9.0)
    assert (summary.env_steps, summary.recent_steps_per_second) == (300, 100.0)
    record = log_record(summary)
    assert (record["learner/version"], record["learner/restarts"]) == (9.0, 1.0)
