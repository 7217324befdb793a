"""What a run could not write, counted and put into words: entries of its logs, checkpoints. Pure.

Writer: the supervisor's main thread, or the serial run's only one. Reader: whoever says it, to the terminal and to
run.log. What must never happen: a loss that nobody hears of, or a line per loss: it is said the first time, then each
time the count has doubled, and once more when it is over. Left to others: files (appending), when a checkpoint is due
(the learner).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Loss:
    """Of one file, since it was last whole."""

    why: str
    count: int = 0
    told: int = 0
    over: bool = False


class LostWrites:
    """Entries of logs that are lost because their file could not be written."""

    def __init__(self) -> None:
        self.total = 0
        self._losses: dict[str, _Loss] = {}

    def failed(self, what: str, why: object, count: int = 1) -> None:
        """An entry of `what`, e.g. `run.log`, could not be written; or `count` of them."""
        loss = self._losses.setdefault(what, _Loss(str(why)))
        loss.count += count
        loss.why, loss.over = str(why), False
        self.total += count

    def written(self, what: str) -> None:
        """An entry was written."""
        if what in self._losses:
            self._losses[what].over = True

    def news(self) -> list[str]:
        """What is to be said now."""
        said = []
        for what, loss in list(self._losses.items()):
            if not loss.told or (not loss.over and loss.count >= 2 * loss.told):
                said.append(
                    f"{what} cannot be written ({loss.why}): {loss.count} entries are lost so far, the run goes on; "
                    "make room, or look at what is wrong with that disk"
                )
                loss.told = loss.count
            if loss.over:
                said.append(f"{what} is written again; {loss.count} entries are missing in it")
                del self._losses[what]
        return said


class MissingCheckpoints:
    """Checkpoints that were due and could not be written."""

    def __init__(self) -> None:
        self.since: int | None = None
        """The update of the first of them, until one is written."""
        self.failures = 0
        self._in_a_row = 0

    def notice(self, update: int, written: object, failure: str | None) -> str | None:
        """An update was made, and behind it a checkpoint was written, or could not be, or neither.

        Returns what to say now, if anything.
        """
        if failure is not None:
            self.failures += 1
            self._in_a_row += 1
            self.since = update if self.since is None else self.since
            if self._in_a_row & (self._in_a_row - 1):
                return None
            return f"{failure}; a checkpoint is due since update {self.since}, and will be tried again"
        if written is None or self.since is None:
            return None
        since, tries = self.since, self._in_a_row
        self.forget()
        return f"checkpoint {written} is written, after {tries} that failed: updates {since} to {update} are saved"

    def forget(self) -> None:
        """The run went back to a checkpoint."""
        self.since, self._in_a_row = None, 0
