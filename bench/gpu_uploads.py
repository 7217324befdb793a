"""Uploads on a GPU: batches equal the CPU's, and shared memory is pinned where CUDA takes it; see `gpu_checks`.

On a CPU pinning is left out. `python -m bench.gpu_uploads cuda` pins once and prints the digest of a batch: for a
process with another limit of locked memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.gpu_checks import ESTIMATOR, Figures, one_update, require, require_healthy, trainer
from learner.rollout_buffer import RecurrentRolloutBuffer
from learner.sequences import SequenceBatch
from learner.staging import DeviceStaging, HostStaging, Staging
from learner.upload import is_uploaded_whole, lane_for, upload
from rollout_service.bench.rig import STATE, fill_slot, null_spaces
from rollout_service.config import Device
from rollout_service.memory.schema import rollout_fields
from rollout_service.memory.slots import RolloutMemory
from rollout_service.runspec import Leaf, SpaceKind, Spaces

ROOT: Final = Path(__file__).resolve().parents[1]
ESTIMATE_TOLERANCE: Final = 1e-5
"""float32 advantages and returns whose float64 sums were made in another order."""
REOPENINGS: Final = 20
SPIN_CYCLES: Final = 10**9
"""About half a second; an upload of this size is issued in a few milliseconds."""
MEMLOCK_KIB: Final = 64
SUBPROCESS_S: Final = 60


def device_batch(device: torch.device) -> Figures:
    """The batch made on the device is the CPU's, to the bit where it is copied: adjacent slots, and others."""
    worst = 0.0
    with filled_memory() as memory, closing(DeviceStaging(device)) as staging:
        staging.prepare(memory)
        for slots, counts in (((0, 1), (64, 64)), ((1, 0), (64, 17)), ((2, 0), (0, 40))):
            steps = np.repeat(np.array(counts, np.int64), memory.envs_per_slot)
            found, expected = (batch_by(way, memory, slots, steps) for way in (staging, HostStaging()))
            worst = max(worst, batch_difference(found.to("cpu"), expected))
    require(worst <= ESTIMATE_TOLERANCE, f"advantages or returns differ from the CPU's by {worst:.3g}")
    return {"estimate_difference": worst}


def batch_by(
    staging: Staging, memory: RolloutMemory, slots: tuple[int, ...], steps: NDArray[np.int64]
) -> SequenceBatch:
    """As the learner has it made."""
    rollout = RecurrentRolloutBuffer.over(memory, slots, at_once=False)
    return staging.batch(rollout, steps, ESTIMATOR, lambda _: nullcontext())[0]


def batch_difference(found: SequenceBatch, expected: SequenceBatch) -> float:
    """Largest difference of an estimate. Raises CheckFailed if anything else differs in a bit."""
    theirs, ours = flat_fields(found), flat_fields(expected)
    for name in ours.keys() - {"advantages", "returns"}:
        require(torch.equal(theirs[name], ours[name]), f"{name} of the device's batch is not the CPU's")
    return max(float((theirs[name] - ours[name]).abs().max()) for name in ("advantages", "returns"))


def flat_fields(batch: SequenceBatch) -> dict[str, Tensor]:
    leaves = batch.obs_seq if isinstance(batch.obs_seq, dict) else {"observations": batch.obs_seq}
    others = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor) and name != "obs_seq"}
    return {**leaves, **batch.initial_state, **others}


@contextmanager
def filled_memory(
    *, envs: int = 8, steps: int = 64, spaces: Spaces | None = None, slots: int = 3
) -> Iterator[RolloutMemory]:
    """Slots full of noise. Observations other than one plain array of floats stay as they are: no floats, please."""
    fields = rollout_fields(spaces or null_spaces(), STATE)
    with RolloutMemory.create(fields, num_slots=slots, envs_per_slot=envs, num_steps=steps) as memory:
        for slot in range(slots):
            writer = memory.writer(slot)
            if "observations" not in writer.arrays:  # `fill_slot` writes one
                writer.arrays["observations"] = np.zeros(writer.arrays["rewards"].shape, np.float32)
            fill_slot(writer, slot + 1, np.random.default_rng(slot))
        yield memory


