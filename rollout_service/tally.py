"""What a run has counted about its rows, as of one update: finished episodes, oddities in the envs, policy lags. Pure.

    service: BATCH takes it along -> learner: its checkpoint holds it -> READY brings it back -> service

So figures go on where a run goes on, whichever process died in between. Who keeps one: the coordinator, for BATCH; the
supervisor's figures, from the coordinator's events; a serial run. What must never happen: a figure that knows of
episodes from updates that were rolled back. Left to others: what happened to processes and rollouts (restarts, drops)
is counted where it happens, and never taken back.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final, Protocol

from pydantic import BaseModel, ConfigDict, Field

RETURN_WINDOW: Final = 100
"""return_mean and length_mean are over the last this many finished episodes."""
SUCCESS_WINDOW: Final = 1000
"""success_rate is over the last this many finished episodes that report success."""
COUNTERS_KEPT: Final = 256
LARGEST_COUNT: Final = 2**63 - 1

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
FromList = Field(strict=False)
"""For tuples, which msgpack and JSON know as lists; what is in them stays strict."""


class FinishedEpisode(Protocol):
    """What is read of an episode: raw reward sum, length in env steps, success if the env reports it."""

    @property
    def total_reward(self) -> float: ...
    @property
    def length(self) -> int: ...
    @property
    def success(self) -> bool | None: ...


class TallyRecord(BaseModel):
    """A tally at one moment, for messages and checkpoints. Windows begin with the oldest episode."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    episodes: Count = 0
    returns: Annotated[tuple[float, ...], FromList, Field(max_length=RETURN_WINDOW)] = ()
    lengths: Annotated[tuple[Count, ...], FromList, Field(max_length=RETURN_WINDOW)] = ()
    successes: Annotated[str, Field(pattern="^[01]*$", max_length=SUCCESS_WINDOW)] = ""
    counters: Annotated[dict[Annotated[str, Field(max_length=64)], Count], Field(max_length=COUNTERS_KEPT)] = {}
    """What actors counted."""
    policy_lags: Annotated[tuple[Count, ...], FromList] = ()
    """Entry k: rollouts trained on that were k updates old."""

    @property
    def score(self) -> float | None:
        """The mean return, by which checkpoints are compared; None before the first episode, and if not finite."""
        mean = _mean(self.returns)
        return mean if mean is not None and math.isfinite(mean) else None


class Tally:
    """The tally as it grows."""

    def __init__(self) -> None:
        self.restore(TallyRecord())

    def restore(self, record: TallyRecord) -> None:
        """Everything as it was when the record was taken."""
        self.episodes = record.episodes
        self.counters: Counter[str] = Counter(record.counters)
        self.policy_lags: Counter[int] = Counter(dict(enumerate(record.policy_lags)))
        """Policy lag in updates -> rollouts trained on with it."""
        self._returns = deque(record.returns, maxlen=RETURN_WINDOW)
        self._lengths = deque(record.lengths, maxlen=RETURN_WINDOW)
        self._successes = deque(record.successes, maxlen=SUCCESS_WINDOW)

    def record(self) -> TallyRecord:
        return TallyRecord(
            episodes=self.episodes,
            returns=tuple(self._returns),
            lengths=tuple(self._lengths),
            successes="".join(self._successes),
            counters=dict(self.counters),
            policy_lags=tuple(self.policy_lags[lag] for lag in range(max(self.policy_lags, default=-1) + 1)),
        )

    def finish(self, episodes: Iterable[FinishedEpisode]) -> None:
        """Episodes that ended, in an order that does not depend on who was faster."""
        for episode in episodes:
            self.episodes += 1
            self._returns.append(episode.total_reward)
            self._lengths.append(episode.length)
            if episode.success is not None:
                self._successes.append("1" if episode.success else "0")

    def count(self, counters: Mapping[str, int]) -> None:
        """What an actor counted."""
        add_counts(self.counters, counters)

    @property
    def return_mean(self) -> float | None:
        """None before the first episode has ended."""
        return _mean(self._returns)

    @property
    def length_mean(self) -> float | None:
        return _mean(self._lengths)

    @property
    def success_rate(self) -> float | None:
        return self._successes.count("1") / len(self._successes) if self._successes else None


def add_counts(table: Counter[str], counters: Mapping[str, int]) -> None:
    """What an actor counted. Names and numbers are its own: the table stays small, and its entries can be sent."""
    for name, count in counters.items():
        if name in table or len(table) < COUNTERS_KEPT:
            table[name] = min(table[name] + count, LARGEST_COUNT)


def _mean(values: Collection[float]) -> float | None:
    return sum(values) / len(values) if values else None
