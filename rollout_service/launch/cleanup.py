"""What dead runs left behind: segments, child processes, socket directories. Found by proof of death, never by name
alone.

Who calls: `clean`, and every start of a run. Proofs: the owner's lock on a segment can be taken; nobody listens on a
run's socket; a child's supervisor, whose pid it carries in its environment, is no longer its parent; whoever was to end
what a role had started, by the mark of that, is dead.
What must never happen: touching a run that lives, or a process that somebody started by hand. When unsure it stays.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from rollout_service import offspring
from rollout_service.control.endpoints import sweep_socket_directories
from rollout_service.lifeline import GRACE_S, PARENT_VARIABLE
from rollout_service.memory.segment import SegmentInfo, list_segments, sweep

if TYPE_CHECKING:
    import psutil

ROLE_MODULES: Final = ("workers", "learner")
EXIT_DEADLINE_S: Final = 5.0
"""How long a killed process may take to be gone."""


@dataclass(frozen=True)
class LeftoverProcess:
    """A role without supervisor, or what one had started. `process` knows its start: no reused pid is taken for it."""

    process: psutil.Process
    what: str


@dataclass(frozen=True)
class Leftovers:
    """What was found, and removed unless only asked for."""

    segments: tuple[SegmentInfo, ...]
    processes: tuple[LeftoverProcess, ...]
    sockets: tuple[Path, ...]

    def __bool__(self) -> bool:
        return bool(self.segments or self.processes or self.sockets)

    def lines(self) -> list[str]:
        """One line per thing."""
        return [
            *(f"process {each.process.pid} ({each.what})" for each in self.processes),
            *(
                f"segment {each.name} ({each.nbytes / 2**20:.1f} MiB, owner pid {each.owner_pid})"
                for each in self.segments
            ),
            *(f"socket directory {path}" for path in self.sockets),
        ]


def clean_up(*, dry_run: bool = False) -> Leftovers:
    """Removes what dead runs of this user left; with `dry_run` only lists it."""
    roles = tuple(_orphans(live_endpoints()))
    if not dry_run:
        _kill(roles, leave_s=GRACE_S, with_children=True)  # the learner may be saving a checkpoint
    started = tuple(_offspring())
    if not dry_run:
        _kill(started)
    sockets = tuple(sweep_socket_directories(dry_run=dry_run))
    return Leftovers(tuple(sweep(dry_run=dry_run)), (*roles, *started), sockets)


def live_endpoints() -> set[str]:
    """Endpoints of all runs whose segments are locked by a living owner."""
    return {
        endpoint
        for segment in list_segments()
        if segment.owner_alive and (endpoint := run_header(segment).get("endpoint"))
    }


def run_header(segment: SegmentInfo) -> dict[str, str]:
    """The run's JSON in a segment's header; {} if there is none."""
    try:
        header = json.loads(segment.spec) if segment.spec else {}
    except ValueError:
        return {}
    return header if isinstance(header, dict) else {}


def _orphans(alive: set[str]) -> Iterator[LeftoverProcess]:
    import psutil

    here = _pid_namespace("self")
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            role = _role(process.info["cmdline"] or [])
            # Pids of another namespace cannot be compared: a container's run may be alive and well.
            if role is None or role[1] in alive or _pid_namespace(process.pid) != here:
                continue
            supervisor = process.environ().get(PARENT_VARIABLE)
            if supervisor is not None and process.ppid() != int(supervisor):
                yield LeftoverProcess(process, f"python -m {role[0]}, {role[1]}")


def _offspring() -> Iterator[LeftoverProcess]:
    """What roles had started and nobody is left to end. If the pid of that one was used again, it stays."""
    import psutil

    here = _pid_namespace("self")
    # Of a run that began inside a dead one, and whoever started this process.
    spared = {segment.owner_pid for segment in list_segments() if segment.owner_alive}
    spared |= {parent.pid for parent in psutil.Process().parents()}
    for process, mark in offspring.marked():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            if process.pid in spared or _role(process.cmdline()) is not None:
                continue
            if offspring.alive(int(mark.partition("/")[0])):
                continue
            if _pid_namespace(process.pid) == here:
                yield LeftoverProcess(process, f"{process.name()}, started by a role of a run")


def _role(command: list[str]) -> tuple[str, str] | None:
    """Module and endpoint of `python [-P] -m workers|learner --connect ENDPOINT ...`, or None for any other command."""
    if "-m" not in command or "--connect" not in command:
        return None
    module_at, endpoint_at = command.index("-m") + 1, command.index("--connect") + 1
    if max(module_at, endpoint_at) >= len(command) or command[module_at] not in ROLE_MODULES:
        return None
    return command[module_at], command[endpoint_at]


def _pid_namespace(pid: int | Literal["self"]) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def _kill(processes: tuple[LeftoverProcess, ...], *, leave_s: float = 0.0, with_children: bool = False) -> None:
    """leave_s: how long they may take to leave by themselves. Of what is marked every child that is to go is, too."""
    import psutil

    psutil.wait_procs([each.process for each in processes], timeout=leave_s)
    killed = []
    for each in processes:
        with contextlib.suppress(psutil.Error):
            for victim in (each.process, *(each.process.children(recursive=True) if with_children else ())):
                victim.kill()
                killed.append(victim)
    psutil.wait_procs(killed, timeout=EXIT_DEADLINE_S)
