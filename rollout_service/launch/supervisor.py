"""The supervisor: starts the processes of a run, replaces those that die or hang, and ends everything once.

Without a launcher it starts nobody: actors and learner come by themselves, as guests.

    inbox <- events of the coordinator | ChildEnded | ChildGone | Interruption        one queue, one thread, no polling

    phase      leaves by                                                               what is done meanwhile
    RUNNING    last update | Ctrl-C, SIGTERM | budget spent | failure                  replace children, log, draw
    STOPPING   no child left, no guest left or worth waiting for                       STOP; SIGTERM, SIGKILL for
                                                                                       children that are overdue

Who writes: the main thread alone starts, signals and reaps children, writes logs and draws; the coordinator runs in the
server's thread and is spoken to through `server.submit`. A new actor starts its envs anew; a new learner goes on from
the newest checkpoint, and the logs are cut back to it. What must never happen: an exit that leaves a process, a segment
or a socket behind, whichever way the run ends; file IO in the coordinator's thread; torch in this process.
Left to others: how a child is started and described (children), whether one comes back (failures, succession),
processes that were started by hand (guests), figures and logs (records).
"""

from __future__ import annotations

import heapq
import itertools
import queue
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final

from rollout_service import offspring
from rollout_service.control import events
from rollout_service.control.coordinator import FINISHED
from rollout_service.control.messages import Role
from rollout_service.control.roster import SILENT_PHASE
from rollout_service.errors import ProtocolError
from rollout_service.launch.children import Child, ChildEnded, ChildGone, Launcher, describe_exit, kill_with_descendants
from rollout_service.launch.ending import PATIENCE, Ending, How, failed
from rollout_service.launch.failures import ActorFailures
from rollout_service.launch.guests import Guests
from rollout_service.launch.records import Records
from rollout_service.launch.run import Run
from rollout_service.launch.signals import Interruption
from rollout_service.launch.succession import Succession
from rollout_service.lifeline import STACK_DUMP_SIGNAL

STACK_DUMP_S: Final = 0.5
"""A stuck child gets this long to write its stacks before it is killed."""
LAST_WORDS_S: Final = 2.0
"""The service's thread gets this long to pass on what it has received; it is woken: a bound, not a wait."""
START_TRIES: Final = 30
START_AGAIN_S: Final = 1.0
"""Between two tries to start a process that the system refuses."""
START_DEADLINE_S: Final = 120.0
"""From a process start to an actor's JOIN or the learner's HELLO: importing torch, making envs. Longer is a hang."""


