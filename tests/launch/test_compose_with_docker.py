"""The containers themselves, where a Docker engine with compose runs; elsewhere skipped with the reason.

Building the image downloads torch, so the first run takes minutes; later ones use the cached layers.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.machine import eventually

ROOT = Path(__file__).parents[2]
BUILD_S = 1800.0
START_S = 180.0


def missing() -> str | None:
    """Why containers cannot be tried out here, or None."""
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{' '.join(command)}: {error}"
        if asked.returncode:
            return f"{' '.join(command)}: {(asked.stderr or asked.stdout).strip().splitlines()[-1]}"
    return None


class Compose:
    """One compose project of its own name, with the given files."""

    def __init__(self, *files: Path) -> None:
        named = [word for file in files for word in ("--file", str(file))]
        self.words = ["docker", "compose", "--project-name", f"rs-test-{uuid.uuid4().hex[:8]}", *named]

    def run(self, *words: str, within_s: float = 60.0, check: bool = True) -> str:
        command = [*self.words, "--profile", "cpu", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=within_s, check=check).stdout

    def states(self) -> dict[str, list[tuple[str, int]]]:
        """service -> (state, exit code) of each of its containers."""
        found: dict[str, list[tuple[str, int]]] = {}
        for line in self.run("ps", "--all", "--format", "json").splitlines():
            listed = json.loads(line)
            for container in listed if isinstance(listed, list) else [listed]:
                found.setdefault(container["Service"], []).append((container["State"], container["ExitCode"]))
        return found

    def updates(self) -> int:
        shown = self.run("exec", "-T", "service", "rollout-service", "status", "--json", check=False)
        runs = json.loads(shown)["runs"] if shown else []
        reports = [run["report"] for run in runs if run["report"]]
        return max((report["updates"] for report in reports), default=0)


@pytest.fixture
def compose() -> Iterator[Compose]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    project = Compose(ROOT / "docker-compose.yml")
    yield project
    project.run("down", "--volumes", "--timeout", "1", within_s=120.0, check=False)


@pytest.mark.timeout(BUILD_S + 2 * START_S)
def test_containers_train_stop_in_time_and_leave_a_checkpoint_and_no_zombie(compose: Compose) -> None:
    compose.run("up", "--build", "--detach", within_s=BUILD_S)
    eventually(lambda: compose.updates() >= 2, START_S, "two updates")
    processes = compose.run("top")
    compose.run("stop", within_s=60.0)
    ended = compose.states()
    checkpoints = compose.run("run", "--rm", "--no-deps", "--entrypoint", "ls", "service", "runs/compose/checkpoints")
    assert "<defunct>" not in processes
    assert {service: {code for _, code in states} for service, states in ended.items()} == {
        "service": {143},
        "learner": {0},
        "actor": {0},
    }
    assert "checkpoint-" in checkpoints


@pytest.mark.timeout(BUILD_S + 2 * START_S)
def test_an_actor_without_the_services_memory_leaves_with_the_reason(compose: Compose, tmp_path: Path) -> None:
    alone = tmp_path / "alone.yml"
    alone.write_text("services:\n  actor:\n    ipc: private\n    restart: 'no'\n")
    apart = Compose(ROOT / "docker-compose.yml", alone)
    apart.words[3] = compose.words[3]
    apart.run("up", "--build", "--detach", within_s=BUILD_S)
    eventually(lambda: all(state == "exited" for state, _ in apart.states()["actor"]), START_S, "the actors leave")
    assert all(code == 1 for _, code in apart.states()["actor"])
    assert "is not visible from this process" in apart.run("logs", "actor")
