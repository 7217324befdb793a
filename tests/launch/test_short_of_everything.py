"""A machine with nothing to spare: too little is an error before the start, what is taken later hurts nobody."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rollout_service.control.descriptors import OF_A_RUN, OF_AN_ACTOR
from tests.fixtures.limits import OWN_MOUNTS, own_tmpfs
from tests.fixtures.machine import command, environment, logged_steps
from tests.memory.other_process import can_run

WORDS = ["--num-actors", "2", "--envs-per-actor", "2", "--num-steps", "8", "--epochs", "1", "--no-tensorboard"]
DESCRIPTORS = OF_A_RUN + 2 * OF_AN_ACTOR
ENV = '''
import os, resource
from contextlib import suppress
from tests.fixtures.machine import FaultyEnv, argument, eventually

def allow(descriptors):
    """How many the service may have open from now on."""
    _, hard = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (descriptors or hard, hard))

class Env(FaultyEnv):
    """Before its first step actor 0 takes what /dev/shm has left. In update 3 actor 1 takes all descriptors from the
    service, and dies; actor 0 gives them back once the service has found out.
    """

    def step(self, action):
        if self.number == 1 and argument("--incarnation") == 0:
            if argument("--actor") == 1 and self.steps == 19:
                allow(5)
            if argument("--actor") == 0 and self.steps == 23:
                eventually(lambda: "cannot be started" in open("run/run.log").read(), 40.0, "a start fails")
                allow(None)
        return super().step(action)

    def reset(self, **options):
        if argument("--actor") == 0 and self.steps == 0 and self.number == 1:
            filler = os.open("/dev/shm/filler", os.O_WRONLY | os.O_CREAT)
            with suppress(OSError):
                while os.write(filler, bytes(4096)):
                    pass
            print("pages left:", os.statvfs("/dev/shm").f_bfree, flush=True)
        return super().reset(**options)
'''


def train(*words: str, cwd: Path, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    whole = [*prefix, *command("train", *WORDS, *words, "--run-dir", "run")]
    return subprocess.run(whole, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60.0, check=False)


@pytest.mark.skipif(not can_run(*own_tmpfs("/dev/shm", "8m"), "true"), reason="no right to mount a small /dev/shm")
def test_a_run_goes_on_while_others_take_its_shared_memory_and_its_descriptors(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(ENV)
    faults = ["--env-kwargs", f"faults={json.dumps({'1.0': 'exit'})}", "at_step=20"]
    prefix = (*OWN_MOUNTS, f'mount -t tmpfs -o size=1m tmpfs /dev/shm && ulimit -n {DESCRIPTORS} && exec "$@"', "sh")
    ran = train("--env", "greedy:Env", *faults, "--total-steps", f"{8 * 32}", cwd=tmp_path, prefix=prefix)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("ended with") == ran.stderr.count("ended with exit code 3; replaced now") == 1
    assert "actor 1 cannot be started: Too many open files; tried again in 1 s (try 1 of 30)" in ran.stderr
    assert logged_steps(tmp_path / "run") == [32 * update for update in range(1, 9)]
    assert "pages left: 0" in (tmp_path / "run" / "logs" / "actor-0.0.log").read_text()


def test_too_few_descriptors_are_an_error_before_anything_starts(tmp_path: Path) -> None:
    prefix = ("sh", "-c", f'ulimit -n {DESCRIPTORS - 1} && exec "$@"', "sh")
    ran = train("--env", "Memory/TMaze-v0", "--total-steps", "320", cwd=tmp_path, prefix=prefix)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    assert f"a run with 2 actors needs {DESCRIPTORS} file descriptors" in ran.stderr
    assert f"the limit is {DESCRIPTORS - 1}; raise it (ulimit -n {DESCRIPTORS}" in ran.stderr
    assert not (tmp_path / "run").exists()
