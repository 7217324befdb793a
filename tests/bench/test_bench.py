"""Every subject of the bench runs with tiny sizes and gives whole, finite figures; their size is not asserted."""

from __future__ import annotations

import functools
import io
import json
import math
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.gae import Estimator, advantages_and_returns
from learner.rollout_buffer import RecurrentRolloutBuffer
from rollout_service.bench import (
    actors,
    collect,
    gae,
    handover,
    materialize,
    sequence,
    startup,
    train,
    waiting,
    weights,
    write,
)
from rollout_service.bench.command import SUBJECTS, main, measure
from rollout_service.bench.envs import NullEnv
from rollout_service.bench.report import Report, markdown, plain, show, text
from rollout_service.bench.rig import NULL_ENV, fill_slot, paper_spec, rollout_memory
from rollout_service.bench.timing import Samples, alternate, quartiles
from rollout_service.errors import ConfigError, RunFailed, WaitTimedOut

ROOT = Path(__file__).parents[2]
TINY_RUN = train.Case("tiny", NULL_ENV, 4, 2, num_steps=8, hidden_dim=8, encoder_dim=8, minibatches=2)


@functools.cache
def waiting_processes() -> Report:
    return waiting.measure(1, watched_s=0.8, wake_ups=2, actors=1, modes=("streaming",))


SUBJECTS_AT_TINY_SIZES: dict[str, tuple[Callable[[], Report], set[str]]] = {
    "write": (
        lambda: write.measure(2, envs=(2,), steps=4),
        {"slot_us", "plain_us", "lease_us", "slot_to_plain", "lease_to_plain"},
    ),
    "handover": (
        lambda: handover.measure(2, sizes=((2, 4),)),
        {"shared_us", "pickled_us", "shared_to_pickled"},
    ),
    "gae": (
        lambda: gae.measure(2, sizes=((3, 8),), peer=False),
        {"whole_us", "reference_us", "recursion_us", "naive_us", "whole_to_naive", "whole_to_reference"},
    ),
    "sequence": (
        lambda: sequence.measure(2, rows=(3,), steps=8, inputs=4, hidden_dim=4),
        {"none_ms", "few_ms", "many_ms", "cells_ms", "few_to_none", "many_to_none", "none_to_cells", "few_to_cells",
         "many_to_cells",
         "few_resets_per_row", "many_resets_per_row"},
    ),
    "materialize": (
        lambda: materialize.measure(2, sizes=((2, 8),)),
        {"ours_us", "naive_us", "ours_to_naive"},
    ),
    "weights": (
        lambda: weights.measure(2, sizes=(8,)),
        {"publish_us", "load_us", "copy_us", "take_us", "adopt_us", "publish_to_copy", "load_to_copy"},
    ),
    "collect": (
        lambda: collect.measure(2, envs=(2,), steps=4),
        {"env_steps_per_s", *(f"{phase}_{unit}" for phase in ("policy", "env", "rest") for unit in ("us", "share"))},
    ),
    "actors": (
        lambda: actors.measure(1, cases=(actors.SLOW_ONES.same(2, 1), actors.SLOW_ONES.same(1, 1)), measured_s=0.1),
        {"env_steps_per_s"},
    ),
    "train": (
        lambda: train.measure(1, cases=(TINY_RUN,)),
        {"env_steps_per_s", "first_update_s", "actor_policy_share", "actor_env_share", "actor_wait_share",
         "learner_update_share", "learner_gae_share", "learner_batch_share", "learner_wait_share"},
    ),
    "startup": (
        lambda: startup.measure(1, actors=(1,)),
        {"first_step_s", "all_ready_s", "first_update_s", "actor_rss_mib", "learner_rss_mib", "service_rss_mib",
         "slower_than_one_actor"},
    ),
    "waiting": (
        waiting_processes,
        {"learner_paused_actors_share", "learner_paused_service_share", "actors_paused_learner_share",
         "actors_paused_service_share", "wake_learner_us", "wake_actor_us"},
    ),
}  # fmt: skip


def test_the_tiny_sizes_cover_every_subject():
    assert SUBJECTS_AT_TINY_SIZES.keys() == SUBJECTS.keys()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_subject_gives_its_figures_in_every_case(subject: str):
    measured, expected = SUBJECTS_AT_TINY_SIZES[subject]
    report = measured()
    assert report.subject == subject
    assert report.cases
    for figures in report.cases.values():
        assert expected <= figures.keys()
        assert all(math.isfinite(value) and value >= 0 for value in figures.values())
        shares = [value for name, value in figures.items() if name.endswith("_share")]
        assert all(share <= 1 for share in shares)
        for ratio in (name for name in figures if "_to_" in name and not name.endswith(("_low", "_high"))):
            assert figures[f"{ratio}_low"] <= figures[ratio] <= figures[f"{ratio}_high"]
    again = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert [case["case"] for case in again["cases"]] == list(report.cases)