class Supervisor:
    """One run's processes, from the first start to the last exit."""

    def __init__(
        self,
        run: Run,
        launcher: Launcher | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = run.config
        self.num_actors = run.num_actors
        self.launcher = launcher
        self.server = run.server
        self.inbox = run.inbox
        self.metrics = run.metrics
        self.journal = run.journal
        self.logs = run.logs
        self.progress = run.progress
        self.clock = clock
        self.records = Records(run)
        self.guests = Guests(run, is_child=self._is_child, failed=self._guest_failed)
        self.failures = ActorFailures(run)
        self.learners = Succession(run)
        self.ending: Ending | None = None
        self._alive: dict[int, Child] = {}
        self._started: set[tuple[Role, int]] = set()
        self._joined: set[tuple[int, int]] = set()
        self._welcomed_learners: set[int] = set()
        self._killed_for: dict[int, str] = {}
        self._last_words: dict[int, events.PeerLeft] = {}
        """By pid."""
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._stopping_since = 0.0
        self._terminated: set[int] = set()

    def run(self) -> Ending:
        """Starts all children, returns when nobody is left. Any exception ends the children too."""
        try:
            if self.launcher is not None:
                self._start("the learner", self.launcher.learner)
                for actor_id in range(self.num_actors):
                    self._start(f"actor {actor_id}", partial(self.launcher.actor, actor_id, 0))
            self.logs.open()
            self._look_at_guests()
            while self.ending is None or self._alive or self.guests:
                self._turn()
            self._hear_last_words()
        finally:
            self._kill_all()
            if self.launcher is not None:
                self._end_offspring(self.launcher.family, "the processes of the run")
        return self.ending

    def _turn(self) -> None:
        """One message, or one tick of the clock."""
        now = self.clock()
        wait = min(self.progress.interval_s, self._timers[0][0] - now if self._timers else self.progress.interval_s)
        try:
            message = self.inbox.get(timeout=max(0.0, wait))
        except queue.Empty:
            pass
        else:
            self._react(message)
        now = self.clock()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        if self.ending is not None:
            self._press(now)
        self.records.tell_losses()
        self.records.show(now)

    def _hear_last_words(self) -> None:
        """What the roles said before they left: an update that is in a checkpoint has to be in the log too."""
        with suppress(TimeoutError, ProtocolError):
            self.server.submit(lambda _coordinator, _now: []).result(LAST_WORDS_S)
        with suppress(queue.Empty):
            while True:
                self._react(self.inbox.get_nowait())
        self.records.tell_losses()

    def _react(self, message: object) -> None:
        now = self.clock()
        if self.guests.notice(message):
            self._end_without_actors()
            return
        if self.records.notice(message, now):
            return
        match message:
            case ChildEnded(process=process):
                if child := self._alive.pop(process.pid, None):
                    self._child_ended(child, process.wait())
            case ChildGone(child=child, code=code):
                self._child_gone(child, code, now)
            case Interruption():
                self._interrupted(message)
            case events.ActorJoined():
                self._joined.add((message.actor_id, message.incarnation))
                self.metrics.actor_joined(message.actor_id)
            case events.ActorStuck():
                self._actor_stuck(message)
            case events.PeerWelcomed(role=Role.LEARNER):
                self._welcomed_learners.add(message.pid)
            case events.PeerWelcomed():
                pass
            case events.LearnerReady():
                self.learners.ready(message, now)
            case events.LearnerStuck():
                limit = f"(learner_timeout {self.config.learner_timeout:g} s)"
                self._learner_stuck(message.pid, f"was stuck in {message.phase} for {message.seconds:.1f} s {limit}")
            case events.LearnerSilent():
                self._learner_stuck(message.pid, f"sent no heartbeat for {message.seconds:.1f} s")
            case events.PeerLeft():
                self._last_words[message.pid] = message
            case events.RunFinished(reason) if reason != FINISHED and self.ending is None:
                self.journal.say(reason)
                self._stop(failed(reason))
            case events.RunFinished():
                self._stop(Ending(How.FINISHED, message.reason, 0))
            case events.ServerFailed():
                self.journal.say(message.traceback.rstrip())
                self._stop(failed(f"the service failed: {message.error}"))
            case _:
                raise TypeError(f"unexpected message in the supervisor's inbox: {message!r}")

    # Children

    def _start(self, who: str, start: Callable[[], Child], tries: int = 1) -> None:
        """Where the system has no process, descriptor or memory to give at the moment, it may have one soon."""
        if self.ending is not None:
            return
        try:
            self._adopt(start())
        except OSError as error:
            text = f"{who} cannot be started: {error.strerror}"
            if tries == START_TRIES:
                self._stop(failed(f"{text}, {tries} times in a row"))
                return
            if tries & (tries - 1) == 0:
                self.journal.say(f"{text}; tried again in {START_AGAIN_S:g} s (try {tries} of {START_TRIES})")
            self._after(START_AGAIN_S, lambda: self._start(who, start, tries + 1))

    def _adopt(self, child: Child) -> None:
        self._alive[child.process.pid] = child
        self._started.add((child.role, child.process.pid))
        self.journal.note(f"started {child.name}")
        self._after(START_DEADLINE_S, lambda: self._check_joined(child))

    def _has_joined(self, child: Child) -> bool:
        if child.role is Role.LEARNER:
            return child.process.pid in self._welcomed_learners
        return (child.actor_id, child.incarnation) in self._joined

    def _check_joined(self, child: Child) -> None:
        if not self._has_joined(child):
            self._kill_stuck(child, f"did not join within {START_DEADLINE_S:g} s of its start")

    def _child_ended(self, child: Child, code: int) -> None:
        """What follows waits for what the service has heard by now: the child's goodbye, or that the run is over."""
        self.journal.note(f"{child.name} ended with {describe_exit(code)}")
        if child.role is Role.ACTOR:
            self.metrics.actor_left(child.actor_id)
        if self.ending is None:
            if self.launcher is not None:
                self._end_offspring(self.launcher.mark(child.log), child.name)
            self._report_lost(child, code).add_done_callback(lambda _: self.inbox.put(ChildGone(child, code)))
        else:
            self._child_gone(child, code, self.clock())

    def _report_lost(self, child: Child, code: int) -> Future[None]:
        pid, actor_id, incarnation = child.process.pid, child.actor_id, child.incarnation
        if child.role is Role.LEARNER:
            return self.server.submit(lambda coordinator, at: coordinator.learner_lost(at, pid))
        reason = self._killed_for.get(pid, f"ended with {describe_exit(code)}")
        return self.server.submit(lambda coordinator, at: coordinator.actor_lost(actor_id, incarnation, reason, at))

    def _child_gone(self, child: Child, code: int, now: float) -> None:
        words = self._words_of(child)
        if self.ending is not None:
            asked = child.process.pid in self._terminated or code in (0, -signal.SIGTERM)
            if not asked and self.ending.how is not How.FAILED:
                self.journal.say(f"{child.name} ended with {describe_exit(code)} while stopping\n{words}".rstrip())
            return
        if child.role is Role.LEARNER:
            self._learner_ended(child, code, words, now)
        else:
            self._actor_ended(child, code, words, now)

    def _words_of(self, child: Child) -> str:
        """The last ones of a child that is gone: a traceback, or the end of its log and what its disk did not take."""
        left = self._last_words.pop(child.process.pid, None)
        if left is not None and left.traceback:
            return left.traceback
        tail = child.log_tail()
        return tail if left is None or left.reason in tail else f"{tail}\n{left.reason}".strip()

    def _learner_ended(self, child: Child, code: int, words: str, now: float) -> None:
        """Another one goes on from the newest checkpoint, unless that would only end the same way."""
        reason = self._killed_for.pop(child.process.pid, f"ended with {describe_exit(code)}")
        delay = self.learners.after_death(child, reason, code, words, now)
        if delay is None:
            self._stop(failed(f"the learner {reason}"))
        else:
            self._after(delay, self._restore_learner)

    def _restore_learner(self) -> None:
        if self.ending is None and self.launcher is not None:
            self._start("the learner", partial(self.launcher.learner, restored=True))

    def _learner_stuck(self, pid: int, text: str) -> None:
        if (child := self._alive.get(pid)) is not None:
            self._kill_stuck(child, text)

    def _actor_ended(self, child: Child, code: int, words: str, now: float) -> None:
        actor_id, incarnation = child.actor_id, child.incarnation
        reason = self._killed_for.pop(child.process.pid, f"ended with {describe_exit(code)}")
        match self.failures.after_death(child, reason, words, self._actors_left(), now):
            case Ending() as ending:
                self._stop(ending)
            case None:
                self.server.submit(lambda coordinator, at: coordinator.abandon_actor(actor_id, at))
                self._end_without_actors()
            case delay:
                self._after(delay, lambda: self._replace(actor_id, incarnation + 1))

    def _actors_left(self) -> int:
        return sum(child.role is Role.ACTOR for child in self._alive.values()) + self.guests.actors

    def _end_without_actors(self) -> None:
        """Where nobody is replaced the run ends with its last actor; under `serve` others may come by themselves."""
        given_up = self.launcher is not None and self.failures.some_given_up
        if self.ending is None and given_up and not self._actors_left():
            self._stop(self.failures.nobody_left())

    def _replace(self, actor_id: int, incarnation: int) -> None:
        if self.ending is None and self.launcher is not None:
            self._start(f"actor {actor_id}", partial(self.launcher.actor, actor_id, incarnation))

    def _actor_stuck(self, event: events.ActorStuck) -> None:
        limit = f"step_timeout {self.config.step_timeout:g} s"
        if event.phase == SILENT_PHASE:
            limits = f"(silence_timeout {self.config.silence_timeout:g} s, at work {limit})"
            text = f"sent no heartbeat for {event.seconds:.1f} s {limits}"
        else:
            text = f"was stuck in {event.phase} for {event.seconds:.1f} s ({limit})"
        if (child := self._alive.get(event.pid)) is not None:
            self._kill_stuck(child, text)

    def _kill_stuck(self, child: Child, why: str) -> None:
        """First its stacks into its log, then the end; its death is then reported like any other."""
        pid = child.process.pid
        if pid in self._alive and pid not in self._killed_for:
            self._killed_for[pid] = f"{why} and was killed"
            child.process.send_signal(STACK_DUMP_SIGNAL)
            self._after(STACK_DUMP_S, lambda: self._kill(child))

    def _kill(self, child: Child) -> None:
        if child.process.pid in self._alive:
            kill_with_descendants(child.process)

    def _end_offspring(self, mark: str, whose: str) -> None:
        """Of one that is gone: its successor may want the same port, or the memory."""
        if count := offspring.end(mark):
            self.journal.say(f"left behind by {whose}, and ended: {count} process{'' if count == 1 else 'es'}")

    def _after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.clock() + delay, next(self._timer_numbers), action))

    # Guests

    def _is_child(self, role: Role, pid: int) -> bool:
        """Also of one that is dead: what it said may be heard after its end."""
        return (role, pid) in self._started

    def _guest_failed(self, reason: str) -> None:
        if self.ending is None and (ending := self.failures.after_guest(reason, self._actors_left())) is not None:
            self._stop(ending)

    def _look_at_guests(self) -> None:
        self.guests.look()
        self._after(self.guests.look_every_s, self._look_at_guests)

    # The end

    def _interrupted(self, interruption: Interruption) -> None:
        if self.ending is not None:
            self.journal.say(f"{interruption.name} while stopping: killing what is left")
            self._kill_all()
            for role in Role:
                self.guests.give_up(role, self.clock() - self._stopping_since)
            return
        saves = "" if self.config.deterministic else ", the learner saves a checkpoint"
        self.journal.say(f"{interruption.name}: stopping{saves} (again: stop at once)")
        self._stop(Ending(How.INTERRUPTED, f"interrupted by {interruption.name}", interruption.exit_code))

    def _stop(self, ending: Ending) -> None:
        """From RUNNING to STOPPING. A second reason changes nothing."""
        if self.ending is not None:
            return
        self.ending = ending
        self._stopping_since = self.clock()
        self._timers.clear()
        self.guests.told_to_leave()
        self._look_at_guests()
        self.server.submit(lambda coordinator, at: coordinator.stop(ending.reason, at))
        for child in self._alive.values():
            if not self._has_joined(child):
                # Still importing: it cannot hear STOP, and has nothing to save.
                self._terminate(child)

    def _press(self, now: float) -> None:
        """SIGTERM, then SIGKILL, for whoever is overdue; and a timer for the next one."""
        if self.ending is None:
            return
        waited = now - self._stopping_since
        for role in (Role.ACTOR, Role.LEARNER):
            if waited >= PATIENCE[self.ending.how, role].kill_s:
                self.guests.give_up(role, waited)
        due = []
        for child in self._alive.values():
            patience = PATIENCE[self.ending.how, child.role]
            if waited >= patience.kill_s:
                if child.process.pid not in self._killed_for:
                    self.journal.say(f"{child.name} did not stop within {patience.kill_s:g} s and was killed")
                    self._killed_for[child.process.pid] = "overdue"
                    self._terminated.add(child.process.pid)
                    kill_with_descendants(child.process)
            elif waited >= patience.term_s:
                self._terminate(child)
                due.append(patience.kill_s)
            else:
                due.append(patience.term_s)
        if due and not self._timers:
            self._after(max(0.0, min(due) - waited), lambda: None)

    def _terminate(self, child: Child) -> None:
        if child.process.pid not in self._terminated:
            self._terminated.add(child.process.pid)
            child.process.terminate()

    def _kill_all(self) -> None:
        """The last resort, and the net under every exception."""
        for child in self._alive.values():
            self._terminated.add(child.process.pid)
            kill_with_descendants(child.process)
        for child in self._alive.values():
            child.process.wait()
        self._alive.clear()
