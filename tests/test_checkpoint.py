"""Checkpoints are whole or not there, and a damaged one is never used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout_service import checkpoint as checkpoints
from rollout_service.checkpoint import ARRAYS_FILE, MANIFEST_FILE, Manifest
from rollout_service.config import TrainConfig
from rollout_service.errors import CheckpointError
from rollout_service.runspec import ArraySpec, Leaf, PolicySpec, RunSpec, SpaceKind, Spaces

SPEC = RunSpec(
    env="Memory/TMaze-v0",
    spaces=Spaces(
        observation=(Leaf(kind=SpaceKind.BOX, shape=(3,), dtype="float32"),),
        action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=2),
    ),
    policy=PolicySpec(),
    state={"hidden": (1, 64), "cell": (1, 64)},
    parameters=(ArraySpec(name="head.weight", shape=(2, 64), dtype="float32"),),
    num_steps=4,
    num_actors=1,
    envs_per_actor=2,
    envs_per_forward=2,
)


def manifest(update: int) -> Manifest:
    return Manifest(
        update=update,
        env_steps=update * 8,
        version=update + 1,
        run_digest=SPEC.digest(),
        run_spec=SPEC,
        config=TrainConfig().model_dump(mode="json"),
        counters={"updates_skipped": 1},
        generators={"shuffle": '{"state": 123456789012345678901234567890}'},
    )


def arrays(update: int) -> dict[str, np.ndarray]:
    return {
        "policy/weight": np.full((3, 2), update, np.float32),
        "policy/count": np.array([update], np.float64),
        "adam/step": np.array(update, np.float32),
        "generator": np.arange(5, dtype=np.uint8),
    }


def save(run_dir: Path, update: int) -> Path:
    return checkpoints.save(run_dir, arrays(update), manifest(update))


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    loaded = checkpoints.load(save(tmp_path, 7))
    assert loaded.manifest.update == 7
    assert loaded.manifest.run_spec == SPEC
    assert loaded.manifest.generators == manifest(7).generators
    assert loaded.manifest.counters == {"updates_skipped": 1}
    expected = arrays(7)
    assert set(loaded.arrays) == set(expected)
    for name, array in expected.items():
        assert loaded.arrays[name].dtype == array.dtype
        assert loaded.arrays[name].shape == array.shape
        np.testing.assert_array_equal(loaded.arrays[name], array)


def test_newest_is_the_one_of_the_highest_update(tmp_path: Path) -> None:
    for update in (5, 100_000_000, 20):
        save(tmp_path, update)
    found = checkpoints.newest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.update == 100_000_000
    assert found.damaged == ()


def test_without_a_checkpoint_newest_is_none_and_require_says_where_it_looked(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) == checkpoints.Found(None)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        checkpoints.require(tmp_path)


def test_a_flipped_byte_is_detected_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    content = bytearray((damaged / ARRAYS_FILE).read_bytes())
    content[-1] ^= 1
    (damaged / ARRAYS_FILE).write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="sha256"):
        checkpoints.load(damaged)
    found = checkpoints.newest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.update == 1
    assert [each.path for each in found.damaged] == [damaged]
    assert len(found.warnings()) == 1
    assert "using checkpoint-00000001" in found.warnings()[0]


@pytest.mark.parametrize("file", [ARRAYS_FILE, MANIFEST_FILE])
@pytest.mark.parametrize("harm", ["missing", "empty", "half"])
def test_missing_and_cut_files_are_damage(tmp_path: Path, file: str, harm: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2) / file
    match harm:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "half":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = checkpoints.newest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.update == 1
    assert len(found.damaged) == 1


def test_a_format_of_another_release_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    text = (path / MANIFEST_FILE).read_text().replace('"format_version": 1', '"format_version": 99')
    (path / MANIFEST_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="format version 99, this release reads 1"):
        checkpoints.load(path)


def test_a_manifest_with_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    text = (path / MANIFEST_FILE).read_text().replace('"update": 3', '"update": 3, "surprise": 1')
    (path / MANIFEST_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="surprise"):
        checkpoints.load(path)


def test_rotation_keeps_the_newest_and_clears_unfinished_saves(tmp_path: Path) -> None:
    for update in range(5):
        save(tmp_path, update)
    unfinished = checkpoints.checkpoint_root(tmp_path) / ".writing-0123"
    unfinished.mkdir()
    removed = checkpoints.rotate(tmp_path, keep=2)
    assert [path.name for path in checkpoints.listed(tmp_path)] == ["checkpoint-00000003", "checkpoint-00000004"]
    assert len(removed) == 4
    assert not unfinished.exists()
    assert [path for path in checkpoints.checkpoint_root(tmp_path).iterdir() if path.name.startswith(".")] == []


def test_rotation_with_fewer_than_kept_removes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert checkpoints.rotate(tmp_path, keep=3) == []
    assert len(checkpoints.listed(tmp_path)) == 1


def test_saving_the_same_update_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 4)
    path = checkpoints.save(tmp_path, {"policy/weight": np.zeros(1, np.float32)}, manifest(4))
    assert set(checkpoints.load(path).arrays) == {"policy/weight"}
    assert [child.name for child in checkpoints.checkpoint_root(tmp_path).iterdir()] == ["checkpoint-00000004"]


def test_a_disk_that_refuses_leaves_the_earlier_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert [path.name for path in checkpoints.checkpoint_root(tmp_path).iterdir()] == ["checkpoint-00000001"]
    assert checkpoints.require(tmp_path).checkpoint.manifest.update == 1


def test_a_process_killed_while_saving_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    """The child saves ever newer checkpoints until it is killed, each time at another moment of a save."""
    code = (
        "import sys, pathlib, tests.test_checkpoint as t\n"
        "print('up', flush=True)\n"
        "for update in range(10**6):\n"
        "    t.save(pathlib.Path(sys.argv[1]), update)\n"
        "    t.checkpoints.rotate(pathlib.Path(sys.argv[1]), 2)\n"
        "    print(update, flush=True)\n"
    )
    for lines in (1, 2, 3):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        assert child.stdout is not None
        for _ in range(lines + 1):
            child.stdout.readline()
        child.kill()
        child.wait(10)
        child.stdout.close()
        found = checkpoints.newest(tmp_path)
        assert found.checkpoint is not None
        assert found.damaged == ()
        weight = found.checkpoint.arrays["policy/weight"]
        np.testing.assert_array_equal(weight, np.full((3, 2), found.checkpoint.manifest.update, np.float32))


def test_checkpoints_need_no_torch() -> None:
    code = "import sys, rollout_service.checkpoint; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_damaged_ones_that_are_set_aside_are_neither_newest_nor_kept_for_good_ones(tmp_path: Path) -> None:
    for update in (2, 4, 6):
        save(tmp_path, update)
    (checkpoints.listed(tmp_path)[-1] / ARRAYS_FILE).write_bytes(b"")
    found = checkpoints.newest(tmp_path)
    checkpoints.set_aside(found.damaged)
    assert [path.name for path in checkpoints.listed(tmp_path)] == ["checkpoint-00000002", "checkpoint-00000004"]
    assert checkpoints.newest(tmp_path).damaged == ()
    save(tmp_path, 5)
    checkpoints.rotate(tmp_path, 1)
    assert [path.name for path in checkpoints.listed(tmp_path)] == ["checkpoint-00000005"]
    (aside,) = checkpoints.checkpoint_root(tmp_path).glob("damaged-*")
    assert aside.name.endswith("-checkpoint-00000006")
    assert (aside / MANIFEST_FILE).exists()
