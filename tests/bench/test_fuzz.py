"""The fuzzer in short: hostile messages against decoder and coordinator over real memory, and over a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from bench.fuzz import PLACES, fuzz
from bench.fuzz_memory import GUARD_SLOTS, Ground, WriteOutOfPlace, laid_out
from rollout_service.bench.rig import paper_spec
from rollout_service.control.messages import Batch, Grant, StartFrom
from rollout_service.errors import TornSlot

SLOTS = 2 * PLACES
HONEST, HOSTILE = b"honest", b"hostile"


def test_hostile_messages_are_counted_touch_nobody_elses_memory_and_training_goes_on() -> None:
    found = fuzz(12_000, seed=7)
    assert found["problems"] == []
    coordinator, server = found["coordinator"], found["server"]
    assert coordinator["decoded"] + coordinator["rejected"] == coordinator["messages"] == 11_400
    assert coordinator["updates"] > 100
    assert coordinator["fills"] > coordinator["updates"]
    assert coordinator["scribbles"] > 5, "hostile actors hold slots, too"
    assert coordinator["counters"]["rejected_messages"] >= coordinator["rejected"] > 4000
    assert coordinator["counters"]["refused_handshakes"] > 600
    assert coordinator["counters"]["names_made_up"] <= 256
    assert server["counters"]["rejected_messages"] > 200


@pytest.fixture
def ground() -> Iterator[Ground]:
    spec = paper_spec(2, 8).model_copy(update={"num_actors": PLACES})
    with laid_out(spec, seed=1) as found:
        found.granted(HONEST, grant(0))
        found.fill(grant(0), version=5)
        found.let_go(HONEST, 0, 1)
        found.granted(HOSTILE, grant(1))
        found.check()
        yield found


def grant(slot: int, epoch: int = 1) -> Grant:
    return Grant(slot=slot, epoch=epoch, version=5, start=StartFrom.FRESH, update=1)


def batch(slot: int, steps: int = 8, seed_into: int | None = None) -> Batch:
    return Batch(update=1, slots=(slot,), valid_steps=(steps,), versions=(5,), env_steps=16, seed_into=(seed_into,))


def test_rightful_writes_are_no_complaint(ground: Ground) -> None:
    ground.scribble(honest=(HONEST,))
    ground.learn(batch(0, seed_into=4))
    ground.learn(batch(1, steps=0))
    ground.take_part((HONEST,))
    ground.granted(HONEST, grant(1, epoch=2))
    ground.fill(grant(1, epoch=2), version=5)
    ground.check()
    assert (ground.fills, ground.scribbles) == (2, 1)


@pytest.mark.parametrize("name", ["observations", "rewards", "final_cell", "episode_start_carry", "returns"])
@pytest.mark.parametrize("slot", [3, SLOTS, SLOTS + GUARD_SLOTS - 1], ids=["a slot", "behind the last", "a guard"])
def test_a_byte_out_of_place_is_found_in_every_field(ground: Ground, name: str, slot: int) -> None:
    ground.memory.array(name)[slot].view("u1").flat[-1] ^= 1
    with pytest.raises(WriteOutOfPlace, match="byte"):
        ground.check()


@pytest.mark.parametrize(
    ("happens", "says"),
    [
        (lambda ground: ground.granted(HONEST, grant(SLOTS)), "the run has 8"),
        (lambda ground: ground.granted(HONEST, grant(1, epoch=2)), "while b'hostile' may still write"),
        (lambda ground: ground.learn(batch(1)), "in a batch while b'hostile'"),
        (lambda ground: ground.learn(batch(0, seed_into=1)), "to be seeded while b'hostile'"),
    ],
    ids=["out of range", "two writers", "a batch too early", "a seed too early"],
)
def test_a_slot_in_two_hands_is_found(ground: Ground, happens: Callable[[Ground], None], says: str) -> None:
    with pytest.raises(WriteOutOfPlace, match=says):
        happens(ground)


def test_rows_that_are_not_those_of_the_actor_are_found(ground: Ground) -> None:
    ground.memory.array("rewards")[0, 0, 0] += 1.0
    with pytest.raises(TornSlot):
        ground.learn(batch(0))
