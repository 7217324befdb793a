"""A tally goes from process to process, and on from where its record was taken."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rollout_service.control.messages import Ready, decode, encode
from rollout_service.tally import COUNTERS_KEPT, RETURN_WINDOW, Tally, TallyRecord


@dataclass
class Episode:
    total_reward: float
    length: int = 4
    success: bool | None = None


def tally_of(count: int) -> Tally:
    """So many episodes, of which every second reports success, and every fourth had it."""
    tally = Tally()
    tally.finish(Episode(k / 7, k, None if k % 2 else k % 4 == 0) for k in range(count))
    tally.count({"odd": count})
    tally.policy_lags.update([0, 0, 2])
    return tally


def test_a_restored_tally_goes_on_as_the_one_it_was_taken_of() -> None:
    tally, other = tally_of(150), Tally()
    record = tally.record()
    other.restore(TallyRecord.model_validate(json.loads(json.dumps(record.model_dump(mode="json")))))
    for each in (tally, other):
        each.finish([Episode(3.0, 9, True)])
        each.count({"odd": 1})
        each.policy_lags.update([1])
    assert other.record() == tally.record()
    assert (other.episodes, other.counters, other.policy_lags) == (151, {"odd": 151}, {0: 2, 1: 1, 2: 1})
    assert other.return_mean == (sum(k / 7 for k in range(51, 150)) + 3.0) / RETURN_WINDOW
    assert other.success_rate == (38 + 1) / (75 + 1)


def test_an_older_record_takes_back_what_came_after_it() -> None:
    tally = tally_of(3)
    record = tally.record()
    tally.finish([Episode(1e9)] * 200)
    tally.count({"other": 1})
    tally.restore(record)
    assert tally.record() == record == tally_of(3).record()


def test_a_full_one_is_a_small_message() -> None:
    tally = tally_of(5000)
    tally.count({f"{'x' * 60}{number:04}": 2**63 - 1 for number in range(1000)})
    assert len(tally.counters) == COUNTERS_KEPT
    ready = Ready(version=1, tally=tally.record())
    packed = encode(ready)
    assert decode(packed) == ready
    assert len(packed) < 32 * 1024


def test_a_mean_that_is_not_finite_is_no_score() -> None:
    tally = Tally()
    assert tally.return_mean is tally.record().score is None
    tally.finish([Episode(float("inf"))])
    assert tally.return_mean == float("inf")
    assert tally.record().score is None
