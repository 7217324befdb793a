"""Sockets on tcp: ZeroMQ's Router and Dealer, encrypted and authenticated where there are keys. The only home of zmq.

Who uses it: `transport`, for tcp:// endpoints. With keys (CURVE) a service admits only clients whose public key it was
given, and a client talks only to the service whose public key it has; without keys there is no authentication at all,
which is why endpoints beyond this machine need them (endpoints).

What must never happen:
  - a vanished, slow or hostile peer raises out of a loop: what cannot be delivered is dropped (every message of the
    protocol is resent by whoever waits for its answer), and oversized messages are cut off by zmq itself;
  - a process hangs at exit with unsent messages: linger is 0 from each socket's creation, `close` may flush briefly;
  - a context crosses a fork: it is made inside the process that uses it.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import uuid
from collections import Counter
from typing import Final

import zmq

from rollout_service.control.keys import Keys
from rollout_service.control.messages import MAX_MESSAGE_BYTES
from rollout_service.control.wakeup import WakeUp, Woken
from rollout_service.errors import ConfigError

HIGH_WATER_MARK: Final = 1000
"""Messages queued per peer and direction. A peer has one or two in flight; more means that it is gone."""
RECONNECT_MS: Final = 50
RECONNECT_MAX_MS: Final = 1000
BACKLOG: Final = 512
"""Pending connections: two per actor may arrive at once."""


# --- one context per process -----------------------------------------------------------------------------------------


class _Contexts:
    """The zmq context of this process, made with its first socket and terminated with its last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._users = 0
        self._inherited: list[object] = []

    def acquire(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if self._context is None:
                self._context = zmq.Context()
            self._users += 1
            return self._context

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._context is not None:
                self._context.term()
                self._context = None

    def forget_after_fork(self) -> None:
        """In a forked child: the parent's context is unusable here; keep it referenced, never touch it."""
        self._inherited.append(self._context)
        self._lock, self._context, self._users = threading.Lock(), None, 0


_contexts = _Contexts()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_contexts.forget_after_fork)


