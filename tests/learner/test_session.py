"""The learner's conversation with the service: what is on disk and in shared memory before each message leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from learner.session import LearnerSession
from rollout_service import checkpoint as checkpoints
from rollout_service.control.client import PulseState
from rollout_service.control.messages import (
    Batch,
    Grant,
    Message,
    Publish,
    Ready,
    Release,
    Restore,
    StartFrom,
    Stop,
    Welcome,
)
from rollout_service.errors import CheckpointError, ProtocolError
from rollout_service.launch.probe import build_run_spec
from rollout_service.launch.serial import run_serial, weights_digest
from rollout_service.memory.schema import rollout_fields
from rollout_service.memory.slots import RolloutMemory
from rollout_service.memory.weights import WeightsMemory
from rollout_service.runspec import RunSpec
from rollout_service.tally import TallyRecord
from tests.fixtures.training import small_config
from workers.actor import Actor


class ScriptedClient:
    """A client whose service is the test: `inbox` is what arrives, `sent` what left."""

    def __init__(self) -> None:
        self.pulse = PulseState()
        self.sent: list[Message] = []
        self.inbox: list[Message] = []
        self.stopping = False

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float) -> Message | None:
        message = self.inbox.pop(0) if self.inbox else Stop(reason="nothing left")
        self.stopping = self.stopping or isinstance(message, Stop)
        return message


class Service:
    """Memory, one actor that fills banks, and a learner session."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        self.config = small_config(num_actors=1, total_steps=32 * 4, checkpoint_interval=2, **settings)
        self.spec: RunSpec = build_run_spec(self.config)
        self.run_dir = run_dir
        self.memory = RolloutMemory.create(
            rollout_fields(self.spec.spaces, self.spec.state),
            num_slots=self.spec.num_slots,
            envs_per_slot=self.spec.envs_per_actor,
            num_steps=self.spec.num_steps,
        )
        self.weights = WeightsMemory.create(self.spec.parameters)
        self.client = ScriptedClient()
        self.session = self.learner()
        self.actor = Actor(self.spec, self.memory, self.weights, 0)
        self.epoch = 0

    def learner(self, version: int = 0) -> LearnerSession:
        welcome = Welcome(
            run_id="t",
            run_spec=self.spec.to_json(),
            config=self.config.to_json(),
            rollout_segment=self.memory.name,
            weights_segment=self.weights.name,
            heartbeat_interval=1.0,
            version=version,
        )
        return LearnerSession(self.client, welcome, self.run_dir)  # type: ignore[arg-type]

    def fill(self, update: int, last: bool = False) -> Batch:
        """A filled bank, as BATCH announces it."""
        self.epoch += 1
        bank = (update + 1) % 2
        start = StartFrom.FRESH if update == 1 else StartFrom.SEEDED
        grant = Grant(slot=bank, epoch=self.epoch, version=self.session.version, start=start, update=update)
        commit = self.actor.fill(grant)
        assert commit.counters.get("seed_mismatches", 0) == 0
        return Batch(
            update=update,
            slots=(bank,),
            valid_steps=(commit.valid_steps,),
            versions=(commit.version,),
            env_steps=update * 32,
            last=last,
            seed_into=(1 - bank,),
        )

    def stream(self, update: int, *slots: int) -> Batch:
        """A batch as it comes in streaming: these slots, filled one after the other."""
        for slot in slots:
            self.epoch += 1
            start = StartFrom.FRESH if self.epoch == 1 else StartFrom.CARRY
            self.actor.fill(Grant(slot=slot, epoch=self.epoch, version=self.session.version, start=start, update=1))
        versions = (self.session.version,) * len(slots)
        return Batch(
            update=update, slots=slots, valid_steps=(16,) * len(slots), versions=versions, env_steps=update * 32
        )

    def close(self) -> None:
        self.session.close()
        self.actor.close()
        self.weights.close()
        self.memory.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


def saved(service: Service) -> list[int]:
    return [int(path.name[-8:]) for path in checkpoints.listed(service.run_dir)]


