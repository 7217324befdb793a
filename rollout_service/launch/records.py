"""What happens in a run, on record: events of the coordinator as figures, lines of run.log and entries of the logs.

Who calls: the supervisor's main thread, with every message of its inbox. What must never happen: a line per event of a
kind that comes by the thousand; a loss of entries that nobody hears of. Left to others: what follows for processes
(supervisor), what becomes of figures and logs when a learner is lost (succession), the numbers themselves (observe).
"""

from __future__ import annotations

import math

from rollout_service.control import events
from rollout_service.launch.run import Run
from rollout_service.observe.metrics import LOG_WRITE_FAILURES, log_record
from rollout_service.observe.remarks import RemarkWatch
from rollout_service.observe.stragglers import AgeWatch, StragglerWatch, gone_without, overdue


class Records:
    """The records of one run."""

    def __init__(self, run: Run) -> None:
        config = run.config
        self._run = run
        self._metrics = run.metrics
        self._journal = run.journal
        self._stragglers = StragglerWatch(preempts=config.preempt_share < 1.0, streaming=config.max_policy_lag > 0)
        self._ages = AgeWatch(config.max_policy_lag)
        self._remarks = RemarkWatch()
        self._shown_at = -math.inf

    def notice(self, message: object, now: float) -> bool:
        """Takes down what an event says of data, updates and logs. True if it says nothing of processes."""
        match message:
            case events.RolloutCommitted():
                self._committed(message, now)
            case events.BatchFormed():
                self._batch_formed(message, now)
            case events.UpdateFinished():
                self._update_finished(message, now)
            case events.RolloutTooOld():
                self._metrics.too_old(message.env_steps)
                self._say(self._ages.notice(message))
            case events.BatchOverdue():
                self._say(overdue(message))
            case events.OutputLost(role=role, actor_id=actor_id):
                who = role.value if actor_id is None else f"{role.value} {actor_id}"
                self._journal.lost.failed(f"the log of {who}", "its disk does not take it", message.writes)
            case events.PeerRefused():
                self._say(f"{message.role.value} (pid {message.pid}) was turned away: {message.reason}")
            case _:
                return False
        return True

    def tell_losses(self) -> None:
        """What the logs have lost goes to the terminal, to run.log once it takes it, and to whoever asks for status."""
        self._journal.tell_losses()
        if (total := self._journal.lost.total) != self._metrics.counters[LOG_WRITE_FAILURES]:
            self._metrics.counters[LOG_WRITE_FAILURES] = total
            self._run.server.submit(lambda coordinator, _at: coordinator.counted(LOG_WRITE_FAILURES, total))

    def show(self, now: float) -> None:
        """Draws the progress, if it is time to."""
        if now - self._shown_at >= self._run.progress.interval_s:
            self._shown_at = now
            self._run.progress.show(self._metrics.summary(now))

    def _committed(self, event: events.RolloutCommitted, now: float) -> None:
        self._metrics.rollout(
            episodes=event.episodes,
            seconds=event.seconds,
            counters=event.counters,
            now=now,
            actor_id=event.actor_id,
            slot=event.slot,
            env_steps=event.env_steps,
        )
        for line in self._remarks.notice(event.remarks, event.counters):
            self._say(line)

    def _batch_formed(self, event: events.BatchFormed, now: float) -> None:
        self._metrics.batch(
            waited_for=event.waited_for,
            wait_s=event.wait_s,
            partial=len(event.partial),
            late=len(event.late),
            lags=event.lags,
            now=now,
        )
        self._say(gone_without(event))
        self._say(self._stragglers.notice(self._metrics.slowest()))

    def _update_finished(self, event: events.UpdateFinished, now: float) -> None:
        self._metrics.update(
            update=event.update,
            env_steps=event.env_steps,
            figures=event.metrics,
            seconds=event.seconds,
            now=now,
            version=event.version,
        )
        text = self._metrics.checkpoint(event.update, event.checkpoint, event.checkpoint_failure)
        self._run.logs.write(event.env_steps, event.update, log_record(self._metrics.summary(now)))
        if event.checkpoint is not None:
            self._journal.note(f"checkpoint {event.checkpoint}")
        self._say(text)

    def _say(self, text: str | None) -> None:
        if text is not None:
            self._journal.say(text)
