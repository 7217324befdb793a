"""What runs on this machine, and how it is doing: found by locked segment headers, asked as an observer.

Who calls: `status`. Imports neither torch nor gymnasium. What must never happen: an answer about a dead run as if it
lived, or a wait for a run that does not answer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

from rollout_service.control.client import Client
from rollout_service.control.keys import Keys
from rollout_service.control.messages import Hello, Role, Status, StatusReport
from rollout_service.errors import RolloutServiceError
from rollout_service.launch.cleanup import run_header
from rollout_service.memory.segment import list_segments
from rollout_service.memory.slots import KIND as ROLLOUT_KIND

ANSWER_DEADLINE_S: Final = 3.0
RESEND_S: Final = 0.5
SHOWN_WAIT_S: Final = 5.0
"""Younger waits are rollouts under way."""


@dataclass(frozen=True)
class RunStatus:
    """One run that lives here: what its segment says, and what its service answered."""

    run_id: str
    run_dir: str
    pid: int
    endpoint: str
    age_s: float
    memory_bytes: int
    report: dict[str, Any] | None
    """None if the service did not answer."""
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "run_dir": self.run_dir,
            "pid": self.pid,
            "endpoint": self.endpoint,
            "age_s": round(self.age_s, 1),
            "memory_bytes": self.memory_bytes,
            "report": self.report,
            **({"problem": self.problem} if self.problem else {}),
        }


def running(keys: Keys | None = None) -> list[RunStatus]:
    """Every run of this user that is alive on this machine, oldest first. keys: for those on tcp that ask for them."""
    found = []
    for segment in list_segments():
        header = run_header(segment)
        if segment.kind != ROLLOUT_KIND or not segment.owner_alive or not segment.ready or "endpoint" not in header:
            continue
        report, problem = _ask(header["endpoint"], keys)
        for actor in (report or {}).get("actors", ()):
            actor["cores"] = _cores(actor["pid"], segment.owner_pid)
        found.append(
            RunStatus(
                run_id=header["run_id"],
                run_dir=header["run_dir"],
                pid=segment.owner_pid,
                endpoint=header["endpoint"],
                age_s=segment.age_s,
                memory_bytes=segment.nbytes,
                report=report,
                problem=problem,
            )
        )
    return sorted(found, key=lambda run: -run.age_s)


def _ask(endpoint: str, keys: Keys | None) -> tuple[dict[str, Any] | None, str]:
    hello = Hello(role=Role.OBSERVER, pid=os.getpid())
    keys = keys if endpoint.startswith("tcp://") else None
    client = Client(endpoint, hello, connect_deadline_s=ANSWER_DEADLINE_S, keys=keys)
    try:
        client.connect()
        answer = client.exchange(Status(), StatusReport, resend_every_s=RESEND_S, deadline_s=ANSWER_DEADLINE_S)
    except RolloutServiceError as error:
        return None, str(error)
    finally:
        client.close()
    return (answer.report, "") if isinstance(answer, StatusReport) else (None, "no answer")


def _cores(pid: int | None, parent: int) -> list[int] | None:
    """The cores that an actor keeps to. None: any that the run may use, or nobody knows: it is no child of the run."""
    import psutil

    try:
        process, owner = psutil.Process(pid or 0), psutil.Process(parent)
        own = sorted(process.cpu_affinity() or ())
        return own if process.ppid() == parent and own != sorted(owner.cpu_affinity() or ()) else None
    except (psutil.Error, AttributeError):  # cpu_affinity is not everywhere
        return None


def render(run: RunStatus) -> str:
    """One run as text of a few lines, a table of its actors among them."""
    lines = [
        f"run {run.run_id}  pid {run.pid}  up {run.age_s:.0f} s  {run.memory_bytes / 2**20:.1f} MiB",
        f"  {run.run_dir}",
    ]
    if run.report is None:
        return "\n".join([*lines, f"  no answer: {run.problem}"])
    report = run.report
    rates = report.get("rates", {})
    learner = report.get("learner")
    lines += [
        f"  {report['state']}   update {report['updates']}/{report['total_updates']}"
        f"   {report['env_steps']:,} env steps   {rates.get('env_steps_per_second', 0):,.0f} steps/s",
        "  slots    " + "   ".join(f"{state} {count}" for state, count in report["slots"].items()),
        "  learner  " + ("none" if learner is None else f"pid {learner['pid']}   {learner['state']}"),
    ]
    if (waiting := report.get("waiting_for")) and (waited := report.get("waiting_seconds") or 0.0) >= SHOWN_WAIT_S:
        lines.append(f"  waiting  {waited:.0f} s for {', '.join(waiting)}")
    actors = [actor for actor in report["actors"] if actor["pid"] is not None or actor.get("awaited", True)]
    if empty := len(report["actors"]) - len(actors):
        here = sum(actor["pid"] is not None for actor in actors)
        lines.append(f"  actors   {here} here   {empty} places empty, not waited for")
    header = ("actor", "inc", "pid", "state", "steps/s", "waited for", "lag", "silent", "cores")
    rows = [header] + [
        (
            str(actor["actor_id"]),
            str(actor["incarnation"]),
            _text(actor["pid"]),
            actor["state"],
            f"{actor['steps_per_second']:,.0f}",
            f"{actor.get('waited_share', 0.0):.0%}",
            _text(actor["lag"]),
            _text(actor["silent_seconds"]),
            ",".join(map(str, actor.get("cores") or ())),
        )
        for actor in actors
    ]
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    if counters := {name: count for name, count in report.get("counters", {}).items() if count}:
        lines.append("  counted  " + "   ".join(f"{name} {count}" for name, count in counters.items()))
    return "\n".join(lines)


def _text(value: object) -> str:
    return "-" if value is None else str(value)
