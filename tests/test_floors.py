"""Imports go down only, and each outside library of the core has one home file.

A floor may import itself and what is below it. `workers` and `learner` never meet; only the composition root sees both.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("rollout_service", "workers", "learner")

FLOORS: dict[str, int] = {
    "rollout_service.errors": 0,
    "rollout_service.streams": 0,
    "rollout_service.offspring": 0,
    "rollout_service.lifeline": 1,
    "rollout_service.runspec": 1,
    "rollout_service.recurrence": 1,
    "rollout_service.tally": 1,
    "rollout_service.config": 2,
    "rollout_service.checkpoint": 2,
    "rollout_service.memory": 3,
    "rollout_service.control": 3,
    "rollout_service.envs": 4,
    "rollout_service.policy": 4,
    "rollout_service.observe": 5,
    "workers": 6,
    "learner": 6,
    "rollout_service.launch": 7,
    "rollout_service.bench": 8,
    "rollout_service.cli": 9,
    "rollout_service.__main__": 10,
}
HOMES = {
    "zmq": {"rollout_service/control/zeromq.py"},
    "msgpack": {"rollout_service/control/messages.py"},
    "multiprocessing.shared_memory": {"rollout_service/memory/mapping.py"},
}
TORCH_FLOORS = {"rollout_service.policy", "workers", "learner", "rollout_service.launch", "rollout_service.bench"}


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> str | None:
    """The longest entry of FLOORS that `module` is or lies in."""
    hits = [name for name in FLOORS if module == name or module.startswith(f"{name}.")]
    return max(hits, key=len, default=None)


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that `path` imports, lazily or not, `from a import b` as both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.ImportFrom(level=level) if level:
                pytest.fail(f"{path}:{node.lineno}: relative import; name the whole path")


def test_every_module_has_a_floor() -> None:
    homeless = [
        name for path in source_files() if (name := module_name(path)) != "rollout_service" and not floor_of(name)
    ]
    assert homeless == []


def test_imports_go_down_only() -> None:
    upward = []
    for path in source_files():
        here = floor_of(module_name(path))
        if here is None:
            continue
        for target in imported_modules(path):
            there = floor_of(target)
            if there is None or there == here:
                continue
            if FLOORS[there] >= FLOORS[here]:
                upward.append(f"{path.relative_to(ROOT)} imports {target}")
    assert upward == []


@pytest.mark.parametrize("library", HOMES)
def test_each_outside_library_of_the_core_has_one_home(library: str) -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in source_files()
        if any(name == library or name.startswith(f"{library}.") for name in imported_modules(path))
    }
    assert users == HOMES[library]


def test_torch_stays_where_networks_are() -> None:
    users = {
        floor_of(module_name(path))
        for path in source_files()
        if any(name == "torch" or name.startswith("torch.") for name in imported_modules(path))
    }
    assert users <= TORCH_FLOORS


def says_that_it_is_pure(path: Path) -> bool:
    words = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return re.search(r"\bPure( functions)?[.:;]", words) is not None


def test_pure_modules_read_no_clock_and_do_no_io() -> None:
    pure = {
        *filter(says_that_it_is_pure, source_files()),
        ROOT / "rollout_service" / "recurrence.py",
        ROOT / "rollout_service" / "tally.py",
        *(
            ROOT / "rollout_service" / "control" / f"{name}.py"
            for name in ("barriers", "ledger", "scheduling", "filling", "waits", "coordinator")
        ),
        *(ROOT / "learner" / f"{name}.py" for name in ("gae", "single_pass", "scan", "vtrace", "sequences", "ppo")),
    }
    impure = {"time", "os", "socket", "random", "zmq", "logging", "subprocess", "pathlib", "datetime"}
    found = {str(path.relative_to(ROOT)): sorted(impure & set(imported_modules(path))) for path in pure}
    assert {name: modules for name, modules in found.items() if modules} == {}
    assert len(found) > 30


def test_the_parent_process_imports_neither_torch_nor_gymnasium() -> None:
    code = (
        "import sys, rollout_service.cli, rollout_service.launch.supervisor; "
        "print(sorted({'torch', 'gymnasium'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout.strip() == "[]"


def test_no_multiprocessing_primitives_that_outlive_a_kill() -> None:
    primitives = {
        "Lock",
        "RLock",
        "Event",
        "Semaphore",
        "BoundedSemaphore",
        "Queue",
        "SimpleQueue",
        "Condition",
        "Barrier",
    }
    banned = {f"multiprocessing.{name}" for name in primitives} | {
        "multiprocessing.queues",
        "multiprocessing.synchronize",
    }
    found = [f"{path}: {name}" for path in source_files() for name in imported_modules(path) if name in banned]
    assert found == []
