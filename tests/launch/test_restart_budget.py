"""How often a lost actor or learner comes back, and how soon."""

from __future__ import annotations

from rollout_service.launch.restarts import LONGEST_DELAY_S, RestartBudget, RestartsFromCheckpoint


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


def learner_deaths(*reached: int, max_restarts: int = 3, apart_s: float = 1000.0) -> list[float | str]:
    """Highest update of the run at each death -> what follows from it."""
    restarts = RestartsFromCheckpoint(max_restarts, 300.0)
    return [restarts.after_death(reached=update, now=apart_s * number) for number, update in enumerate(reached)]


def test_a_learner_comes_back_at_once_and_later_ones_wait_longer():
    assert learner_deaths(5, 9, 14, 20, max_restarts=9, apart_s=1.0) == [0.0, 0.5, 1.0, 2.0]


def test_deaths_without_progress_end_however_slowly_they_come():
    *waits, why = learner_deaths(40, 40, 40, 40)
    assert waits == [0.0] * 3
    assert why == "it died 4 times while the run got no further than update 40 (max_restarts)"


def test_progress_between_them_earns_more():
    assert learner_deaths(40, 40, 40, 41, 41, 41) == [0.0] * 6


def test_the_learners_budget_runs_out_even_with_progress():
    *_, why = learner_deaths(1, 2, 3, 4, apart_s=1.0)
    assert why == "all 3 restarts within 300 s are used up (max_restarts, restart_window)"


def test_without_restarts_the_first_death_ends_the_run():
    assert isinstance(learner_deaths(5, max_restarts=0)[0], str)
