"""One batch as a file to look at: `train --dump-batch FILE`, a safetensors file with the names of SequenceBatch.

    obs_seq (or obs_seq/<leaf>)   actions   episode_starts   old_log_probs   old_values   advantages   returns   valid
    env_ids   initial_state/hidden   initial_state/cell

    >>> from safetensors.numpy import load_file
    >>> load_file("batch.safetensors")["advantages"].shape
    (16, 128)

Writer: the trainer, once, before advantages are normalised. What must never happen: a file that is half written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from safetensors.torch import save
from torch import Tensor

from learner.sequences import SequenceBatch
from rollout_service.memory.schema import OBSERVATIONS

PLAIN: Final = (
    "actions",
    "episode_starts",
    "old_log_probs",
    "old_values",
    "advantages",
    "returns",
    "valid",
    "env_ids",
)


def write_batch(batch: SequenceBatch, path: Path, *, update: int, env: str) -> None:
    """Raises OSError if the file cannot be written."""
    arrays = {name: getattr(batch, name) for name in PLAIN} | _observations(batch)
    arrays |= {f"initial_state/{name}": state for name, state in batch.initial_state.items()}
    content = save(
        {name: array.detach().cpu().contiguous() for name, array in arrays.items()},
        {"update": str(update), "env": env},
    )
    beside = path.with_name(f"{path.name}.writing")
    beside.write_bytes(content)
    beside.replace(path)


def _observations(batch: SequenceBatch) -> dict[str, Tensor]:
    if isinstance(batch.obs_seq, Tensor):
        return {"obs_seq": batch.obs_seq}
    return {f"obs_seq{name.removeprefix(OBSERVATIONS)}": leaf for name, leaf in batch.obs_seq.items()}
