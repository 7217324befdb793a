"""Checkpoints are whole or not there, and a damaged one is never used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rollout_service import checkpoint as checkpoints
from rollout_service.checkpoint import ARRAYS_FILE, MANIFEST_FILE, Manifest
from rollout_service.config import TrainConfig
from rollout_service.errors import CheckpointError
from rollout_service.runspec import ArraySpec, Leaf, PolicySpec, RunSpec, SpaceKind, Spaces
from tests.fixtures.limits import largest_file, own_tmpfs
from tests.memory.other_process import can_run, run_python

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


SAVES = """
import os, pathlib, sys
import numpy as np
import tests.test_checkpoint as t
run_dir, extra = pathlib.Path(sys.argv[1]), {"ballast": np.zeros(1 << 18, np.uint8)}
while sys.stdin.readline():
    if (child := os.fork()) == 0:
        update = 1 + t.checkpoints.newest(run_dir).checkpoint.manifest.update
        print(os.getpid(), flush=True)
        while True:  # until it is killed
            t.checkpoints.save(run_dir, t.arrays(update) | extra, t.manifest(update))
            t.checkpoints.rotate(run_dir, 2)
            update += 1
            print("saved", flush=True)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


def test_twenty_of_twenty_saves_killed_while_being_written_leave_a_loadable_checkpoint(tmp_path: Path) -> None:
    """Each process saves ever newer checkpoints until it is killed: within its first save, its second, or its third."""
    save(tmp_path, 0)
    began = time.perf_counter()
    checkpoints.save(tmp_path, arrays(0) | {"ballast": np.zeros(1 << 18, np.uint8)}, manifest(0))
    one_save_s = time.perf_counter() - began
    never, reached, unfinished = threading.Event(), 0, 0
    with subprocess.Popen(
        [sys.executable, "-c", SAVES, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    ) as saver:
        assert saver.stdin is not None
        assert saver.stdout is not None
        for number in range(20):
            saver.stdin.write("go\n")
            saver.stdin.flush()
            pid = int(saver.stdout.readline())
            for _ in range(number % 3):
                assert saver.stdout.readline() == "saved\n"
            never.wait(one_save_s * (1 + number) / 20)
            os.kill(pid, signal.SIGKILL)
            assert next(line for line in saver.stdout if line != "saved\n") == "killed\n"
            unfinished += any(checkpoints.checkpoint_root(tmp_path).glob(".writing-*"))
            found = checkpoints.newest(tmp_path)
            assert found.checkpoint is not None
            assert found.damaged == ()
            update = found.checkpoint.manifest.update
            assert update >= reached
            reached = update
            weight = found.checkpoint.arrays["policy/weight"]
            np.testing.assert_array_equal(weight, np.full((3, 2), update, np.float32))
        saver.stdin.close()
    assert unfinished >= 5, "killed between saves, not inside them"
    assert reached > 0


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


def test_a_full_disk_costs_the_save_under_way_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    earlier = save(tmp_path, 2)
    before = {file.name: file.read_bytes() for file in earlier.iterdir()}
    with largest_file(100):
        for update in (2, 3):
            with pytest.raises(CheckpointError, match=r"could not be written: .*File too large.*earlier checkpoints"):
                save(tmp_path, update)
    names = sorted(path.name for path in checkpoints.checkpoint_root(tmp_path).iterdir())
    assert names == ["checkpoint-00000001", "checkpoint-00000002"]
    assert {file.name: file.read_bytes() for file in earlier.iterdir()} == before
    save(tmp_path, 3)
    assert checkpoints.require(tmp_path).checkpoint.manifest.update == 3


@pytest.mark.skipif(not can_run(*own_tmpfs("/mnt", "64k"), "true"), reason="no right to mount a small file system")
def test_on_a_file_system_that_is_really_full_the_earlier_checkpoint_stays() -> None:
    code = (
        "import os, pathlib, tests.test_checkpoint as t\n"
        "run_dir = pathlib.Path('/mnt')\n"
        "t.save(run_dir, 1)\n"
        "filler = os.open('/mnt/filler', os.O_CREAT | os.O_WRONLY)\n"
        "room = os.statvfs('/mnt')\n"
        "os.posix_fallocate(filler, 0, room.f_bavail * room.f_frsize)\n"
        "try:\n"
        "    t.save(run_dir, 2)\n"
        "except t.CheckpointError as error:\n"
        "    print('No space left' in str(error))\n"
        "print(t.checkpoints.require(run_dir).checkpoint.manifest.update)\n"
        "os.unlink('/mnt/filler'), os.close(filler)\n"
        "t.save(run_dir, 2)\n"
        "print(t.checkpoints.require(run_dir).checkpoint.manifest.update, os.listdir('/mnt/checkpoints'))\n"
    )
    done = run_python(code, prefix=own_tmpfs("/mnt", "64k"))
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()
    assert shown[:2] == ["True", "1"]
    assert shown[2].startswith("2 ")
    assert ".writing" not in shown[2]


# The best one


def scored(run_dir: Path, **scores: float | None) -> None:
    """Checkpoints u1, u2, ... with these scores."""
    for name, score in scores.items():
        update = int(name.removeprefix("u"))
        checkpoints.save(run_dir, arrays(update), manifest(update).model_copy(update={"return_mean": score}))


def updates(run_dir: Path) -> list[int]:
    return [int(path.name[-8:]) for path in checkpoints.listed(run_dir)]


def best_update(run_dir: Path) -> int | None:
    found = checkpoints.best(run_dir).checkpoint
    return None if found is None else found.manifest.update


def test_the_best_is_the_newest_of_those_with_the_highest_score(tmp_path: Path) -> None:
    scored(tmp_path, u1=None, u2=2.5, u3=2.5, u4=-7.0, u5=float("nan"))
    assert best_update(tmp_path) == 3
    assert checkpoints.require(tmp_path, by_score=True).checkpoint.manifest.return_mean == 2.5
    assert checkpoints.require(tmp_path).checkpoint.manifest.update == 5


def test_without_a_score_there_is_no_best_and_the_message_says_so(tmp_path: Path) -> None:
    scored(tmp_path, u1=None)
    assert checkpoints.best(tmp_path) == checkpoints.Found(None)
    with pytest.raises(CheckpointError, match="holds none with a return_mean"):
        checkpoints.require(tmp_path, by_score=True)


def test_rotation_keeps_the_best_besides_the_newest_until_another_is_better(tmp_path: Path) -> None:
    scored(tmp_path, u1=1.0, u2=9.0, u3=3.0, u4=4.0, u5=None)
    checkpoints.rotate(tmp_path, 2, keep_best=True)
    assert updates(tmp_path) == [2, 4, 5]
    scored(tmp_path, u6=9.5)
    checkpoints.rotate(tmp_path, 2, keep_best=True)
    assert updates(tmp_path) == [5, 6]
    scored(tmp_path, u7=0.0, u8=0.0)
    checkpoints.rotate(tmp_path, 2, keep_best=False)
    assert updates(tmp_path) == [7, 8]


@pytest.mark.parametrize("file", [ARRAYS_FILE, MANIFEST_FILE])
def test_a_damaged_best_is_passed_over_aloud_and_does_not_take_the_place_of_the_next_one(
    tmp_path: Path, file: str
) -> None:
    scored(tmp_path, u1=8.0, u2=9.0, u3=3.0, u4=4.0)
    damaged = checkpoints.checkpoint_root(tmp_path) / "checkpoint-00000002"
    (damaged / file).write_bytes((damaged / file).read_bytes()[:-1])
    found = checkpoints.best(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.update == 1
    assert [each.path for each in found.damaged] == [damaged]
    checkpoints.rotate(tmp_path, 1, keep_best=True)
    assert updates(tmp_path) == [1, 4]


def test_a_best_with_a_flipped_byte_is_passed_over_too(tmp_path: Path) -> None:
    scored(tmp_path, u1=8.0, u2=9.0)
    damaged = checkpoints.listed(tmp_path)[1] / ARRAYS_FILE
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(bytes(content))
    assert best_update(tmp_path) == 1
