"""Where inserted reset steps go."""

from __future__ import annotations

import torch

from rollout_service.policy.resets import in_place, lay_out, plan_resets


def test_nothing_is_inserted_for_starts_in_the_first_column() -> None:
    assert plan_resets(torch.tensor([[1.0, 0, 0], [0, 0, 0]])) is None


def test_one_step_is_inserted_in_front_of_each_later_start() -> None:
    starts = torch.tensor([[0, 0, 1, 0, 1], [1, 0, 0, 1, 0]])
    plan = plan_resets(starts)
    assert plan is not None
    assert (plan.num_steps, plan.num_rows) == (7, 2)
    rows = (torch.arange(10.0) + 1).view(2, 5, 1)
    spread = plan.spread(rows)
    assert [x for x, flag in spread[:, 0].tolist() if flag == 0] == [1, 2, 3, 4, 5]
    assert spread[:, 0, 1].tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert [x for x, flag in spread[:, 1].tolist() if flag == 0] == [6, 7, 8, 9, 10]
    assert spread[:, 1, 1].tolist() == [0, 0, 0, 1, 0, 0, 1]
    assert torch.equal(plan.gather(spread[..., :1]), rows)
    assert plan.lengths.tolist() == [7, 6]


def test_a_row_that_ends_early_is_filled_up_with_flagged_places() -> None:
    plan = lay_out(torch.tensor([[0, 1, 1], [0, 0, 0]]))
    assert plan.lengths.tolist() == [5, 3]
    assert plan.flags[:, 0, 0].tolist() == [0, 1, 0, 1, 0]
    assert plan.flags[:, 1, 0].tolist() == [0, 0, 0, 1, 1]
    assert lay_out(torch.zeros(2, 3)).lengths.tolist() == [3, 3]


def test_in_place_is_the_order_of_time_and_the_starts() -> None:
    starts = torch.tensor([[0.0, 1, 1], [1, 0, 0]])
    plan = in_place(starts)
    assert (plan.num_steps, plan.num_rows, plan.lengths.tolist()) == (3, 2, [3, 3])
    assert plan.flags.shape == (3, 2, 1)
    assert torch.equal(plan.flags[..., 0], starts.t())
    rows = torch.arange(6)
    assert rows[plan.source].tolist() == [0, 3, 1, 4, 2, 5]
    assert torch.equal(rows[plan.source][plan.real], rows)


def test_gradients_pass_through_insertion_and_selection_unchanged() -> None:
    plan = plan_resets(torch.tensor([[0, 1, 1], [0, 0, 1]]))
    assert plan is not None
    rows = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = torch.arange(18.0).view(2, 3, 3)
    (plan.gather(plan.spread(rows)) * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    assert torch.equal(rows.grad, weights[..., :2])


def test_the_plan_leaves_the_flags_it_was_given_alone() -> None:
    starts = torch.ones(2, 3)
    plan_resets(starts)
    assert torch.equal(starts, torch.ones(2, 3))
