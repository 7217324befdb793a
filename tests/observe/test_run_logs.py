"""Log files: one curve, strictly increasing steps, also after a resume; TensorBoard without torch."""

from __future__ import annotations

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollout_service.observe.logs import RunLogs


def steps(run_dir: Path) -> list[int]:
    return [json.loads(line)["env_steps"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def write(run_dir: Path, updates: range, *, resume_at: int = 0) -> None:
    with RunLogs(run_dir, tensorboard=True, resume_at=resume_at) as logs:
        logs.open()
        for update in updates:
            logs.write(100 * update, update, {"rollout/return_mean": float(update)})


def test_steps_increase_strictly_over_a_resume_from_an_older_checkpoint(tmp_path: Path):
    write(tmp_path, range(1, 8))
    write(tmp_path, range(5, 10), resume_at=400)
    assert steps(tmp_path) == [100, 200, 300, 400, 500, 600, 700, 800, 900]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("rollout/return_mean")
    assert [(event.step, event.value) for event in scalars] == [(100 * update, update) for update in range(1, 10)]


def test_a_new_run_starts_its_file_anew_and_a_torn_line_is_dropped(tmp_path: Path):
    write(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 300, "upd')
    write(tmp_path, range(3, 4), resume_at=200)
    assert steps(tmp_path) == [100, 200, 300]
    write(tmp_path, range(1, 2))
    assert steps(tmp_path) == [100]


def test_a_log_that_is_cut_back_goes_on_from_there_in_both_files(tmp_path: Path):
    with RunLogs(tmp_path, tensorboard=True) as logs:
        logs.open()
        for update in range(1, 8):
            logs.write(100 * update, update, {"learner/version": float(update)})
        logs.cut_back(400)
        assert steps(tmp_path) == [100, 200, 300, 400]
        for update in range(5, 9):
            logs.write(100 * update, update, {"learner/version": 10.0 + update})
    assert steps(tmp_path) == [100, 200, 300, 400, 500, 600, 700, 800]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    read = [(event.step, event.value) for event in events.Scalars("learner/version")]
    assert read == [(100 * update, update) for update in range(1, 5)] + [(100 * u, 10.0 + u) for u in range(5, 9)]


def test_a_log_can_be_cut_back_to_the_start(tmp_path: Path):
    with RunLogs(tmp_path, tensorboard=False) as logs:
        logs.cut_back(0)
        logs.open()
        logs.write(100, 1, {})
        logs.cut_back(0)
        logs.write(100, 1, {})
    assert steps(tmp_path) == [100]


def test_it_is_known_how_far_the_log_reaches(tmp_path: Path):
    with RunLogs(tmp_path, tensorboard=False) as logs:
        logs.open()
        assert logs.reaches == 0
        for update in range(1, 4):
            logs.write(100 * update, update, {})
        assert logs.reaches == 300
        logs.cut_back(250)
        assert logs.reaches == 200
    with RunLogs(tmp_path, tensorboard=False, resume_at=400) as logs:
        logs.open()
        assert logs.reaches == 200