def uploaded_names(memory: RolloutMemory) -> list[str]:
    return [field.name for field in memory.fields if is_uploaded_whole(field)]


def is_pinned(memory: RolloutMemory, name: str) -> bool:
    return bool(torch.from_numpy(memory.array(name)).is_pinned())


def batch_digest(memory: RolloutMemory, staging: DeviceStaging) -> str:
    """Of a batch of slots 1 and 0, which are no neighbours: equal bits, equal digest."""
    batch = batch_by(staging, memory, (1, 0), np.full(2 * memory.envs_per_slot, memory.num_steps))
    digest = hashlib.sha256()
    for name, field in sorted(flat_fields(batch.to("cpu")).items()):
        digest.update(name.encode() + field.contiguous().numpy().tobytes())
    return digest.hexdigest()


def pageable_digest(memory: RolloutMemory, device: torch.device) -> str:
    """The same from memory that is not pinned."""
    with closing(DeviceStaging(device)) as staging:
        return batch_digest(memory, staging)


# Registration


def registration(device: torch.device) -> Figures:
    """Every uploaded field is pinned where it lies, gives the same numbers, and is not pinned any more afterwards."""
    with filled_memory() as memory:
        plain = pageable_digest(memory, device)
        with closing(DeviceStaging(device)) as staging:
            warning = staging.prepare(memory)
            require(warning is None, f"warned: {warning}")
            require_pins(memory, device, expected=True)
            require(batch_digest(memory, staging) == plain, "pinned and pageable memory give different batches")
            nbytes = float(sum(pinned.nbytes for pinned in staging.pinned))
        require_pins(memory, device, expected=False)
    require_healthy(device)
    return {"pinned_mib": nbytes / 2**20}


def beside_the_host(device: torch.device) -> Figures:
    """Copies out of pinned slots keep nobody waiting; behind the lane's event the slots may be filled anew."""
    with filled_memory() as memory, closing(DeviceStaging(device)) as staging:
        staging.prepare(memory)
        lane = lane_for(device)
        rows = RecurrentRolloutBuffer.over(memory, (2, 0), at_once=False).training_rows(memory.num_steps)
        expected = {name: np.concatenate(pieces).tobytes() for name, pieces in rows.steps.items()}
        upload(rows, device, lane)  # the allocator of the device has its memory from now on
        lane.wait()
        busy = occupied(device)
        there = upload(rows, device, lane)
        require(busy is None or not busy.query(), "the host waited until its copies were made")
        lane.wait()
        require(busy is None or busy.query(), "the lane said that copies were complete before they had begun")
        for field in memory.fields:
            memory.array(field.name)[...] = 0
        wrong = [name for name, array in expected.items() if there.steps[name].cpu().numpy().tobytes() != array]
        require(not wrong, f"{', '.join(wrong)}: what was written behind the copies is in them")
    require_healthy(device)
    return {}


def occupied(device: torch.device) -> torch.cuda.Event | None:
    """Keeps the current stream of a GPU busy for a while. Returns an event behind that."""
    if device.type != "cuda":
        return None
    torch.cuda._sleep(SPIN_CYCLES)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def require_pins(memory: RolloutMemory, device: torch.device, *, expected: bool) -> None:
    if device.type == "cuda":
        wrong = [
            name for name in uploaded_names(memory) if memory.array(name).size and is_pinned(memory, name) != expected
        ]
        require(not wrong, f"{', '.join(wrong)}: is_pinned is not {expected}")


