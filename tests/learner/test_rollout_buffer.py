"""RecurrentRolloutBuffer standalone: writing cells, reading views, refusals that teach, clone and close."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from learner import GaeRule, RecurrentRolloutBuffer
from rollout_service.errors import (
    ConfigError,
    IncompleteRollout,
    OutOfOrder,
    OutOfRange,
    RolloutBufferError,
    ShapeError,
    SpaceNotSupported,
)
from tests.learner.filled_rollouts import contents, fill

CELL = {"observation": [0.0, 0.0], "action": 0, "reward": 0.0, "value": 0.0, "log_prob": -1.0}
CELL |= {"terminated": False, "truncated": False}


@pytest.fixture
def buffer():
    with RecurrentRolloutBuffer(4, 3, 2, 5) as made:
        yield made


def test_public_names_come_lazily_and_without_torch():
    code = (
        "import sys, learner\n"
        "assert 'torch' not in sys.modules and 'learner.rollout_buffer' not in sys.modules\n"
        "assert sorted(learner.__all__) == ['GaeRule', 'RecurrentRolloutBuffer', 'SequenceBatch']\n"
        "assert learner.GaeRule.BOUNDARY_CORRECT == 'boundary_correct' and 'torch' not in sys.modules\n"
        "assert set(learner.__all__) <= set(dir(learner))\n"
        "try: learner.NoSuchName\n"
        "except AttributeError as error: assert 'NoSuchName' in str(error)\n"
        "from learner import RecurrentRolloutBuffer\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_a_cell_reads_back_at_its_step_and_env(buffer):
    buffer.add(2, 1, [0.5, -0.5], 3, 1.5, 2.5, -0.25, False, True, truncation_value=7.0)
    assert buffer.observations()[2][1].tolist() == [0.5, -0.5]
    assert buffer.actions()[2][1] == 3
    assert buffer.rewards()[2][1] == 1.5
    assert buffer.values()[2][1] == 2.5
    assert buffer.log_probs()[2][1] == -0.25
    assert (bool(buffer.terminated()[2][1]), bool(buffer.truncated()[2][1])) == (False, True)
    assert buffer.truncation_values()[2][1] == 7.0
    assert buffer.valid()[2][1]
    assert buffer.valid().sum() == 1


def test_accessors_are_views_that_read_step_then_env(buffer):
    shapes = {name: getattr(buffer, name)().shape for name in ("rewards", "observations", "hidden", "advantages")}
    assert shapes == {"rewards": (4, 3), "observations": (4, 3, 2), "hidden": (4, 3, 1, 5), "advantages": (4, 3)}
    rewards = buffer.rewards()
    buffer.add(3, 2, **CELL | {"reward": 9.0})
    assert rewards[3, 2] == 9.0
    assert buffer.terminated().dtype == buffer.truncated().dtype == buffer.valid().dtype == bool
    assert buffer.actions().dtype == np.int64


def test_what_was_written_cannot_be_changed_through_a_view(buffer):
    for name in contents(buffer):
        with pytest.raises(ValueError, match="read-only"):
            getattr(buffer, name)()[...] = 0
    buffer.advantages()[1, 2] = 5.0
    assert buffer.advantages()[1, 2] == 5.0


def test_shape_and_hidden_dim_are_the_originals(buffer):
    assert buffer.shape() == (4, 3, 2)
    assert buffer.hidden_dim() == 5


def test_a_fresh_buffer_starts_every_env_anew(buffer):
    assert buffer.episode_start_carry().tolist() == [1.0, 1.0, 1.0]
    assert not buffer.hidden()[0].any()
    assert not buffer.cell()[0].any()
    assert not buffer.advantages().any()


@pytest.mark.parametrize("envs", [range(1, 3), slice(1, 3), slice(1, None), slice(-2, None)])
def test_a_range_of_envs_is_written_at_once(buffer, envs):
    buffer.add_recurrent_state(1, envs, np.full((2, 1, 5), [[[1.0]], [[2.0]]]), np.full((2, 5), [[3.0], [4.0]]))
    buffer.add(
        1, envs, [[1, 2], [3, 4]], [5, 6], [7, 8], [9, 10], [-1, -2], [True, False], [0, 1],
        truncation_value=[np.nan, 11.0],
    )  # fmt: skip
    assert buffer.observations()[1, 1:].tolist() == [[1, 2], [3, 4]]
    assert buffer.actions()[1, 1:].tolist() == [5, 6]
    assert buffer.rewards()[1, 1:].tolist() == [7, 8]
    assert buffer.values()[1, 1:].tolist() == [9, 10]
    assert buffer.log_probs()[1, 1:].tolist() == [-1, -2]
    assert buffer.terminated()[1].tolist() == [False, True, False]
    assert buffer.truncated()[1].tolist() == [False, False, True]
    assert buffer.truncation_values()[1, 2] == 11.0
    assert buffer.hidden()[1, 1:, 0, 0].tolist() == [1.0, 2.0]
    assert buffer.cell()[1, 1:, 0, 0].tolist() == [3.0, 4.0]
    assert buffer.valid()[1].tolist() == [False, True, True]


def test_a_truncation_value_of_an_overwritten_cell_does_not_survive(buffer):
    buffer.add(0, 0, **CELL | {"truncated": True}, truncation_value=3.0)
    buffer.add(0, 0, **CELL | {"truncated": True})
    assert np.isnan(buffer.truncation_values()[0, 0])


def test_with_one_layer_states_come_with_or_without_the_layer_axis(buffer):
    buffer.add_recurrent_state(1, 0, np.arange(5), [np.arange(5, 10)])
    assert buffer.hidden()[1, 0].tolist() == [[0, 1, 2, 3, 4]]
    assert buffer.cell()[1, 0].tolist() == [[5, 6, 7, 8, 9]]


def test_with_two_layers_states_need_the_layer_axis():
    with RecurrentRolloutBuffer(2, 2, 1, 3, num_layers=2) as buffer:
        buffer.add_recurrent_state(0, 1, np.ones((2, 3)), np.ones((2, 3)))
        assert buffer.hidden()[0].sum(axis=(1, 2)).tolist() == [0.0, 6.0]
        with pytest.raises(ShapeError, match=r"h has shape \(3,\); it needs \(2, 3\)"):
            buffer.add_recurrent_state(0, 1, np.ones(3), np.ones(3))


def test_a_filler_row_gets_zero_state(buffer):
    buffer.add_recurrent_state(2, range(3), np.ones((3, 5)), np.ones((3, 5)))
    buffer.add(2, range(3), np.zeros((3, 2)), [0] * 3, [0] * 3, [0] * 3, [0] * 3, False, False, valid=[1, 0, 1])
    assert buffer.hidden()[2, :, 0, 0].tolist() == [1.0, 0.0, 1.0]
    assert buffer.cell()[2, :, 0, 0].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("reward", [1, np.float64(1), np.array([1.0]), torch.tensor(1.0)])
def test_scalars_of_any_kind_are_scalars(buffer, reward):
    buffer.add(0, 0, **CELL | {"reward": reward, "terminated": np.bool_(True), "truncated": 0})
    assert buffer.rewards()[0, 0] == 1.0
    assert buffer.terminated()[0, 0]
    assert not buffer.truncated()[0, 0]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"reward": np.array([1.0, 2.0])}, ShapeError, r"reward has shape \(2,\); it needs \(\)"),
        ({"observation": [0.0]}, ShapeError, r"observation has shape \(1,\); it needs \(2,\)"),
        ({"observation": ["a", "b"]}, ShapeError, "observation has dtype <U1, the buffer keeps float32"),
        ({"action": 0.5}, ShapeError, "action has dtype float64, the buffer keeps int64"),
        ({"terminated": 2}, ShapeError, "terminated holds 2, which bool cannot"),
        ({"terminated": 0.5}, ShapeError, "terminated holds 0.5, which bool cannot"),
        ({"observation": [np.nan, 0.0]}, IncompleteRollout, "observations of env 2 at step 1 .* not finite"),
        ({"observation": [1e39, 0.0]}, IncompleteRollout, "not finite in float32"),
        ({"reward": np.inf}, IncompleteRollout, "rewards of env 2 at step 1"),
        ({"step": 4}, OutOfRange, r"step is 4; steps are 0\.\.3"),
        ({"step": -1}, OutOfRange, "step is -1"),
        ({"step": 1.0}, ShapeError, "step is 1.0; it must be a whole number"),
        ({"env_id": 3}, OutOfRange, r"env_id is 3; .* of 0\.\.2"),
        ({"env_id": -1}, OutOfRange, "env_id is -1"),
        ({"env_id": True}, ShapeError, "env_id is True"),
        ({"env_id": range(1, 4)}, OutOfRange, r"range\(1, 4\)"),
        ({"env_id": range(0, 3, 2)}, OutOfRange, "adjacent"),
        ({"env_id": range(2, 2)}, OutOfRange, "env_id"),
        ({"env_id": range(2)}, ShapeError, r"observation has shape \(2,\); it needs \(2, 2\)"),
    ],
)
def test_a_wrong_cell_is_refused_and_nothing_is_written(buffer, wrong, error, message):
    before = contents(buffer)
    with pytest.raises(error, match=message) as raised:
        buffer.add(**{"step": 1, "env_id": 2} | CELL | wrong)
    assert isinstance(raised.value, RolloutBufferError)
    assert contents(buffer) == before


def test_a_wrong_state_is_refused(buffer):
    with pytest.raises(ShapeError, match=r"c has shape \(4,\); it needs \(1, 5\)"):
        buffer.add_recurrent_state(0, 0, np.zeros(5), np.zeros(4))
    with pytest.raises(ShapeError, match="1 of the state arrays h, c were given; the buffer keeps hidden, cell"):
        buffer.add_recurrent_state(0, 0, np.zeros(5))
    with pytest.raises(IncompleteRollout, match="cell of env 1 at step 2"):
        buffer.add_recurrent_state(2, 1, np.zeros(5), np.full(5, np.nan))
    with pytest.raises(OutOfRange, match="step is 9"):
        buffer.add_recurrent_state(9, 0, np.zeros(5), np.zeros(5))


def test_a_filler_rows_numbers_need_not_be_finite(buffer):
    buffer.add(0, 0, [np.nan, 0], 0, np.nan, np.nan, np.nan, False, False, valid=False)
    assert not buffer.valid()[0, 0]


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((0, 1, 1, 1), OutOfRange, "num_steps is 0"),
        ((1, 0, 1, 1), OutOfRange, "num_envs is 0"),
        ((1, 1, 0, 1), OutOfRange, "obs_dim is 0"),
        ((1, 1, 1, 0), OutOfRange, "hidden_dim is 0"),
        ((1.5, 1, 1, 1), OutOfRange, "num_steps is 1.5"),
        ((1, 1), ConfigError, "neither obs_dim nor observation_space"),
    ],
)
def test_sizes_are_checked(sizes, error, message):
    with pytest.raises(error, match=message):
        RecurrentRolloutBuffer(*sizes)


def test_gymnasium_spaces_in_place_of_sizes_keep_their_dtype():
    image = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    actions = gymnasium.spaces.Discrete(5, start=3)
    with RecurrentRolloutBuffer(
        128, 8, hidden_dim=4, observation_space=image, action_space=actions, num_layers=2
    ) as buffer:
        assert buffer.shape() == (128, 8, 64, 64, 3)
        assert buffer.observations().nbytes == 12_582_912
        assert buffer.observations().dtype == np.uint8
        assert buffer.hidden().shape == (128, 8, 2, 4)
        picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
        buffer.add(5, 3, picture, 7, 0, 0, 0, False, False)
        assert buffer.observations()[5, 3].tobytes() == picture.tobytes()
        assert buffer.actions()[5, 3] == 7
        buffer.add(5, 4, picture.astype(np.int64), 7, 0, 0, 0, False, False)
        with pytest.raises(ShapeError, match="observation holds 300, which uint8 cannot"):
            buffer.add(5, 5, np.full((64, 64, 3), 300), 7, 0, 0, 0, False, False)
        with pytest.raises(ShapeError, match="observation has dtype float32, the buffer keeps uint8"):
            buffer.add(5, 5, picture.astype(np.float32), 7, 0, 0, 0, False, False)


def test_a_dict_of_observations_is_kept_leaf_by_leaf():
    space = gymnasium.spaces.Dict(
        {"eyes": gymnasium.spaces.Box(0, 255, (2, 2, 1), np.uint8), "body": gymnasium.spaces.Dict(
            {"speed": gymnasium.spaces.Box(-1, 1, (3,), np.float32)})}
    )  # fmt: skip
    with RecurrentRolloutBuffer(1, 1, hidden_dim=1, observation_space=space) as buffer:
        assert buffer.shape() == (1, 1)
        buffer.add(0, 0, {"eyes": np.full((2, 2, 1), 9, np.uint8), "body": {"speed": [1, 2, 3]}}, 0, 0, 0, 0, 0, 1,
                   truncation_value=0.0)  # fmt: skip
        leaves = buffer.observations()
        assert leaves["observations/eyes"][0, 0].sum() == 36
        assert leaves["observations/body/speed"][0, 0].tolist() == [1, 2, 3]
        buffer.compute_advantages([0.0], 0.9, 0.9)
        assert buffer.to_sequence_batch().obs_seq["observations/body/speed"].tolist() == [[[1, 2, 3]]]
        with pytest.raises(ShapeError, match="no part 'body'"):
            buffer.add(0, 0, {"eyes": np.zeros((2, 2, 1), np.uint8)}, 0, 0, 0, 0, 0, 0)


def test_spaces_and_sizes_contradict_each_other():
    box = gymnasium.spaces.Box(-1, 1, (2,))
    with pytest.raises(ConfigError, match="both"):
        RecurrentRolloutBuffer(1, 1, 2, 1, observation_space=box)
    with pytest.raises(SpaceNotSupported, match="MultiDiscrete"):
        RecurrentRolloutBuffer(1, 1, 2, 1, action_space=gymnasium.spaces.MultiDiscrete([2, 2]))
    with RecurrentRolloutBuffer(1, 1, 2, 1, action_space=gymnasium.spaces.Discrete(2)) as buffer:
        assert buffer.shape() == (1, 1, 2)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_smallest_rollout_keeps_its_axes(layers):
    with RecurrentRolloutBuffer(1, 1, 1, 1, num_layers=layers) as buffer:
        for update in range(3):
            buffer.add_recurrent_state(0, 0, buffer.hidden()[0, 0] if update else np.zeros((layers, 1)),
                                       np.zeros((layers, 1)))  # fmt: skip
            buffer.add(0, 0, [0.5], 1, 1.0, 0.5, -0.7, False, False)
            buffer.compute_advantages([2.0], 0.5, 0.5)
            assert buffer.advantages().tolist() == [[1.5]]
            batch = buffer.to_sequence_batch()
            assert batch.obs_seq.shape == (1, 1, 1)
            assert batch.actions.shape == batch.valid.shape == batch.returns.shape == (1, 1)
            assert [state.shape for state in batch.initial_state.values()] == [(layers, 1, 1)] * 2
            assert batch.initial_state["hidden"].flatten().tolist() == [float(update)] * layers
            assert [len(minibatch) for minibatch in buffer.to_minibatches(1, True)] == [1]
            buffer.seed_warm_start(0, np.full((1, layers, 1), update + 1.0), np.zeros((1, layers, 1)))


def test_without_hidden_dim_there_is_no_state():
    with RecurrentRolloutBuffer(1, 2, 1) as buffer:
        fill(buffer, {"truncated": [[0, 1]], "truncation_values": [[0, 4.0]]})
        assert buffer.hidden_dim() == 0
        buffer.compute_advantages([0.0, 0.0], 0.5, 0.5)
        assert buffer.to_sequence_batch().initial_state == {}
        buffer.seed_warm_start(0)
        assert buffer.episode_start_carry().tolist() == [0.0, 1.0]
        with pytest.raises(OutOfOrder, match="hidden_dim"):
            buffer.hidden()


def test_a_clone_is_deep_and_stands_in_the_same_place(buffer):
    fill(buffer, {"rewards": np.arange(12.0).reshape(4, 3)})
    buffer.compute_advantages(np.zeros(3), 0.5, 0.5)
    with buffer.clone() as twin:
        assert contents(twin) == contents(buffer)
        assert twin.advantages().tolist() == buffer.advantages().tolist()
        assert torch.equal(twin.to_sequence_batch().returns, buffer.to_sequence_batch().returns)
        twin.add(0, 0, **CELL | {"reward": 99.0})
        assert buffer.rewards()[0, 0] == 0.0
        with pytest.raises(OutOfOrder, match="GAE has not run"):
            twin.to_sequence_batch()
        assert len(buffer.to_sequence_batch()) == 3


def test_a_clone_of_a_half_written_buffer_knows_what_is_missing(buffer):
    fill(buffer, {}, steps=2)
    with buffer.clone() as twin:
        twin.compute_advantages_partial(2, np.zeros(3), 0.5, 0.5)
        with pytest.raises(IncompleteRollout, match="step 2 of env 0"):
            twin.compute_advantages(np.zeros(3), 0.5, 0.5)


def test_a_clone_of_a_seeded_buffer_refuses_batches_too(buffer):
    fill(buffer, {})
    buffer.compute_advantages(np.zeros(3), 0.5, 0.5)
    buffer.seed_warm_start(3, np.ones((3, 5)), np.ones((3, 5)))
    with buffer.clone() as twin, pytest.raises(OutOfOrder, match="seeded"):
        twin.to_sequence_batch()


def test_repr_is_one_line_with_sizes_and_bytes(buffer):
    text = repr(buffer)
    assert "\n" not in text
    assert text.startswith("RecurrentRolloutBuffer(num_steps=4, num_envs=3, hidden_dim=5, rs-")
    assert f"{buffer.nbytes} bytes" in text
    assert buffer.nbytes == sum(array.nbytes for array in buffer._arrays.values())


def test_closing_removes_the_memory_and_later_use_says_so():
    buffer = RecurrentRolloutBuffer(1, 1, 1, 1)
    segment = Path("/dev/shm") / buffer._memory.name
    view = buffer.rewards()
    assert segment.exists()
    with buffer:
        pass
    assert not segment.exists()
    assert view.shape == (1, 1)
    buffer.close()
    assert "closed" in repr(buffer)
    for call in (buffer.rewards, buffer.reset, buffer.to_sequence_batch, buffer.clone):
        with pytest.raises(OutOfOrder, match="closed"):
            call()
    with pytest.raises(OutOfOrder, match="closed"):
        buffer.add(0, 0, **CELL | {"observation": [0.0]})


def test_rules_are_taken_by_name_or_by_value(buffer):
    fill(buffer, {"truncated": np.eye(4, 3)})
    buffer.compute_advantages(np.zeros(3), 0.5, 0.5, rule=GaeRule.ORIGINAL_STATED)
    buffer.compute_advantages(np.zeros(3), 0.5, 0.5, rule="original_actual")
    with pytest.raises(ValueError, match="no_such_rule"):
        buffer.compute_advantages(np.zeros(3), 0.5, 0.5, rule="no_such_rule")
