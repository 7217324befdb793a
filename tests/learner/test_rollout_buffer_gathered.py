"""RecurrentRolloutBuffer over slots that are no neighbours: copied once, in the order given; then on its own.

With at_once=False field by field, when it is read: then only what nobody has read yet may still be the slots'.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from learner import RecurrentRolloutBuffer, SequenceBatch
from rollout_service.errors import IncompleteRollout, OutOfOrder
from rollout_service.memory.slots import RolloutMemory
from tests.learner.filled_slots import FIELDS, commit

T, E, SLOTS = 4, 2, 6
ORDER = (4, 1, 3)


@pytest.fixture
def memory() -> Iterator[RolloutMemory]:
    """Six committed slots; env 1 of slot 1 has ended, slot 3 has two steps."""
    with RolloutMemory.create(FIELDS, num_slots=SLOTS, envs_per_slot=E, num_steps=T) as made:
        for slot in range(SLOTS):
            steps = 2 if slot == 3 else T
            commit(made, slot, epoch=1, actor=slot % 3, valid_steps=steps, ended_envs=(1,) if slot == 1 else ())
        yield made


def tensors(batch: SequenceBatch) -> dict[str, torch.Tensor]:
    """Every field of a batch but the numbers of its rows; states env-major."""
    assert isinstance(batch.obs_seq, torch.Tensor)
    names = ("actions", "episode_starts", "old_log_probs", "old_values", "advantages", "returns", "valid")
    states = {name: state.swapaxes(0, 1) for name, state in batch.initial_state.items()}
    return {"obs_seq": batch.obs_seq, **{name: getattr(batch, name) for name in names}, **states}


def estimated(rollout: RecurrentRolloutBuffer, steps: list[int] | int) -> SequenceBatch:
    rollout.compute_advantages_partial(steps, rollout.last_values(), 0.9, 0.8)
    return rollout.to_training_batch()


@pytest.mark.parametrize("at_once", [True, False])
def test_slots_in_any_order_give_the_batch_that_they_give_one_by_one(memory: RolloutMemory, at_once: bool) -> None:
    together = tensors(estimated(RecurrentRolloutBuffer.over(memory, ORDER, at_once=at_once), [T, T, 2]))
    apart = [
        tensors(estimated(RecurrentRolloutBuffer.over(memory, [slot]), steps))
        for slot, steps in zip(ORDER, (T, T, 2), strict=True)
    ]
    for name, tensor in together.items():
        for index, single in enumerate(apart):
            own = tensor[index * E : (index + 1) * E]
            columns = single[name].shape[1]
            torch.testing.assert_close(own[:, :columns], single[name], rtol=0, atol=0)
    assert together["obs_seq"][:, 0, 0].tolist() == [4000, 4100, 1000, 1100, 3000, 3100]
    assert together["valid"].sum(1).tolist() == [4, 4, 4, 4, 2, 2]


def test_what_actors_write_afterwards_reaches_neither_the_rollout_nor_its_estimates(memory: RolloutMemory) -> None:
    rollout = RecurrentRolloutBuffer.over(memory, ORDER)
    expected = tensors(estimated(RecurrentRolloutBuffer.over(memory, ORDER), [T, T, 2]))
    for slot in ORDER:
        commit(memory, slot, epoch=2, valid_steps=1, ended_envs=(0, 1))
        for field in FIELDS:
            memory.array(field.name)[slot] = 77
    rollout.compute_advantages_partial([T, T, 2], rollout.last_values(), 0.9, 0.8)
    for field in FIELDS:
        memory.array(field.name)[list(ORDER)] = 78
    seen = tensors(rollout.to_training_batch())
    for name, tensor in expected.items():
        torch.testing.assert_close(seen[name], tensor, rtol=0, atol=0)


def test_a_field_is_copied_when_it_is_read_for_the_first_time_if_not_at_once(memory: RolloutMemory) -> None:
    rollout = RecurrentRolloutBuffer.over(memory, ORDER, at_once=False)
    rewards = rollout.rewards().copy()
    for name in ("rewards", "values"):
        memory.array(name)[list(ORDER)] = 79
    np.testing.assert_array_equal(rollout.rewards(), rewards)
    assert (rollout.values() == 79).all()
    assert not rollout.advantages().any()
    assert rollout.hidden().shape == (1, 3 * E, 1, 2)


def test_nothing_is_written_into_the_slots(memory: RolloutMemory) -> None:
    before = {field.name: memory.array(field.name).tobytes() for field in FIELDS}
    estimated(RecurrentRolloutBuffer.over(memory, ORDER), [T, T, 2])
    assert {field.name: memory.array(field.name).tobytes() for field in FIELDS} == before


def test_adjacent_slots_stay_views_also_when_they_come_as_a_tuple(memory: RolloutMemory) -> None:
    rollout = RecurrentRolloutBuffer.over(memory, (1, 2))
    assert not rollout.is_gathered
    assert np.shares_memory(rollout.rewards(), memory.array("rewards"))
    assert RecurrentRolloutBuffer.over(memory, (2, 1)).is_gathered


def test_a_batch_of_all_its_rows_takes_the_gathered_arrays_over(memory: RolloutMemory) -> None:
    rollout = RecurrentRolloutBuffer.over(memory, (4, 1))
    batch = estimated(rollout, T)
    for tensor, array in [
        (batch.obs_seq, rollout.observations()),
        (batch.actions, rollout.actions()),
        (batch.old_log_probs, rollout.log_probs()),
        (batch.old_values, rollout.values()),
        (batch.advantages, rollout.advantages()),
    ]:
        assert isinstance(tensor, torch.Tensor)
        assert isinstance(array, np.ndarray)
        assert np.shares_memory(tensor.numpy(), array)


def test_of_the_recurrent_state_there_is_row_0_and_the_final_one(memory: RolloutMemory) -> None:
    rollout = RecurrentRolloutBuffer.over(memory, ORDER)
    assert rollout.hidden().shape == rollout.cell().shape == (1, 3 * E, 1, 2)
    assert rollout.hidden()[0, :, 0, 0].tolist() == [4, 4, 1, 1, 3, 3]
    assert rollout.final_state()["hidden"][:, 0, 0].tolist() == [41, 42, 11, 12, 31, 32]


def test_envs_have_the_numbers_they_have_in_the_run(memory: RolloutMemory) -> None:
    assert RecurrentRolloutBuffer.over(memory, ORDER).run_env_ids().tolist() == [2, 3, 2, 3, 0, 1]
    assert RecurrentRolloutBuffer.over(memory, range(3)).run_env_ids().tolist() == [0, 1, 2, 3, 4, 5]
    with RecurrentRolloutBuffer(T, 3, 1) as standalone:
        assert standalone.run_env_ids().tolist() == [0, 1, 2]


def test_rows_that_were_not_committed_are_refused_as_over_adjacent_slots(memory: RolloutMemory) -> None:
    with pytest.raises(IncompleteRollout, match="step 2 of env 4"):
        estimated(RecurrentRolloutBuffer.over(memory, ORDER), T)
    memory.writer(1).open(epoch=2, actor=1, incarnation=0, version=2)
    with pytest.raises(IncompleteRollout, match="step 0 of env 2"):
        estimated(RecurrentRolloutBuffer.over(memory, ORDER), [T, 1, 2])


def test_a_seed_into_a_copy_is_refused(memory: RolloutMemory) -> None:
    rollout = RecurrentRolloutBuffer.over(memory, (0, 1))
    copy = RecurrentRolloutBuffer.over(memory, (5, 2))
    with pytest.raises(OutOfOrder, match="gathered copy"):
        rollout.seed_warm_start(T - 1, *rollout.final_state().values(), into=copy)


def test_a_gathered_rollout_may_seed_adjacent_slots(memory: RolloutMemory) -> None:
    rollout, following = RecurrentRolloutBuffer.over(memory, (4, 1)), RecurrentRolloutBuffer.over(memory, (2, 3))
    rollout.seed_warm_start(T - 1, *rollout.final_state().values(), into=following)
    assert following.hidden()[0, :, 0, 0].tolist() == [41, 42, 11, 0]
    assert following.episode_start_carry().tolist() == [0, 0, 0, 1]


def test_a_clone_has_the_same_rows_and_no_states_but_the_first(memory: RolloutMemory) -> None:
    rollout = RecurrentRolloutBuffer.over(memory, ORDER)
    expected = tensors(estimated(RecurrentRolloutBuffer.over(memory, ORDER), [T, T, 2]))
    with rollout.clone() as twin:
        seen = tensors(estimated(twin, [T, T, T, T, 2, 2]))
        assert np.isnan(twin.hidden()[1:]).all()
    for name, tensor in expected.items():
        torch.testing.assert_close(seen[name], tensor, rtol=0, atol=0)
