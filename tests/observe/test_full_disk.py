"""Logs on a disk that takes nothing: the run goes on, losses are counted and said, no file has half a record."""

from __future__ import annotations

import io
import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollout_service.observe.appending import AppendedFile
from rollout_service.observe.journal import Journal
from rollout_service.observe.logs import RunLogs
from rollout_service.observe.losses import LostWrites, MissingCheckpoints
from rollout_service.observe.progress import PlainProgress, open_progress
from tests.fixtures.limits import largest_file


def write(logs: RunLogs, updates: range) -> None:
    for update in updates:
        logs.write(100 * update, update, {"learner/loss": float(update)})


def logged(run_dir: Path) -> list[int]:
    """Updates in metrics.jsonl, every line of which is whole."""
    return [json.loads(line)["update"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def charted(run_dir: Path) -> list[int]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [event.step // 100 for event in events.Scalars("learner/loss")]


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    lost = LostWrites()
    file = AppendedFile(tmp_path / "log", lost, header=b"head\n")
    assert file.append(b"one\n")
    with largest_file(12):
        assert not file.append(b"two\n")
        assert (tmp_path / "log").read_bytes() == b"head\none\n"
        assert file.append(b"2\n")
    assert file.append(b"three\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"head\none\n2\nthree\n"
    assert lost.total == 1


def test_a_file_that_cannot_be_opened_is_tried_again_and_then_begins_with_its_header(tmp_path: Path) -> None:
    lost = LostWrites()
    (tmp_path / "later").write_text("in the way")
    file = AppendedFile(tmp_path / "later" / "log", lost, header=b"head\n")
    assert not file.append(b"one\n")
    (tmp_path / "later").unlink()
    assert file.append(b"two\n")
    file.close()
    assert (tmp_path / "later" / "log").read_bytes() == b"head\ntwo\n"
    assert lost.total == 1


def test_both_logs_lose_what_a_full_disk_does_not_take_and_go_on_behind_it(tmp_path: Path) -> None:
    lost = LostWrites()
    with RunLogs(tmp_path, tensorboard=True, lost=lost) as logs:
        logs.open()
        write(logs, range(1, 4))
        [events] = (tmp_path / "tensorboard").iterdir()
        with largest_file(min(events.stat().st_size, (tmp_path / "metrics.jsonl").stat().st_size) + 10):
            write(logs, range(4, 7))
        write(logs, range(7, 9))
    assert logged(tmp_path) == charted(tmp_path) == [1, 2, 3, 7, 8]
    assert lost.total == 6


def test_a_log_is_cut_back_on_a_full_disk_and_tensorboard_hears_of_it_before_the_next_point(tmp_path: Path) -> None:
    with RunLogs(tmp_path, tensorboard=True) as logs:
        logs.open()
        write(logs, range(1, 8))
        with largest_file(1):
            logs.cut_back(400)
            assert logged(tmp_path) == [1, 2, 3, 4]
            write(logs, range(5, 6))
        write(logs, range(6, 9))
    assert logged(tmp_path) == charted(tmp_path) == [1, 2, 3, 4, 6, 7, 8]


def test_logs_that_cannot_even_be_made_do_not_stop_a_run(tmp_path: Path) -> None:
    lost = LostWrites()
    (tmp_path / "tensorboard").write_text("in the way")
    (tmp_path / "metrics.jsonl").mkdir()
    with RunLogs(tmp_path, tensorboard=True, lost=lost, resume_at=100) as logs:
        logs.open()
        write(logs, range(2, 4))
        logs.cut_back(100)
    assert lost.total > 4


def test_losses_are_said_at_growing_distance_and_their_end_too(tmp_path: Path) -> None:
    terminal = io.StringIO()
    lost = LostWrites()
    with Journal(tmp_path / "run.log", PlainProgress(terminal), lost) as journal:
        with largest_file(0):
            for _ in range(20):
                journal.note("something happened")
                journal.tell_losses()
        journal.note("something else happened")
        journal.tell_losses()
    said = terminal.getvalue().splitlines()
    assert [line.partition(": ")[2].partition(" ")[0] for line in said[:-1]] == ["1", "3", "6", "12", "24"]
    assert said[0].startswith("run.log cannot be written (File too large): 1 entries are lost so far, the run goes on")
    assert said[-1] == f"run.log is written again; {lost.total} entries are missing in it"
    assert (tmp_path / "run.log").read_text().count("\n") == 2
    assert said[-1] in (tmp_path / "run.log").read_text()


def test_progress_that_goes_to_a_full_disk_is_counted_and_noted_in_the_log(tmp_path: Path) -> None:
    lost = LostWrites()
    with open("/dev/full", "w") as full, Journal(tmp_path / "run.log", open_progress("t", full, lost), lost) as journal:
        journal.say("hello")
        journal.tell_losses()
    assert "the progress cannot be written (No space left on device)" in (tmp_path / "run.log").read_text()
    assert lost.total > 0


def test_a_checkpoint_that_is_missing_is_said_at_growing_distance_until_one_is_written() -> None:
    missing = MissingCheckpoints()
    said = [missing.notice(update, None, "no room") for update in range(5, 11)]
    assert [text is not None for text in said] == [True, True, False, True, False, False]
    assert said[3] == "no room; a checkpoint is due since update 5, and will be tried again"
    assert (missing.since, missing.failures) == (5, 6)
    assert missing.notice(11, "there", None) == (
        "checkpoint there is written, after 6 that failed: updates 5 to 11 are saved"
    )
    assert (missing.since, missing.failures) == (None, 6)
    assert missing.notice(12, None, None) is None
