"""Short versions of `make chaos`: faults at random moments in one run, and runs that are stopped at one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench import faults
from bench.faults import OTHERS_PER_KILL, plan, run_with_faults
from bench.short_runs import run_and_stop


def test_after_kills_of_actors_and_learner_the_account_closes_and_nothing_is_left(tmp_path: Path) -> None:
    found = run_with_faults(
        tmp_path, schedule="streaming", actors=2, seconds=3.0, kills=3, measured=0, seed=3, resume=False
    )
    assert [what for what, holds in found["checks"].items() if not holds] == []
    assert found["kills"] == 3
    assert found["faults"]["learner killed"] == 1
    account = found["account"]
    assert account["missing"] == 0
    assert account["committed"] >= account["trained"] > 0
    assert found["slots_checked"] > 0


def test_runs_that_are_stopped_at_random_moments_end_with_a_code_and_leave_nothing(tmp_path: Path) -> None:
    found = run_and_stop(tmp_path, 5, seed=1, longest_s=2.0)
    assert found["problems"] == []
    assert sum(found["exit_codes"].values()) == 5
    assert found["exit_codes"]["SIGKILL: -9"] == 1


@pytest.mark.parametrize("kills", [20, 200])
def test_a_plan_has_the_kills_it_was_asked_for_and_their_share_of_other_faults(kills: int) -> None:
    planned = plan(random.Random(1), 600.0, kills)
    kinds = [fault.kind for fault in planned]
    assert kinds.count("killed") == kills
    assert {kind: kinds.count(kind) for kind in OTHERS_PER_KILL} == {
        kind: round(share * kills) for kind, share in OTHERS_PER_KILL.items()
    }
    assert [fault.at for fault in planned] == sorted(fault.at for fault in planned)
    assert {fault.learner for fault in planned} == {True, False}
    assert planned == plan(random.Random(1), 600.0, kills)
    with_guests = plan(random.Random(1), 600.0, kills, guests=True)
    assert sum(fault.kind == "joined" for fault in with_guests) == kills // 2
    assert sum(fault.kind != "joined" for fault in with_guests) == len(planned)


def test_a_rate_that_is_back_too_late_or_never_is_wrong() -> None:
    def holds(survivors_s: float | None, full_s: float | None) -> list[bool]:
        kills = [{"survivors_s": 1.0, "full_s": 1.0}, {"survivors_s": survivors_s, "full_s": full_s}]
        return list(faults._bars(kills).values())

    assert [holds(2.0, 10.0), holds(2.1, 9.0), holds(1.0, None), holds(None, None)] == [
        [True, True], [False, True], [True, False], [False, False],
    ]  # fmt: skip
