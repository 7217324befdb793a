"""One learner after another: what follows from the death of one, and what the next one's READY means for the run.

The learner holds what the run has learned, and only its checkpoints outlive it. So the next one goes on from the newest
that is usable; counters, `metrics.jsonl` and the TensorBoard events go back with it, and the updates since are made
again. An exception is final: it is a mistake, or something that a person has to look at. What must never happen: a
curve that runs backwards; a restart that can only end as the one before did; a traceback said twice.
Who calls: the supervisor, which starts and reaps the processes. Left to others: how often and how soon (restarts), what
was dropped on the way (control/losses).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rollout_service.control import events
from rollout_service.launch.children import Child
from rollout_service.launch.restarts import RestartsFromCheckpoint
from rollout_service.launch.run import Run
from rollout_service.launch.rundir import ResumePoint, newest_point
from rollout_service.observe.metrics import log_record


class Succession:
    """The learners of one run. Says what happens to the journal, and takes numbers and logs along."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._restarts = RestartsFromCheckpoint(run.config.max_restarts, run.config.restart_window)

    def after_death(self, child: Child, reason: str, code: int, words: str, now: float) -> float | None:
        """Seconds until the next one is started, or None if the run has to stop.

        reason: e.g. `ended with exit code 1`. words: the last ones of that process, a traceback if it had one.
        """
        point = newest_point(self._run.path)
        for warning in point.warnings:
            self._run.journal.say(warning)
        verdict = self._verdict(code, point, now)
        if isinstance(verdict, str):
            self._run.journal.say(f"{child.name} {reason}; the run stops: {verdict}\n{words}".rstrip())
            return None
        when = f"in {verdict:g} s" if verdict else "now"
        budget = self._restarts.budget
        count = f"restart {budget.spent} of {budget.max_restarts} within {budget.window_s:g} s"
        origin = "the start" if point.checkpoint is None else point.checkpoint.name
        lost = max(0, self._run.metrics.env_steps - point.env_steps)
        self._run.journal.say(
            f"{child.name} {reason}; restarted {when} ({count}) from {origin} (update {point.updates}, env step "
            f"{point.env_steps}): {lost} env steps are rolled back\n{words}".rstrip()
        )
        self._run.metrics.learner_restarts += 1
        return verdict

    def ready(self, event: events.LearnerReady, now: float) -> None:
        """The run stands where this learner stands."""
        metrics = self._run.metrics
        metrics.missing.forget()
        if event.env_steps < metrics.env_steps:
            self._run.logs.cut_back(event.env_steps)
        if (event.updates, event.env_steps) != (metrics.updates, metrics.env_steps):
            metrics.go_back(update=event.updates, env_steps=event.env_steps, now=now)
        metrics.restore(event.tally)
        if event.figures and self._run.logs.reaches < event.env_steps:
            # The service of an earlier run died before it heard of the update that its learner had just saved.
            then = replace(metrics.summary(now), figures=event.figures, version=event.version)
            self._run.logs.write(event.env_steps, event.updates, log_record(then))
        if event.restored:
            metrics.counters.update({name: count for name, count in costs(event).items() if count})
            self._run.journal.say(goes_on(event))

    def _verdict(self, code: int, point: ResumePoint, now: float) -> float | str:
        if code > 0:
            return "an error of the learner's own is not tried again"
        if point.checkpoint is None and point.warnings:
            return "there is no usable checkpoint to go on from"
        return self._restarts.after_death(reached=self._run.metrics.furthest, now=now)


def costs(event: events.LearnerReady) -> Mapping[str, int]:
    return {
        "dropped_rollouts": event.dropped_rollouts,
        "dropped_env_steps": event.dropped_env_steps,
        "rolled_back_updates": event.rolled_back_updates,
        "rolled_back_env_steps": event.rolled_back_env_steps,
    }


def goes_on(event: events.LearnerReady) -> str:
    """Where a restored learner goes on, and what that costs, in one line."""
    return (
        f"learner (pid {event.pid}) goes on from update {event.updates}, env step {event.env_steps}, with weights "
        f"version {event.version}; rolled back: {event.rolled_back_updates} updates, {event.rolled_back_env_steps} env "
        f"steps; dropped: {event.dropped_rollouts} rollouts, {event.dropped_env_steps} env steps"
    )
