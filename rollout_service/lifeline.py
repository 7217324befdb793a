"""A child's tie to the service that started it: it ignores Ctrl-C, and it leaves when its parent dies.

Who calls: `workers`, `learner` and the probe, first thing in their `__main__`, before torch is imported. Who decides:
the supervisor, by putting its pid into PARENT_VARIABLE; a role started by hand has no such variable and is left alone.
A whole command can be tied to whoever starts it in the same way, by OWNER_VARIABLE.

Two ties, because each has a hole. The kernel's PR_SET_PDEATHSIG works even while the main thread hangs in C code and
holds the interpreter, but only on Linux. A watching thread works elsewhere, gives a learner time to save, and ends a
process whose main thread does not react to SIGTERM.
It also answers SIGUSR1 with the stacks of all threads on standard error, which is how the supervisor shows where a
stuck actor hangs; and what it prints may be lost, but never ends it: its output is a log file on a disk that may be
full. What must never happen: a child that outlives its parent by more than GRACE_S plus a moment.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Final, NoReturn

from rollout_service import offspring
from rollout_service.streams import Dropped, lenient

PARENT_VARIABLE: Final = "ROLLOUT_SERVICE_PARENT"
"""Environment variable with the pid of the supervising process."""
OWNER_VARIABLE: Final = "ROLLOUT_SERVICE_OWNER"
"""Environment variable with the pid of a process whose children our commands are, and which they are not to outlive."""
ROLE_VARIABLE: Final = "ROLLOUT_SERVICE_ROLE"
"""Environment variable that says that a process is a role of a run, and which one."""
WAIT_S: Final = 30.0
"""How long a role looks for its service at the start: whoever is started by hand may come first."""
GRACE_S: Final = 6.0
"""From the parent's death to the end of a child that did not leave by itself; children have to be gone within 10 s."""
COMMAND_GRACE_S: Final = 15.0
"""The same for a command: a run that was told to stop ends its own processes first."""
POLL_S: Final = 0.5
"""How often the parent is looked for where the kernel cannot tell of its death."""
EXIT_ORPHANED: Final = 70
"""Exit code of a child that the watching thread had to end."""
PR_SET_PDEATHSIG: Final = 1
STACK_DUMP_SIGNAL: Final = getattr(signal, "SIGUSR1", signal.SIGTERM)
"""Makes a child write the stacks of all its threads to standard error. SIGTERM where there is no SIGUSR1."""
KILL: Final = getattr(signal, "SIGKILL", signal.SIGTERM)
OUTPUT: Final = Dropped()
"""What was dropped of this role's standard output and error; its heartbeats tell."""


def follow_parent(on_death: signal.Signals = KILL, grace_s: float = GRACE_S) -> bool:
    """Ignore SIGINT and leave when the supervisor dies. Returns whether there is a supervisor to follow.

    on_death: what the kernel sends at the parent's death. SIGKILL for a process with nothing to save (an actor: its
    lease is void, and an env that hangs in C code would ignore anything gentler); SIGTERM for one that may write a
    checkpoint. grace_s: seconds from the parent's death until this process is ended in any case.
    """
    text = os.environ.get(PARENT_VARIABLE)
    if text is None:
        return False
    parent = int(text)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(faulthandler, "register"):
        faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _ask_kernel(on_death)
    if os.getppid() != parent:
        # The parent died before the kernel was asked.
        os.kill(os.getpid(), on_death)
    threading.Thread(target=_watch, args=(parent, grace_s), name="lifeline", daemon=True).start()
    return True


def follow_owner() -> None:
    """For a command: it gets a SIGTERM when the process that started it dies and had asked for that.

    So a run does not outlive its bench. The kernel might send it twice, which to a run says: without a checkpoint. Not
    handed on: the variable is of this process alone.
    """
    if (owner := os.environ.pop(OWNER_VARIABLE, None)) is not None:
        arguments = int(owner), COMMAND_GRACE_S, signal.SIGTERM
        threading.Thread(target=_watch, args=arguments, name="lifeline", daemon=True).start()


def owned(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a command that is started here and now, and is to end with this process."""
    return {**environment, OWNER_VARIABLE: str(os.getpid())}


def die_with_parent() -> None:
    """Asks the kernel to kill this process once its parent has died: for a helper that has nothing to save."""
    _ask_kernel(KILL)


def role_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The words that every role understands: which service, and how long to look for it."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--connect", required=True, metavar="ENDPOINT", help="where the service listens")
    parser.add_argument(
        "--wait-for-service",
        type=float,
        default=WAIT_S,
        metavar="SECONDS",
        help=f"how long to look for a service that is not there yet (default: {WAIT_S:g})",
    )
    parser.add_argument(
        "--reconnect",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to look for a service that was there and is lost, to begin anew with it (default: 0, leave)",
    )
    parser.add_argument(
        "--key-file", metavar="PATH", help="the client's key file, for a service on tcp that has keys (see keygen)"
    )
    parser.add_argument(
        "--share-with-group", metavar="GROUP", help="trust a service of another user, if its socket is this group's"
    )
    return parser


def begin(role: str, on_death: signal.Signals = KILL) -> bool:
    """A role's first step: `follow_parent`. Returns whether it was started by hand, and then belongs to a terminal."""
    os.environ[ROLE_VARIABLE] = role
    sys.stdout, sys.stderr = (lenient(stream, OUTPUT.note) for stream in (sys.stdout, sys.stderr))
    by_hand = not follow_parent(on_death)
    if by_hand:
        os.environ[offspring.MARK_VARIABLE] = offspring.new_family()
    if by_hand and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Ctrl-C in the middle of an import ends the process, and prints nothing.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return by_hand


def role_of_this_process() -> str | None:
    """What this process is for a run, or what the one that started it is; None outside of any."""
    if (role := os.environ.get(ROLE_VARIABLE)) is not None:
        return role
    return "child" if PARENT_VARIABLE in os.environ else None


def end_offspring() -> None:
    """On the way out, where no supervisor does it: what this role has started itself, or all of a dead supervisor's."""
    mark, parent = os.environ.get(offspring.MARK_VARIABLE), os.environ.get(PARENT_VARIABLE)
    if mark is not None and parent != str(os.getppid()):
        offspring.end(offspring.family_of(mark))


def leave(code: int) -> NoReturn:
    """Ends this process: exit handlers and flushing included, interpreter teardown excluded. The last call of a role.

    Unloading torch takes 0.3 s of a core per process, 1.7 s where three of them share two cores, and frees only what
    the kernel frees anyway. A thread that some library left behind cannot hold the exit up either.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    end_offspring()
    os._exit(code)


def _ask_kernel(on_death: signal.Signals) -> None:
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(on_death), 0, 0, 0)


def _watch(parent: int, grace_s: float, on_death: signal.Signals | None = None) -> None:
    wait_for_death(parent)
    if on_death is not None:
        os.kill(os.getpid(), on_death)
    time.sleep(grace_s)
    if on_death is None:  # of a command: the mark it inherited is of somebody else's family
        end_offspring()
    os._exit(EXIT_ORPHANED)


def wait_for_death(parent: int) -> None:
    """Returns once `parent` is no longer this process's parent. Waits without polling where the kernel has pidfds."""
    try:
        descriptor = os.pidfd_open(parent)
    except (AttributeError, OSError):
        while os.getppid() == parent:
            time.sleep(POLL_S)
        return
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while os.getppid() == parent:
            poller.poll()
    finally:
        os.close(descriptor)
