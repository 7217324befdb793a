"""How often a lost actor comes back, and how soon."""

from __future__ import annotations

from rollout_service.launch.restarts import LONGEST_DELAY_S, RestartBudget


def test_the_first_restart_is_immediate_and_later_ones_wait_longer():
    budget = RestartBudget(10, 300.0)
    assert [budget.spend(1, now) for now in (0.0, 3.0, 6.0, 9.0)] == [0.0, 0.5, 1.0, 2.0]
    assert budget.spend(2, 10.0) == 0.0


def test_the_wait_is_bounded():
    budget = RestartBudget(100, 1e9)
    assert [budget.spend(0, 0.0) for _ in range(20)][-1] == LONGEST_DELAY_S


def test_the_budget_is_over_all_actors_and_comes_back_with_time():
    budget = RestartBudget(2, 10.0)
    assert (budget.spend(0, 0.0), budget.spend(1, 1.0), budget.spend(2, 2.0)) == (0.0, 0.0, None)
    assert budget.spend(2, 10.5) == 0.0
    assert budget.spent == 2


def test_a_budget_of_zero_allows_none():
    assert RestartBudget(0, 10.0).spend(0, 0.0) is None
