"""A batch as a file: the names of the contract, the numbers of the rollout, of the update that was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from rollout_service.errors import ConfigError
from rollout_service.launch.prepare import resolve
from tests.fixtures.training import serial_run, small_config

NAMES = {
    "obs_seq",
    "actions",
    "episode_starts",
    "old_log_probs",
    "old_values",
    "advantages",
    "returns",
    "valid",
    "env_ids",
    "initial_state/hidden",
    "initial_state/cell",
}


def test_the_first_batch_is_what_the_rollout_held(tmp_path: Path):
    path = tmp_path / "batch.safetensors"
    with serial_run(small_config(dump_batch=path)) as run:
        rollout = run.rollouts[0]
        run.one_update()
        expected = {
            "obs_seq": rollout.observations(),
            "actions": rollout.actions(),
            "advantages": rollout.advantages(),
            "returns": rollout.returns(),
            "old_log_probs": rollout.log_probs(),
            "old_values": rollout.values(),
        }
        expected = {name: np.array(array).swapaxes(0, 1) for name, array in expected.items()}
        written = path.stat().st_mtime_ns
        run.one_update()
        assert path.stat().st_mtime_ns == written
    found = load_file(path)
    assert set(found) == NAMES
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert found["valid"].all()
    assert found["initial_state/hidden"].shape == (1, 4, 8)
    np.testing.assert_array_equal(found["episode_starts"][:, 0], np.ones(4))
    np.testing.assert_array_equal(found["env_ids"], np.arange(4))
    assert [path.name for path in tmp_path.iterdir()] == ["batch.safetensors"]


def test_the_batch_of_a_later_update(tmp_path: Path):
    path = tmp_path / "third"
    with serial_run(small_config(dump_batch=path, dump_batch_update=3)) as run:
        for update in (1, 2, 3):
            assert not path.exists()
            run.one_update()
            assert path.exists() == (update == 3)
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"update": "3", "env": "tests.fixtures.random_ends:RandomEnds"}


def test_a_file_that_cannot_be_written_is_named_before_the_run_and_ends_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(ConfigError, match="gone/batch has to be a file in a directory that exists"):
        resolve(small_config(dump_batch=tmp_path / "gone" / "batch"))
    with pytest.raises(ConfigError, match="has to be a file"):
        resolve(small_config(dump_batch=tmp_path))
    config, _ = resolve(small_config(dump_batch=Path("batch")))
    assert config.dump_batch == Path.cwd() / "batch"
    with serial_run(small_config(dump_batch=tmp_path / "gone" / "batch")) as run:
        run.one_update()
        run.one_update()
        assert run.trainer.updates_done == 2
    said = capsys.readouterr().err
    assert said.count("was not written") == 1
    assert "gone/batch" in said
