"""When checkpoints are written, and what follows if one cannot be: the disk is full, or gone, or read-only.

    due      every checkpoint_interval updates, and after the last one
    failed   earlier ones stay; it is owed, and tried again after every further update, until one is written; in a
             deterministic run, which goes on from barriers only, when the next one is due

Who uses it: the learner's session and the serial run. What must never happen: an update that is lost because the one
before it could not be saved, or a failure that nobody hears of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from learner.trainer import Trainer
from rollout_service.errors import CheckpointError
from rollout_service.tally import TallyRecord


@dataclass(frozen=True)
class Attempt:
    """What became of the checkpoint behind one update; neither where none was due."""

    path: Path | None = None
    failure: str | None = None


class Saving:
    """The checkpoints of one trainer, in `run_dir`."""

    def __init__(self, trainer: Trainer, run_dir: Path) -> None:
        self._trainer = trainer
        self._run_dir = run_dir
        self._saved_update = -1
        self._owed = False
        self._figures: Mapping[str, float] = {}
        self._tally = TallyRecord()

    @property
    def up_to_date(self) -> bool:
        """The last update is in a checkpoint."""
        return self._saved_update == self._trainer.updates_done

    def restored(self) -> None:
        """The trainer was given the state of a checkpoint."""
        self._saved_update = self._trainer.updates_done

    def after_update(self, version: int, *, last: bool, figures: Mapping[str, float], tally: TallyRecord) -> Attempt:
        """The checkpoint of the update just made, if one is due or owed. figures, tally: of that update."""
        self._figures, self._tally = figures, tally
        if not (last or self._in_turn or self._owed):
            return Attempt()
        try:
            return Attempt(self.save(version))
        except CheckpointError as error:
            self._owed = not self._trainer.config.deterministic
            return Attempt(failure=str(error))

    def at_end(self, version: int) -> Path | None:
        """The checkpoint of a run that ends here, unless there is one. Raises CheckpointError if it cannot be written.

        A deterministic run that is stopped between two barriers goes on from the one before.
        """
        trainer = self._trainer
        leaves_one = not trainer.config.deterministic or trainer.finished or self._in_turn
        return self.save(version) if leaves_one and not self.up_to_date else None

    @property
    def _in_turn(self) -> bool:
        return self._trainer.updates_done % self._trainer.config.checkpoint_interval == 0

    def save(self, version: int) -> Path:
        """A checkpoint of the last update, now. Raises CheckpointError if it cannot be written."""
        path = self._trainer.save(self._run_dir, version=version, figures=self._figures, tally=self._tally)
        self._owed = False
        self.restored()
        return path
