"""What a run is doing, as numbers: episodes, rates, time split. Pure: takes values and `now`, returns values.

Writer: the supervisor's main thread, from the coordinator's events. Readers: progress, logs, the result line.
What must never happen: counting a step that no update consumed, or scaled rewards in `return_mean`.
Leaves to others: drawing (`progress`), files (`jsonl`, `tensorboard`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from rollout_service.control.waits import Pace, Slowest, WaitShares
from rollout_service.observe.losses import MissingCheckpoints
from rollout_service.tally import FinishedEpisode, Tally, TallyRecord

LOG_WRITE_FAILURES: Final = "log_write_failures"
"""Counts entries of logs that could not be written (losses)."""
RECENT_UPDATES: Final = 20
"""Window of the time split and of the rate behind the time left."""


WAIT: Final = "wait"
"""What is left of the time between two commits, or two updates: waiting for the other side."""
COLLECT_INNER: Final = ("policy", "env")
"""Phases that an actor's `collect` contains; the rest of it is writing rows."""


@dataclass(frozen=True)
class Summary:
    """The run at one moment. None where nothing is known yet."""

    env_steps: int
    total_steps: int
    updates: int
    total_updates: int
    """At the end, if all that is still to come are full rollouts."""
    episodes: int
    return_mean: float | None
    success_rate: float | None
    length_mean: float | None
    steps_per_second: float | None
    """From the first env step to the last update."""
    recent_steps_per_second: float | None
    eta_s: float | None
    elapsed_s: float
    actors_alive: int
    num_actors: int
    """That the run begins with."""
    restarts: int
    slowest_actor: int | None
    """The actor that the others waited for longest, over the last minute; in streaming the one that brings least."""
    slowest_share: float
    """Share of that time in which they did; in streaming what it lacks of a typical actor's steps."""
    actor_split: Mapping[str, float]
    """Phase -> share of the actors' time, over the last updates."""
    learner_split: Mapping[str, float]
    figures: Mapping[str, float]
    """The learner's figures of the last update."""
    counters: Mapping[str, int]
    version: int | None = None
    """Of the weights that the last update made."""
    learner_restarts: int = 0
    streaming: bool = False
    max_actors: int | None = None
    """That may be there at once; None: num_actors."""
    policy_lags: Mapping[int, int] = field(default_factory=dict)
    """Policy lag in updates -> rollouts trained on with it, so far."""
    checkpoint_missing_since: int | None = None
    """The first update whose checkpoint was due and could not be written, until one is."""


