"""Checkpoints: named arrays and one JSON document on disk, written whole or not at all.

    <run_dir>/checkpoints/
        checkpoint-00000050/
            arrays.safetensors      every array by name
            manifest.json           format, counters, configuration, sha256 of the arrays
        .writing-<token>/           a save that is under way, or that was killed
        damaged-<token>-<name>/     one that did not verify when a learner went on from the one before

Writers: the learner of the run, one at a time. Readers: a restored learner, `eval`, the service (counters only).
A save fills a directory beside its final place, flushes files and directory to the disk and renames: a reader, and a
process killed at any moment, sees the checkpoint whole or does not see it. What must never happen: that a damaged
checkpoint is loaded; sizes and sha256 are compared first, and `newest` falls back to the one before and says so.
No pickle anywhere. Torch-free: what the arrays mean is left to the learner.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as parse_arrays
from safetensors.numpy import save as serialize_arrays

from rollout_service.errors import CheckpointError
from rollout_service.runspec import RunSpec

FORMAT_VERSION: Final = 1
ARRAYS_FILE: Final = "arrays.safetensors"
MANIFEST_FILE: Final = "manifest.json"
POLICY_PREFIX: Final = "policy/"
"""What the names of the policy's parameters and statistics begin with; an evaluation needs no others."""
_PREFIX: Final = "checkpoint-"
_WRITING: Final = ".writing-"
_DAMAGED: Final = "damaged-"

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Manifest(BaseModel):
    """What a checkpoint says about itself. `arrays_bytes` and `arrays_sha256` are filled in by `save`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    update: Count
    """Updates that went into the weights."""
    env_steps: Count
    """Env steps over all actors, up to and including that update."""
    version: Count
    """Weights version that was published with these weights."""
    run_digest: str
    run_spec: RunSpec
    config: dict[str, Any]
    """TrainConfig as JSON."""
    counters: dict[str, Count] = {}
    generators: dict[str, str] = {}
    """States of random generators that are not arrays, as JSON."""
    arrays_bytes: Count = 0
    arrays_sha256: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory, verified."""

    path: Path
    manifest: Manifest
    arrays: dict[str, np.ndarray]


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that could not be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Found:
    """The newest usable checkpoint, if there is one, and the newer ones that were passed over because of damage."""

    checkpoint: Checkpoint | None
    damaged: tuple[Damaged, ...] = ()

    def warnings(self) -> list[str]:
        """One line per damaged checkpoint, for the log."""
        used = f"using {self.checkpoint.path.name}" if self.checkpoint else "none is left"
        return [f"checkpoint {each.path} is damaged ({each.reason}); {used}" for each in self.damaged]


@dataclass(frozen=True)
class Usable:
    """A checkpoint to go on from, and one line per damaged newer one."""

    checkpoint: Checkpoint
    warnings: tuple[str, ...] = ()


def checkpoint_root(run_dir: Path) -> Path:
    """Where the checkpoints of a run are."""
    return Path(run_dir) / "checkpoints"


def listed(run_dir: Path) -> list[Path]:
    """Checkpoint directories of a run, oldest update first. Unfinished saves are not among them."""
    root = checkpoint_root(run_dir)
    if not root.is_dir():
        return []
    found = (path for path in root.iterdir() if path.name.startswith(_PREFIX) and path.name[len(_PREFIX) :].isdigit())
    return sorted(found, key=lambda path: int(path.name[len(_PREFIX) :]))


def save(run_dir: Path, arrays: Mapping[str, np.ndarray], manifest: Manifest) -> Path:
    """Writes one checkpoint and returns its directory. Raises CheckpointError if the disk refuses.

    A checkpoint of the same update is replaced: after a resume from an older one the same update is reached again.
    """
    root = checkpoint_root(run_dir)
    content = serialize_arrays({name: np.asarray(array, order="C") for name, array in arrays.items()})
    stamped = manifest.model_copy(
        update={"arrays_bytes": len(content), "arrays_sha256": hashlib.sha256(content).hexdigest()}
    )
    target = root / f"{_PREFIX}{manifest.update:08d}"
    writing = root / f"{_WRITING}{secrets.token_hex(8)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        writing.mkdir()
        _write_flushed(writing / ARRAYS_FILE, content)
        _write_flushed(writing / MANIFEST_FILE, json.dumps(stamped.model_dump(mode="json"), indent=1).encode())
        _flush_directory(writing)
        replaced = root / f"{_WRITING}{secrets.token_hex(8)}"
        if target.exists():
            target.rename(replaced)
        writing.rename(target)
        _flush_directory(root)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {target} could not be written: {error}; look at the free space and permissions of {root}, "
            "earlier checkpoints are untouched"
        ) from error
    return target


