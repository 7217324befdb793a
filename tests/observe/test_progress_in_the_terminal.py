"""Progress: plain lines into files, a panel on a terminal, the table at the end."""

from __future__ import annotations

import io
from dataclasses import replace

from rollout_service.observe.metrics import RunMetrics, Summary
from rollout_service.observe.progress import (
    LiveProgress,
    PlainProgress,
    open_progress,
    plain_line,
    result_rows,
    result_table,
)


def summary(**changes: object) -> Summary:
    run = RunMetrics(total_steps=1000, total_updates=10, num_actors=2, started=0.0)
    run.update(update=3, env_steps=300, figures={"entropy": 0.69}, seconds={"update": 1.0}, now=1.0)
    return replace(
        run.summary(2.0), **{"return_mean": 0.5, "recent_steps_per_second": 1234.5, "eta_s": 3700.0, **changes}
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_plain_line_says_how_far_how_well_and_how_fast():
    line = plain_line(summary(success_rate=0.75, length_mean=21.0))
    assert line == (
        "300/1,000 steps (30%)  update 3/10  return 0.500  success 0.750  length 21.0  1,234 steps/s"
        "  eta 1:01:40  actors 0/2"
    )
    assert "success" not in plain_line(summary())


def test_an_actor_that_is_often_waited_for_is_in_the_plain_line():
    assert plain_line(summary(slowest_actor=3, slowest_share=0.19)).endswith("actors 0/2")
    assert plain_line(summary(slowest_actor=3, slowest_share=0.2)).endswith("actors 0/2  waited for actor 3 20%")


def test_plain_lines_come_every_few_seconds_and_only_with_news():
    stream = io.StringIO()
    progress = PlainProgress(stream)
    for second in range(1, 12):
        progress.show(summary(elapsed_s=float(second), updates=second))
    progress.show(summary(elapsed_s=50.0, updates=10))
    assert stream.getvalue().count("\n") == 2


def test_while_actors_start_a_line_says_how_many_are_there():
    stream = io.StringIO()
    progress = PlainProgress(stream)
    for second, alive in enumerate([0, 1, 1, 2, 1, 2]):
        progress.show(summary(elapsed_s=float(second), actors_alive=alive, updates=0))
    assert stream.getvalue().splitlines() == [
        "1 of 2 actors ready after 1.0 s",
        "2 of 2 actors ready after 3.0 s",
    ]


def test_a_file_gets_plain_lines_without_control_characters():
    stream = io.StringIO()
    progress = open_progress("title", stream)
    progress.show(summary(elapsed_s=6.0))
    progress.say("actor 1 [bold]left[/bold]")
    progress.close()
    assert isinstance(progress, PlainProgress)
    assert "\x1b" not in stream.getvalue()
    assert "actor 1 [bold]left[/bold]" in stream.getvalue()


def test_a_terminal_gets_the_panel_with_messages_above_it():
    stream = Terminal()
    progress = open_progress("Memory/TMaze-v0  runs/x", stream)
    progress.show(summary(counters={"seed_mismatches": 2}, slowest_actor=1, slowest_share=0.5))
    progress.say("actor 1 left [sic]")
    progress.close()
    assert isinstance(progress, LiveProgress)
    text = stream.getvalue()
    shown = ("Memory/TMaze-v0", "300 / 1,000", "entropy 0.69", "seed_mismatches 2", "slowest 1", "actor 1 left [sic]")
    assert [needle for needle in shown if needle not in text] == []


def test_the_result_table_is_aligned():
    table = result_table(result_rows(summary(steps_per_second=2000.0), "runs/x")).splitlines()
    assert table[0] == "  env steps      300"
    assert table[-1] == "  run directory  runs/x"
    assert not any("best" in row or "lost" in row for row in table)


def test_the_result_table_names_the_best_checkpoint_and_what_the_logs_have_lost():
    rows = result_rows(summary(counters={"log_write_failures": 1200}), "runs/x", ("checkpoint-00000050", 12.3456))
    assert (rows["best"], rows["log entries lost"]) == ("checkpoint-00000050, return 12.346", "1,200")
