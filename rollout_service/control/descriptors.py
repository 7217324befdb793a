"""File descriptors of this process: room for the connections of a run, and a word in time when strangers take it.

Who asks: `zeromq.ZmqRouter`, as it begins and whenever somebody has connected. What must never happen: a service
without a descriptor left. ZeroMQ ends a process that cannot accept on an ipc socket for want of one, and nothing else
works either. Left to others: what to do about it.

Connections come faster than they are counted, since ZeroMQ accepts them in a thread of its own. So between what may be
open and what the system allows there has to be room for thousands, where this process may have it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

WANTED: Final = 65_536
"""To which this process raises its own limit, if it may."""
ENOUGH: Final = 6144
"""That may be open. A run needs about five per actor; a connection takes 24 KiB of memory."""
SHARE: Final = 0.75
"""Of the limit that may be open, where that is less."""


def make_room() -> None:
    """Raises this process's own limit to WANTED, or as far as it may."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _number(soft) < (most := min(WANTED, _number(hard))):
        with suppress(OSError, ValueError):  # some systems have a further limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def running_short() -> bool:
    """Whether more are open than should be."""
    import resource

    return _open() > min(ENOUGH, SHARE * _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def _number(limit: int) -> int:
    import resource

    return WANTED if limit == resource.RLIM_INFINITY else limit


def _open() -> int:
    """Open descriptors; WANTED if not even they can be counted, which takes one more."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return WANTED
