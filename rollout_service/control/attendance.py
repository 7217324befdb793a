"""A role's process from the first HELLO to the last BYE: waiting for a service, leaving it, finding it again.

    look for the service, wait_s -> WELCOME -> take the seat -> take part -> BYE -> sockets closed -> seat given up
         ^                                                        |
         +----- reconnect_s > 0, and the service was lost --------+     a new HELLO: nothing is kept but the process

Who uses it: the shells of actor and learner. `take_part` is the role's whole work, once per service; `seat` is what
shows, for as long as it is open, that this process lives.
What must never happen: an exit without a word, a traceback for what one line says better, a role started by hand that
outlives its service without having been asked to. Left to others: children, who follow their parent (lifeline).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from rollout_service.control.client import Client
from rollout_service.control.endpoints import group_id
from rollout_service.control.keys import Keys
from rollout_service.control.messages import Hello, Role, Welcome
from rollout_service.errors import (
    USER_ERRORS,
    CheckpointError,
    ConfigError,
    HandshakeRefused,
    RolloutServiceError,
    SegmentError,
    WaitTimedOut,
)
from rollout_service.lifeline import end_offspring

EXIT_FAILED: Final = 1
GRACE_S: Final = 3.0
"""From the moment an actor is to leave to its end, even if its env does not return: it has nothing to save."""
PLAIN: Final = (CheckpointError, ConfigError, HandshakeRefused, SegmentError, WaitTimedOut)
"""Errors whose text says it all: where they were raised helps nobody."""


@dataclass(frozen=True)
class Attendance:
    """How a role takes part."""

    endpoint: str
    hello: Hello
    by_hand: bool
    """Started by a person: Ctrl-C is meant for it, and nobody ends it if it hangs."""
    wait_s: float
    """For a service that is not there yet."""
    reconnect_s: float = 0.0
    """For one that was lost, e.g. while a supervisor restarts it; 0: leave."""
    key_file: str | None = None
    """The client's keys, for a service on tcp that has keys."""
    group: str | None = None
    """Name or number of the group whose members are trusted to run the service."""

    def attend(
        self,
        take_part: Callable[[Client, Welcome], None],
        seat: Callable[[Welcome], AbstractContextManager[object]],
    ) -> int:
        """Takes part until the service, a signal or an error ends it. Returns the exit code."""
        signals = _Signals(self.by_hand)
        try:
            keys = None if self.key_file is None else Keys.read(Path(self.key_file))
            group = None if self.group is None else group_id(self.group)
            client = Client(self.endpoint, self.hello, connect_deadline_s=self.wait_s, keys=keys, group=group)
        except ConfigError as error:
            self._say(str(error))
            return EXIT_FAILED
        while True:
            signals.stop(client)
            code = self._once(client, take_part, seat)
            if not client.lost or not self.reconnect_s or signals.received:
                return code
            self._say(f"waiting up to {self.reconnect_s:g} s for a service at {self.endpoint}")
            client = Client(self.endpoint, self.hello, connect_deadline_s=self.reconnect_s, keys=keys, group=group)

    def _once(
        self,
        client: Client,
        take_part: Callable[[Client, Welcome], None],
        seat: Callable[[Welcome], AbstractContextManager[object]],
    ) -> int:
        """One service, from HELLO to BYE."""
        welcomed = False
        with ExitStack() as stack:
            if self.by_hand and self.hello.role is Role.ACTOR:
                stack.callback(self._leave_in_time(client).set)
            try:
                welcome = client.connect()
                welcomed = True
                # Given up after the sockets: until BYE is out, the seat says that this process lives.
                stack.enter_context(seat(welcome))
                take_part(client, welcome)
                self._say(f"leaving, {client.stop_reason}")
                client.bye(client.stop_reason or "finished")
                return EXIT_FAILED if client.lost else 0
            except USER_ERRORS as error:
                if client.stopping and not welcomed:
                    self._say(str(error))
                    return 0
                return self._report(client, error)
            finally:
                client.close()

    def _report(self, client: Client, error: BaseException) -> int:
        text = str(error) if isinstance(error, RolloutServiceError) else f"{type(error).__name__}: {error}"
        trace = "" if isinstance(error, PLAIN) else traceback.format_exc()
        if trace:
            # Not in BYE alone: where the service is busy, this process is gone before it is read.
            print(trace, file=sys.stderr, end="")
        self._say(text)
        client.bye(text, trace)
        return EXIT_FAILED

    def _leave_in_time(self, client: Client) -> threading.Event:
        """Ends this process if it has not left within GRACE_S of being told to. Set the event once it has."""
        left = threading.Event()

        def watch() -> None:
            client.wait_until_stopping()
            if (client.lost and self.reconnect_s) or left.wait(GRACE_S):
                return
            end_offspring()
            self._say(f"{client.stop_reason}; ended in {client.pulse.phase}, which did not return within {GRACE_S:g} s")
            os._exit(EXIT_FAILED)

        threading.Thread(target=watch, name="leave-in-time", daemon=True).start()
        return left

    def _say(self, text: str) -> None:
        print(f"{self.hello.role.value}: {text}", file=sys.stderr, flush=True)


class _Signals:
    """SIGTERM, and by hand Ctrl-C and a closed terminal, stop the client. By hand the same one again ends the process.

    A child leaves Ctrl-C to its parent, which then says STOP: it reaches every process of a terminal at once.
    SIGTERM can come more than once: when its parent dies, the kernel sends it for each thread that gets the child.
    """

    def __init__(self, by_hand: bool) -> None:
        self.received = False
        self._by_hand = by_hand
        self._client: Client | None = None
        self._handle("SIGTERM")
        for name in ("SIGINT", "SIGHUP"):
            if by_hand:
                self._handle(name)
        if not by_hand:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def stop(self, client: Client) -> None:
        """From now on this is the client to stop."""
        self._client = client
        if self.received:
            client.stop()

    def _handle(self, name: str) -> None:
        number = getattr(signal, name, None)
        # A signal that is ignored here (nohup) stays ignored.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, self._received)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        self.received = True
        if self._by_hand:
            signal.signal(number, signal.SIG_DFL)
        if self._client is not None:
            self._client.stop(f"stopped by {signal.Signals(number).name}")
