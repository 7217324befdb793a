"""Actors that fail: what follows from the death of one, as `on_actor_failure` has it.

    restart     another one in its place, within the budget; then the run ends
    continue    nobody in its place, unless somebody takes it by hand; the run ends once no actor is left
    stop        the run ends

An actor that hangs has been killed before anybody asks here. What must never happen: an endless restart loop; a run
that goes on without anybody who could bring it further; a traceback said twice.
Who calls: the supervisor, which starts, kills and reaps the processes, and knows who is left. Left to others: how often
and how soon (restarts), what guests say of themselves (guests).
"""

from __future__ import annotations

from rollout_service.config import OnActorFailure
from rollout_service.launch.children import Child
from rollout_service.launch.ending import Ending, failed
from rollout_service.launch.restarts import RestartBudget, RestartsFromCheckpoint
from rollout_service.launch.run import Run


class ActorFailures:
    """The failed actors of one run. Says what happens to the journal, and counts it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._policy = run.config.on_actor_failure
        limits = run.config.max_restarts, run.config.restart_window
        self._from_checkpoint = RestartsFromCheckpoint(*limits) if run.config.deterministic else None
        self._budget = RestartBudget(*limits) if self._from_checkpoint is None else self._from_checkpoint.budget
        self._last = ""
        """Who failed last and has no successor."""

    @property
    def some_given_up(self) -> bool:
        """Somebody failed whom nobody replaces."""
        return bool(self._last)

    def after_death(self, child: Child, reason: str, words: str, left: int, now: float) -> float | Ending | None:
        """Seconds until another one is started, how the run ends, or None if it goes on without.

        reason: e.g. `ended with exit code 1`. words: the last ones of that process, a traceback if it had one. left:
        actors that are still there.
        """
        what, failure = f"{child.name} {reason}", f"actor {child.actor_id} {reason}"
        if self._policy is OnActorFailure.STOP:
            self._say(f"{what}; the run stops (on_actor_failure stop)", words)
            return failed(failure)
        if self._policy is OnActorFailure.CONTINUE:
            self._say(f"{what}; not replaced, {left} actors are left (on_actor_failure continue)", words)
            self._give_up(failure)
            return None
        budget = self._budget
        verdict = self._verdict(child.actor_id, now)
        if isinstance(verdict, str):
            self._say(f"{what}; the run stops: {verdict}", words)
            return failed(f"{failure}, and no restart is left")
        when = f"in {verdict:g} s" if verdict else "now"
        count = f"restart {budget.spent} of {budget.max_restarts} within {budget.window_s:g} s"
        back = "" if self._from_checkpoint is None else "; the run goes back to the last barrier"
        self._say(f"{what}; replaced {when} ({count}){back}", words)
        self._run.metrics.restarts += 1
        return verdict

    def after_guest(self, failure: str, left: int) -> Ending | None:
        """How the run ends after the failure of an actor that nobody here has started; None if it goes on."""
        if self._policy is OnActorFailure.STOP:
            return failed(failure)
        if self._policy is OnActorFailure.CONTINUE:
            self._give_up(failure)
            return None if left else self.nobody_left()
        return None

    def nobody_left(self) -> Ending:
        """How a run ends in which nobody is replaced, once nobody is left."""
        return failed(f"no actor is left (on_actor_failure continue); the last that failed: {self._last}")

    def _verdict(self, actor_id: int, now: float) -> float | str:
        """Seconds until another one is started, or why none is."""
        if self._from_checkpoint is not None:
            return self._from_checkpoint.after_death(reached=self._run.metrics.furthest, now=now, actor_id=actor_id)
        delay = self._budget.spend(actor_id, now)
        return self._budget.used_up if delay is None else delay

    def _give_up(self, failure: str) -> None:
        self._last = failure
        self._run.metrics.counters["actors_given_up"] += 1

    def _say(self, text: str, words: str) -> None:
        self._run.journal.say(f"{text}\n{words}".rstrip())
