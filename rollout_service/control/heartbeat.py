"""The heartbeat of a peer: a thread of its own, with a socket of its own, beside the main thread's work.

    HEARTBEAT each interval -> PONG          silence for too long, or another run's PONG: the service is lost
                            <- PREEMPT       becomes `client.preempt`, which the main thread looks at between steps

Who starts it: a client, once it is welcome. What must never happen: a main thread that works on for a service that is
gone; a service taken for dead because this thread was kept from listening.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from rollout_service.control.messages import Heartbeat, Hello, Message, Pong, Preempt, Welcome, decode, encode
from rollout_service.control.transport import Dealer
from rollout_service.errors import MessageRejected, ProtocolError
from rollout_service.lifeline import OUTPUT

if TYPE_CHECKING:
    from rollout_service.control.client import Client


class Heart(threading.Thread):
    """Sends heartbeats, reads PONGs and PREEMPTs, and stops its client if the service says so or says nothing."""

    def __init__(
        self,
        client: Client,
        dealer: Dealer,
        endpoint: str,
        hello: Hello,
        welcome: Welcome,
        service_timeout_s: float,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._client = client
        self._endpoint = endpoint
        self._hello = hello
        self._welcome = welcome
        self._service_timeout_s = service_timeout_s
        self._leaving = threading.Event()
        self._dealer = dealer

    def run(self) -> None:
        dealer = self._dealer
        try:
            self._beat(dealer)
        except ProtocolError as error:
            self._client.stop(f"heartbeats ended: {error}")
        finally:
            dealer.close()

    def close(self) -> None:
        self._leaving.set()
        self._dealer.wake()
        self.join(self._service_timeout_s)

    def _beat(self, dealer: Dealer) -> None:
        unanswered_s = 0.0
        while not self._leaving.is_set():
            pulse = self._client.pulse
            beat = Heartbeat(
                role=self._hello.role,
                pid=os.getpid(),
                actor_id=self._welcome.actor_id,
                incarnation=self._welcome.incarnation,
                progress=int(pulse.progress),
                phase=str(pulse.phase)[:200],
                lost_writes=OUTPUT.writes,
            )
            dealer.send(encode(beat))
            # A beat counts as one interval of silence, however long it took: whatever is beyond that, this thread was
            # kept from listening (native code of an env holds the interpreter, the process was stopped).
            unanswered_s = 0.0 if self._listen(dealer) else unanswered_s + self._welcome.heartbeat_interval
            if unanswered_s > self._service_timeout_s and not self._client.stopping:
                self._client.lose(f"the service at {self._endpoint} has not answered for {unanswered_s:.0f} s")

    def _listen(self, dealer: Dealer) -> bool:
        """Reads for one interval, and then whatever has come by now. Returns whether the service answered."""
        answered = False
        next_beat = time.monotonic() + self._welcome.heartbeat_interval
        while not self._leaving.is_set():
            left = next_beat - time.monotonic()
            data = dealer.receive(max(0.0, left), self._leaving.is_set)
            if data is None and left <= 0:
                break
            answered = self._take(_decoded(data)) or answered
        return answered

    def _take(self, message: Message | None) -> bool:
        """Acts on one message. True for an answer to a heartbeat."""
        match message:
            case Pong() as pong:
                if pong.run_id not in ("", self._welcome.run_id):
                    self._client.lose(f"another run's service answers at {self._endpoint}")
                elif pong.stopping and not self._client.stopping:
                    self._client.stop("the service is stopping")
                return True
            case Preempt() as preempt:
                self._client.preempt = preempt
            case _:
                pass
        return False


def _decoded(data: bytes | None) -> Message | None:
    """The message, or None for what is none."""
    try:
        return None if data is None else decode(data)
    except MessageRejected:
        return None