def figures_of(message: Message) -> dict[str, float]:
    assert isinstance(message, Publish)
    return message.metrics


def test_checkpoint_zero_and_the_first_weights_are_there_before_ready(service: Service) -> None:
    def look(message: Message) -> None:
        assert saved(service) == [0]
        assert service.weights.newest_version() == 1
        service.client.sent.append(message)

    service.client.send = look  # type: ignore[method-assign]
    service.session.prepare(resume=False)
    assert service.client.sent == [Ready(version=1, updates_done=0, env_steps_done=0)]


def test_the_first_version_follows_the_highest_that_was_ever_published(service: Service) -> None:
    service.session.prepare(resume=False)
    service.session.close()
    service.session = service.learner(version=7)
    service.session.prepare(resume=True)
    assert service.weights.newest_version() == 8
    assert service.client.sent[-1] == Ready(version=8, updates_done=0, env_steps_done=0)


def test_a_batch_is_answered_with_weights_seeds_and_figures(service: Service) -> None:
    service.session.prepare(resume=False)
    for update in (1, 2, 3):
        service.session.learn(service.fill(update))
        published = service.client.sent[-1]
        assert isinstance(published, Publish)
        assert (published.update, published.version) == (update, update + 1)
        assert published.seeded == (update % 2,)
        assert published.metrics["valid_rows"] == 32
        assert "update" in published.seconds
        assert (published.checkpoint is not None) == (update == 2)
        assert service.weights.newest_version() == update + 1
        assert weights_digest(service.weights.load().arrays) == weights_digest(service.session.trainer.weights())
    assert saved(service) == [0, 2]
    assert service.client.pulse.progress >= 3 * 4


def test_slots_are_not_called_seeded_under_the_zero_strategy(tmp_path: Path) -> None:
    service = Service(tmp_path, state_strategy="zero")
    try:
        service.session.prepare(resume=False)
        service.session.learn(service.fill(1))
        published = service.client.sent[-1]
        assert isinstance(published, Publish)
        assert published.seeded == ()
    finally:
        service.close()


def test_the_last_update_and_a_stop_leave_a_checkpoint(service: Service) -> None:
    service.session.prepare(resume=False)
    service.session.learn(service.fill(1, last=True))
    published = service.client.sent[-1]
    assert isinstance(published, Publish)
    assert published.checkpoint == str(checkpoints.listed(service.run_dir)[-1])
    assert saved(service) == [0, 1]
    service.session.run()
    assert saved(service) == [0, 1]


def test_a_stop_between_updates_saves_what_was_learned(service: Service) -> None:
    service.session.prepare(resume=False)
    service.client.inbox = [service.fill(1)]
    service.session.run()
    assert saved(service) == [0, 1]
    assert checkpoints.require(service.run_dir).checkpoint.manifest.env_steps == 32


def test_a_stop_inside_an_update_publishes_nothing_and_saves_the_last_whole_one(service: Service) -> None:
    service.session.prepare(resume=False)
    service.session.learn(service.fill(1))
    before = weights_digest(service.session.trainer.weights())
    service.client.inbox = [service.fill(2)]
    told = iter([False, True])
    service.session._between_minibatches = lambda: next(told)  # type: ignore[method-assign]
    service.session.run()
    assert [type(message) for message in service.client.sent] == [Ready, Publish]
    assert saved(service) == [0, 1]
    arrays = checkpoints.require(service.run_dir).checkpoint.arrays
    policy = {name.removeprefix("policy/"): array for name, array in arrays.items() if name.startswith("policy/")}
    assert weights_digest(policy) == before


def test_a_resumed_learner_tells_where_it_stands(service: Service) -> None:
    service.session.prepare(resume=False)
    service.session.learn(service.fill(1))
    service.session.learn(service.fill(2))
    figures = figures_of(service.client.sent[-1])
    service.session.close()
    service.session = service.learner(version=3)
    service.session.prepare(resume=True)
    assert service.client.sent[-1] == Ready(version=4, updates_done=2, env_steps_done=64, metrics=figures)


def test_resume_without_a_checkpoint_starts_anew(service: Service) -> None:
    service.session.prepare(resume=True)
    assert saved(service) == [0]


