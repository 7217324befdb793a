"""Slots that were cut short or left out: ratio law, seeds, counts, and memory that somebody else may be writing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from learner.trainer import UpdateReport
from rollout_service.control.messages import Commit, Grant, StartFrom
from rollout_service.launch.serial import SerialRun
from tests.fixtures.training import after_steps, serial_run, sharpen, small_config

LIMIT = 1e-4


class Bank:
    """One run whose leases the test grants itself: any start, any length, and slots that nobody fills."""

    def __init__(self, run: SerialRun) -> None:
        self.run = run
        self.epoch = 100
        self.env_steps = 0

    def fill(self, actor: int, start: StartFrom, steps: int = 16) -> Commit:
        run = self.run
        self.epoch += 1
        grant = Grant(
            slot=run.spec.bank(run.bank)[actor],
            epoch=self.epoch,
            version=run.version,
            start=start,
            update=run.trainer.updates_done + 1,
        )
        commit = run.actors[actor].fill(grant, preempted=after_steps(steps))
        assert commit.valid_steps == steps
        return commit

    def learn(self, *commits: Commit | None, withheld: tuple[int, ...] = ()) -> UpdateReport:
        """One update as the learner's session makes it; None for a slot that is left out."""
        run = self.run
        other = 1 - run.bank
        steps = [0 if commit is None else commit.valid_steps for commit in commits]
        self.env_steps += run.spec.envs_per_actor * sum(steps)
        report = run.trainer.update(
            run.rollouts[run.bank],
            valid_steps=steps,
            seed_into=run.rollouts[other],
            seed_where=[slot not in withheld for slot in run.spec.bank(other)],
            update=run.trainer.updates_done + 1,
            env_steps=self.env_steps,
        )
        run.publish()
        run.bank = other
        return report


@pytest.fixture(params=[{}, {"normalize_returns": True, "normalize_observations": True, "num_layers": 2}])
def bank(request: pytest.FixtureRequest) -> Iterator[Bank]:
    settings: dict[str, Any] = request.param
    with serial_run(small_config(self_check=1, **settings), total_updates=8) as run:
        sharpen(run)
        yield Bank(run)


def spoil(bank: Bank, actor: int) -> None:
    """What a late actor may leave behind at any moment: half a rollout, numbers that are none."""
    slot = bank.run.spec.bank(bank.run.bank)[actor]
    for field in bank.run.memory.fields:
        array = bank.run.memory.array(field.name)[slot]
        array[...] = np.nan if field.dtype.kind == "f" else 1


def test_the_ratio_law_holds_with_slots_cut_short_left_out_and_come_back(bank: Bank) -> None:
    fresh, seeded, carry = StartFrom.FRESH, StartFrom.SEEDED, StartFrom.CARRY
    reports = [bank.learn(bank.fill(0, fresh), bank.fill(1, fresh, steps=4))]
    first = bank.fill(0, seeded, steps=9)
    late = bank.fill(1, seeded, steps=5)  # its commit comes too late and is dropped; the envs have moved on
    spoil(bank, 1)
    reports.append(bank.learn(first, None))
    reports.append(bank.learn(bank.fill(0, seeded), bank.fill(1, carry, steps=1)))
    last = [bank.fill(0, seeded, steps=16), bank.fill(1, seeded, steps=16)]
    reports.append(bank.learn(*last))
    assert [report.metrics["valid_rows"] for report in reports] == [2 * 20, 2 * 9, 2 * 17, 2 * 32]
    assert max(report.metrics["self_check_deviation"] for report in reports) <= LIMIT
    assert all(np.isfinite(value) for report in reports for value in report.metrics.values())
    assert [commit.counters.get("seed_mismatches", 0) for commit in (first, late, *last)] == [0] * 4
    assert bank.run.trainer.env_steps_done == 2 * (20 + 9 + 17 + 32)


def test_a_slot_that_a_late_actor_may_still_write_is_not_touched(bank: Bank) -> None:
    run = bank.run
    bank.learn(bank.fill(0, StartFrom.FRESH), bank.fill(1, StartFrom.FRESH))
    bank.learn(bank.fill(0, StartFrom.SEEDED), None)
    held = run.spec.bank(1 - run.bank)[1]
    names = [field.name for field in run.memory.fields]
    before = {name: run.memory.array(name)[held].tobytes() for name in names}
    report = bank.learn(bank.fill(0, StartFrom.SEEDED), None, withheld=(held,))
    assert {name: run.memory.array(name)[held].tobytes() for name in names} == before
    assert report.metrics["self_check_deviation"] <= LIMIT
    assert bank.fill(0, StartFrom.SEEDED).counters.get("seed_mismatches", 0) == 0


def test_the_learning_rate_follows_the_env_steps_and_the_run_ends_with_them() -> None:
    with serial_run(small_config(learning_rate=1e-3), total_updates=4) as run:
        bank, rates = Bank(run), []
        start = StartFrom.FRESH
        while not run.trainer.finished:
            report = bank.learn(bank.fill(0, start, steps=16), bank.fill(1, start, steps=4))
            rates.append(report.metrics["learning_rate"])
            start = StartFrom.SEEDED
    assert len(rates) == 5, "4 full rollouts have 256 steps, each of these 40: behind the fifth a full one has no room"
    assert rates == pytest.approx([1e-3 * (1 - 0.95 * 40 * update / 256) for update in range(5)])
