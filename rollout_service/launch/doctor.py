"""What this machine offers a run, and what would stop one: `rollout-service doctor`.

    check      name, verdict (ok | warning | problem), what was found, what to do
    exit code  1 if there is a problem, else 0; a warning is something a run survives

Who calls: people, before their first run and after a strange one. Nothing is changed: a segment and a socket are made
to see whether they can be, and removed. Torch is asked in a child process, with a deadline.
What must never happen: a traceback because this machine lacks something; saying what is missing is what this is for.
So modules that may be missing are imported inside a check, and a check that raises has found a problem.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TextIO

from rollout_service.errors import RolloutServiceError, SegmentError, SegmentTooLarge
from rollout_service.launch.cpu import CGROUP_MEMBERSHIP, CGROUP_ROOT, usable_cores

DISTRIBUTION: Final = "rollout-service"
LIBRARIES: Final = ("numpy", "torch", "gymnasium")
SMALL_SHARED_MEMORY: Final = 256 << 20
"""Vector observations need a few MiB, images hundreds; Docker's default is 64 MiB."""
MEMORY_OF_A_ROLE: Final = 350 << 20
"""What an actor or a learner takes on the CPU besides its envs: torch, mostly."""
TORCH_DEADLINE_S: Final = 60.0
"""The first import from a cold disk takes a while."""
GIB: Final = 2**30
MIB: Final = 2**20

TORCH_QUESTION: Final = """
import json, torch
devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
print(json.dumps({
    "version": torch.__version__,
    "threads": torch.get_num_threads(),
    "cuda_build": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(index) for index in devices],
}))
"""


