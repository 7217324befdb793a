"""Where a deterministic run begins anew: all episodes, recurrent states and random streams, whoever runs them. Pure.

    update            1 .. every-1    every             every+1 ...
    row 0             carried on      carried on        envs and noise reseeded from (seed, env, update), zero state
    last row          goes on         every running
                                      episode is cut
    behind it                         checkpoint

A barrier lies behind every update whose number divides by `every`, and wherever the learner itself began: at 0, or at
the checkpoint it went on from. A run that goes on from there and one that was never interrupted see the same.
What must never happen: a barrier that depends on what became of processes. Who asks: whoever grants leases.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Barriers:
    """every: updates between two of them; 0: the run has none."""

    every: int
    began_at: int = 0
    """Updates behind the learner when it began, or went back."""

    def behind(self, update: int) -> bool:
        """Whether everything begins anew once this update is done."""
        return self.every > 0 and (update == self.began_at or self.cut(update))

    def cut(self, update: int) -> bool:
        """Whether the rollout of this update ends all episodes."""
        return self.every > 0 and update % self.every == 0
