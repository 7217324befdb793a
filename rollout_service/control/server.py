"""The loop around the coordinator: bytes in, decisions, bytes out, in one thread of its own.

Who calls: the process that runs the service (supervisor, or a bare `serve`). Its own threads talk to the coordinator
only through `submit` and `report`, and hear of it only through `events`.
What must never happen: a bad message ends the loop (it is counted, and its sender told); the loop sleeps on a message
that is there, or spins; file IO, process starts or drawing in this thread. An error of the loop itself is no bad
message: it ends the service, peers are told to stop, and `events` says ServerFailed.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final

from rollout_service.control.coordinator import Coordinator, Effect, Notify, Send
from rollout_service.control.events import Event, ServerFailed
from rollout_service.control.messages import StatusReport, Stop, decode, encode
from rollout_service.control.transport import Router
from rollout_service.errors import MessageRejected, ProtocolError, WaitTimedOut

LONGEST_SLEEP_S: Final = 0.5
"""The loop ticks at least this often, whatever the deadlines say."""
FLUSH_S: Final = 0.5
"""Time that last messages (STOP) get to leave at the end."""
ANSWER_DEADLINE_S: Final = 5.0
"""A loop that does not answer for so long is gone."""

Action = Callable[[Coordinator, float], list[Effect]]


class Server:
    """Owns the router from `start` on, and closes it at its end."""

    def __init__(self, router: Router, coordinator: Coordinator, clock: Callable[[], float] = time.monotonic) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._router = router
        self._coordinator = coordinator
        self._clock = clock
        self._actions: queue.SimpleQueue[tuple[Action, Future[None]]] = queue.SimpleQueue()
        self._leaving = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollout-service", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, action: Action) -> Future[None]:
        """Runs `action(coordinator, now)` in the loop's thread and carries out its effects; safe from any thread."""
        finished: Future[None] = Future()
        if self._ended.is_set():
            finished.set_exception(ProtocolError("the service's loop has ended; nothing can be asked of it any more"))
            return finished
        self._actions.put((action, finished))
        self._router.wake()
        return finished

    def report(self, timeout_s: float = ANSWER_DEADLINE_S) -> dict[str, Any]:
        """The coordinator's report. Raises WaitTimedOut if the loop does not answer."""
        found: dict[str, Any] = {}

        def ask(coordinator: Coordinator, now: float) -> list[Effect]:
            found.update(self._with_refusals(coordinator.report(now)))
            return []

        try:
            self.submit(ask).result(timeout_s)
        except TimeoutError:
            raise WaitTimedOut(f"the service's loop gave no report within {timeout_s} s") from None
        return found

    def stop(self) -> None:
        """Ends the loop, whatever the run's state; `coordinator.stop` is what tells the peers."""
        self._leaving.set()
        self._router.wake()

    def join(self, timeout_s: float = ANSWER_DEADLINE_S) -> None:
        """Waits for the loop's end. Raises WaitTimedOut."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WaitTimedOut(f"the service's loop did not end within {timeout_s} s")

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._leaving.is_set():
                self._turn()
            self._run_actions()
        except Exception as error:
            self._say_goodbye(error)
        finally:
            self._ended.set()
            self._router.close(FLUSH_S)

    def _turn(self) -> None:
        """One round: what arrived, what other threads asked for, what time has brought."""
        now = self._clock()
        sleep = min(LONGEST_SLEEP_S, max(0.0, self._coordinator.next_deadline(now) - now))
        for peer, data in self._router.receive(sleep):
            try:
                message = decode(data)
            except MessageRejected as error:
                self._carry_out(self._coordinator.reject(peer, str(error)))
                continue
            self._carry_out(self._coordinator.handle(peer, message, self._clock()))
        self._run_actions()
        self._carry_out(self._coordinator.tick(self._clock()))

    def _run_actions(self) -> None:
        while True:
            try:
                action, finished = self._actions.get_nowait()
            except queue.Empty:
                return
            try:
                self._carry_out(action(self._coordinator, self._clock()))
            except Exception as error:
                finished.set_exception(error)
                raise
            finished.set_result(None)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        """Messages at once, and events behind them: whoever hears these is a thread of this process, and takes the
        interpreter."""
        told: list[Event] = []
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case Notify(event):
                    told.append(event)
        for event in told:
            self.events.put(event)

    def _send(self, send: Send) -> None:
        """One message. What cannot be packed (a report that grew too large) is counted, and the loop lives."""
        message = send.message
        if isinstance(message, StatusReport):
            message = StatusReport(report=self._with_refusals(message.report))
        try:
            data = encode(message)
        except MessageRejected:
            self._coordinator.counters["unsendable_messages"] += 1
            return
        self._router.send(send.peer, data)

    def _with_refusals(self, report: dict[str, Any]) -> dict[str, Any]:
        """A report of the coordinator, and what the socket refused before it could say a word."""
        return {**report, "counters": dict(sorted({**report["counters"], **(+self._router.counters)}.items()))}

    def _say_goodbye(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        self.events.put(ServerFailed(text, "".join(traceback.format_exception(error))))
        data = encode(Stop(reason=f"the service failed: {text}"[:8000]))
        for peer in self._coordinator.peers():
            self._router.send(peer, data)
