"""Checksums of slots: proof that what the learner reads is what the actor committed. Pure, and off by default.

Writer: the actor, at the end of its lease, over the rows that it commits. Reader: the learner, before it uses a slot
and once more when it is through with it. What must never happen: a byte in the sum that anyone but the actor may change
while the slot is filled. Costs a copy and about 1 ms per MiB, twice; for runs that look for faults (checksum_slots).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollout_service.memory.schema import Field, Per, Role

CHECKED: Final = 1 << 32
"""Set in a stamp that holds a sum: a sum of zero is a sum too."""


def slot_checksum(arrays: Mapping[str, NDArray[Any]], fields: Iterable[Field], valid_steps: int) -> int:
    """CRC-32 over all that an actor commits, and CHECKED.

    arrays: field name -> [E, T, *shape] or [E, *shape] of one slot; of steps only the first valid_steps count.
    """
    total = 0
    for field in fields:
        if field.role is not Role.LEARNER:
            array = arrays[field.name]
            rows = array[:, :valid_steps] if field.per is Per.STEP else array
            total = zlib.crc32(np.ascontiguousarray(rows).view(np.uint8).reshape(-1).data, total)
    return total | CHECKED