def test_nobody_who_waits_spins_or_looks_only_now_and_then():
    """Generous: they need below a hundredth of a core, and well below a millisecond."""
    (figures,) = waiting_processes().cases.values()
    shares = {name: value for name, value in figures.items() if name.endswith("_share")}
    assert len(shares) == 4
    assert max(shares.values()) < 0.3
    assert max(figures["wake_learner_us"], figures["wake_actor_us"]) < 200_000


# The sides of a comparison do the same work


def test_the_naive_advantages_are_ours():
    rows, last_values = gae.rollout(8, 40)
    assert rows["truncated"].any()
    ours = advantages_and_returns(
        rows, last_values.astype(np.float64), np.full(8, 40), Estimator(gae.GAMMA, gae.LAMBDA)
    )
    naive = gae.naive_advantages(*gae.time_major(rows, last_values))
    assert naive[0].dtype == np.float32
    for mine, theirs in zip(ours, naive, strict=True):
        np.testing.assert_allclose(theirs.T, mine, atol=1e-5)


def test_the_naive_batch_is_ours():
    spec = paper_spec(3, 20)
    with rollout_memory(spec) as memory:
        fill_slot(memory.writer(0), 1, np.random.default_rng(0), end_probability=0.2)
        with RecurrentRolloutBuffer.over(memory, spec.bank(0)) as rollout:
            rollout.compute_advantages_partial(np.full(3, 20), rollout.last_values(), 0.99, 0.95)
            ours = rollout.to_training_batch()
            naive = materialize.naive_batch(materialize.per_step_arrays(memory.rollout(spec.bank(0))))
    assert torch.equal(naive["starts"], ours.episode_starts)
    assert naive["starts"][:, 1:].any()
    assert torch.equal(naive["observations"], ours.obs_seq)
    assert torch.equal(naive["advantages"], ours.advantages)
    assert torch.equal(naive["hidden"], ours.initial_state["hidden"])


def test_both_ways_of_writing_leave_the_same_rows():
    step = write.transition(2)
    with rollout_memory(paper_spec(2, 3)) as memory:
        slot = memory.writer(0)
        write.write_slot(slot, step)
        arrays = {name: np.zeros((3, *value.shape), value.dtype) for name, value in step.items()}
        write.write_plain(arrays, step)
        for name, array in arrays.items():
            np.testing.assert_array_equal(slot.arrays[name].swapaxes(0, 1), array)


def test_the_null_env_ends_by_termination_after_its_length():
    env = NullEnv(size=3, length=2)
    observation, _ = env.reset(seed=1)
    assert observation.tolist() == [0.0, 0.0, 0.0]
    assert [env.step(0)[2:4] for _ in range(2)] == [(False, False), (True, False)]


def test_rates_of_several_actors_are_compared_within_a_repetition():
    four, all_in_one, one = (actors.SLOW_ONES.same(*split) for split in ((4, 4), (1, 16), (1, 4)))
    figures = actors.compared({four: [40.0, 90.0, 80.0], all_in_one: [20.0, 30.0, 20.0], one: [10.0, 30.0, 20.0]})
    assert list(figures) == ["slow, 4x4", "slow, 1x16", "slow, 1x4"]
    assert figures["slow, 4x4"] == {
        "env_steps_per_s": 80.0, "rate_over_one_times": 4.0, "rate_over_all_in_one_times": 3.0,
    }  # fmt: skip
    assert figures["slow, 1x16"] == {"env_steps_per_s": 20.0}


def test_actors_that_break_are_reported_with_their_words():
    def fail() -> None:
        with actors.workers("no://endpoint", 1) as started:
            assert started[0].wait(30) != 0
            raise WaitTimedOut("nobody came")

    with pytest.raises(RunFailed, match=r"(?s)nobody came.*no://endpoint"):
        fail()


# Timing


def test_sides_take_turns_forwards_and_backwards():
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    samples = alternate(sides, repetitions=3, least_s=0.0)
    assert "".join(calls) == "aabb" + "ab" + "ba" + "ab"
    assert {name: len(times) for name, times in samples.seconds.items()} == {"a": 3, "b": 3}