@dataclass
class RunMetrics:
    """Aggregates one run. `env_steps` and `updates` start above 0 in a resumed run."""

    total_steps: int
    total_updates: int
    num_actors: int
    started: float
    max_actors: int | None = None
    streaming: bool = False
    """Nobody waits for anybody: who is slow brings less."""
    env_steps: int = 0
    updates: int = 0
    restarts: int = 0
    learner_restarts: int = 0
    version: int | None = None
    figures: dict[str, float] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    """What became of processes and rollouts."""
    tally: Tally = field(default_factory=Tally)
    """What the rollouts said."""
    missing: MissingCheckpoints = field(default_factory=MissingCheckpoints)

    def __post_init__(self) -> None:
        self.furthest = self.updates
        """The highest update that was ever finished."""
        self._steps_before = self.env_steps
        self._first_step: float | None = None
        self._last_update: float | None = None
        self._alive: set[int] = set()
        self._actor_phases: deque[Mapping[str, float]] = deque(
            maxlen=RECENT_UPDATES * (self.max_actors or self.num_actors)
        )
        self._learner_phases: deque[Mapping[str, float]] = deque(maxlen=RECENT_UPDATES)
        self._last_commit: dict[int, float] = {}
        self._marks: deque[tuple[float, int]] = deque(maxlen=RECENT_UPDATES + 1)
        self._waits = WaitShares()
        self._pace = Pace()
        self._unordered: list[tuple[int, FinishedEpisode]] = []
        """(slot, episode) of the slots that have been filled since the last batch, as they arrived."""

    def actor_joined(self, actor_id: int) -> None:
        self._alive.add(actor_id)

    def actor_left(self, actor_id: int) -> None:
        self._alive.discard(actor_id)
        self._last_commit.pop(actor_id, None)
        self._pace.forget(actor_id)

    def rollout(
        self,
        *,
        episodes: Iterable[FinishedEpisode],
        seconds: Mapping[str, float],
        counters: Mapping[str, int],
        now: float,
        actor_id: int | None = None,
        slot: int | None = None,
        env_steps: int = 0,
    ) -> None:
        """One accepted commit. seconds: phase -> seconds of the lease. With an actor_id its waiting is told apart.

        With a slot its episodes count once `batch` is called, in the order of slots: means over the last episodes do
        not depend on which actor was faster. Without one they count at once.
        """
        phases = disjoint(seconds)
        busy = sum(phases.values())
        if self._first_step is None:
            self._steps_before = self.env_steps
            self._marks.append((now - busy, self.env_steps))
        if self._last_update is None and (self._first_step is None or now - busy < self._first_step):
            self._first_step = now - busy
        if slot is None:
            self.tally.finish(episodes)
        else:
            self._unordered += [(slot, episode) for episode in episodes]
        if actor_id is not None:
            if actor_id in self._last_commit:
                phases[WAIT] = max(0.0, now - self._last_commit[actor_id] - busy)
            self._last_commit[actor_id] = now
            self._pace.add(actor_id, env_steps, now)
        self._actor_phases.append(phases)
        self.tally.count(counters)

    def batch(
        self,
        *,
        waited_for: int,
        wait_s: float,
        partial: int = 0,
        late: int = 0,
        lags: Iterable[int] = (),
        now: float,
    ) -> None:
        """One batch went to the learner.

        partial, late: how many slots were cut short, or left out. lags: policy lag of each rollout, in updates.
        """
        self.tally.finish(episode for _, episode in sorted(self._unordered, key=itemgetter(0)))
        self._unordered.clear()
        self._waits.add(waited_for, wait_s, now)
        self.counters.update({"partial_rollouts": partial, "late_actors": late})
        self.tally.policy_lags.update(lags)

    def too_old(self, env_steps: int) -> None:
        """A rollout was dropped because of its policy lag."""
        self.counters.update({"dropped_over_lag": 1, "dropped_over_lag_env_steps": env_steps})

    def slowest(self) -> Slowest | None:
        """The actor that the others waited for longest; in streaming the one that brings fewest steps."""
        return self._pace.slowest() if self.streaming else self._waits.slowest()

    def update(
        self,
        *,
        update: int,
        env_steps: int,
        figures: Mapping[str, float],
        seconds: Mapping[str, float],
        now: float,
        version: int | None = None,
    ) -> None:
        """One finished update. env_steps: env steps consumed up to and including it. version: of its weights."""
        self.updates, self.env_steps, self.version = update, env_steps, version
        self.furthest = max(self.furthest, update)
        self.figures = dict(figures)
        phases = dict(seconds)
        if self._last_update is not None:
            phases[WAIT] = max(0.0, now - self._last_update - sum(seconds.values()))
        self._last_update = now
        self._learner_phases.append(phases)
        self._marks.append((now, env_steps))

    def checkpoint(self, update: int, written: object, failure: str | None) -> str | None:
        """What became of the checkpoint behind an update. Returns what to say of it, if anything."""
        text = self.missing.notice(update, written, failure)
        self.counters["checkpoint_failures"] = self.missing.failures
        return text

    def restore(self, tally: TallyRecord) -> None:
        """A learner is ready, as of whose last update this is the tally."""
        self.tally.restore(tally)
        self._unordered.clear()

    def go_back(self, *, update: int, env_steps: int, now: float) -> None:
        """The run goes on from a checkpoint; what came after it was lost."""
        self.updates, self.env_steps = update, env_steps
        self._marks.clear()
        self._marks.append((now, env_steps))

    def summary(self, now: float) -> Summary:
        recent = self._rate(self._marks[0], self._marks[-1]) if self._marks else None
        left = self.total_steps - self.env_steps
        slowest = self.slowest()
        full_rollout = max(1, self.total_steps // max(1, self.total_updates))
        return Summary(
            env_steps=self.env_steps,
            total_steps=self.total_steps,
            updates=self.updates,
            total_updates=self.updates + max(0, left) // full_rollout,
            episodes=self.tally.episodes,
            return_mean=self.tally.return_mean,
            success_rate=self.tally.success_rate,
            length_mean=self.tally.length_mean,
            steps_per_second=self._overall_rate(),
            recent_steps_per_second=recent,
            eta_s=max(left, 0) / recent if recent else None,
            elapsed_s=now - self.started,
            actors_alive=len(self._alive),
            num_actors=self.num_actors,
            restarts=self.restarts,
            slowest_actor=None if slowest is None else slowest.actor_id,
            slowest_share=0.0 if slowest is None else slowest.share,
            actor_split=_split(self._actor_phases),
            learner_split=_split(self._learner_phases),
            figures=self.figures,
            counters=dict(self.tally.counters + self.counters),
            version=self.version,
            learner_restarts=self.learner_restarts,
            streaming=self.streaming,
            max_actors=self.max_actors,
            policy_lags=dict(sorted(self.tally.policy_lags.items())),
            checkpoint_missing_since=self.missing.since,
        )

    def _overall_rate(self) -> float | None:
        if self._first_step is None or self._last_update is None:
            return None
        return self._rate((self._first_step, self._steps_before), (self._last_update, self.env_steps))

    @staticmethod
    def _rate(first: tuple[float, int], last: tuple[float, int]) -> float | None:
        seconds = last[0] - first[0]
        return (last[1] - first[1]) / seconds if seconds > 0 and last[1] > first[1] else None


def log_record(summary: Summary) -> dict[str, float]:
    """The scalars of one log entry, by tag; unknown ones are left out."""
    scalars: dict[str, float | None] = {
        "rollout/return_mean": summary.return_mean,
        "rollout/success_rate": summary.success_rate,
        "rollout/length_mean": summary.length_mean,
        "rollout/episodes": summary.episodes,
        "time/steps_per_second": summary.recent_steps_per_second,
        "time/elapsed_s": summary.elapsed_s,
        "actors/alive": summary.actors_alive,
        "actors/restarts": summary.restarts,
        "actors/slowest": summary.slowest_actor,
        f"actors/slowest_{'behind' if summary.streaming else 'waited'}_share": summary.slowest_share,
        "learner/restarts": summary.learner_restarts,
        "learner/version": summary.version,
        "learner/checkpoint_missing_since": summary.checkpoint_missing_since,
        **{f"learner/{name}": value for name, value in summary.figures.items()},
        **{f"split_actor/{name}": value for name, value in summary.actor_split.items()},
        **{f"split_learner/{name}": value for name, value in summary.learner_split.items()},
        **{f"count/{name}": value for name, value in summary.counters.items()},
        **{f"policy_lag/{lag}": count for lag, count in summary.policy_lags.items()},
    }
    return {tag: float(value) for tag, value in scalars.items() if value is not None}


def disjoint(seconds: Mapping[str, float]) -> dict[str, float]:
    """An actor's phases without overlap: `collect` contains policy and env, what is left of it is called write."""
    phases = dict(seconds)
    if (whole := phases.pop("collect", None)) is not None:
        phases["write"] = max(0.0, whole - sum(phases.get(name, 0.0) for name in COLLECT_INNER))
    return phases


def _split(phases: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: Counter[str] = Counter()
    for seconds in phases:
        for phase, value in seconds.items():
            totals[phase] += value  # type: ignore[assignment]
    whole = sum(totals.values())
    return {phase: value / whole for phase, value in totals.items()} if whole > 0 else {}
