"""A peer's side of the control plane: handshake, requests that survive lost messages, heartbeats, one stop flag.

Who uses it: the shells of actors and learner, and observers. One main thread calls everything; a daemon thread sends
heartbeats on a socket of its own, watches that the service still answers, and takes what the main thread is to see in
the middle of its work: PREEMPT, as one attribute that is read without a system call.

Lost messages: the last request that wants an answer (JOIN, COMMIT, ABORT -> GRANT; READY, PUBLISH -> BATCH) is sent
again from within `receive` until the answer comes; the service answers repeats alike, and repeats of an answer already
delivered (same slot, epoch not above; same or earlier update, unless RESTORE took it back) are dropped here.
What must never happen: a wait that no signal, STOP or dead service can end. `stop` is safe in a signal handler.
"""

from __future__ import annotations

import threading
import time
from typing import Final, TypeVar, overload

from rollout_service.control.endpoints import check_reachable
from rollout_service.control.heartbeat import Heart
from rollout_service.control.keys import Keys
from rollout_service.control.messages import (
    Abort,
    Batch,
    Bye,
    Commit,
    Grant,
    Hello,
    Join,
    Message,
    Preempt,
    Publish,
    Ready,
    Refused,
    Restore,
    Stop,
    Welcome,
    decode,
    encode,
    message_name,
)
from rollout_service.control.transport import Dealer
from rollout_service.errors import (
    HandshakeRefused,
    MessageRejected,
    ProtocolVersionDiffers,
    WaitTimedOut,
)

HELLO_EVERY_S: Final = 0.5
RESEND_EVERY_S: Final = 1.0
"""A reply takes well below a millisecond; a longer wait means that there is nothing to grant yet, or a lost message."""
LOOK_AGAIN_S: Final = 5.0
"""While nobody answers HELLO: how often to see whether this process could reach the endpoint at all."""
FLUSH_S: Final = 0.5
"""Time that a BYE gets to leave at close."""
FOREVER_S: Final = 3600.0
TRACEBACK_LIMIT: Final = 64 * 1024
"""Characters of a traceback that travel: its end says most."""

ANSWERED_BY: Final[dict[type[Message], type[Message]]] = {
    Join: Grant,
    Commit: Grant,
    Abort: Grant,
    Ready: Batch,
    Publish: Batch,
}

M = TypeVar("M", bound=Message)
M2 = TypeVar("M2", bound=Message)


class PulseState:
    """How far this process is; the main thread writes, the heartbeat thread reads. Plain attributes, no lock."""

    __slots__ = ("phase", "progress")

    def __init__(self) -> None:
        self.progress: int = 0
        """Grows with every env step or minibatch."""
        self.phase: str = ""
        """"env.step", "env.reset" and "policy" are watched by the service; anything else may take its time."""


