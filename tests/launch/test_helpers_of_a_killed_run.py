"""Processes beside the roles die with whom they belong to, also in the middle of something that never returns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import psutil

from rollout_service.lifeline import PARENT_VARIABLE
from tests.fixtures.machine import environment, eventually

OWNER = """
from rollout_service.envs.make_vector import make_vector_env
from rollout_service.runspec import Vectorize
if __name__ == "__main__":
    envs = make_vector_env("{module}:HangingEnv", {{}}, Vectorize.ASYNC, 1, [1])
    envs.reset(seed=1)
    envs.step([0])
"""
SUPERVISOR = """
import subprocess, sys, threading
from rollout_service.launch.children import start_interpreter
process = start_interpreter(
    ["rollout_service.launch.probe"], {}, stdin=sys.stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
)
print(process.pid, flush=True)
threading.Event().wait()
"""
START_S, GONE_S = 40.0, 5.0


class HangingEnv(gymnasium.Env[np.ndarray, np.int64]):
    """Its first step writes its process's id to `hanging`, and does not return."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        import os
        import threading

        Path("hanging.part").write_text(str(os.getpid()))
        Path("hanging.part").rename("hanging")
        threading.Event().wait()


def test_a_vector_envs_process_that_hangs_in_a_step_dies_with_its_actor(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER.format(module=__name__))
    owner = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, env=environment())
    try:
        pid = eventually((tmp_path / "hanging").exists, START_S, "an env hangs") and (tmp_path / "hanging").read_text()
        hanging = psutil.Process(int(pid))
        assert hanging.pid != owner.pid
    finally:
        owner.kill()
        owner.wait()
    eventually(lambda: not hanging.is_running(), GONE_S, "the env's process is gone")


def test_the_probe_dies_with_the_parent_of_the_run(tmp_path: Path) -> None:
    """It waits for its settings here, which never come; what it does then would be the same for it."""
    clean = {name: value for name, value in environment().items() if name != PARENT_VARIABLE}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    parent = subprocess.Popen([sys.executable, "-c", SUPERVISOR], cwd=tmp_path, env=clean, **pipes)
    assert parent.stdin is not None
    assert parent.stdout is not None
    try:
        probe = psutil.Process(int(parent.stdout.readline()))
        eventually(lambda: probe.num_threads() > 1, START_S, "the probe watches its parent")
        parent.kill()
        parent.wait()
        eventually(lambda: not probe.is_running(), GONE_S, "the probe is gone")
    finally:
        parent.kill()
        parent.stdin.close()
        parent.stdout.close()
        parent.wait()