def test_a_ratio_is_taken_within_each_repetition():
    samples = Samples({"a": [1.0, 20.0, 300.0], "b": [1.0, 10.0, 100.0]})
    assert samples.ratio("a", "b") == {"a_to_b": 2.0, "a_to_b_low": 1.5, "a_to_b_high": 2.5}
    assert samples.medians("ms", per=2.0) == {"a_ms": 10_000.0, "b_ms": 5_000.0}
    assert quartiles([4.0]) == (4.0, 4.0, 4.0)


# Runs that break, words, tables


def test_a_run_that_breaks_is_reported_with_its_last_words():
    with pytest.raises(RunFailed, match="NoSuchEnv"):
        train.one_run(train.Case("broken", "NoSuchEnv-v0", 4, 2))


def test_a_hand_over_that_breaks_is_reported_with_the_words_of_its_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handover, "ROLE_MODULE", "rollout_service.bench.no_such_role")
    with pytest.raises(RunFailed, match="no_such_role"):
        handover.one_case(1, 2, 4)


def test_figures_of_a_run_leave_the_warm_up_out():
    slow = [{"env_steps": 100 * update, "wall_time": 10.0 * update} for update in range(1, train.WARM_UP + 1)]
    fast = {"env_steps": slow[-1]["env_steps"] + 100, "wall_time": slow[-1]["wall_time"] + 0.5}
    log = [line | {"time/elapsed_s": 3.5, "split_actor/env": 0.25, "split_learner/update": 0.5} for line in slow]
    assert train.figures_of([*log, log[-1] | fast]) == {
        "env_steps_per_s": 200.0,
        "first_update_s": 3.5,
        "actor_env_share": 0.25,
        "learner_update_share": 0.5,
    }


REPORT = Report(
    "gae",
    "a title",
    {
        "small": {"ours_us": 12.34, "ours_to_naive": 0.5, "ours_to_naive_low": 0.4, "ours_to_naive_high": 0.6},
        "large": {"env_steps_per_s": 12345.6, "env_share": 0.256, "ours_over_peer_times": 1.5},
    },
    ("a note",),
)


def test_a_table_has_a_line_per_figure_and_says_what_is_missing():
    assert plain(REPORT).splitlines() == [
        "gae: a title",
        "                                small   large",
        "  ours us                        12.3       -",
        "  ours / naive    0.50 (0.40 to 0.60)       -",
        "  env steps / s                     -  12,346",
        "  env share                         -     26%",
        "  ours over peer                    -   1.50x",
        "  a note",
    ]
    assert "| ours / naive | 0.50 (0.40 to 0.60) | - |" in markdown(REPORT).splitlines()


def test_a_small_share_is_not_rounded_to_nothing():
    shares = {"a_share": 0.004, "b_share": 0.05, "c_share": 0.0}
    assert [text(shares, name) for name in shares] == ["0.4%", "5%", "0%"]


def test_no_control_characters_where_there_is_no_terminal():
    stream = io.StringIO()
    show(REPORT, stream)
    assert stream.getvalue() == plain(REPORT) + "\n\n"


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    show(REPORT, stream)
    assert "0.50 (0.40 to 0.60)" in stream.getvalue()
    assert "┃" in stream.getvalue()


def test_wrong_words_are_refused_before_anything_is_measured():
    with pytest.raises(ConfigError, match="'speed' is no subject; there are write, handover"):
        measure(["gae", "speed"])
    with pytest.raises(ConfigError, match="repetitions is 0"):
        measure(["gae"], 0)


def test_json_is_one_document_with_its_surroundings(capsys: pytest.CaptureFixture[str]):
    assert main(["weights", "--repetitions", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert out.count("\n") == 1
    assert err.startswith("measuring weights")
    assert found.keys() == {"date", "machine", "versions", "command", "subjects"}
    assert "torch" in found["versions"]
    assert found["command"] == "rollout-service bench weights --repetitions 1 --json"
    assert [report["subject"] for report in found["subjects"]] == ["weights"]


def test_help_needs_no_torch():
    code = (
        "import sys, contextlib\n"
        "from rollout_service.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['bench', '--help'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert all(name in shown.stdout for name in SUBJECTS)


def test_make_bench_keeps_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["throughput", "weights", "--repetitions", "1", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("bench.throughput", run_name="__main__")
    figures = json.loads((tmp_path / "bench.json").read_text())
    page = (tmp_path / "bench.md").read_text()
    assert figures["command"].startswith("python -m bench.throughput weights")
    assert figures["date"] in page
    assert figures["machine"] in page
    assert "## weights" in page
