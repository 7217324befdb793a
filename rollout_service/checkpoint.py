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
checkpoint is loaded; sizes and sha256 are compared first, and `newest` and `best` fall back to the next one and say
so. A disk that refuses costs the save under way, never an earlier checkpoint.
No pickle anywhere. Torch-free: what the arrays mean is left to the learner.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
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
from rollout_service.tally import TallyRecord

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
    return_mean: float | None = None
    """Score: mean raw return of the newest finished episodes as of that update's batch; None before the first."""
    run_digest: str
    run_spec: RunSpec
    config: dict[str, Any]
    """TrainConfig as JSON."""
    counters: dict[str, Count] = {}
    figures: dict[str, float] = {}
    """The learner's figures of that update."""
    tally: TallyRecord = TallyRecord()
    """What the run had counted by then."""
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
    """The first usable checkpoint, if there is one, and those before it that were passed over because of damage."""

    checkpoint: Checkpoint | None
    damaged: tuple[Damaged, ...] = ()

    def warnings(self) -> list[str]:
        """One line per damaged checkpoint, for the log."""
        used = f"using {self.checkpoint.path.name}" if self.checkpoint else "none is left"
        return [f"checkpoint {each.path} is damaged ({each.reason}); {used}" for each in self.damaged]


@dataclass(frozen=True)
class Usable:
    """A checkpoint to use, and one line per damaged one that was passed over."""

    checkpoint: Checkpoint
    warnings: tuple[str, ...] = ()


def require_fits(path: Path, theirs: RunSpec, ours: RunSpec) -> None:
    """Raises CheckpointError, naming both values, if a run cannot go on from that checkpoint.

    Env, spaces and policy have to be its own; the number of actors, the length of the run and every setting of learning
    may differ.
    """
    for name in ("env", "spaces", "policy", "state", "parameters", "state_strategy"):
        if getattr(theirs, name) != getattr(ours, name):
            raise CheckpointError(
                f"{path} was made with {name} {getattr(theirs, name)}, this run has {getattr(ours, name)}; "
                "use the checkpoint's own setting, or start a new run_dir"
            )


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
    writing, replaced = (root / f"{_WRITING}{secrets.token_hex(8)}" for _ in range(2))
    try:
        root.mkdir(parents=True, exist_ok=True)
        writing.mkdir()
        _write_flushed(writing / ARRAYS_FILE, content)
        _write_flushed(writing / MANIFEST_FILE, json.dumps(stamped.model_dump(mode="json"), indent=1).encode())
        _flush_directory(writing)
        if target.exists():
            target.rename(replaced)
        writing.rename(target)
        _flush_directory(root)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        if replaced.exists() and not target.exists():
            with suppress(OSError):
                replaced.rename(target)
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
    _check_size(path, len(content), manifest)
    if (digest := hashlib.sha256(content).hexdigest()) != manifest.arrays_sha256:
        raise CheckpointError(f"{path / ARRAYS_FILE} has sha256 {digest}, its manifest says {manifest.arrays_sha256}")
    try:
        arrays = parse_arrays(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path / ARRAYS_FILE} is not a safetensors file: {error}") from error
    return Checkpoint(path, manifest, arrays)


def _check_size(path: Path, nbytes: int, manifest: Manifest) -> None:
    if nbytes != manifest.arrays_bytes:
        raise CheckpointError(f"{path / ARRAYS_FILE} has {nbytes} bytes, its manifest says {manifest.arrays_bytes}")


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
    return _first_usable(reversed(listed(run_dir)))


def best(run_dir: Path) -> Found:
    """The checkpoint with the highest return_mean that verifies, of equal ones the newest; none without a score."""
    scored, damaged = _by_score(listed(run_dir))
    found = _first_usable(scored)
    return Found(found.checkpoint, (*damaged, *found.damaged))


def _first_usable(paths: Iterable[Path]) -> Found:
    damaged: list[Damaged] = []
    for path in paths:
        try:
            return Found(load(path), tuple(damaged))
        except CheckpointError as error:
            damaged.append(Damaged(path, str(error)))
    return Found(None, tuple(damaged))


def _by_score(paths: Iterable[Path]) -> tuple[list[Path], list[Damaged]]:
    """Those with a score, the highest first, of equal ones the newest; and those whose damage shows at a glance."""
    scored: list[tuple[float, int, Path]] = []
    damaged: list[Damaged] = []
    for path in paths:
        try:
            manifest = load_manifest(path)
            _check_size(path, (path / ARRAYS_FILE).stat().st_size, manifest)
        except (CheckpointError, OSError) as error:
            damaged.append(Damaged(path, str(error)))
            continue
        if manifest.return_mean is not None and math.isfinite(manifest.return_mean):
            scored.append((manifest.return_mean, manifest.update, path))
    return [path for _, _, path in sorted(scored, reverse=True)], damaged


def require(path: Path, *, by_score: bool = False) -> Usable:
    """What `path` names: a checkpoint directory, or a run directory, of which the newest usable one is taken.

    by_score: of a run directory the best one instead. Raises CheckpointError if there is none.
    """
    path = Path(path)
    if (path / MANIFEST_FILE).exists():
        return Usable(load(path))
    found = best(path) if by_score else newest(path)
    if found.checkpoint is None:
        none = "none with a return_mean" if by_score and listed(path) else "none"
        why = "; ".join(each.reason for each in found.damaged) or f"{checkpoint_root(path)} holds {none}"
        raise CheckpointError(f"no usable checkpoint in {path}: {why}")
    return Usable(found.checkpoint, tuple(found.warnings()))


def rotate(run_dir: Path, keep: int, *, keep_best: bool = False) -> list[Path]:
    """Removes what killed saves left and all checkpoints but the `keep` newest; returns what it removed.

    keep_best: the one with the highest return_mean stays besides. What the disk does not let go stays for next time.
    For the writer of the run only: it would remove another writer's save under way.
    """
    root = checkpoint_root(run_dir)
    present = listed(run_dir)
    kept = {*present[-keep:], *(_by_score(present)[0][:1] if keep_best else ())}
    surplus = [path for path in present if path not in kept] if keep > 0 else []
    unfinished = [path for path in root.glob(f"{_WRITING}*") if path.is_dir()] if root.is_dir() else []
    removed = []
    for path in unfinished:
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
    for path in surplus:
        # Renamed first: a removal that is killed half way must not leave a damaged checkpoint behind.
        aside = root / f"{_WRITING}{secrets.token_hex(8)}"
        with suppress(OSError):
            path.rename(aside)
            removed.append(path)
            shutil.rmtree(aside, ignore_errors=True)
    return removed


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
