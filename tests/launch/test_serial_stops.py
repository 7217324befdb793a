"""A serial run that is told to stop, or that fails, keeps what it has learned and leaves nothing in shared memory."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rollout_service import checkpoint
from rollout_service.launch.signals import Interruption, StopRequest
from rollout_service.memory.segment import list_segments
from tests.fixtures.machine import Service, eventually, logged_steps, run_command

START_S, STOP_S = 60.0, 5.0
WORDS = [
    *("--serial", "--env", "tests.fixtures.machine:FaultyEnv", "--num-actors", "1", "--envs-per-actor", "2"),
    *("--num-steps", "8", "--hidden-dim", "8", "--envs-per-minibatch", "2", "--no-tensorboard", "--run-dir", "run"),
    *("--checkpoint-interval", "1000000"),
]


def segments_of(pid: int) -> list[str]:
    return [segment.name for segment in list_segments() if segment.owner_pid == pid]


@pytest.mark.parametrize(("signum", "name", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)])
def test_a_signal_ends_it_with_a_checkpoint_of_all_its_updates(tmp_path: Path, signum: int, name: str, code: int):
    run_dir = tmp_path / "run"
    with Service(*WORDS, "--total-steps", "100000000", cwd=tmp_path) as service:
        eventually(lambda: service.updates(run_dir) >= 3, START_S, "three updates")
        assert segments_of(service.process.pid)
        service.process.send_signal(signum)
        assert service.wait(STOP_S) == code
        said = service.stderr()
    assert segments_of(service.process.pid) == []
    updates = service.updates(run_dir)
    assert checkpoint.require(run_dir).checkpoint.manifest.update == updates
    assert said.count(f"{name}: stopped after update {updates}, with a checkpoint") == 1
    assert "Traceback" not in said


def test_a_second_signal_ends_it_in_the_middle_of_a_step_and_leaves_nothing(tmp_path: Path):
    run_dir = tmp_path / "run"
    hangs = ("--env", "tests.fixtures.envs:BoomEnv", "--env-kwargs", "at=3000", "how=hang")
    with Service(*WORDS, *hangs, "--total-steps", "100000000", cwd=tmp_path) as service:
        eventually(lambda: service.updates(run_dir) >= 2999 // 8, START_S, "all updates before the step that hangs")
        service.process.send_signal(signal.SIGTERM)
        service.process.send_signal(signal.SIGINT)
        assert service.wait(STOP_S) in (130, 143)
    assert segments_of(service.process.pid) == []


def test_the_second_signal_is_an_interrupt_and_nothing_interrupts_teardown():
    stop = StopRequest()
    assert not stop()
    stop.put(Interruption(signal.SIGTERM))
    assert stop()
    with pytest.raises(KeyboardInterrupt):
        stop.put(Interruption(signal.SIGINT))
    stop.put(Interruption(signal.SIGINT))
    assert stop.first == Interruption(signal.SIGTERM)
    late = StopRequest()
    late.close()
    for _ in range(2):
        late.put(Interruption(signal.SIGINT))


def test_an_env_that_fails_ends_it_with_one_traceback_and_leaves_nothing(tmp_path: Path):
    before = {segment.name for segment in list_segments()}
    boom = ("--env", "tests.fixtures.envs:BoomEnv", "--env-kwargs", "at=40", "--total-steps", "100000")
    ran = run_command("train", *WORDS, *boom, cwd=tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert ran.stderr.rstrip().rpartition("\n")[2].startswith("rollout_service.errors.EnvFault"), ran.stderr
    assert "boom-7" in ran.stderr
    assert {segment.name for segment in list_segments() if not segment.owner_alive} <= before
    assert logged_steps(tmp_path / "run")
