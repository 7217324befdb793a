"""The state of a run for people and programs: what `status` shows. Pure.

Reader: whoever sends STATUS. JSON-able, and complete without any other message. What must never happen: a decision that
rests on it, or a change of the run by looking at it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rollout_service.control.admission import Admission
from rollout_service.control.filling import Filling
from rollout_service.control.leases import Leases
from rollout_service.control.roster import Place, PlaceState, Rate, rounded_since
from rollout_service.control.updates import Updates


@dataclass(frozen=True)
class RunReport:
    """The parts of a run that a report is made of."""

    run_id: str
    admission: Admission
    leases: Leases
    filling: Filling
    updates: Updates
    collected: Rate
    """Env steps."""
    counters: Counter[str]

    def at(self, now: float, *, stopped: str | None, stopped_at: float | None) -> dict[str, Any]:
        """stopped, stopped_at: why the run is over and since when, if it is."""
        updates, filling = self.updates, self.filling
        return {
            "run_id": self.run_id,
            "state": "stopped" if stopped is not None else self._state(),
            "stop_reason": stopped,
            "stopped_seconds": rounded_since(stopped_at, now),
            "without_learner_seconds": rounded_since(self.admission.learner_gone_at, now),
            "version": updates.version,
            "updates": updates.done,
            "total_updates": updates.expected(),
            "env_steps": updates.env_steps,
            "checkpoint_missing_since": updates.checkpoint_missing_since,
            "waiting_for": filling.waited_for(),
            "waiting_seconds": filling.waiting_seconds(now),
            "slots": {state.value: count for state, count in self.leases.ledger.count().items()},
            "actors": [self._place(place, now) for place in self.admission.roster.places],
            "learner": self._learner(now),
            "rates": {
                "env_steps_per_second": round(self.collected.per_second(now), 3),
                "updates_per_second": round(updates.rate.per_second(now), 3),
            },
            "policy_lags": {str(lag): count for lag, count in sorted(updates.tally.policy_lags.items())},
            "account": updates.balance(),
            "counters": dict(sorted((+self.counters).items())),
        }

    def _state(self) -> str:
        learner = self.admission.learner
        if learner is None or not learner.ready:
            return "waiting for the learner"
        return "collecting" if self.updates.batch is None else "updating"

    def _place(self, place: Place, now: float) -> dict[str, Any]:
        return {
            "actor_id": place.actor_id,
            "incarnation": max(place.incarnation, 0),
            "pid": place.pid if place.occupied else None,
            "state": self._doing(place) if place.state is PlaceState.JOINED else place.state.value,
            "awaited": place.awaited,
            "phase": place.pulse.phase if place.occupied else "",
            "steps_per_second": round(place.rate.per_second(now), 1),
            "lag": place.lag,
            "waited_share": round(self.filling.waits.share(place.actor_id), 3),
            "silent_seconds": rounded_since(place.pulse.heard_at if place.occupied else None, now),
        }

    def _doing(self, place: Place) -> str:
        if self.leases.is_late(place.identity):
            return "late"
        return "waiting" if self.leases.ledger.lease_of(place.identity) is None else "collecting"

    def _learner(self, now: float) -> dict[str, Any] | None:
        learner = self.admission.learner
        if learner is None:
            return None
        return {
            "pid": learner.pid,
            "state": "preparing" if not learner.ready else "waiting" if self.updates.batch is None else "updating",
            "phase": learner.pulse.phase,
            "silent_seconds": rounded_since(learner.pulse.heard_at, now),
        }