class Verdict(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


Finding = tuple[Verdict, str, str]
"""Verdict, what was found, what to do."""
COLOURS: Final = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "red"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `remedy` is empty where nothing need be done."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def main(words: Sequence[str]) -> int:
    """The command: examines, prints, returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"{DISTRIBUTION} doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help='print one line of JSON: {"verdict": ..., "checks": [...]}')
    chosen = parser.parse_args(words)
    checks = examine()
    if chosen.json:
        fields = {"verdict": worst(checks), "checks": [asdict(check) for check in checks]}
        print(json.dumps(fields), flush=True)
    else:
        show(checks, sys.stdout)
    return int(worst(checks) is Verdict.PROBLEM)


def examine() -> list[Check]:
    """Every check, in the order in which a run would stumble."""
    return [_guarded(name, check) for name, check in CHECKS.items()]


def worst(checks: Iterable[Check]) -> Verdict:
    """The gravest verdict."""
    return max((check.verdict for check in checks), key=list(Verdict).index, default=Verdict.OK)


def show(checks: Sequence[Check], stream: TextIO) -> None:
    """A table on a terminal, plain lines anywhere else."""
    if not stream.isatty():
        print("\n".join(plain_lines(checks)), file=stream)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "verdict", "found", "what to do")
    for check in checks:
        verdict = Text(check.verdict.value, style=COLOURS[check.verdict])
        table.add_row(check.name, verdict, Text(check.found), Text(check.remedy))
    Console(file=stream).print(table)


def plain_lines(checks: Sequence[Check]) -> list[str]:
    """One line per check, and one more under those that ask for something."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.verdict.value:<7}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    return lines


def ok(found: str) -> Finding:
    return Verdict.OK, found, ""


def warning(found: str, remedy: str) -> Finding:
    return Verdict.WARNING, found, remedy


def problem(found: str, remedy: str) -> Finding:
    return Verdict.PROBLEM, found, remedy


def _guarded(name: str, check: Callable[[], Finding]) -> Check:
    try:
        return Check(name, *check())
    except RolloutServiceError as error:
        return Check(name, Verdict.PROBLEM, str(error))
    except (ImportError, AttributeError) as error:
        return Check(name, Verdict.PROBLEM, f"cannot be looked at here: {error}", "run on Linux")
    except Exception as error:
        return Check(name, Verdict.PROBLEM, f"cannot be looked at: {type(error).__name__}: {error}")


# What runs here


def check_platform() -> Finding:
    from rollout_service.launch.prepare import NEEDED_MODULES, importable

    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    missing = [name for name in (*NEEDED_MODULES, "pwd") if not importable(name)]
    if missing:
        found += f", without the modules {', '.join(missing)}"
    if not sys.platform.startswith("linux") or set(missing) & set(NEEDED_MODULES):
        return problem(found, "runs need Linux, for POSIX shared memory and file locks; a container will do")
    return ok(found)


def check_libraries() -> Finding:
    least = _least_versions()
    versions = {name: _version(name) for name in LIBRARIES}
    found = ", ".join([f"python {platform.python_version()}", *(f"{name} {versions[name]}" for name in LIBRARIES)])
    unfit = [
        f"'{name}>={least.get(name, '0')}'"
        for name, version in versions.items()
        if version is None or _numbers(version) < _numbers(least.get(name, "0"))
    ]
    return problem(found, f"pip install {' '.join(unfit)}") if unfit else ok(found)


def check_torch() -> Finding:
    """In a child: torch takes seconds to import, and hundreds of MiB that this process has no use for."""
    facts, cores = ask_torch(), usable_cores().count
    found = f"{facts['version']}, {facts['threads']} threads"
    if facts["devices"]:
        found += f", CUDA {facts['cuda_build']}: {', '.join(facts['devices'])}"
    else:
        found += ", no CUDA device: the learner computes on the CPU"
        if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
            build = f"CUDA {facts['cuda_build']}" if facts["cuda_build"] else "the CPU only"
            return warning(
                f"{found}, though a driver is here; this build of torch is for {build}",
                "install a build for the CUDA version of the driver; in a container, hand the GPU in (--gpus all)",
            )
    if facts["threads"] > cores:
        return warning(
            f"{found}; that is more threads than the {cores} usable cores",
            f"set OMP_NUM_THREADS={cores} for programs of your own; runs choose theirs (learner_threads)",
        )
    return ok(found)


def ask_torch() -> dict[str, Any]:
    """What torch says of itself. Raises RolloutServiceError with its last word if it cannot be imported."""
    command = [sys.executable, "-P", "-c", TORCH_QUESTION]
    try:
        asked = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TORCH_DEADLINE_S, check=False
        )
        facts: dict[str, Any] = json.loads(asked.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise RolloutServiceError(f"torch could not be imported within {TORCH_DEADLINE_S:g} s") from None
    except (IndexError, ValueError):
        words = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        raise RolloutServiceError(f"torch cannot be imported: {words[-1]}") from None
    return facts


def check_compiled() -> Finding:
    from learner import single_pass
    from rollout_service.policy import compiled

    missing = [part.NOT_BUILT for part in (single_pass, compiled) if not part.BUILT]
    if missing:
        return Verdict.OK, "; ".join(missing), single_pass.REMEDY
    lstm = "sequences by the compiled layer" if compiled.USABLE else compiled.NOT_SUPPORTED
    return ok(f"advantages by the compiled pass; {lstm}")


# What a run uses up


def check_cores() -> Finding:
    usable = usable_cores()
    found = f"{usable.count} usable of {os.cpu_count()}: {usable.reason}; num_actors auto is {usable.count}"
    if usable.count == 1:
        return warning(found, "actors and learner will take turns on one core; allow this process more of them")
    return ok(found)


def check_memory() -> Finding:
    import psutil

    from rollout_service.memory.room import available_memory

    total, left, limit = psutil.virtual_memory().total, available_memory(), memory_limit()
    limited = "no cgroup limit" if limit is None or limit >= total else f"the cgroup's limit is {_size(limit)}"
    found = f"{_size(left)} left of {_size(total)}, {limited}"
    actors = usable_cores().count
    if left < (needed := (actors + 1) * MEMORY_OF_A_ROLE):
        return warning(
            found,
            f"{actors} actors and a learner take about {_size(needed)} besides their envs; lower num_actors, or raise "
            "the limit",
        )
    return ok(found)


def memory_limit(*, root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> int | None:
    """Bytes that the strictest memory cgroup (v1 or v2) from this process up to `root` allows, or None."""
    places = [(root, "/", "memory.max"), (root / "memory", "/", "memory.limit_in_bytes")]
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            places.append((root, group, "memory.max"))
        elif "memory" in controllers.split(","):
            places.append((root / "memory", group, "memory.limit_in_bytes"))
    limits = []
    for base, group, name in places:
        inner = base / group.strip("/")
        # In a container the group's own path is often not mounted; its limit then stands at the root.
        above = (directory for directory in (inner, *inner.parents) if directory.is_relative_to(base))
        limits += [int(text) for directory in above if (text := _text(directory / name)).isdigit()]
    return min(limits, default=None)


def check_shared_memory() -> Finding:
    from rollout_service.memory.room import SHARED_MEMORY
    from rollout_service.memory.segment import Segment

    if not SHARED_MEMORY.is_dir():
        return problem(f"{SHARED_MEMORY} is missing", "runs need Linux; in a sandbox, mount a tmpfs there")
    usage = shutil.disk_usage(SHARED_MEMORY)
    room = f"{SHARED_MEMORY}: {_size(usage.free)} free of {_size(usage.total)}"
    try:
        Segment.create(1, kind="doctor").close()
    except SegmentTooLarge:
        return problem(f"{room}, too little for anything", f"{DISTRIBUTION} clean; or look for who fills it")
    except SegmentError:
        raise
    except OSError as error:
        return problem(f"{room}; no segment can be made: {error.strerror}", "look at its owner, mode and mount options")
    found = f"{room}; a segment can be made and locked"
    if usage.free < SMALL_SHARED_MEMORY:
        return warning(found, "enough for vectors, not for images; docker run --shm-size 1g, compose: shm_size")
    return ok(found)


def check_locked_memory() -> Finding:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "any amount" if soft == resource.RLIM_INFINITY else _size(soft)
    return ok(f"{limit} may be locked (memlock); a run locks none itself")


def check_open_files() -> Finding:
    from rollout_service.control.descriptors import OF_A_RUN, OF_AN_ACTOR, UNLIMITED, hard_limit

    if (limit := hard_limit()) == UNLIMITED:
        return ok("no limit")
    actors = max(0, limit - OF_A_RUN) // OF_AN_ACTOR
    found = f"up to {limit} per process, room for about {actors} actors"
    if actors < usable_cores().count:
        return warning(found, "raise the hard limit: ulimit -n 4096 as root, docker run --ulimit nofile=4096")
    return ok(found)


def check_sockets() -> Finding:
    from rollout_service.control.endpoints import MAX_ENDPOINT_BYTES, SOCKET_DIR_VARIABLE, SOCKET_PREFIX, socket_root

    root = socket_root()
    length = len(os.fsencode(f"ipc://{root / (SOCKET_PREFIX + '0' * 12) / 'c'}"))
    with tempfile.TemporaryDirectory(prefix="rs-doctor-", dir=root) as directory:
        try:
            with socket.socket(socket.AF_UNIX) as trial:
                trial.bind(str(Path(directory, "c")))
        except OSError as error:
            return problem(
                f"{root} holds no sockets: {error.strerror or error}",
                f"set {SOCKET_DIR_VARIABLE} to a directory on a local disk",
            )
    return ok(f"in {root}, endpoints of {length} bytes, at most {MAX_ENDPOINT_BYTES} fit")


def check_leftovers() -> Finding:
    from rollout_service.launch.cleanup import clean_up, live_endpoints

    alive = len(live_endpoints())
    runs = f"{alive} run{'' if alive == 1 else 's'} of this user alive"
    if leftovers := clean_up(dry_run=True):
        return warning(f"{'; '.join(leftovers.lines())}; {runs}", f"{DISTRIBUTION} clean")
    return ok(f"none of dead runs; {runs}")


CHECKS: Final[dict[str, Callable[[], Finding]]] = {
    "platform": check_platform,
    "libraries": check_libraries,
    "torch": check_torch,
    "compiled": check_compiled,
    "cores": check_cores,
    "memory": check_memory,
    "shared memory": check_shared_memory,
    "locked memory": check_locked_memory,
    "open files": check_open_files,
    "sockets": check_sockets,
    "leftovers": check_leftovers,
}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _least_versions() -> dict[str, str]:
    """What this distribution asks for, as installed; {} in a checkout that is not installed."""
    try:
        wanted = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    return {found[1]: found[2] for each in wanted if (found := re.match(r"([\w-]+)>=([\d.]+)", each))}


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