def test_a_message_that_is_not_for_learners_is_an_error(service: Service) -> None:
    service.session.prepare(resume=False)
    service.client.inbox = [Grant(slot=0, epoch=1, version=1, start=StartFrom.FRESH, update=1)]
    with pytest.raises(ProtocolError, match="was sent Grant"):
        service.session.run()


def test_a_session_gives_the_weights_of_a_serial_run(service: Service) -> None:
    service.session.prepare(resume=False)
    for update in (1, 2, 3, 4):
        service.session.learn(service.fill(update, last=update == 4))
    assert weights_digest(service.session.trainer.weights()) == run_serial(service.config)["weights_digest"]


def test_a_version_that_was_published_and_never_announced_is_not_used_again(service: Service) -> None:
    service.session.prepare(resume=False)
    service.weights.publish(5, service.session.trainer.weights())
    service.session.close()
    service.session = service.learner(version=1)
    service.session.prepare(resume=True)
    assert service.client.sent[-1] == Ready(version=6, updates_done=0, env_steps_done=0)
    assert service.weights.newest_version() == 6


def test_versions_do_not_fall_below_the_checkpoints_in_a_new_segment(service: Service) -> None:
    service.session.prepare(resume=False)
    service.session.learn(service.fill(1))
    service.session.learn(service.fill(2))
    figures = figures_of(service.client.sent[-1])
    service.session.close()
    service.weights.close()
    service.weights = WeightsMemory.create(service.spec.parameters)
    service.session = service.learner()
    service.session.prepare(resume=True)
    assert service.client.sent[-1] == Ready(version=4, updates_done=2, env_steps_done=64, metrics=figures)


