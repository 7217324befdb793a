"""Actors whose heartbeats fall silent because native code holds the interpreter: spared, or ended in time."""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path

import numpy as np

from tests.fixtures.machine import FaultyEnv, argument, run_command

SILENCE_S, STEP_S, HELD_S = 2.0, 6.0, 4.0
FOR_EVER_S = 1000.0


def hold_the_interpreter(seconds: float) -> None:
    """As native code does that keeps the lock of the interpreter: no other thread runs."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


class HoldingEnv(FaultyEnv):
    """In actor 1 one step holds the interpreter for HELD_S; actor 0's first process is never done making this env."""

    def __init__(self) -> None:
        super().__init__()
        self.place = (argument("--actor"), argument("--incarnation"))
        if self.place == (0, 0):
            hold_the_interpreter(FOR_EVER_S)

    def step(self, action: np.int64):
        if self.place == (1, 0) and (self.number, self.steps) == (0, 10):
            hold_the_interpreter(HELD_S)
        return super().step(action)


def test_a_step_may_hold_the_interpreter_for_step_timeout_and_an_actor_that_stays_silent_is_replaced(tmp_path: Path):
    settings = ["--env", f"{__name__}:HoldingEnv", "--num-actors", "2", "--envs-per-actor", "2", "--num-steps", "8"]
    settings += ["--silence-timeout", str(SILENCE_S), "--step-timeout", str(STEP_S), "--total-steps", str(4 * 32)]
    ran = run_command("train", *settings, "--run-dir", "run", "--no-tensorboard", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    (seconds,) = re.findall(
        r"^actor 0 \(incarnation 0, pid \d+\) sent no heartbeat for (.*) s "
        r"\(silence_timeout 2 s, at work step_timeout 6 s\) and was killed; replaced now",
        ran.stderr,
        re.MULTILINE,
    )
    assert float(seconds) >= STEP_S
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert log[-1]["env_steps"] == 4 * 32
    assert log[-1]["actors/restarts"] == 1
