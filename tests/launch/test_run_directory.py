"""The run directory: one living run, nothing of an old run mistaken for a new one's, nothing deleted."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from rollout_service.config import TrainConfig
from rollout_service.errors import CheckpointError, ConfigError
from rollout_service.launch.rundir import RunDirectory, default_run_directory, unsaved
from tests.control.world import make_spec
from tests.fixtures.limits import largest_file
from tests.test_checkpoint import save


def test_the_default_name_says_env_and_time():
    path = default_run_directory("my.module:Env-v0", "0123456789abcdef", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert path == Path("runs/my.module-Env-v0-20260102-030405-01234567")


def test_a_living_run_keeps_others_out(tmp_path: Path):
    with RunDirectory(tmp_path / "run", resume=False), pytest.raises(ConfigError, match="alive"):
        RunDirectory(tmp_path / "run", resume=False)
    RunDirectory(tmp_path / "run", resume=False).close()


def test_an_earlier_run_is_moved_aside_and_what_is_not_ours_stays(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.toml").write_text("seed = 1\n")
    (tmp_path / "notes.txt").write_text("mine")
    with RunDirectory(tmp_path, resume=False) as opened:
        opened.begin(TrainConfig(seed=2), make_spec())
        assert opened.moved_aside == tmp_path / "earlier-1"
    assert (tmp_path / "earlier-1" / "config.toml").read_text() == "seed = 1\n"
    assert "seed = 2" in (tmp_path / "config.toml").read_text()
    assert (tmp_path / "notes.txt").exists()
    assert not (tmp_path / "checkpoints").exists()


def test_resuming_nothing_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="nothing to resume"):
        RunDirectory(tmp_path / "missing", resume=True)
    with pytest.raises(CheckpointError):
        RunDirectory(tmp_path, resume=True)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/run"):
        RunDirectory(tmp_path / "file" / "run", resume=False)


def test_settings_that_a_full_disk_does_not_take_are_an_error_and_the_old_ones_stay(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.toml").write_text("seed = 1\n")
    with (
        RunDirectory(tmp_path, resume=False) as opened,
        largest_file(10),
        pytest.raises(ConfigError, match="cannot be written: File too large; make room"),
    ):
        opened.begin(TrainConfig(), make_spec())
    assert (tmp_path / "config.toml").read_text() == "seed = 1\n"
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "config.toml", "lock"}


def test_a_directory_is_gone_again_if_nothing_began_in_it(tmp_path: Path):
    path = tmp_path / "deep" / "run"
    with RunDirectory(path, resume=False), pytest.raises(ConfigError, match="alive"):
        RunDirectory(path, resume=False)
    assert list(tmp_path.iterdir()) == []
    with RunDirectory(path, resume=False):
        (path / "notes.txt").write_text("not the run's")
    assert [each.name for each in path.iterdir()] == ["notes.txt"]
    with RunDirectory(path, resume=False) as opened:
        opened.begin(TrainConfig(), make_spec())
    assert {each.name for each in path.iterdir()} == {"config.toml", "lock", "logs", "notes.txt"}


def test_a_file_where_a_run_has_a_directory_is_named_and_nothing_is_changed(tmp_path: Path):
    (tmp_path / "logs").write_text("mine")
    (tmp_path / "config.toml").write_text("seed = 1\n")
    with RunDirectory(tmp_path, resume=False) as opened, pytest.raises(ConfigError, match="logs is a file"):
        opened.begin(TrainConfig(), make_spec())
    assert ((tmp_path / "logs").read_text(), (tmp_path / "config.toml").read_text()) == ("mine", "seed = 1\n")


def test_a_run_that_cannot_go_on_from_a_checkpoint_leaves_the_settings_that_can(tmp_path: Path):
    save(tmp_path, 5)
    (tmp_path / "config.toml").write_text("hidden_dim = 64\n")
    with RunDirectory(tmp_path, resume=True) as opened:
        own = opened.resume_point.run_spec
        assert own is not None
        other = own.model_copy(update={"policy": own.policy.model_copy(update={"hidden_dim": 63})})
        with pytest.raises(CheckpointError, match=r"was made with policy .* this run has .*hidden_dim=63"):
            opened.begin(TrainConfig(), other)
        assert (tmp_path / "config.toml").read_text() == "hidden_dim = 64\n"
        opened.begin(TrainConfig(num_actors=3), own.model_copy(update={"num_actors": 3}))
    assert "num_actors = 3" in (tmp_path / "config.toml").read_text()


def test_what_is_in_no_checkpoint_is_said_in_updates(tmp_path: Path):
    assert unsaved(tmp_path, 7) == "7 updates are to be made again: the run goes on from the start"
    save(tmp_path, 5)
    assert unsaved(tmp_path, 7) == "2 updates are to be made again: the run goes on from checkpoint-00000005"
