"""Updates from whichever slots came first: two of one actor, none of another, rows of older weights among them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from learner.epochs import Outcome
from learner.rollout_buffer import RecurrentRolloutBuffer
from rollout_service.control.messages import Commit
from rollout_service.errors import RatioLawBroken, ShapeError
from tests.fixtures.training import serial_run, sharpen, small_config
from tests.learner.stream import Stream

LIMIT = 1e-4


@pytest.fixture
def stream() -> Iterator[Stream]:
    with serial_run(small_config(max_policy_lag=1, self_check=1)) as run:
        sharpen(run)
        yield Stream(run)


def test_the_ratio_law_holds_whichever_slots_a_batch_has(stream: Stream) -> None:
    reports = [
        stream.learn(stream.fill(0, 2), stream.fill(0, 0)),
        stream.learn(stream.fill(1, 3), stream.fill(0, 1, steps=5)),
        stream.learn(stream.fill(1, 1)),
        stream.learn(stream.fill(0, 0), stream.fill(1, 3, steps=7), stream.fill(1, 2)),
    ]
    assert [report.metrics["valid_rows"] for report in reports] == [64, 42, 32, 2 * (16 + 7 + 16)]
    assert max(report.metrics["self_check_deviation"] for report in reports) <= LIMIT
    assert {report.metrics["policy_lag_max"] for report in reports} == {0.0}
    assert stream.run.trainer.env_steps_done == 64 + 42 + 32 + 78


def test_rows_of_older_weights_are_told_by_their_lag_and_held_to_no_law(stream: Stream) -> None:
    old = stream.fill(1, 3)
    stream.learn(stream.fill(0, 0))
    report = stream.learn(old, stream.fill(0, 1, steps=4))
    assert report.metrics["policy_lag_max"] == 1.0
    assert report.metrics["policy_lag_mean"] == pytest.approx(16 / 20)
    assert report.metrics["self_check_deviation"] <= LIMIT
    assert report.metrics["ratio_deviation"] <= LIMIT
    both_old = stream.fill(0, 2), stream.fill(1, 0)
    stream.learn(stream.fill(0, 3))
    report = stream.learn(*both_old)
    assert report.metrics["policy_lag_mean"] == report.metrics["policy_lag_max"] == 1.0
    assert "self_check_deviation" not in report.metrics


def test_rows_that_are_called_current_and_are_not_break_the_law(stream: Stream) -> None:
    old = stream.fill(1, 3)
    stream.learn(stream.fill(0, 0))
    with pytest.raises(RatioLawBroken):
        stream.run.trainer.update(
            RecurrentRolloutBuffer.over(stream.run.memory, [old.slot]), valid_steps=[16], policy_lags=[0], update=2
        )


def test_the_slots_are_given_back_before_the_first_minibatch_and_may_be_filled_again(stream: Stream) -> None:
    """The same rollouts, once with an actor that overwrites them at once: the update does not notice."""
    order: list[str] = []
    commits = stream.fill(0, 2), stream.fill(1, 0)
    trainer = stream.run.trainer
    before = trainer.capture()
    expected = stream.learn(*commits)
    after = trainer.capture()

    def given_back() -> None:
        order.append("copied")
        for field in stream.run.memory.fields:
            stream.run.memory.array(field.name)[[0, 2]] = 99

    def minibatch() -> bool:
        order.append("minibatch")
        return False

    trainer.load(before)
    trainer.updates_done = trainer.env_steps_done = 0
    stream.run.version -= 1
    seen = trainer.update(
        RecurrentRolloutBuffer.over(stream.run.memory, [2, 0], at_once=False),
        valid_steps=[16, 16],
        policy_lags=[0, 0],
        update=1,
        copied=given_back,
        should_stop=minibatch,
    )
    assert order == ["copied"] + ["minibatch"] * 8
    assert seen.metrics == expected.metrics
    for name, array in trainer.capture().arrays.items():
        np.testing.assert_array_equal(array, after.arrays[name], err_msg=name)


@pytest.mark.parametrize("estimator", ["gae", "vtrace"])
def test_adjacent_slots_are_given_back_before_they_are_read_again(estimator: str) -> None:
    config = small_config(max_policy_lag=1, advantage_estimator=estimator, normalize_returns=True)
    with serial_run(config) as run:
        stream = Stream(run)
        commits = stream.fill(0, 1), stream.fill(1, 2)

        def given_back() -> None:
            for field in run.memory.fields:
                run.memory.array(field.name)[[1, 2]] = np.nan if field.dtype.kind == "f" else 1

        report = stream.learn(*commits, copied=given_back)
        assert report.outcome is Outcome.COMPLETE
        assert all(np.isfinite(value) for value in report.metrics.values())


def test_slots_are_given_back_when_there_is_nothing_to_learn(stream: Stream) -> None:
    calls: list[int] = []
    report = stream.run.trainer.update(
        RecurrentRolloutBuffer.over(stream.run.memory, [2, 0], at_once=False),
        valid_steps=[0, 0],
        update=1,
        copied=lambda: calls.append(1),
    )
    assert report.outcome is Outcome.SKIPPED
    assert calls == [1]


def test_nothing_is_seeded(stream: Stream) -> None:
    commits = stream.fill(0, 2), stream.fill(1, 0)
    free = {f.name: stream.run.memory.array(f.name)[[1, 3]].tobytes() for f in stream.run.memory.fields}
    stream.learn(*commits)
    assert {f.name: stream.run.memory.array(f.name)[[1, 3]].tobytes() for f in stream.run.memory.fields} == free


@pytest.mark.parametrize("strategy", ["stored", "zero"])
def test_the_discounted_return_follows_each_actor_from_slot_to_slot(strategy: str) -> None:
    """Two rollouts of actor 0 in the first batch, none in the second: each actor's are one line all the same."""
    config = small_config(
        state_strategy=strategy,
        max_policy_lag=1,
        normalize_returns=True,
        gamma=0.9,
        env_kwargs={"end": 0.05},
        learning_rate=1e-12,
    )
    lines: dict[int, list[np.ndarray]] = {0: [], 1: []}
    with serial_run(config) as run:
        stream = Stream(run)

        def fill(actor: int, slot: int) -> Commit:
            commit = stream.fill(actor, slot)
            rows = [run.memory.array(name)[slot] for name in ("rewards", "terminated", "truncated")]
            lines[actor].append(np.stack([rows[0], (rows[1] | rows[2]).astype(np.float32)]))
            return commit

        stream.learn(fill(0, 3), fill(1, 1), fill(0, 0))
        stream.learn(fill(1, 2))
        stream.learn(fill(1, 0), fill(0, 1))
        mean, variance, count = run.trainer.capture().arrays["returns/statistics"]
    seen = []
    for line in lines.values():
        carried = np.zeros(2)
        rewards, ends = np.concatenate(line, axis=2)
        for step in range(rewards.shape[1]):
            returns = 0.9 * carried + rewards[:, step]
            seen.append(returns)
            carried = np.where(ends[:, step] > 0, 0.0, returns)
    assert count == 2 * 16 * 6
    assert mean == pytest.approx(np.mean(seen), rel=1e-6)
    assert variance == pytest.approx(np.var(seen), rel=1e-6)


def test_numbers_per_slot_must_be_as_many_as_the_slots(stream: Stream) -> None:
    commit = stream.fill(0, 2)
    rollout = RecurrentRolloutBuffer.over(stream.run.memory, [2])
    with pytest.raises(ShapeError, match=r"valid_steps has 3 entries; give one per slot \(1\) or one per env \(2\)"):
        stream.run.trainer.update(rollout, valid_steps=[16, 16, 16], update=1)
    with pytest.raises(ShapeError, match="policy_lags has 3 entries"):
        stream.run.trainer.update(rollout, valid_steps=[commit.valid_steps], policy_lags=[0, 0, 0], update=1)
