"""What actors remark on bad data, to people: the first of it word by word, then only how much there is. Pure.

Writer: the supervisor's main thread, or the serial run. Readers: people. What must never happen: a line per dropped
episode in a run that drops thousands. Leaves to others: counting (the counters of COMMIT).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rollout_service.control.messages import DROPPED_EPISODES

TOLD: Final = 5
"""Remarks of a run that are told in full."""


class RemarkWatch:
    """Tells the first few remarks, and after them the number of dropped episodes whenever it has doubled."""

    def __init__(self) -> None:
        self._told = 0
        self._dropped = 0
        self._said_at = TOLD

    def notice(self, remarks: Sequence[str], counters: Mapping[str, int]) -> list[str]:
        """What to say of one commit, line by line; often nothing."""
        lines = list(remarks[: TOLD - self._told])
        if lines and self._told + len(lines) == TOLD:
            lines.append("further bad data are only counted (count/bad_observations, count/bad_rewards)")
        self._told += min(len(remarks), TOLD - self._told)
        self._dropped += counters.get(DROPPED_EPISODES, 0)
        if self._told == TOLD and self._dropped >= 2 * self._said_at:
            self._said_at = self._dropped
            lines.append(
                f"{self._dropped} episodes were dropped for bad data so far (count/{DROPPED_EPISODES}); their env "
                "steps are in count/dropped_bad_env_steps and were not trained on"
            )
        return lines
