"""A start that is refused, for whatever reason, leaves the disk as it was."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rollout_service.errors import ConfigError, RolloutServiceError, SegmentTooLarge
from rollout_service.launch.run import Door
from rollout_service.launch.train import serve, train, train_serially
from rollout_service.memory import room
from tests.fixtures.training import small_config


def refused(directory: Path, kind: type[RolloutServiceError], start, **settings: object) -> None:
    """Over an earlier run's directory, and in a new one."""
    earlier, new = directory / "earlier", directory / "new"
    (earlier / "checkpoints").mkdir(parents=True)
    (earlier / "config.toml").write_text("seed = 1\n")
    for path in (earlier, new / "run"):
        with pytest.raises(kind):
            start(small_config(run_dir=path, **settings))
    (earlier / "lock").unlink(missing_ok=True)
    assert not new.exists()
    assert sorted(each.name for each in earlier.rglob("*")) == ["checkpoints", "config.toml"]
    assert (earlier / "config.toml").read_text() == "seed = 1\n"


@pytest.mark.parametrize("start", [train, train_serially])
def test_a_wrong_env(tmp_path: Path, start):
    refused(tmp_path, ConfigError, start, env="tests.fixtures.machine:NoSuchEnv")


@pytest.mark.parametrize("start", [train, train_serially])
def test_too_large_a_segment(tmp_path: Path, start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "free_shared_memory", lambda: 0)
    refused(tmp_path, SegmentTooLarge, start)


def test_a_port_in_use(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        door = Door(f"tcp://127.0.0.1:{taken.getsockname()[1]}", allow_tcp=True)
        refused(tmp_path, ConfigError, lambda config: serve(config, door))
