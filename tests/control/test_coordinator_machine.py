"""Every order of events that hypothesis can think of, against the laws of the protocol.

Peers are modelled as real ones behave: they send what they may send, lose messages, repeat themselves, die, and are
replaced. The laws are checked from the outside, on what was sent, besides the ledger's own check.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_service.control.coordinator import Effect, Notify, Send
from rollout_service.control.events import ActorJoined, RolloutCommitted, RolloutTooOld, UpdateFinished
from rollout_service.control.ledger import Identity, Ledger, SlotState
from rollout_service.control.messages import (
    Abort,
    Batch,
    Bye,
    Commit,
    Committed,
    Grant,
    Message,
    Pong,
    Preempt,
    Publish,
    Ready,
    Refused,
    Release,
    StartFrom,
    Stop,
)
from rollout_service.control.scheduling import Patience, schedule
from tests.control.world import STEPS, Peer, World, make_join

ACTORS, PLACES = 2, 4
"""Those that a run begins with, and in an elastic one those that may be there."""
BATCH_DEADLINE_S = 30.0


@dataclass
class Actor:
    """One actor process: what it fills, and what it would repeat."""

    peer: Peer
    joined: bool = False
    grant: Grant | None = None
    last: Message | None = None
    """What it repeats until it is granted."""
    seen: dict[int, int] = field(default_factory=dict)
    """slot -> highest epoch it was granted."""
    finished: Commit | None = None
    """The commit of the lease it ended last: its live state is the state after these rows."""

    moved: bool = False
    """It gave a lease back since, somewhere in the middle."""

    @property
    def identity(self) -> tuple[int, int]:
        assert self.peer.welcome is not None
        assert self.peer.welcome.actor_id is not None
        return self.peer.welcome.actor_id, self.peer.welcome.incarnation


class CheckedWorld(World):
    """Watches everything that is sent."""

    def __init__(
        self, max_policy_lag: int, patience: Patience, *, min_actors: int, elastic: bool, kept_places: int
    ) -> None:
        self.min_actors, self.patience = min_actors, patience
        super().__init__(
            ACTORS,
            scheduler=schedule(PLACES if elastic else ACTORS, max_policy_lag, patience),
            total_updates=10**6,
            max_policy_lag=max_policy_lag,
            max_actors=PLACES if elastic else None,
            elastic=elastic,
            kept_places=kept_places,
        )
        self.taken_once: set[int] = set()
        """Places in which somebody has joined."""
        self.granted: dict[tuple[int, int], bytes] = {}
        self.epochs: dict[int, int] = {}
        self.accepted: set[tuple[int, int]] = set()
        self.handed_over: set[tuple[int, int]] = set()
        self.answers: dict[tuple[bytes, int, int], bool] = {}
        self.batches: dict[bytes, list[Batch]] = {}
        self.first_version = 0
        """Of the learner that is there: what older weights collected is none of its business."""
        self.out: Batch | None = None
        """The batch whose update is neither finished nor lost."""
        self.trained = self.outdated = 0
        """Rollouts that were accepted first, and then trained on or dropped for their age."""

    def carry_out(self, effects: list[Effect]) -> None:
        refused = any(isinstance(sent, Send) and _refuses(sent.message) for sent in effects)
        for effect in sorted(effects, key=lambda effect: isinstance(effect, Send)):  # BATCH goes before a word is said
            match effect:
                case Send(peer, Grant() as grant):
                    self.check_grant(peer, grant)
                case Send(peer, Batch() as batch):
                    self.check_batch(peer, batch)
                case Send(peer, Preempt() as preempt):
                    self.check_preempt(peer, preempt)
                case Send(peer, Committed() as answer):
                    key = (peer, answer.slot, answer.epoch)
                    assert self.answers.setdefault(key, answer.accepted) == answer.accepted, "another answer"
                case Notify(RolloutCommitted() as event):
                    row = (event.slot, self.coordinator._leases.ledger.epoch(event.slot))
                    assert row not in self.accepted, "accepted twice"
                    self.accepted.add(row)
                case Notify(ActorJoined(actor_id=actor_id)):
                    self.taken_once.add(actor_id)
                case Notify(RolloutTooOld()):
                    self.outdated += not refused
                case Notify(UpdateFinished()):
                    self.trained, self.out = self.trained + rollouts(self.out), None
                case _:
                    pass
        super().carry_out(effects)

    def check_grant(self, peer: bytes, grant: Grant) -> None:
        assert self.coordinator.version is not None, "granted before weights exist"
        key = (grant.slot, grant.epoch)
        if key in self.granted:
            assert self.granted[key] == peer, "one lease, two holders"
            return
        assert grant.epoch == self.epochs.get(grant.slot, 0) + 1, "epochs grow by one"
        assert grant.version == self.coordinator.version
        slots, batches = self.coordinator._leases.ledger.count(), self.spec.max_policy_lag + (self.out is None)
        size = self.batch_size() if self.spec.max_policy_lag else self.spec.num_places
        assert slots[SlotState.LEASED] + slots[SlotState.READY] <= size * batches, "collected in vain"
        self.epochs[grant.slot] = grant.epoch
        self.granted[key] = peer

    def check_preempt(self, heart: bytes, preempt: Preempt) -> None:
        """Only with the rule on, only the holder of a lease that holds, and only while somebody waits for it."""
        ledger = self.coordinator._leases.ledger
        assert self.patience.preempt_share < 1.0
        lease = ledger.lease(preempt.slot)
        assert lease is not None
        assert lease.epoch == preempt.epoch
        assert heart == self.granted[preempt.slot, preempt.epoch] + b"-heart"

    def awaited(self) -> set[int]:
        """Places that a batch waits for."""
        places = self.coordinator.report(self.now)["actors"]
        return {place["actor_id"] for place in places if place["awaited"]}

    def batch_size(self) -> int:
        """In streaming, of as many rollouts as there are actors."""
        return max(self.min_actors, len(self.awaited()))

    def check_batch(self, learner: bytes, batch: Batch) -> None:
        sent = self.batches.setdefault(learner, [])
        if sent and sent[-1] == batch:
            return
        assert sum(version > 0 for version in batch.versions) >= self.min_actors
        ledger, newest = self.coordinator._leases.ledger, self.coordinator.version
        assert newest is not None
        if self.spec.max_policy_lag == 0:
            number = batch.slots[0] // self.spec.num_places
            bank, other = tuple(self.spec.bank(number)), tuple(self.spec.bank(1 - number))
            late = [slot for slot in other if ledger.state(slot) is SlotState.QUARANTINED]
            assert batch.slots == bank
            assert batch.seed_into == tuple(None if slot in late else slot for slot in other)
        else:
            assert batch.seed_into == ()
        if self.patience.deadline_s == float("inf"):
            filled = {place for place, version in enumerate(batch.versions) if version > 0}
            whole = self.awaited() <= filled if self.spec.max_policy_lag == 0 else len(filled) == self.batch_size()
            assert whole, "a batch of fewer actors than there are"
        assert not sent or batch.update == sent[-1].update + 1
        sent.append(batch)
        self.out = batch
        for slot, steps, version in zip(batch.slots, batch.valid_steps, batch.versions, strict=True):
            if version == 0:
                assert steps == 0
                continue
            assert newest - self.spec.max_policy_lag <= version <= newest, "rows of an old policy"
            assert version >= self.first_version, "rows of weights that were rolled back"
            row = (slot, ledger.epoch(slot))
            assert row in self.accepted, "trained without a commit"
            assert row not in self.handed_over, "trained twice"
            self.handed_over.add(row)


def rollouts(batch: Batch | None) -> int:
    return 0 if batch is None else sum(version > 0 for version in batch.versions)


def _refuses(message: Message) -> bool:
    return isinstance(message, Committed) and not message.accepted


class Run(RuleBasedStateMachine):
    """A run in which anything may happen at any time."""

    @initialize(
        max_policy_lag=st.integers(0, 2),
        deadline_s=st.sampled_from([float("inf"), BATCH_DEADLINE_S]),
        min_actors=st.integers(1, ACTORS),
        preempt_share=st.sampled_from([0.5, 1.0]),
        elastic=st.booleans(),
        kept_places=st.sampled_from([0, ACTORS]),
    )
    def start(
        self,
        max_policy_lag: int,
        deadline_s: float,
        min_actors: int,
        preempt_share: float,
        elastic: bool,
        kept_places: int,
    ) -> None:
        patience = Patience(min_actors=min_actors, deadline_s=deadline_s, preempt_share=preempt_share)
        self.world = CheckedWorld(
            max_policy_lag, patience, min_actors=min_actors, elastic=elastic, kept_places=kept_places
        )
        self.kept = set(range(kept_places))
        """Places that only those get who ask for them."""
        self.actors: dict[int, Actor] = {}
        self.gone: list[Actor] = []
        self.learner: Peer | None = None
        self.learner_ready = False
        self.batch: Batch | None = None
        self.last_publish: Publish | None = None
        self.published: Batch | None = None
        """The batch whose weights were published last."""

    # --- actors

    @rule(actor_id=st.integers(0, PLACES - 1), supervised=st.booleans())
    def an_actor_comes(self, actor_id: int, supervised: bool) -> None:
        peer = self.world.hello(actor_id if supervised else None)
        free = set(range(self.world.spec.num_places)) - set(self.actors)
        taken = actor_id not in free if supervised else not free - self.kept
        assert peer.got(Refused) == taken
        if not taken:
            actor = Actor(peer)
            assert actor.identity[0] not in self.actors
            self.actors[actor.identity[0]] = actor

    @rule(actor_id=st.integers(0, PLACES - 1), lose=st.booleans())
    def it_joins_or_repeats_its_request(self, actor_id: int, lose: bool) -> None:
        if (actor := self.actors.get(actor_id)) is None or actor.grant is not None:
            return
        actor.joined = True
        actor.last = actor.last or make_join(self.world.spec)
        actor.peer.tell(actor.last)
        self.read_mail(actor, lose)

    @rule(actor_id=st.integers(0, PLACES - 1), steps=st.integers(0, STEPS), lose=st.booleans())
    def it_commits(self, actor_id: int, steps: int, lose: bool) -> None:
        if (actor := self.actors.get(actor_id)) is None or actor.grant is None:
            return
        self.commit(actor, steps)
        self.read_mail(actor, lose)

    @rule(actor_id=st.integers(0, PLACES - 1))
    def it_gives_its_lease_back(self, actor_id: int) -> None:
        if (actor := self.actors.get(actor_id)) is None or actor.grant is None:
            return
        actor.last, actor.grant = Abort(slot=actor.grant.slot, epoch=actor.grant.epoch, reason="no"), None
        actor.moved = True
        actor.peer.tell(actor.last)
        self.read_mail(actor, lose=False)

    @rule(actor_id=st.integers(0, PLACES - 1))
    def its_heart_beats(self, actor_id: int) -> None:
        if (actor := self.actors.get(actor_id)) is None:
            return
        heard = self.world.sent[actor.peer.address + b"-heart"]
        heard.clear()
        actor.peer.beat(0, "env.step")
        pong, *asked = heard
        assert isinstance(pong, Pong)
        assert not pong.stopping
        lease = self.world.coordinator._leases.ledger.lease_of(Identity(*actor.identity))
        asked_for = [(preempt.slot, preempt.epoch) for preempt in asked if isinstance(preempt, Preempt)]
        assert len(asked_for) == len(asked)
        assert asked_for in ([], [] if lease is None else [(lease.slot, lease.epoch)])

    @rule(actor_id=st.integers(0, PLACES - 1))
    def it_says_goodbye(self, actor_id: int) -> None:
        if (actor := self.actors.pop(actor_id, None)) is None:
            return
        self.gone.append(actor)
        actor.peer.tell(Bye(reason="stopped by SIGTERM"))
        self.read_all_mail()

    @rule(actor_id=st.integers(0, PLACES - 1), abandoned=st.booleans())
    def it_dies(self, actor_id: int, abandoned: bool) -> None:
        if (actor := self.actors.pop(actor_id, None)) is None:
            return
        self.gone.append(actor)
        self.world.carry_out(self.world.coordinator.actor_lost(*actor.identity, "killed", self.world.now))
        if abandoned:
            self.abandon(actor_id)
        self.read_all_mail()

    @precondition(lambda self: self.gone)
    @rule(which=st.integers(0, 100))
    def a_dead_actors_message_arrives_late(self, which: int) -> None:
        actor = self.gone[which % len(self.gone)]
        if actor.grant is not None:
            self.commit(actor, STEPS)
        elif actor.last is not None:
            actor.peer.tell(actor.last)
        assert not actor.peer.got(Grant), "a dead actor was granted a slot"
        actor.peer.inbox.clear()

    @precondition(lambda self: self.gone)
    @rule(which=st.integers(0, 100))
    def an_old_death_is_proven_again(self, which: int) -> None:
        identity = self.gone[which % len(self.gone)].identity
        self.world.carry_out(self.world.coordinator.actor_lost(*identity, "killed", self.world.now))
        self.read_all_mail()

    # --- learner

    @precondition(lambda self: self.learner is None)
    @rule()
    def a_learner_comes(self) -> None:
        self.learner, self.learner_ready, self.batch = self.world.learner(ready=False), False, None

    @precondition(lambda self: self.learner is not None)
    @rule(back=st.integers(0, 2))
    def it_is_ready_or_says_so_again(self, back: int) -> None:
        assert self.learner is not None
        if not self.learner_ready:
            coordinator = self.world.coordinator
            done = max(0, coordinator.updates_done - back)
            self.world.first_version = (coordinator.version or 0) + 1
            self.learner.tell(Ready(version=self.world.first_version, updates_done=done))
        else:
            self.learner.tell(Ready(version=self.world.coordinator.version or 0))
        self.learner_ready = True
        self.read_all_mail()

    @precondition(lambda self: self.batch is not None)
    @rule(seeds=st.sets(st.integers(0, PLACES - 1)))
    def it_publishes(self, seeds: set[int]) -> None:
        assert self.batch is not None
        targets = enumerate(self.batch.seed_into)
        self.publish(tuple(slot for place, slot in targets if place in seeds and slot is not None))

    @precondition(lambda self: self.batch is not None and self.world.spec.max_policy_lag > 0)
    @rule(too_late=st.booleans())
    def it_releases_what_it_has_copied(self, too_late: bool) -> None:
        assert self.batch is not None
        assert self.learner is not None
        self.learner.tell(Release(update=self.batch.update - too_late))
        self.read_all_mail()

    @precondition(lambda self: self.learner is not None and self.last_publish is not None)
    @rule()
    def it_publishes_again(self) -> None:
        assert self.learner is not None
        assert self.last_publish is not None
        version, updates = self.world.coordinator.version, self.world.coordinator.updates_done
        self.learner.tell(self.last_publish)
        assert (self.world.coordinator.version, self.world.coordinator.updates_done) == (version, updates)
        self.read_all_mail()

    @precondition(lambda self: self.learner is not None)
    @rule()
    def it_is_killed(self) -> None:
        self.world.carry_out(self.world.coordinator.learner_lost(self.world.now))
        self.world.out = None
        self.learner, self.learner_ready, self.batch, self.last_publish = None, False, None, None

    @rule(seconds=st.sampled_from([0.0, 1.0, BATCH_DEADLINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)
        self.read_all_mail()

    @rule(
        steps=st.lists(st.none() | st.integers(0, STEPS), min_size=PLACES, max_size=PLACES),
        late_for_good=st.booleans(),
        releases=st.booleans(),
        publishes=st.booleans(),
        learner_dies=st.sampled_from([None, "waiting", "updating"]),
    )
    def a_round(
        self,
        steps: list[int | None],
        late_for_good: bool,
        releases: bool,
        publishes: bool,
        learner_dies: str | None,
    ) -> None:
        """One round of a run, so that interesting things happen late in it too. Steps None: that actor is late."""
        if self.learner is None:
            self.a_learner_comes()
        if not self.learner_ready:
            self.it_is_ready_or_says_so_again(0)
        for actor_id in {*range(ACTORS), *self.actors}:
            if actor_id not in self.actors:
                self.an_actor_comes(actor_id, True)
            self.it_joins_or_repeats_its_request(actor_id, lose=False)
        if learner_dies == "waiting":
            self.it_is_killed()
        for actor_id, count in enumerate(steps):
            actor = self.actors.get(actor_id)
            if actor is not None and actor.grant is not None and count is not None:
                self.commit(actor, count)
        self.read_all_mail()
        if late_for_good:
            self.time_passes(BATCH_DEADLINE_S)
        if releases and self.batch is not None and self.world.spec.max_policy_lag > 0:
            self.it_releases_what_it_has_copied(too_late=False)
        if learner_dies == "updating" and self.learner is not None:
            self.it_is_killed()
        if publishes and self.batch is not None:
            self.publish(tuple(slot for slot in self.batch.seed_into if slot is not None))

    # --- laws

    @invariant()
    def the_ledger_agrees_with_itself(self) -> None:
        self.world.coordinator._leases.ledger.check()

    @invariant()
    def whoever_lives_keeps_its_place(self) -> None:
        places = self.world.coordinator.report(self.world.now)["actors"]
        assert {place["actor_id"] for place in places if place["pid"] is not None} == set(self.actors)

    @invariant()
    def who_takes_part_is_waited_for_and_who_has_left_an_elastic_run_is_not(self) -> None:
        here = {actor_id for actor_id, actor in self.actors.items() if actor.joined}
        assert here <= self.world.awaited()
        if self.world.spec.max_actors is not None:
            assert self.world.awaited() - here <= set(range(ACTORS)) - self.world.taken_once

    @invariant()
    def the_report_counts_every_slot(self) -> None:
        slots = self.world.coordinator.report(self.world.now)["slots"]
        assert sum(slots.values()) == self.world.spec.num_slots

    @invariant()
    def every_committed_rollout_is_trained_on_or_counted(self) -> None:
        world = self.world
        dropped = world.counters.get("dropped_rollouts", 0) + world.outdated
        waiting = len(self.ledger.ready()) + rollouts(world.out)
        assert len(world.accepted) == world.trained + dropped + waiting

    @invariant()
    def the_account_closes_to_the_step(self) -> None:
        account = self.world.coordinator.report(self.world.now)["account"]
        assert account["missing"] == 0, account

    @property
    def ledger(self) -> Ledger:
        return self.world.coordinator._leases.ledger

    def teardown(self) -> None:
        """While one actor and the learner live, the run goes on."""
        if not hasattr(self, "world"):
            return
        if self.learner is None:
            self.a_learner_comes()
        if not self.learner_ready:
            self.it_is_ready_or_says_so_again(0)
        for actor_id in range(self.world.min_actors):
            if len(self.actors) < self.world.min_actors and actor_id not in self.actors:
                self.an_actor_comes(actor_id, True)
        elastic = self.world.spec.max_actors is not None
        for actor_id in range(self.world.spec.num_places):
            if actor_id not in self.actors and not (elastic and actor_id in self.world.taken_once):
                self.abandon(actor_id)
        wanted = self.world.coordinator.updates_done + 3
        for _ in range(12):
            for actor_id, actor in self.actors.items():
                if actor.grant is not None:
                    self.commit(actor, STEPS)
                self.it_joins_or_repeats_its_request(actor_id, lose=False)
            self.read_all_mail()
            if self.batch is not None:
                self.publish(())
            elif self.learner is not None:
                self.it_is_ready_or_says_so_again(0)
        assert self.world.coordinator.updates_done >= wanted, self.world.coordinator.report(self.world.now)

    def abandon(self, actor_id: int) -> None:
        self.kept.discard(actor_id)
        self.world.carry_out(self.world.coordinator.abandon_actor(actor_id, self.world.now))

    # --- what peers do

    def commit(self, actor: Actor, steps: int) -> None:
        assert actor.grant is not None
        grant, actor.grant = actor.grant, None
        actor.last = Commit(slot=grant.slot, epoch=grant.epoch, valid_steps=steps, version=grant.version)
        actor.finished, actor.moved = actor.last, False
        actor.peer.tell(actor.last)

    def publish(self, seeded: tuple[int, ...]) -> None:
        assert self.batch is not None
        assert self.learner is not None
        version = (self.world.coordinator.version or 0) + 1
        publish = Publish(update=self.batch.update, version=version, seeded=seeded)
        self.last_publish, self.published, self.batch = publish, self.batch, None
        self.learner.tell(publish)
        self.read_all_mail()

    def read_mail(self, actor: Actor, lose: bool) -> None:
        messages = [] if lose else actor.peer.inbox
        for message in messages:
            assert not isinstance(message, Refused | Stop), message
            if isinstance(message, Grant) and message.epoch > actor.seen.get(message.slot, 0):
                assert actor.joined
                assert actor.grant is None, "two leases at once"
                actor.grant, actor.seen[message.slot] = message, message.epoch
                self.check_start(actor, message)
        actor.peer.inbox.clear()

    def check_start(self, actor: Actor, grant: Grant) -> None:
        """A seed is the state after the rows that this very process committed last, and the learner read last."""
        finished, publish = actor.finished, self.last_publish
        assert (grant.start is StartFrom.FRESH) == (finished is None)
        if grant.start is StartFrom.SEEDED:
            assert finished is not None
            assert not actor.moved
            assert publish is not None
            assert (finished.slot, finished.epoch) in self.world.handed_over
            assert self.published is not None
            assert finished.slot in self.published.slots
            assert finished.valid_steps > 0
            assert grant.slot in publish.seeded

    def read_all_mail(self) -> None:
        for actor in self.actors.values():
            self.read_mail(actor, lose=False)
        if self.learner is not None:
            for message in self.learner.inbox:
                assert not isinstance(message, Refused | Stop), message
                if isinstance(message, Batch):
                    self.batch = message
            self.learner.inbox.clear()


Run.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRun = Run.TestCase
