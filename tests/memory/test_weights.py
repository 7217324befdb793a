"""Weights in two banks: a reader gets one whole version, or an error that says what it waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rollout_service.errors import OutOfRange, SegmentMismatch, ShapeError, WaitTimedOut
from rollout_service.memory import weights as weights_module
from rollout_service.memory.segment import Segment
from rollout_service.memory.weights import NOTHING_PUBLISHED, WeightsMemory
from rollout_service.runspec import ArraySpec
from tests.memory.other_process import OtherProcess

PARAMETERS = (
    ArraySpec(name="encoder.weight", shape=(3, 5), dtype="float32"),
    ArraySpec(name="normalizer.count", shape=(), dtype="int64"),
    ArraySpec(name="encoder.bias", shape=(3,), dtype="float64"),
)


def version_arrays(version: int) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays that say which version they are of."""
    return {spec.name: np.full(spec.shape, version, spec.dtype) for spec in PARAMETERS}


@pytest.fixture
def weights() -> Iterator[WeightsMemory]:
    with WeightsMemory.create(PARAMETERS) as made:
        yield made


def test_what_was_published_is_loaded_by_whoever_attaches(weights: WeightsMemory) -> None:
    weights.publish(0, version_arrays(0))
    weights.publish(1, version_arrays(1))
    with WeightsMemory.attach(weights.name) as reader:
        assert reader.parameters == PARAMETERS
        assert reader.newest_version() == 1
        loaded = reader.load(at_least=1)
    assert loaded.version == 1
    assert loaded.arrays.keys() == {spec.name for spec in PARAMETERS}
    for spec in PARAMETERS:
        assert loaded.arrays[spec.name].shape == spec.shape
        assert loaded.arrays[spec.name].dtype == spec.dtype
        assert (loaded.arrays[spec.name] == 1).all()


def test_loaded_arrays_are_the_readers_own(weights: WeightsMemory) -> None:
    weights.publish(0, version_arrays(0))
    first = weights.load()
    for version in (1, 2, 3):
        weights.publish(version, version_arrays(version))
    second = weights.load()
    first.arrays["encoder.bias"][:] = 77
    assert (first.arrays["encoder.weight"] == 0).all()
    assert (second.arrays["encoder.weight"] == 3).all()
    assert (weights.load().arrays["encoder.bias"] == 3).all()


def test_arrays_that_are_not_contiguous_are_published_by_value(weights: WeightsMemory) -> None:
    arrays = version_arrays(0)
    arrays["encoder.weight"] = np.arange(15, dtype=np.float32).reshape(5, 3).T
    weights.publish(0, arrays)
    assert weights.load().arrays["encoder.weight"].tolist() == arrays["encoder.weight"].tolist()


def test_nothing_is_loaded_before_the_first_publish(weights: WeightsMemory) -> None:
    assert weights.newest_version() == NOTHING_PUBLISHED == -1
    with pytest.raises(WaitTimedOut, match=r"waited 0\.01 s .*the newest there is none"):
        weights.load(deadline_s=0.01)


def test_a_version_that_was_never_published_is_waited_for_with_a_deadline(weights: WeightsMemory) -> None:
    weights.publish(4, version_arrays(4))
    with pytest.raises(WaitTimedOut, match=r"version 5 or newer .*the newest there is version 4"):
        weights.load(at_least=5, deadline_s=0.01)
    assert weights.load(at_least=4).version == 4


@pytest.mark.parametrize("version", [-1, 2, 3])
def test_versions_only_grow(weights: WeightsMemory, version: int) -> None:
    weights.publish(3, version_arrays(3))
    with pytest.raises(OutOfRange, match=f"version {version} cannot follow 3"):
        weights.publish(version, version_arrays(version))
    assert weights.load().version == 3


