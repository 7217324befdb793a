"""Processes that were not started here: what proves the death of one, and what does not."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollout_service.control import events
from rollout_service.control.messages import Role
from rollout_service.launch.guests import LOOK_EVERY_S, LOOK_WHILE_LEAVING_S, Guests
from rollout_service.memory.presence import LEARNER, actor_seat

CHILD_PID = 77


@dataclass
class FakeRun:
    """What guests ask of a run, with notes of what they did."""

    segment: str = "rs-token-rollout"
    said: list[str] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    lost: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def journal(self) -> FakeRun:
        return self

    metrics = server = journal

    def say(self, text: str) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        self.said.append(f"noted: {text}")

    def actor_joined(self, actor_id: int) -> None:
        self.alive.add(actor_id)

    def actor_left(self, actor_id: int) -> None:
        self.alive.discard(actor_id)

    def submit(self, action: Any) -> None:
        action(self, 0.0)

    def actor_lost(self, actor_id: int, incarnation: int, reason: str, now: float) -> None:
        self.lost.append((actor_id, incarnation))

    def learner_lost(self, now: float, pid: int) -> None:
        self.lost.append(("learner", pid))


@dataclass
class World:
    run: FakeRun
    guests: Guests
    seats: set[int]
    """Those whose lock is held."""
    failures: list[str]

    def come(self, role: Role, actor_id: int | None, pid: int, *, joined: bool = False) -> None:
        self.guests.notice(events.PeerWelcomed(role, actor_id, 0, pid))
        if joined and actor_id is not None:
            self.guests.notice(events.ActorJoined(actor_id, 0, pid))

    def lost(self) -> list[tuple[Any, ...]]:
        self.guests.look()
        return self.run.lost


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    seats: set[int] = set()
    monkeypatch.setattr("rollout_service.launch.guests.is_present", lambda segment, seat: seat in seats)
    run, failures = FakeRun(), list[str]()
    guests = Guests(run, is_child=lambda role, pid: pid == CHILD_PID, failed=failures.append)  # type: ignore[arg-type]
    return World(run, guests, seats, failures)


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_free_seat_that_was_taken_proves_a_death(world: World):
    world.seats |= {LEARNER, actor_seat(1)}
    world.come(Role.LEARNER, None, os.getpid())
    world.come(Role.ACTOR, 1, os.getpid(), joined=True)
    assert world.lost() == []
    world.seats.clear()
    assert world.lost() == [("learner", os.getpid()), (1, 0)]
    assert not world.guests
    assert world.run.alive == set()
    assert world.run.said[-1].endswith("left, its place is free: died, without a goodbye")


def test_a_seat_is_looked_at_when_an_actor_joins(world: World):
    world.seats.add(actor_seat(0))
    world.come(Role.ACTOR, 0, os.getpid(), joined=True)
    world.seats.clear()
    assert world.lost() == [(0, 0)]


def test_an_actor_without_a_seat_is_dead_once_it_is_silent_unless_it_may_still_write(world: World):
    world.come(Role.ACTOR, 0, os.getpid())
    world.come(Role.ACTOR, 1, os.getpid(), joined=True)
    world.come(Role.ACTOR, 2, dead_pid(), joined=True)
    assert world.lost() == []
    for actor_id, guest in ((0, os.getpid()), (1, os.getpid()), (2, world.guests._here[2].pid)):
        world.guests.notice(events.ActorStuck(actor_id, 0, guest, "silent", 11.0))
    assert world.lost() == [(0, 0), (2, 0)]


def test_a_silent_learner_without_a_seat_is_judged_by_its_pid(world: World):
    pid = dead_pid()
    world.come(Role.LEARNER, None, pid)
    assert world.lost() == []
    world.guests.notice(events.LearnerSilent(pid, 11.0))
    assert world.lost() == [("learner", pid)]


def test_a_guest_that_hangs_is_named_and_keeps_its_place(world: World):
    world.seats.add(actor_seat(0))
    world.come(Role.ACTOR, 0, 5, joined=True)
    assert world.guests.notice(events.ActorStuck(0, 0, 5, "env.step", 61.0))
    assert world.run.said[-1].startswith("actor 0 (incarnation 0, pid 5) is stuck in env.step since 61.0 s")
    assert world.lost() == []


def test_children_are_left_to_the_supervisor(world: World):
    assert not world.guests.notice(events.PeerWelcomed(Role.ACTOR, 0, 0, CHILD_PID))
    assert not world.guests.notice(events.ActorJoined(0, 0, CHILD_PID))
    assert not world.guests.notice(events.PeerLeft(Role.ACTOR, 0, 0, CHILD_PID, "finished", ""))
    assert not world.guests


def test_a_goodbye_frees_the_place_and_an_error_is_passed_on(world: World):
    world.come(Role.ACTOR, 0, 5, joined=True)
    world.come(Role.LEARNER, None, 6)
    world.guests.notice(events.PeerLeft(Role.LEARNER, None, 0, 6, "stopped by SIGTERM", ""))
    world.guests.notice(events.PeerLeft(Role.ACTOR, 0, 0, 5, "EnvFault: boom", "Traceback ..."))
    assert world.failures == ["actor 0 (incarnation 0, pid 5) left: EnvFault: boom"]
    assert world.run.said[-1].endswith("its place is free: EnvFault: boom\nTraceback ...")
    assert not world.guests


def test_who_does_not_leave_is_given_up(world: World):
    world.come(Role.ACTOR, 0, 5)
    world.come(Role.LEARNER, None, 6)
    assert world.guests.look_every_s == LOOK_EVERY_S
    world.guests.told_to_leave()
    assert world.guests.look_every_s == LOOK_WHILE_LEAVING_S
    world.guests.give_up(Role.ACTOR, 2.5)
    assert world.guests
    world.guests.give_up(Role.LEARNER, 4.0)
    assert not world.guests
    assert world.run.said[-2:] == [
        "actor 0 (incarnation 0, pid 5) did not leave within 2.5 s of being told",
        "learner (pid 6) did not leave within 4.0 s of being told",
    ]
