"""Ctrl-C, SIGTERM and SIGHUP as messages in the supervisor's inbox.

Who installs: whoever runs a training, around the whole of it, in the main thread. `queue.SimpleQueue.put` may be
called from a signal handler, and a `get` that waits is interrupted for the handler to run, so the main thread reacts at
once without polling. A serial run has no inbox to wait at: it looks at its StopRequest between steps. What must never
happen: an exception raised in the middle of teardown because a signal came.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final, Protocol

from rollout_service.errors import RolloutServiceError

STOP_SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@dataclass(frozen=True)
class Interruption:
    """A signal asked the run to end."""

    signum: int

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells count: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signum

    @property
    def name(self) -> str:
        return "Ctrl-C" if self.signum == signal.SIGINT else signal.Signals(self.signum).name


class Interrupted(RolloutServiceError):
    """A signal asked the run to end before it had begun."""

    def __init__(self, interruption: Interruption) -> None:
        super().__init__(f"interrupted by {interruption.name}")
        self.interruption = interruption


class Inbox(Protocol):
    """What signals are put into: a `queue.SimpleQueue`, or a StopRequest."""

    def put(self, item: Interruption, /) -> None: ...


class StopRequest:
    """The inbox of a run that is one thread: keeps the first signal, the next is a KeyboardInterrupt on the spot.

    Further ones are ignored: from the second on, all that is left is teardown. So is the second once `close` was
    called.
    """

    def __init__(self) -> None:
        self.first: Interruption | None = None
        self._closed = False

    def __call__(self) -> bool:
        """Whether the run is to end."""
        return self.first is not None

    def put(self, item: Interruption, /) -> None:
        if self.first is None:
            self.first = item
        elif not self._closed:
            self._closed = True
            raise KeyboardInterrupt

    def close(self) -> None:
        """What is left is teardown."""
        self._closed = True


class Signalled(BaseException):
    """A stop signal came where no run listens for it. No SystemExit: an env that calls `sys.exit` is at fault."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = Interruption(signum).exit_code


@contextmanager
def ends_with_a_code() -> Iterator[None]:
    """For the process of one command: no stop signal kills it, whenever it comes.

    Inside, but for the run itself (`interruptions`), all of them raise Signalled. No KeyboardInterrupt: one that passes
    through an `exec` of a string, as imports are full of, makes CPython 3.11 end by SIGINT although it was caught. From
    the end on they are ignored: what is left is the interpreter's own end.
    """

    def leave(signum: int, _frame: FrameType | None) -> None:
        raise Signalled(signum)

    heard = [each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
    for each in heard:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in heard:
            signal.signal(each, signal.SIG_IGN)


@contextmanager
def interruptions(inbox: Inbox) -> Iterator[None]:
    """While inside, stop signals arrive in `inbox` as Interruption. Outside the main thread nothing is installed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(signum: int, _frame: FrameType | None) -> None:
        inbox.put(Interruption(signum))

    # A signal that is ignored here (nohup) stays ignored.
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, note)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