def test_consecutive_versions_alternate_and_a_jump_spares_the_newest(weights: WeightsMemory) -> None:
    for version in (0, 1, 3):
        weights.publish(version, version_arrays(version))
    banks = sorted(int(header[2]) for header in weights._headers)
    assert banks == [1, 3]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"encoder.weight": None}, r"missing \['encoder.weight'\]"),
        ({"extra": np.zeros(1)}, r"unknown \['extra'\]"),
        ({"encoder.weight": np.zeros((5, 3), np.float32)}, r"float32\[5, 3\], the manifest has float32\[3, 5\]"),
        ({"encoder.weight": np.zeros((3, 5))}, r"float64\[3, 5\], the manifest has float32\[3, 5\]"),
    ],
)
def test_arrays_other_than_the_manifests_are_refused_before_anything_is_written(
    weights: WeightsMemory, changes: dict[str, Any], why: str
) -> None:
    weights.publish(0, version_arrays(0))
    arrays = {name: array for name, array in {**version_arrays(1), **changes}.items() if array is not None}
    with pytest.raises(ShapeError, match=why):
        weights.publish(1, arrays)
    assert weights.load().version == 0


def test_a_learner_that_died_while_publishing_leaves_the_version_before(
    weights: WeightsMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(version: int, bank: object) -> int:
        raise KeyboardInterrupt

    weights.publish(6, version_arrays(6))
    weights.publish(7, version_arrays(7))
    with monkeypatch.context() as patched:
        patched.setattr(weights_module, "_checksum", die)
        with pytest.raises(KeyboardInterrupt):
            weights.publish(8, version_arrays(8))
    assert weights.newest_version() == 7
    assert (weights.load().arrays["encoder.weight"] == 7).all()
    with pytest.raises(WaitTimedOut, match="has the learner stopped while publishing"):
        weights.load(at_least=8, deadline_s=0.01)
    with WeightsMemory.attach(weights.name) as restored:
        restored.publish(8, version_arrays(80))
    assert (weights.load(at_least=8).arrays["encoder.weight"] == 80).all()


def test_a_damaged_bank_is_never_handed_out(weights: WeightsMemory) -> None:
    weights.publish(0, version_arrays(0))
    weights._banks[0][13] ^= 1
    with pytest.raises(WaitTimedOut):
        weights.load(deadline_s=0.01)


def test_a_reader_beside_a_writer_in_another_process_never_sees_two_versions_mixed() -> None:
    writer = """
import select
import sys
import numpy as np
from rollout_service.memory.weights import WeightsMemory
weights = WeightsMemory.attach(sys.argv[1])
arrays = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in weights.parameters}
version = 0
weights.publish(version, arrays)
print("publishing", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    version += 1
    for array in arrays.values():
        array.fill(version)
    weights.publish(version, arrays)
"""
    parameters = tuple(ArraySpec(name=f"layer{index}", shape=(100, 300), dtype="float32") for index in range(6))
    with WeightsMemory.create(parameters) as weights, OtherProcess(writer, weights.name) as learner:
        assert learner.answer() == "publishing"
        versions = [0]
        while len(set(versions)) < 100:
            loaded = weights.load()
            contents = {float(array.min()) for array in loaded.arrays.values()}
            contents |= {float(array.max()) for array in loaded.arrays.values()}
            assert contents == {loaded.version}
            versions.append(loaded.version)
        assert versions == sorted(versions)
        assert learner.leave() == (0, "")


def test_an_unreadable_manifest_is_a_mismatch() -> None:
    for layout, why in ((b"{", "no readable parameter manifest"), (b"[]", "holds 100 bytes, its manifest needs 128")):
        with Segment.create(100, kind="weights", layout=layout) as owner:
            owner.mark_ready()
            with pytest.raises(SegmentMismatch, match=why):
                WeightsMemory.attach(owner.name)


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ((PARAMETERS[0], PARAMETERS[0]), "names repeat"),
        ((ArraySpec(name="text", shape=(1,), dtype="U4"),), "text has dtype U4"),
    ],
)
def test_manifests_that_shared_memory_cannot_hold_are_refused(parameters: tuple[ArraySpec, ...], why: str) -> None:
    with pytest.raises(ShapeError, match=why):
        WeightsMemory.create(parameters)
