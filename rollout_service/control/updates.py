"""Where the run stands, the batch that is out, and what became of every rollout that was committed. Pure.

Writer: the coordinator. A committed rollout goes one of these ways, and is counted on all but the first:

    trained on      its batch was published
    dropped         its learner was lost first, or the run has ended (losses)
    too old         the newest weights had left it behind by more than max_policy_lag
    stale           its lease had ended, or it was collected with weights that were rolled back since

What must never happen: a rollout that is trained on twice, or forgotten; a version that falls. Left to others: who may
say what (coordinator), slot states (ledger), which slots a batch has (scheduling).
"""

from __future__ import annotations

from collections import Counter

from rollout_service.control import events
from rollout_service.control.account import Account
from rollout_service.control.filling import Filling
from rollout_service.control.leases import Leases, TakenBatch
from rollout_service.control.ledger import Identity
from rollout_service.control.losses import Losses, LostBatch
from rollout_service.control.messages import Batch, Commit, Episode, Publish, Ready
from rollout_service.control.roster import Rate
from rollout_service.control.scheduling import FormBatch
from rollout_service.runspec import RunSpec
from rollout_service.tally import Tally


class Updates:
    """The updates of one run. `done` and `env_steps` start above 0 in a resumed run."""

    def __init__(
        self,
        spec: RunSpec,
        leases: Leases,
        filling: Filling,
        counters: Counter[str],
        *,
        total: int,
        done: int,
        env_steps: int,
    ) -> None:
        self.done = done
        self.env_steps = env_steps
        """Trained on so far."""
        self.version: int | None = None
        """Newest weights; None before the first READY."""
        self.batch: Batch | None = None
        """The batch the learner works on."""
        self._untold: tuple[Batch, TakenBatch] | None = None
        """The newest batch, as long as nobody but the learner was told of it."""
        self.tally = Tally()
        """Of all that went to the learner."""
        self.rate = Rate()
        self.checkpoint_missing_since: int | None = None
        """The first update whose checkpoint was due and could not be written, until one is."""
        self._total = total
        self._spec = spec
        self._leases = leases
        self._filling = filling
        self._counters = counters
        self._losses = Losses(counters)
        self._account = Account(counters)
        self._released = False
        """The batch's slots are filled anew already."""
        self._env_steps: dict[int, int] = {}
        """Slot -> env steps of the newest commit that was accepted for it."""
        self._episodes: dict[int, tuple[Episode, ...]] = {}
        """Slot -> episodes that ended in that commit."""

    @property
    def newest(self) -> int:
        """The newest version, 0 before the first."""
        return self.version or 0

    def standing(self) -> dict[str, int]:
        """What WELCOME says of it."""
        return {"version": self.newest, "updates_done": self.done, "env_steps_done": self.env_steps}

    def expected(self) -> int:
        """Updates at the end, if all that is still to come are full rollouts."""
        return self.done + self._spec.rollouts_that_fit(self.env_steps, self._total)

    def another_fits(self, env_steps: int) -> bool:
        """Whether a whole rollout fits behind these env steps."""
        return self._spec.rollouts_that_fit(env_steps, self._total) > 0

    # --- commits

    def env_steps_of(self, commit: Commit) -> int:
        return commit.valid_steps * self._spec.envs_per_actor if commit.env_steps is None else commit.env_steps

    def accepted(self, commit: Commit) -> None:
        """A slot was filled."""
        env_steps = self._env_steps[commit.slot] = self.env_steps_of(commit)
        self._episodes[commit.slot] = commit.episodes
        self._account.committed += env_steps
        self.tally.count(commit.counters)

    def rollout(self, identity: Identity, commit: Commit) -> events.RolloutCommitted:
        """What there is to tell about it."""
        return events.RolloutCommitted(
            actor_id=identity.actor_id,
            incarnation=identity.incarnation,
            slot=commit.slot,
            env_steps=self.env_steps_of(commit),
            version=commit.version,
            episodes=commit.episodes,
            seconds=commit.seconds,
            counters=commit.counters,
            remarks=commit.remarks,
        )

    def refused(self, actor_id: int, commit: Commit) -> list[events.RolloutTooOld]:
        """A commit came too late to be used."""
        lag = self.newest - commit.version
        if self._spec.max_policy_lag > 0 and lag > self._spec.max_policy_lag:
            return [self._too_old(actor_id, lag, self.env_steps_of(commit))]
        self._counters["dropped_stale_commits"] += 1
        return []

    # --- one update

    def form(self, due: FormBatch) -> Batch:
        """The batch that goes to the learner now. Behind the last one nothing is granted any more."""
        taken = self._filling.take(due)
        filled = taken.rollouts()
        env_steps = self.env_steps + sum([self._env_steps[slot] for slot, _ in filled])
        for slot, entry in filled:
            self.tally.policy_lags[self.newest - entry.version] += 1
            self.tally.finish(self._episodes[slot] if entry.valid_steps > 0 else ())
        self._released = False
        # Of plain values: a message made by keywords looks for numpy's first, for as long again, and the learner waits.
        self.batch = Batch.model_validate(
            {
                "update": self.done + 1,
                "slots": due.slots,
                "valid_steps": tuple([0 if entry is None else entry.valid_steps for entry in taken.filled]),
                "versions": tuple([0 if entry is None else entry.version for entry in taken.filled]),
                "env_steps": env_steps,
                "last": not self.another_fits(env_steps),
                "tally": self.tally.record(),
                "seed_into": self._filling.seed_into(due.slots),
            }
        )
        if self.batch.last:
            self._filling.close()
        self._untold = self.batch, taken
        return self.batch

    def formed(self, now: float) -> list[events.BatchFormed]:
        """What there is to tell about it, once it is on its way."""
        if self._untold is None:
            return []
        (batch, taken), self._untold = self._untold, None
        waited_for, wait_s = self._filling.waited(taken, now)
        filled = [entry for _, entry in taken.rollouts()]
        partial = [entry.holder.actor_id for entry in filled if 0 < entry.valid_steps < self._spec.num_steps]
        self._counters["partial_rollouts"] += len(partial)
        told = events.BatchFormed(
            batch.update,
            batch.env_steps,
            waited_for,
            wait_s,
            partial=tuple(partial),
            late=taken.late,
            unclaimed=taken.due.unclaimed,
            lags=tuple(self.newest - entry.version for entry in filled),
        )
        return [told]

    def release(self, update: int) -> None:
        """The learner has copied what it needs of this update's batch. Too late or twice, it changes nothing."""
        if self.batch is not None and update == self.batch.update:
            self._leases.release(self.batch.slots)
            self._released = True

    def objection(self, publish: Publish) -> str | None:
        """Why this cannot be the end of the batch that is out."""
        batch = self.batch
        if batch is None or publish.update != batch.update:
            wanted = "no batch is out" if batch is None else f"update {batch.update} is out"
            return f"publish of update {publish.update}: {wanted}"
        if wrong := set(publish.seeded) - set(batch.seed_into):
            return f"publish.seeded has slots {sorted(wrong)}, which BATCH did not name"
        if publish.version <= self.newest:
            return f"publish.version {publish.version} is not above {self.newest}"
        return None

    def publish(self, batch: Batch, publish: Publish, now: float) -> list[events.UpdateFinished | events.RolloutTooOld]:
        """The batch that is out was trained on. Drops what its weights leave too far behind."""
        self._leases.release(batch.slots)
        self._leases.seeded(publish.seeded)
        self._filling.published()
        self.batch = None
        self.version, self.done, self.env_steps = publish.version, batch.update, batch.env_steps
        self.rate.add(now, 1)
        self._checkpoint(publish)
        finished = events.UpdateFinished(
            update=batch.update,
            version=publish.version,
            env_steps=batch.env_steps,
            metrics=publish.metrics,
            seconds=publish.seconds,
            checkpoint=publish.checkpoint,
            checkpoint_failure=publish.checkpoint_failure,
        )
        return [finished, *self._drop_outdated()]

    def _checkpoint(self, publish: Publish) -> None:
        if publish.checkpoint is not None:
            self.checkpoint_missing_since = None
        if publish.checkpoint_failure is not None:
            self._counters["checkpoint_failures"] += 1
            self.checkpoint_missing_since = self.checkpoint_missing_since or publish.update

    # --- learners that come and go

    def ready(self, pid: int, ready: Ready) -> list[events.UpdateFinished | events.LearnerReady]:
        """The run stands where this learner stands; what was collected for another one is dropped."""
        if self.version is None:
            self._leases.resumed = ready.updates_done > 0
        self._leases.first_version = ready.version
        self._dropped(self._leases.drop_filled("older than the restored learner's weights"))
        stands = self._losses.restored(pid, ready, updates=self.done, env_steps=self.env_steps)
        self.version, self.done, self.env_steps = ready.version, ready.updates_done, ready.env_steps_done
        self._leases.barriers.began_at = self.done
        self.tally.restore(ready.tally)
        self.checkpoint_missing_since = None
        if self._account.began_at is None:
            self._account.began_at = ready.env_steps_done
        if not stands.unannounced_update:
            return [stands]
        at = stands.updates, stands.version, stands.env_steps
        return [events.UpdateFinished(*at, ready.metrics, {}, None), stands]

    def learner_lost(self, *, stopped: bool) -> None:
        """What it read or would have read is dropped. stopped: no other learner will come."""
        batch, self.batch = self.batch, None
        lost = None if batch is None else self._lost(batch)
        if not stopped:
            self._losses.learner_lost(lost)
        if lost is not None and self._released:
            self._losses.dropped(lost.rollouts, lost.env_steps)
        self._filling.close()
        self._dropped(self._leases.drop_filled("the learner was lost"))

    @property
    def must_go_back(self) -> bool:
        """The learner has nothing to do, and what is to follow can be collected from the last barrier on only."""
        return self.batch is None and self._leases.is_torn(self.done)

    def go_back(self) -> None:
        """No grants until READY; what was collected meanwhile is dropped."""
        self._losses.goes_back()
        self._filling.close()
        self._dropped(self._leases.drop_filled("an actor was lost: the run goes back to a barrier"))

    def stop(self) -> None:
        """No grants; what no batch has taken is dropped. The batch that is out may still be published."""
        self._filling.close()
        self._dropped(self._leases.drop_ready("the run is over"))

    # --- the account

    def balance(self) -> dict[str, int]:
        """Where every env step went that was ever committed."""
        copied = self.batch.env_steps - self.env_steps if self.batch is not None and self._released else 0
        return self._account.balance(self.env_steps, copied + self._env_steps_in(self._leases.filled()))

    def _drop_outdated(self) -> list[events.RolloutTooOld]:
        """Rollouts that the newest weights have left too far behind."""
        told = []
        for slot, filled in self._leases.drop_outdated(self.newest):
            self._account.outdated += self._env_steps[slot]
            told.append(self._too_old(filled.holder.actor_id, self.newest - filled.version, self._env_steps[slot]))
        return told

    def _lost(self, batch: Batch) -> LostBatch:
        rollouts = sum(version > 0 for version in batch.versions)
        return LostBatch(batch.update, rollouts, batch.env_steps - self.env_steps)

    def _dropped(self, slots: list[int]) -> None:
        self._losses.dropped(len(slots), self._env_steps_in(slots))

    def _env_steps_in(self, slots: list[int]) -> int:
        return sum(self._env_steps[slot] for slot in slots)

    def _too_old(self, actor_id: int, lag: int, env_steps: int) -> events.RolloutTooOld:
        self._counters["dropped_over_lag"] += 1
        self._counters["dropped_over_lag_env_steps"] += env_steps
        return events.RolloutTooOld(actor_id, lag, env_steps)