def zero_length_field(device: torch.device) -> Figures:
    """A field without bytes is left out, the others are pinned, no error is left behind."""
    empty = Leaf(kind=SpaceKind.BOX, shape=(0,), dtype="float32", path=".nothing")
    some = Leaf(kind=SpaceKind.BOX, shape=(3,), dtype="uint8", path=".something")
    with filled_memory(spaces=Spaces(observation=(empty, some), action=null_spaces().action)) as memory:
        for slot in range(memory.num_slots):
            memory.array("observations.something")[slot] = slot
        plain = pageable_digest(memory, device)
        with closing(DeviceStaging(device)) as staging:
            warning = staging.prepare(memory)
            require(warning is None, f"warned: {warning}")
            require_pins(memory, device, expected=True)
            require(batch_digest(memory, staging) == plain, "pinned and pageable memory give different batches")
    require_healthy(device)
    return {}


def refused_range(device: torch.device) -> Figures:
    """Pages that are registered already are refused: one warning, no error left behind, the same numbers; it trains."""
    with filled_memory() as memory:
        plain = pageable_digest(memory, device)
        with closing(DeviceStaging(device)) as first, closing(DeviceStaging(device)) as second:
            require(first.prepare(memory) is None, "the first registration was refused")
            warning = second.prepare(memory)
            if device.type == "cuda":
                require(warning is not None, "a second registration of the same pages was not refused")
                require(second.pinned[0].names == (), f"pinned twice: {second.pinned[0].names}")
            require_healthy(device)
            require(batch_digest(memory, second) == plain, "a refusal changed the batch")
            with closing(trainer(Device(device.type), memory.envs_per_slot, memory.num_steps)) as learner:
                said = io.StringIO()
                with redirect_stderr(said):
                    learner.attach(memory)
                    one_update(learner, memory)()
                lines = [line for line in said.getvalue().splitlines() if line.startswith("learner:")]
                require(len(lines) == (device.type == "cuda"), f"the learner said {lines}")
    require_healthy(device)
    return {}


def reopened(device: torch.device) -> Figures:
    """Segments come and go; each is pinned anew."""
    digests = set()
    for _ in range(REOPENINGS):
        with filled_memory() as memory, closing(DeviceStaging(device)) as staging:
            warning = staging.prepare(memory)
            require(warning is None, f"warned: {warning}")
            require_pins(memory, device, expected=True)
            digests.add(batch_digest(memory, staging))
    require(len(digests) == 1, f"{REOPENINGS} equal rollouts gave {len(digests)} different batches")
    require_healthy(device)
    return {"reopenings": float(REOPENINGS)}


def locked_memory_limit(device: torch.device) -> Figures:
    """A process that may lock 64 KiB only: it trains with or without pins, with at most one warning, the same numbers.

    The driver may count pinned pages towards the limit, or not; root's limit counts nowhere. What it did is a figure.
    """
    command = f"ulimit -l {MEMLOCK_KIB} && exec {shlex.quote(sys.executable)} -m bench.gpu_uploads {device.type}"
    ended = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=SUBPROCESS_S, check=False
    )
    require(ended.returncode == 0, f"exit code {ended.returncode}: {ended.stderr.strip()[-2000:]}")
    answer = json.loads(ended.stdout.strip().splitlines()[-1])
    with filled_memory() as memory:
        require(answer["digest"] == pageable_digest(memory, device), "the limit changed the batch")
    return {"was_refused": float(answer["warning"] is not None), "pinned_fields": float(answer["pinned"])}


def _under_a_limit(device: torch.device) -> dict[str, Any]:
    with filled_memory() as memory, closing(DeviceStaging(device)) as staging:
        warning = staging.prepare(memory)
        digest = batch_digest(memory, staging)
        require_healthy(device)
        pinned = sum(len(fields.names) for fields in staging.pinned)
    require_healthy(device)
    return {"warning": warning, "digest": digest, "pinned": pinned}


if __name__ == "__main__":
    print(json.dumps(_under_a_limit(torch.device(sys.argv[1]))))