class Client:
    """One peer of one service. Not thread-safe but for `stop` and `lose`.

    service_timeout_s: seconds of silence after which the service is gone; by default what WELCOME says. keys: for a
    service on tcp that has keys. group: gid whose members are trusted to run the service.
    """

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        *,
        connect_deadline_s: float,
        service_timeout_s: float | None = None,
        resend_every_s: float = RESEND_EVERY_S,
        keys: Keys | None = None,
        group: int | None = None,
    ) -> None:
        self.pulse = PulseState()
        self.stop_reason: str | None = None
        self.lost = False
        """The service is gone, or another one answers in its place: it was not the service that ended this."""
        self.run_id = ""
        self.preempt: Preempt | None = None
        """The newest request to end a lease early. Written by the heartbeat thread, so that a look costs nothing."""
        self.rejected_messages = 0
        self._last_rejection = ""
        """Why the last message that came here could not be read."""
        self._endpoint = endpoint
        self._hello = hello
        self._connect_deadline_s = connect_deadline_s
        self._service_timeout_s = service_timeout_s
        self._resend_every_s = resend_every_s
        self._stopping = threading.Event()
        self._keys = keys
        self._group = group
        self._dealer = Dealer(endpoint, keys=keys)
        self._heart: Heart | None = None
        self._request: Message | None = None
        self._request_sent_at = 0.0
        self._epochs: dict[int, int] = {}
        self._update = 0
        self._restored = 0
        """Of the newest RESTORE."""
        self._said_goodbye = False

    @property
    def stopping(self) -> bool:
        """Told to leave: by `stop`, by the service, or by its silence. `stop_reason` says which."""
        return self.stop_reason is not None

    def stop(self, reason: str = "stopped by a signal") -> None:
        """Ends every wait. Safe in signal handlers and from other threads."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self._stopping.set()
        self._dealer.wake()

    def wait_until_stopping(self) -> None:
        """For a thread beside the main one."""
        self._stopping.wait()

    def lose(self, reason: str) -> None:
        """`stop`, because the service that welcomed this process is not there any more."""
        self.lost = self.lost or self.stop_reason is None
        self.stop(reason)

    def connect(self) -> Welcome:
        """HELLO until WELCOME; starts the heartbeats.

        Raises HandshakeRefused (also for another protocol version), WaitTimedOut (also after `stop`), or ConfigError if
        this process cannot reach the endpoint, whoever listens there.
        """
        deadline = time.monotonic() + self._connect_deadline_s
        while True:
            check_reachable(self._endpoint, self._group)
            left = deadline - time.monotonic()
            try:
                welcome = self.exchange(
                    self._hello, Welcome, resend_every_s=HELLO_EVERY_S, deadline_s=min(LOOK_AGAIN_S, max(0.0, left))
                )
                break
            except WaitTimedOut:
                if refusal := self._dealer.refusal():
                    raise HandshakeRefused(f"the service at {self._endpoint} does not listen: {refusal}") from None
                if left <= LOOK_AGAIN_S:
                    raise WaitTimedOut(
                        f"no WELCOME from {self._endpoint} within {self._connect_deadline_s:g} s of HELLO; "
                        f"{self._whats_wrong()}"
                    ) from None
        if welcome is None:
            raise WaitTimedOut(f"left while waiting for WELCOME from {self._endpoint}: {self.stop_reason}")
        if self._heart is None:
            self.run_id = welcome.run_id
            timeout = welcome.silence_timeout if self._service_timeout_s is None else self._service_timeout_s
            self._heart = Heart(
                self, Dealer(self._endpoint, keys=self._keys), self._endpoint, self._hello, welcome, timeout
            )
            self._heart.start()
        return welcome

    def send(self, message: Message) -> None:
        """Sends once; a request that wants an answer is repeated by `receive` until that comes."""
        if type(message) in ANSWERED_BY:
            self._request = message
        self._said_goodbye = self._said_goodbye or isinstance(message, Bye)
        self._transmit(message)

    def bye(self, reason: str, traceback: str = "") -> None:
        """The last word; `close` gives it a moment to leave."""
        self.send(Bye(reason=reason[-8000:], traceback=traceback[-TRACEBACK_LIMIT:]))

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None after timeout_s or once stopping. STOP is returned, and sets `stopping`.

        Raises HandshakeRefused with the service's reason for REFUSED. A refusal of another run's service, which was
        started anew and knows nobody of this run, is not one: this run's service is lost.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._next(min(deadline, self._next_resend()))
            if type(message) is Batch or type(message) is Grant:  # what others wait for comes first
                if self._is_news(message):
                    return message
                continue
            match message:
                case Refused(run_id=other) if self._is_other(other):
                    self.lose(f"another run's service answers at {self._endpoint}: {message.reason}")
                case Refused():
                    raise HandshakeRefused(f"the service at {self._endpoint} refused: {message.reason}")
                case Stop():
                    self.stop(message.reason)
                    return message
                case None:
                    if self.stopping or time.monotonic() >= deadline:
                        return None
                    if self._request is not None and time.monotonic() >= self._next_resend():
                        self._transmit(self._request)
                case _:
                    if self._is_news(message):
                        return message

    @overload
    def exchange(
        self, message: Message, until: type[M], resend_every_s: float | None = None, deadline_s: float | None = None
    ) -> M | None: ...

    @overload
    def exchange(
        self,
        message: Message,
        until: tuple[type[M], type[M2]],
        resend_every_s: float | None = None,
        deadline_s: float | None = None,
    ) -> M | M2 | None: ...

    def exchange(
        self,
        message: Message,
        until: type[Message] | tuple[type[Message], ...],
        resend_every_s: float | None = None,
        deadline_s: float | None = None,
    ) -> Message | None:
        """Sends `message`, again every resend_every_s, until a message of a type in `until` comes, which is returned.

        Other messages on the way are dropped. None once stopping (with Stop in `until`, the STOP itself). deadline_s
        None waits for as long as the service answers heartbeats. Raises HandshakeRefused and WaitTimedOut.
        """
        wanted = until if isinstance(until, tuple) else (until,)
        every, self._resend_every_s = self._resend_every_s, resend_every_s or self._resend_every_s
        deadline = time.monotonic() + (FOREVER_S if deadline_s is None else deadline_s)
        self._request = message
        try:
            self._transmit(message)
            while True:
                answer = self.receive(max(0.0, deadline - time.monotonic()))
                if isinstance(answer, wanted):
                    return answer
                if self.stopping:
                    return None
                if time.monotonic() >= deadline and deadline_s is not None:
                    raise WaitTimedOut(
                        f"no {' or '.join(message_name(kind).upper() for kind in wanted)} from {self._endpoint} within "
                        f"{deadline_s} s of {message_name(type(message)).upper()}; {self._whats_wrong()}"
                    )
                if deadline_s is None:
                    deadline = time.monotonic() + FOREVER_S
        finally:
            self._request, self._resend_every_s = None, every

    def close(self) -> None:
        """Ends the heartbeats and closes the sockets. Idempotent."""
        if self._heart is not None:
            self._heart.close()
        self._dealer.close(FLUSH_S if self._said_goodbye else 0.0)

    def _transmit(self, message: Message) -> None:
        self._request_sent_at = time.monotonic()
        self._dealer.send(encode(message))

    def _whats_wrong(self) -> str:
        """What to look at when no answer came."""
        if self._last_rejection:
            return f"what came instead could not be read: {self._last_rejection}"
        return "is the service running?"

    def _is_other(self, run_id: str) -> bool:
        """Is this the id of a run that is not the one which welcomed this process?"""
        return bool(run_id and self.run_id) and run_id != self.run_id

    def _next_resend(self) -> float:
        return self._request_sent_at + self._resend_every_s if self._request is not None else float("inf")

    def _next(self, deadline: float) -> Message | None:
        """One decoded message by `deadline`, or None. What does not decode is counted and dropped.

        Raises HandshakeRefused for an answer in another protocol version, as long as this process has no place: a
        service that cannot read a HELLO refuses it in words that this side cannot read either.
        """
        while True:
            data = self._dealer.receive(max(0.0, deadline - time.monotonic()), lambda: self.stopping)
            if data is None:
                return None
            try:
                return decode(data)
            except ProtocolVersionDiffers as error:
                if self._heart is None:
                    raise HandshakeRefused(
                        f"the service at {self._endpoint} speaks another protocol: {error}"
                    ) from None
                self._reject(error)
            except MessageRejected as error:
                self._reject(error)

    def _reject(self, error: MessageRejected) -> None:
        self.rejected_messages += 1
        self._last_rejection = str(error)

    def _is_news(self, message: Message) -> bool:
        """False for an answer already delivered. Remembers news, and that the request has been answered."""
        match message:
            case Grant(slot=slot, epoch=epoch):
                if epoch <= self._epochs.get(slot, 0):
                    return False
                self._epochs[slot] = epoch
            case Batch(update=update):
                if update <= self._update:
                    return False
                self._update = update
            case Restore(version=version):
                if version <= self._restored:
                    return False
                self._restored, self._update = version, 0
            case Welcome() if self._heart is not None:
                return False
            case _:
                pass
        if self._request is not None and ANSWERED_BY.get(type(self._request)) is type(message):
            self._request = None
        return True
