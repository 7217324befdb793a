"""PREEMPT from the service into a lease that is under way: a real service, a real actor session, envs behind a gate."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from rollout_service.control.client import Client
from rollout_service.control.coordinator import Coordinator
from rollout_service.control.endpoints import remove_socket_directory, socket_endpoint
from rollout_service.control.events import BatchFormed, RolloutCommitted
from rollout_service.control.messages import Batch, Commit, Grant, Hello, Preempt, Publish, Ready, Role, StartFrom
from rollout_service.control.scheduling import Lockstep, Patience
from rollout_service.control.server import Server
from rollout_service.control.transport import Router
from rollout_service.memory.segment import new_run_token
from tests.fixtures.envs import GatedEnv
from tests.fixtures.machine import eventually
from tests.workers.rig import Rig, make_rig
from workers.session import ACTOR_VARIABLE, ActorSession

DEADLINE_S = 20.0
MIN_STEPS = 2


@dataclass
class Preempted:
    """Actor 0 and the learner are played by the test; actor 1 is real, and its envs wait for the test."""

    rig: Rig
    server: Server
    fast: Client
    learner: Client
    slow: Client
    thread: threading.Thread

    def let_through(self, *expected: str) -> None:
        """These steps and resets, in this order, each as soon as it waits."""
        for what in expected:
            assert GatedEnv.waiting.get(timeout=DEADLINE_S) == what
            GatedEnv.gate.release()

    def commit_fast(self, grant: Grant) -> None:
        self.fast.send(Commit(slot=grant.slot, epoch=grant.epoch, valid_steps=8, version=grant.version))

    def await_preempt(self, grant: Grant) -> None:
        def asked() -> bool:
            preempt = self.slow.preempt
            return preempt is not None and preempt.epoch == grant.epoch and preempt.slot == grant.slot + 1

        eventually(asked, DEADLINE_S, "PREEMPT has come")

    def committed(self) -> tuple[int, int]:
        """(valid steps, slot) of the real actor's next rollout."""
        while True:
            event = self.server.events.get(timeout=DEADLINE_S)
            if isinstance(event, RolloutCommitted) and event.actor_id == 1:
                return event.env_steps // self.rig.spec.envs_per_actor, event.slot


def receive(client: Client, kind: type[Grant]) -> Grant:
    while True:
        message = client.receive(DEADLINE_S)
        assert message is not None
        if isinstance(message, kind):
            return message


@contextmanager
def preempting(length: int) -> Iterator[Preempted]:
    while not GatedEnv.waiting.empty():
        GatedEnv.waiting.get()
    rules = Lockstep(2, Patience(preempt_share=0.5, preempt_min_steps=MIN_STEPS))
    endpoint = socket_endpoint(new_run_token())
    with make_rig(
        "tests.fixtures.envs:GatedEnv", {"length": length}, num_actors=2, envs_per_actor=2, num_steps=8, counter=True
    ) as rig:
        coordinator = Coordinator(
            rig.spec,
            run_id="test",
            config_json="{}",
            rollout_segment=rig.memory.name,
            weights_segment=rig.weights.name,
            total_updates=9,
            step_timeout=60.0,
            scheduler=rules,
        )
        server = Server(Router(endpoint), coordinator)
        server.start()

        def client(role: Role, actor_id: int | None = None) -> Client:
            hello = Hello(role=role, pid=os.getpid(), requested_actor=actor_id)
            return Client(endpoint, hello, connect_deadline_s=DEADLINE_S)

        with (
            closing(client(Role.LEARNER)) as learner,
            closing(client(Role.ACTOR, 0)) as fast,
            closing(client(Role.ACTOR, 1)) as slow,
        ):
            learner.connect()
            learner.send(Ready(version=0))
            fast.connect()
            fast.send(rig.actors[0].join_facts())
            with closing(ActorSession(slow, slow.connect())) as session:
                assert os.environ.pop(ACTOR_VARIABLE) == "1"
                thread = threading.Thread(target=session.run, daemon=True)
                thread.start()
                yield Preempted(rig, server, fast, learner, slow, thread)
                slow.stop("the test is over")
                for _ in range(100):
                    GatedEnv.gate.release()
                thread.join(DEADLINE_S)
        GatedEnv.gate = threading.Semaphore(0)
        server.stop()
        server.join()
        remove_socket_directory(endpoint)


