"""File descriptors of the service's process: what a run needs, room for it, and a word in time when strangers take it.

    limit          soft, raised to the hard one (WANTED at most) before anything is opened
    a run needs    OF_A_RUN + OF_AN_ACTOR per actor, of which the hard limit has to have room     `require`
    running short  more are open than ENOUGH, or than SHARE of the limit                          `running_short`

Who asks: whoever starts a run, and `doctor`; `zeromq.ZmqRouter`, as it begins and whenever somebody has connected. What
must never happen: a service without a descriptor left. ZeroMQ ends a process that cannot accept on an ipc socket for
want of one, and nothing else works either. Left to others: what to do about it.

Connections come faster than they are counted, since ZeroMQ accepts them in a thread of its own. So between what may be
open and what the system allows there has to be room for thousands, where this process may have it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final

from rollout_service.errors import ConfigError

OF_A_RUN: Final = 64
"""Files, sockets and pipes of the service itself, with some to spare."""
OF_AN_ACTOR: Final = 4
"""Two connections, and log file and pipe for a moment while it starts."""
WANTED: Final = 65_536
"""To which this process raises its own limit, if it may."""
ENOUGH: Final = 6144
"""That may be open, strangers' connections included; each takes 24 KiB of memory."""
SHARE: Final = 0.75
"""Of the limit that may be open, where that is less."""
UNLIMITED: Final = sys.maxsize


def require(num_actors: int) -> None:
    """Makes room. Raises ConfigError unless this process may open the files and sockets of a run of so many actors."""
    needed = OF_A_RUN + OF_AN_ACTOR * num_actors
    if (hard := hard_limit()) < needed:
        raise ConfigError(
            f"a run with {num_actors} actors needs {needed} file descriptors in the service's process, the limit is "
            f"{hard}; raise it (ulimit -n {needed}, docker run --ulimit nofile={needed}), or lower num_actors"
        )
    make_room(max(WANTED, needed))


def hard_limit() -> int:
    """To which this process may raise its own limit; UNLIMITED if there is none."""
    import resource

    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def make_room(wanted: int = WANTED) -> None:
    """Raises this process's own limit to so many, or as far as it may."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _number(soft) < (most := min(wanted, _number(hard))):
        with suppress(OSError, ValueError):  # some systems have a further limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def running_short() -> bool:
    """Whether more are open than should be."""
    import resource

    return _open() > min(ENOUGH, SHARE * _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def _number(limit: int) -> int:
    import resource

    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def _open() -> int:
    """Open descriptors; UNLIMITED if not even they can be counted, which takes one more."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return UNLIMITED