def load(path: Path) -> Checkpoint:
    """One checkpoint, verified. Raises CheckpointError naming the file and what is wrong with it."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"no checkpoint at {path}: give a checkpoint directory, or a run directory to use its newest"
        )
    manifest = load_manifest(path)
    try:
        content = (path / ARRAYS_FILE).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path / ARRAYS_FILE} cannot be read: {error}") from error
    if len(content) != manifest.arrays_bytes:
        raise CheckpointError(
            f"{path / ARRAYS_FILE} has {len(content)} bytes, its manifest says {manifest.arrays_bytes}"
        )
    if (digest := hashlib.sha256(content).hexdigest()) != manifest.arrays_sha256:
        raise CheckpointError(f"{path / ARRAYS_FILE} has sha256 {digest}, its manifest says {manifest.arrays_sha256}")
    try:
        arrays = parse_arrays(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path / ARRAYS_FILE} is not a safetensors file: {error}") from error
    return Checkpoint(path, manifest, arrays)


def load_manifest(path: Path) -> Manifest:
    """Only the document of a checkpoint, without its arrays. Raises CheckpointError."""
    file = Path(path) / MANIFEST_FILE
    try:
        fields = json.loads(file.read_bytes())
        version = fields.get("format_version") if isinstance(fields, dict) else None
        if version != FORMAT_VERSION:
            raise CheckpointError(f"{file} has format version {version!r}, this release reads {FORMAT_VERSION}")
        return Manifest.model_validate(fields)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{file} is not a manifest: {where}: {first['msg']}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error


def newest(run_dir: Path) -> Found:
    """The newest checkpoint that verifies. Damaged newer ones are reported, not removed and not raised."""
    damaged: list[Damaged] = []
    for path in reversed(listed(run_dir)):
        try:
            return Found(load(path), tuple(damaged))
        except CheckpointError as error:
            damaged.append(Damaged(path, str(error)))
    return Found(None, tuple(damaged))


def require(path: Path) -> Usable:
    """What `path` names: a checkpoint directory, or a run directory, of which the newest usable one is taken.

    Raises CheckpointError if there is none.
    """
    path = Path(path)
    if (path / MANIFEST_FILE).exists():
        return Usable(load(path))
    found = newest(path)
    if found.checkpoint is None:
        why = "; ".join(each.reason for each in found.damaged) or f"{checkpoint_root(path)} holds none"
        raise CheckpointError(f"no usable checkpoint in {path}: {why}")
    return Usable(found.checkpoint, tuple(found.warnings()))


def rotate(run_dir: Path, keep: int) -> list[Path]:
    """Removes all but the `keep` newest checkpoints and what killed saves left; returns what it removed.

    For the writer of the run only: it would remove another writer's save under way.
    """
    root = checkpoint_root(run_dir)
    surplus = listed(run_dir)[:-keep] if keep > 0 else []
    unfinished = [path for path in root.glob(f"{_WRITING}*") if path.is_dir()] if root.is_dir() else []
    for path in (*surplus, *unfinished):
        if path in surplus:
            # Renamed first: a removal that is killed half way must not leave a damaged checkpoint behind.
            aside = root / f"{_WRITING}{secrets.token_hex(8)}"
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return [*surplus, *unfinished]


def set_aside(damaged: Iterable[Damaged]) -> None:
    """Renames damaged checkpoints: they would count as the newest ones, and rotation would keep them for good ones.

    For the writer of the run only. Nothing is deleted.
    """
    for each in damaged:
        each.path.rename(each.path.with_name(f"{_DAMAGED}{secrets.token_hex(4)}-{each.path.name}"))


def _write_flushed(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
