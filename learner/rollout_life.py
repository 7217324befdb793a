"""Where a rollout is in its life: over which of its rows GAE has run, and whether row 0 was seeded for the next one.

    slots filled -> `estimated` -> batches -> `seeded` -> the next rollout: `begun`, or the slots are filled anew

Both facts hold for one filling of the slots only, which their epochs name: an actor that opens a slot anew makes them
void, without a word to anybody here. Who writes: RecurrentRolloutBuffer. What must never happen: a batch from
advantages of an earlier filling, or one whose row 0 belongs to the next rollout.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from learner.rollout_views import Epochs
from rollout_service.errors import OutOfOrder


class Life:
    """Of one rollout, whose slots have the epochs that `epochs` returns."""

    def __init__(self, epochs: Callable[[], Epochs]) -> None:
        self._epochs = epochs
        self._covered: tuple[NDArray[np.int64], Epochs] | None = None
        """K of each env in the last GAE call, and of which filling that was."""
        self._seeded: Epochs | None = None

    def estimated(self, valid_steps: NDArray[np.int64]) -> None:
        """GAE has run over the first K rows of each env."""
        self._covered = valid_steps, self._epochs()

    def changed(self) -> None:
        """Rows, or what GAE made of them, are not what they were."""
        self._covered = None

    def seeded(self) -> None:
        """Row 0 and the carry flag are the next rollout's."""
        self._seeded = self._epochs()

    def begun(self) -> None:
        """That next rollout has begun."""
        self._seeded = None

    @property
    def is_over(self) -> bool:
        """The next rollout begins with the next write."""
        return self._seeded is not None

    @property
    def is_outdated(self) -> bool:
        """GAE has run over an earlier filling of the slots."""
        return self._covered is not None and self._covered[1] != self._epochs()

    def covered(self) -> NDArray[np.int64]:
        """K of each env in the last GAE call, int [N]. Raises OutOfOrder if there was none over these rows."""
        if self._covered is None or self.is_outdated:
            raise OutOfOrder("GAE has not run over these rows; call compute_advantages before taking a batch")
        return self._covered[0]

    def require_unseeded(self) -> None:
        """Raises OutOfOrder if row 0 is the next rollout's."""
        if self._seeded == self._epochs():
            raise OutOfOrder(
                "row 0 was seeded for the next rollout, so a batch would start from the wrong state; "
                "take batches before seed_warm_start, or begin the next rollout with add"
            )

    def hand_to(self, twin: Life) -> None:
        """A copy of the rollout is where this one is."""
        if self._covered is not None and not self.is_outdated:
            twin.estimated(self._covered[0])
        if self._seeded == self._epochs():
            twin.seeded()
