"""What the processes of a run start themselves, an env's simulator for instance: marked, found again, ended.

    <pid>/<random>/<name>/      in MARK_VARIABLE of a role, and of all that comes of it; name: the role's
    family ------->             pid: of whoever is to end them, the supervisor or a role that was started by hand

An environment is inherited whatever becomes of parents, groups and sessions, so a mark says whose a process is when
nothing else does any more. Who calls: the supervisor for a child that is gone, a role on its way out if nobody else is
left to do it (lifeline), and `clean` for the rest.
What must never happen: the end of a process without a mark, or with that of another family. One whose environment
lacks the mark, or cannot be read, is not found; that is also how to start one that is to stay.
Why a mark: docs/decisions/0020.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import psutil

MARK_VARIABLE: Final = "ROLLOUT_SERVICE_MARK"
LEAVE_S: Final = 1.0
"""After SIGTERM, and after each of two rounds of SIGKILL: one that is just starting another may take two."""


def new_family() -> str:
    """How the marks of all begin that this process will have to end."""
    return f"{os.getpid()}/{secrets.token_hex(8)}/"


def family_of(mark: str) -> str:
    owner, token, _ = mark.split("/", 2)
    return f"{owner}/{token}/"


def end(mark: str) -> int:
    """Ends all whose marks begin so, but this process: SIGTERM, then SIGKILL. Returns how many there were."""
    # Imported here: it needs Unix modules, and `--help` has to work without them.
    import psutil

    ended: set[psutil.Process] = set()
    for order in (psutil.Process.terminate, psutil.Process.kill, psutil.Process.kill):
        found = [process for process, its in marked() if its.startswith(mark)]
        if not found:
            break
        for process in found:
            with contextlib.suppress(psutil.Error):
                order(process)
                ended.add(process)
        psutil.wait_procs(found, timeout=LEAVE_S)
    return len(ended)


def marked() -> Iterator[tuple[psutil.Process, str]]:
    """Every other process with a mark, as far as this user may look; and its mark."""
    import psutil

    with contextlib.suppress(OSError):  # for want of a descriptor to look with
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and (mark := process.environ().get(MARK_VARIABLE)):
                    yield process, mark


def alive(pid: int) -> bool:
    """A zombie is not."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except OSError:  # for want of a descriptor to look with
        return True