def test_a_restored_learner_publishes_into_the_bank_that_was_not_published_last(service: Service) -> None:
    service.session.prepare(resume=False)
    handed_out = service.weights.load().arrays
    service.session.close()
    service.session = service.learner(version=1)
    service.session.prepare(resume=True)
    assert {int(words[2]) for words in service.weights._headers.tolist()} == {1, 2}
    assert weights_digest(service.weights.load(2).arrays) == weights_digest(handed_out)


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_used(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.session.prepare(resume=False)
    service.session.learn(service.fill(1))
    service.session.learn(service.fill(2))
    (checkpoints.listed(service.run_dir)[-1] / checkpoints.ARRAYS_FILE).write_bytes(b"")
    service.session.close()
    service.session = service.learner(version=3)
    service.session.prepare(resume=True)
    assert service.client.sent[-1] == Ready(version=4, updates_done=0, env_steps_done=0)
    assert "using checkpoint-00000000" in capsys.readouterr().err
    assert saved(service) == [0]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_unasked(service: Service) -> None:
    service.session.prepare(resume=False)
    (checkpoints.listed(service.run_dir)[0] / checkpoints.MANIFEST_FILE).write_text("")
    service.session.close()
    service.session = service.learner(version=1)
    with pytest.raises(CheckpointError, match="no usable checkpoint is left"):
        service.session.prepare(resume=True)
    assert saved(service) == [0]


def test_a_withheld_place_is_neither_seeded_nor_called_so(service: Service) -> None:
    service.session.prepare(resume=False)
    other = {f.name: service.memory.array(f.name)[1].tobytes() for f in service.memory.fields}
    service.session.learn(service.fill(1).model_copy(update={"seed_into": (None,)}))
    published = service.client.sent[-1]
    assert isinstance(published, Publish)
    assert published.seeded == ()
    assert {f.name: service.memory.array(f.name)[1].tobytes() for f in service.memory.fields} == other


def test_seeds_that_are_not_for_the_other_bank_are_refused(service: Service) -> None:
    service.session.prepare(resume=False)
    batch = service.fill(1).model_copy(update={"seed_into": (7,)})
    with pytest.raises(ProtocolError, match=r"batch 1 has seeds for slots \(7,\)"):
        service.session.learn(batch)


def test_a_batch_that_comes_again_is_answered_again_and_not_learned_twice(service: Service) -> None:
    service.session.prepare(resume=False)
    batch = service.fill(1)
    service.session.learn(batch)
    weights = weights_digest(service.session.trainer.weights())
    service.session.learn(batch)
    assert service.client.sent[-1] == service.client.sent[-2]
    assert weights_digest(service.session.trainer.weights()) == weights
    assert service.session.version == 2


@pytest.fixture
def streaming(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path, max_policy_lag=2)
    made.session.prepare(resume=False)
    yield made
    made.close()


def test_in_streaming_the_slots_are_released_before_the_first_minibatch_and_never_in_lockstep(
    service: Service, streaming: Service
) -> None:
    def first_minibatch() -> bool:
        assert streaming.client.sent[-1] == Release(update=1)
        return False

    streaming.session._between_minibatches = first_minibatch  # type: ignore[method-assign]
    streaming.session.learn(streaming.stream(1, 2, 0))
    assert [type(message) for message in streaming.client.sent] == [Ready, Release, Publish]
    service.session.prepare(resume=False)
    service.session.learn(service.fill(1))
    assert [type(message) for message in service.client.sent] == [Ready, Publish]


def test_in_streaming_nothing_is_seeded_and_the_lag_is_told(streaming: Service) -> None:
    streaming.session.learn(streaming.stream(1, 2, 0))
    old = streaming.stream(3, 1)
    streaming.session.learn(streaming.stream(2, 2))
    streaming.session.learn(old)
    published = [message for message in streaming.client.sent if isinstance(message, Publish)]
    assert [message.seeded for message in published] == [()] * 3
    assert [message.metrics["policy_lag_max"] for message in published] == [0.0, 0.0, 1.0]
    assert [message.metrics["valid_rows"] for message in published] == [64, 32, 32]
    assert [message.version for message in published] == [2, 3, 4]


@pytest.fixture
def deterministic(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path, deterministic=True)
    made.session.prepare(resume=False)
    yield made
    made.close()


def test_a_learner_that_is_told_to_goes_on_from_its_newest_checkpoint(deterministic: Service) -> None:
    service = deterministic
    tally = TallyRecord(episodes=7, returns=(1.0,), lengths=(3,))
    service.session.learn(service.fill(1))
    service.session.learn(service.fill(2).model_copy(update={"tally": tally}))
    figures, saved_weights = figures_of(service.client.sent[-1]), weights_digest(service.session.trainer.weights())
    third = service.fill(3)
    service.session.learn(third)
    first_time = weights_digest(service.session.trainer.weights())
    service.client.inbox = [Restore(version=4)]
    service.session.run()
    assert service.client.sent[-1] == Ready(version=5, updates_done=2, env_steps_done=64, metrics=figures, tally=tally)
    assert weights_digest(service.weights.load(5).arrays) == saved_weights
    service.client.stopping = False
    service.session.learn(third.model_copy(update={"versions": (5,)}))
    published = service.client.sent[-1]
    assert isinstance(published, Publish)
    assert (published.update, published.version) == (3, 6)
    assert weights_digest(service.session.trainer.weights()) == first_time


def test_a_deterministic_learner_saves_at_barriers_and_behind_the_last_update_only(deterministic: Service) -> None:
    service = deterministic
    service.client.inbox = [service.fill(1)]
    service.session.run()
    assert saved(service) == [0]
    service.client.stopping = False
    service.session.learn(service.fill(2))
    service.session.learn(service.fill(3, last=True))
    service.session.run()
    assert saved(service) == [0, 2, 3]


def test_in_a_new_segment_a_deterministic_learner_publishes_a_barriers_weights_as_the_version_that_they_are(
    deterministic: Service,
) -> None:
    service = deterministic
    for update in (1, 2):
        service.session.learn(service.fill(update))
    service.session.close()
    service.weights.close()
    service.weights = WeightsMemory.create(service.spec.parameters)
    service.session = service.learner()
    service.session.prepare(resume=True)
    ready = service.client.sent[-1]
    assert isinstance(ready, Ready)
    assert (ready.version, ready.updates_done) == (3, 2)
