"""The account of a run: where every committed env step went. Pure.

    committed = trained + rolled_back + dropped + outdated + in_hand

    trained       in the weights now, of what this service has seen committed
    rolled_back   trained on, and lost with a learner: not in the checkpoint that its successor went on from
    dropped       committed, and lost with a learner before it was trained on, or left over when the run ended
    outdated      committed, and left too far behind by newer weights
    in_hand       committed, and still in a slot or with the learner

Writer: updates. Commits that were refused are not in it: nothing of them was ever taken.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass
class Account:
    """Env steps, from the service's start on."""

    counters: Counter[str]
    """The run's, which say what the loss of learners has cost."""
    committed: int = 0
    outdated: int = 0
    began_at: int | None = None
    """Env steps that the first learner brought along."""

    def balance(self, trained: int, in_hand: int) -> dict[str, int]:
        """The entries. trained: env steps in the weights, those of an earlier run included."""
        entries = {
            "trained": trained - (trained if self.began_at is None else self.began_at),
            "rolled_back": self.counters["rolled_back_env_steps"],
            "dropped": self.counters["dropped_env_steps"],
            "outdated": self.outdated,
            "in_hand": in_hand,
        }
        return {"committed": self.committed, **entries, "missing": self.committed - sum(entries.values())}