def test_a_lease_ends_after_the_step_in_which_it_was_preempted_and_no_sooner_than_the_least() -> None:
    step = ("step", "step")
    with preempting(length=1000) as run:
        grant = receive(run.fast, Grant)
        run.let_through(*step)
        run.commit_fast(grant)
        run.await_preempt(grant)
        run.let_through(*step)
        assert run.committed() == (MIN_STEPS, 1)

        batch = run.learner.exchange(Ready(version=0), Batch, deadline_s=DEADLINE_S)
        assert batch is not None
        assert batch.valid_steps == (8, MIN_STEPS)
        run.rig.weights.publish(1, run.rig.policy.to_arrays())
        run.learner.send(Publish(update=1, version=1))
        grant = receive(run.fast, Grant)
        run.let_through(*step, *step, *step, "step")
        run.commit_fast(grant)
        run.await_preempt(grant)
        run.let_through("step")
        assert run.committed() == (4, 3)
        following = run.rig.rollout(1)
        assert following["observations"][2:, 0].tolist() == [[0.0, 2.0]] * 2, "its envs went on"
        np.testing.assert_allclose(following["cell"][2:, 0, 0, 0], 0.2, atol=1e-5)


def test_an_actor_that_is_stuck_in_a_reset_commits_right_after_it_and_resets_the_others_later() -> None:
    with preempting(length=3) as run:
        grant = receive(run.fast, Grant)
        run.let_through(*["step"] * 6)
        assert GatedEnv.waiting.get(timeout=DEADLINE_S) == "reset"
        run.commit_fast(grant)
        run.await_preempt(grant)
        GatedEnv.gate.release()
        assert run.committed() == (3, 1)
        assert GatedEnv.waiting.empty(), "the other env's reset waits for the next lease"
        formed = [event for event in drained(run.server) if isinstance(event, BatchFormed)]
        assert [event.partial for event in formed] == [(1,)]

        batch = run.learner.exchange(Ready(version=0), Batch, deadline_s=DEADLINE_S)
        assert batch is not None
        run.rig.weights.publish(1, run.rig.policy.to_arrays())
        run.learner.send(Publish(update=1, version=1))
        receive(run.fast, Grant)
        run.let_through("reset", "step", "step")
        eventually(lambda: not GatedEnv.waiting.empty(), DEADLINE_S, "the second step of the new lease")
        assert run.rig.rollout(1)["observations"][2:, 0].tolist() == [[1.0, 0.0]] * 2


def drained(server: Server) -> list[object]:
    """The events up to the next batch."""
    found: list[object] = []
    while not any(isinstance(event, BatchFormed) for event in found):
        found.append(server.events.get(timeout=DEADLINE_S))
    return found


def test_a_request_for_another_lease_changes_nothing() -> None:
    session = ActorSession.__new__(ActorSession)
    told = SimpleNamespace(preempt=None, stopping=False)
    session.client = told  # type: ignore[assignment]
    enough = session._enough(Grant(slot=0, epoch=5, version=0, start=StartFrom.FRESH, update=1))
    for slot, epoch in ((0, 4), (0, 6), (1, 5)):
        told.preempt = Preempt(slot=slot, epoch=epoch, min_steps=1)
        assert not enough(4)
    told.preempt = Preempt(slot=0, epoch=5, min_steps=3)
    assert [enough(steps) for steps in (1, 2, 3, 4)] == [False, False, True, True]
    told.stopping = True
    assert enough(1)
