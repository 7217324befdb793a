"""The actor's process against a real service: joins, fills what it is granted, says goodbye with its traceback."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import pytest

from rollout_service.control import events
from rollout_service.control.client import Client
from rollout_service.control.coordinator import Coordinator
from rollout_service.control.endpoints import remove_socket_directory, socket_endpoint
from rollout_service.control.messages import Batch, Hello, Publish, Ready, Role
from rollout_service.control.server import Server
from rollout_service.control.transport import Router
from rollout_service.memory.segment import new_run_token
from rollout_service.runspec import RunSpec
from tests.fixtures.machine import eventually
from tests.workers.rig import Rig, make_rig

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
E = TypeVar("E", bound=events.Event)


@dataclass
class Service:
    """A service with the rig's memory, and a learner that the test plays itself."""

    rig: Rig
    server: Server
    endpoint: str
    learner: Client
    actors: list[subprocess.Popen[str]] = field(default_factory=list)

    def start_actor(self, actor_id: int = 0) -> subprocess.Popen[str]:
        actor = subprocess.Popen(
            [sys.executable, "-m", "workers", "--connect", self.endpoint, "--actor", str(actor_id)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.actors.append(actor)
        return actor

    def wait_for(self, kind: type[E]) -> E:
        deadline = time.monotonic() + DEADLINE_S
        while (left := deadline - time.monotonic()) > 0:
            event = self.server.events.get(timeout=left)
            if isinstance(event, kind):
                return event
        raise queue.Empty(f"no {kind.__name__} within {DEADLINE_S} s")

    def stop(self) -> None:
        self.server.submit(lambda coordinator, now: list(coordinator.stop("the test is over", now))).result(DEADLINE_S)


def serve(rig: Rig) -> Iterator[Service]:
    spec: RunSpec = rig.spec
    endpoint = socket_endpoint(new_run_token())
    coordinator = Coordinator(
        spec,
        run_id="test",
        config_json="{}",
        rollout_segment=rig.memory.name,
        weights_segment=rig.weights.name,
        total_updates=9,
        step_timeout=60.0,
    )
    server = Server(Router(endpoint), coordinator)
    server.start()
    learner = Client(endpoint, Hello(role=Role.LEARNER, pid=os.getpid()), connect_deadline_s=DEADLINE_S)
    try:
        learner.connect()
        learner.send(Ready(version=0))
        service = Service(rig, server, endpoint, learner)
        yield service
        for actor in service.actors:
            actor.kill()
            actor.communicate(timeout=DEADLINE_S)
    finally:
        learner.close()
        server.stop()
        server.join()
        remove_socket_directory(endpoint)


@pytest.fixture
def service() -> Iterator[Service]:
    with make_rig(kwargs={"length": 1000}, counter=True, envs_per_actor=2, num_steps=8) as rig:
        yield from serve(rig)


@pytest.fixture
def booming_service() -> Iterator[Service]:
    with make_rig("tests.fixtures.envs:BoomEnv", {"at": 5}, envs_per_actor=2, num_steps=8) as rig:
        yield from serve(rig)


def test_an_actor_fills_its_grants_and_carries_its_state_from_one_to_the_next(service: Service) -> None:
    actor = service.start_actor()
    first_cells = []
    batch = service.learner.exchange(Ready(version=0), Batch, deadline_s=DEADLINE_S)
    for update in (1, 2):
        assert batch is not None
        assert (batch.update, batch.valid_steps) == (update, (8,))
        first_cells.append(
            service.rig.rollout(batch.slots[0] // service.rig.spec.num_actors)["cell"][:, 0, 0, 0].copy()
        )
        service.rig.weights.publish(update, service.rig.policy.to_arrays())
        publish = Publish(update=update, version=update)
        batch = service.learner.exchange(publish, Batch, deadline_s=DEADLINE_S)
    np.testing.assert_allclose(first_cells, [[0.0, 0.0], [0.8, 0.8]], atol=1e-5)
    service.stop()
    assert actor.wait(DEADLINE_S) == 0
    left = service.wait_for(events.PeerLeft)
    assert (left.role, left.actor_id, left.traceback) == (Role.ACTOR, 0, "")
    assert left.reason in {"the test is over", "the service is stopping"}, "by STOP, or by a heartbeat's answer"
    assert actor.stderr is not None
    assert actor.stderr.read() == f"actor: leaving, {left.reason}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_actor_of_a_terminal_that_waits_for_a_grant(service: Service, number: signal.Signals) -> None:
    actor = service.start_actor()
    service.wait_for(events.RolloutCommitted)
    actor.send_signal(number)
    assert actor.wait(DEADLINE_S) == 0
    assert service.wait_for(events.PeerLeft).reason == f"stopped by {number.name}"
    assert actor.stderr is not None
    assert actor.stderr.read() == f"actor: leaving, stopped by {number.name}\n"


def test_an_env_that_raises_sends_its_traceback_and_ends_the_process(booming_service: Service) -> None:
    actor = booming_service.start_actor()
    left = booming_service.wait_for(events.PeerLeft)
    assert actor.wait(DEADLINE_S) == 1
    assert left.actor_id == 0
    assert "env 0 of actor 0" in left.reason
    assert "step 5 of its episode, last action" in left.reason
    assert 'raise ValueError("boom-7")' in left.traceback
    assert "EnvFault" in left.traceback
    assert actor.stderr is not None
    assert actor.stderr.read() == f"{left.traceback}actor: {left.reason}\n"


def test_an_actor_computes_on_one_thread_and_sees_no_gpu() -> None:
    code = (
        "import sys; from unittest import mock; import workers.__main__ as entry; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; "
        "session = mock.MagicMock(); session.run.return_value = 0; sys.modules['workers.session'] = session; "
        "entry.main(['--connect', 'ipc:///x', '--actor', '3']); (how,) = session.run.call_args.args; "
        "print(how.endpoint, how.hello.requested_actor); "
        "import os; print(os.environ['OMP_NUM_THREADS'], repr(os.environ['CUDA_VISIBLE_DEVICES'])); "
        "import torch; print(torch.get_num_threads())"
    )
    bare = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    given = {**bare, "CUDA_VISIBLE_DEVICES": "0"}  # as a scheduler sets it for a whole job
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env=given
    )
    assert shown.stdout.splitlines() == ["ipc:///x 3", "1 ''", "1"]


RSS_GROWTH = 50 << 20


@pytest.fixture
def service_of_three() -> Iterator[Service]:
    with make_rig(kwargs={"length": 7}, num_actors=3, num_steps=8) as rig:
        yield from serve(rig)


def test_fast_actors_wait_for_a_slow_learner_and_every_slot_is_read_once(service_of_three: Service) -> None:
    service, learner = service_of_three, service_of_three.learner
    actors = [psutil.Process(service.start_actor(actor_id).pid) for actor_id in range(3)]
    batch = learner.exchange(Ready(version=0), Batch, deadline_s=DEADLINE_S)
    before = [actor.memory_info().rss for actor in actors]
    read: list[tuple[int, tuple[int, ...]]] = []
    for update in (1, 2, 3):
        assert batch is not None
        assert batch.valid_steps == (8, 8, 8)
        slots = batch.slots
        read.append((batch.update, tuple(service.rig.memory.header(slot).committed_epoch for slot in slots)))
        if update == 2:
            assert learner.receive(1.0) is None, "a batch that was not asked for"
            assert service.server.report()["slots"] == {
                "free": 3,
                "leased": 0,
                "ready": 0,
                "reading": 3,
                "quarantined": 0,
            }
        service.rig.weights.publish(update, service.rig.policy.to_arrays())
        publish = Publish(update=update, version=update)
        batch = learner.exchange(publish, Batch, deadline_s=DEADLINE_S)
    assert read == [(1, (1, 1, 1)), (2, (1, 1, 1)), (3, (2, 2, 2))]
    assert all(actor.memory_info().rss - was < RSS_GROWTH for actor, was in zip(actors, before, strict=True))
    service.stop()
    assert [actor.wait(DEADLINE_S) for actor in service.actors] == [0] * 3


@pytest.fixture
def hanging_service() -> Iterator[Service]:
    with make_rig(
        "tests.fixtures.machine:FaultyEnv", {"faults": {"0.None": "hang"}}, envs_per_actor=2, num_steps=32
    ) as rig:
        yield from serve(rig)


def test_an_actor_of_a_terminal_leaves_even_if_its_env_does_not_return(hanging_service: Service) -> None:
    actor = hanging_service.start_actor()
    hanging_service.wait_for(events.ActorJoined)
    eventually(lambda: doing(hanging_service) == ("collecting", "env.step"), DEADLINE_S, "the env hangs")
    actor.send_signal(signal.SIGTERM)
    assert actor.wait(DEADLINE_S) == 1
    assert actor.stderr is not None
    assert actor.stderr.read() == ("actor: stopped by SIGTERM; ended in env.step, which did not return within 3 s\n")


def doing(service: Service) -> tuple[str, str]:
    (actor,) = service.server.report()["actors"]
    return actor["state"], actor["phase"]
