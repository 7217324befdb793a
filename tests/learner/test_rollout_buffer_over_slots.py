"""RecurrentRolloutBuffer as the learner's face of slots that actors filled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from learner import RecurrentRolloutBuffer
from rollout_service.errors import IncompleteRollout, OutOfOrder, OutOfRange
from rollout_service.memory.schema import rollout_fields
from rollout_service.memory.slots import RolloutMemory
from rollout_service.runspec import Leaf, SpaceKind, Spaces
from tests.learner.filled_rollouts import contents

T, E, ACTORS = 4, 2, 3
SPACES = Spaces(
    observation=(Leaf(kind=SpaceKind.BOX, shape=(1,), dtype="float32"),),
    action=Leaf(kind=SpaceKind.DISCRETE, shape=(), dtype="int64", size=2),
)
FIELDS = rollout_fields(SPACES, {"hidden": (1, 2), "cell": (1, 2)})


@pytest.fixture
def memory() -> Iterator[RolloutMemory]:
    """Two banks of three slots."""
    with RolloutMemory.create(FIELDS, num_slots=2 * ACTORS, envs_per_slot=E, num_steps=T) as made:
        yield made


def commit(
    memory: RolloutMemory, slot: int, *, epoch: int, valid_steps: int = T, ended_envs: tuple[int, ...] = ()
) -> None:
    """Fill one slot as an actor would: observations 1000 * slot + 100 * env + step, rewards 1.

    ended_envs terminate on the last valid row.
    """
    writer = memory.writer(slot)
    writer.open(epoch=epoch, actor=slot % ACTORS, incarnation=0, version=epoch)
    envs = np.arange(E)
    for t in range(valid_steps):
        writer.observation_rows(t)["observations"][:, 0] = 1000 * slot + 100 * envs + t
        if t:
            state = np.full((E, 1, 2), slot + 0.1 * t, np.float32)
            writer.write_state(t, {"hidden": state, "cell": state})
        last = t == valid_steps - 1
        writer.write_transition(
            t,
            actions=np.ones(E, np.int64),
            rewards=np.ones(E),
            values=np.zeros(E),
            log_probs=np.full(E, -0.7),
            terminated=np.isin(envs, ended_envs) & last,
            truncated=np.zeros(E, bool),
        )
    final = np.full((E, 1, 2), 10.0 * slot + epoch, np.float32) + envs[:, None, None]
    writer.close(valid_steps, last_values=np.full(E, float(slot)), final_state={"hidden": final, "cell": -final})


def filled(memory: RolloutMemory) -> RecurrentRolloutBuffer:
    for slot in range(ACTORS):
        commit(memory, slot, epoch=1, ended_envs=(1,) if slot == 0 else ())
    return RecurrentRolloutBuffer.over(memory, range(ACTORS))


def test_adjacent_slots_read_as_one_rollout(memory):
    rollout = filled(memory)
    assert rollout.shape() == (T, E * ACTORS, 1)
    expected = [[1000.0 * (env // E) + 100 * (env % E) + t for env in range(E * ACTORS)] for t in range(T)]
    assert rollout.observations()[:, :, 0].tolist() == expected
    assert rollout.last_values().tolist() == [0, 0, 1, 1, 2, 2]
    assert np.shares_memory(rollout.rewards(), memory.array("rewards"))
    rollout.compute_advantages(rollout.last_values(), 1.0, 1.0)
    assert rollout.advantages()[0].tolist() == [4, 4, 5, 5, 6, 6]
    assert memory.array("advantages")[2, 1, 0] == 6.0
    batch = rollout.to_sequence_batch()
    assert batch.obs_seq[:, :, 0].tolist() == np.transpose(expected).tolist()
    assert batch.episode_starts[:, 0].tolist() == [1.0] * 6


def test_valid_steps_may_be_given_per_slot(memory):
    rollout = filled(memory)
    commit(memory, 1, epoch=2, valid_steps=2)
    rollout.compute_advantages_partial([T, 2, 0], rollout.last_values(), 1.0, 1.0)
    assert rollout.valid_steps.tolist() == [4, 4, 2, 2, 0, 0]
    assert [m.env_ids.tolist() for m in rollout.to_minibatches(3, False)] == [[0, 1, 2], [3]]
    assert rollout.to_sequence_batch_partial([4, 2, 0]).valid.sum(dim=1).tolist() == [4, 4, 2, 2, 0, 0]


def test_a_slot_that_was_not_committed_or_not_so_far_is_refused(memory):
    rollout = filled(memory)
    commit(memory, 1, epoch=2, valid_steps=2)
    with pytest.raises(IncompleteRollout, match=r"step 2 of env 2 was not written.*fewer committed rows"):
        rollout.compute_advantages(rollout.last_values(), 0.9, 0.9)
    memory.writer(2).open(epoch=2, actor=2, incarnation=0, version=2)
    with pytest.raises(IncompleteRollout, match="step 0 of env 4"):
        rollout.compute_advantages_partial([T, 2, T], np.zeros(6), 0.9, 0.9)
    rollout.compute_advantages_partial([T, 2, 0], np.zeros(6), 0.9, 0.9)


def test_the_seed_goes_into_the_next_bank_and_this_one_stays_readable(memory):
    rollout, following = filled(memory), RecurrentRolloutBuffer.over(memory, range(ACTORS, 2 * ACTORS))
    rollout.compute_advantages(rollout.last_values(), 0.9, 0.9)
    before = contents(rollout)
    rollout.seed_warm_start(np.full(6, T - 1), *rollout.final_state().values(), into=following)
    assert contents(rollout) == before
    assert len(rollout.to_sequence_batch()) == 6
    assert following.episode_start_carry().tolist() == [0, 1, 0, 0, 0, 0]
    assert following.hidden()[0, :, 0, 0].tolist() == [1.0, 0.0, 11.0, 12.0, 21.0, 22.0]
    assert following.cell()[0, :, 0, 0].tolist() == [-1.0, 0.0, -11.0, -12.0, -21.0, -22.0]


def test_actors_that_open_seeded_slots_begin_the_next_rollout(memory):
    rollout, following = filled(memory), RecurrentRolloutBuffer.over(memory, range(ACTORS, 2 * ACTORS))
    rollout.seed_warm_start(T - 1, *rollout.final_state().values(), into=following)
    for slot in range(ACTORS, 2 * ACTORS):
        commit(memory, slot, epoch=1)
    following.compute_advantages(following.last_values(), 0.9, 0.9)
    batch = following.to_sequence_batch()
    assert batch.initial_state["hidden"][0, :, 0].tolist() == [1.0, 0.0, 11.0, 12.0, 21.0, 22.0]
    assert batch.episode_starts[:, 0].tolist() == [0, 1, 0, 0, 0, 0]


def test_a_rollout_that_was_seeded_over_refuses_batches(memory):
    rollout, following = filled(memory), RecurrentRolloutBuffer.over(memory, range(ACTORS, 2 * ACTORS))
    for slot in range(ACTORS, 2 * ACTORS):
        commit(memory, slot, epoch=1)
    following.compute_advantages(following.last_values(), 0.9, 0.9)
    following.to_sequence_batch()
    rollout.seed_warm_start(T - 1, *rollout.final_state().values(), into=following)
    with pytest.raises(OutOfOrder, match="seeded for the next rollout"):
        following.to_sequence_batch()


def test_slots_filled_anew_make_earlier_advantages_stale(memory):
    rollout = filled(memory)
    rollout.compute_advantages(rollout.last_values(), 0.9, 0.9)
    commit(memory, 2, epoch=2)
    with pytest.raises(OutOfOrder, match="GAE has not run over these rows"):
        rollout.to_sequence_batch()


def test_actors_own_their_slots(memory):
    rollout = filled(memory)
    state = np.zeros(2)
    with pytest.raises(OutOfOrder, match="add writes a standalone buffer"):
        rollout.add(0, 0, [0.0], 0, 0.0, 0.0, 0.0, False, False)
    with pytest.raises(OutOfOrder, match="add_recurrent_state"):
        rollout.add_recurrent_state(0, 0, state, state)
    with pytest.raises(OutOfOrder, match="seed_warm_start without into="):
        rollout.seed_warm_start(T - 1, *rollout.final_state().values())
    overlapping = RecurrentRolloutBuffer.over(memory, range(1, 1 + ACTORS))
    with pytest.raises(OutOfOrder, match="very rollout"):
        rollout.seed_warm_start(T - 1, *rollout.final_state().values(), into=overlapping)


def test_a_lost_actors_place_moves_on_unchanged(memory):
    rollout, following = filled(memory), RecurrentRolloutBuffer.over(memory, range(ACTORS, 2 * ACTORS))
    memory.writer(1).open(epoch=2, actor=1, incarnation=1, version=1)  # and never committed
    last = [T - 1, -1, T - 1]
    rollout.seed_warm_start(last, *rollout.final_state().values(), into=following)
    assert following.episode_start_carry().tolist() == [0, 1, 1, 1, 0, 0]
    assert following.hidden()[0, 2:4].tolist() == [[[0.0, 0.0]]] * 2


def test_a_clone_stands_alone(memory):
    rollout = filled(memory)
    commit(memory, 1, epoch=2, valid_steps=2)
    with rollout.clone() as twin:
        assert contents(twin) == contents(rollout)
        twin.compute_advantages_partial([4, 4, 2, 2, 4, 4], np.zeros(6), 0.9, 0.9)
        with pytest.raises(IncompleteRollout, match="step 2 of env 2"):
            twin.compute_advantages(np.zeros(6), 0.9, 0.9)
        twin.add(0, 0, [5.0], 0, 0.0, 0.0, 0.0, False, False)
        assert rollout.observations()[0, 0, 0] == 0.0


def test_closing_the_face_leaves_the_memory_to_its_owner(memory):
    rollout = filled(memory)
    rollout.close()
    with pytest.raises(OutOfOrder, match="closed"):
        rollout.rewards()
    assert memory.array("rewards")[0, 0, 0] == 1.0


def test_slots_must_exist_and_none_may_come_twice(memory):
    for slots in (range(4, 8), range(2, 2), (-1, 0), (3, 1, 3)):
        with pytest.raises(OutOfRange, match=r"give at least one of 0\.\.5, none twice"):
            RecurrentRolloutBuffer.over(memory, slots)


def test_over_refilled_slots_advantages_and_returns_are_zero_until_gae_has_run(memory: RolloutMemory) -> None:
    with RecurrentRolloutBuffer.over(memory, range(ACTORS)) as rollout:
        for slot in range(ACTORS):
            commit(memory, slot, epoch=1)
        rollout.compute_advantages(rollout.last_values(), 0.99, 0.95)
        assert rollout.advantages().all()
        for slot in range(ACTORS):
            commit(memory, slot, epoch=2, valid_steps=2)
        twin = rollout.clone()
        assert not rollout.advantages().any()
        assert not rollout.returns().any()
        assert not twin.returns().any()
        twin.close()


def test_rows_past_the_valid_steps_of_refilled_slots_hold_nothing_of_the_rollout_before(memory: RolloutMemory) -> None:
    with RecurrentRolloutBuffer.over(memory, range(ACTORS)) as rollout:
        for slot in range(ACTORS):
            commit(memory, slot, epoch=1)
        rollout.compute_advantages(rollout.last_values(), 0.99, 0.95)
        for slot in range(ACTORS):
            commit(memory, slot, epoch=2, valid_steps=2)
        rollout.compute_advantages_partial(2, rollout.last_values(), 0.99, 0.95)
        assert rollout.advantages()[:2].all()
        assert not rollout.advantages()[2:].any()
        assert not rollout.returns()[2:].any()
