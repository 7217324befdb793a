"""Scripts that train as they are imported: nothing recurses, and where the env stands in the script too, it is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.fixtures.machine import PROJECT, environment, eventually

ACTORS = 2
SETTINGS = (
    f"num_actors={ACTORS}, envs_per_actor=2, num_steps=8, total_steps=128, epochs=1, tensorboard=False, run_dir='run'"
)
ENV = """
import gymnasium, numpy
class Maze(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return numpy.zeros(2, numpy.float32), {}
    def step(self, action):
        return numpy.zeros(2, numpy.float32), 1.0, True, False, {}
"""
TRAINS = f"""
from rollout_service import TrainConfig, train
outcome = train(TrainConfig({SETTINGS}, env=ENV))
print("updates", outcome.summary.updates)
"""


def run(script: str, directory: Path) -> tuple[int, str, str, int]:
    """Exit code, output, errors, and the most processes that were there at once."""
    (directory / "script.py").write_text(script)
    out, err, most = directory / "out", directory / "err", 0
    with out.open("w") as output, err.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "script.py"], cwd=directory, env=environment(), stdout=output, stderr=errors
        )
    tree = psutil.Process(process.pid)

    def ended() -> bool:
        nonlocal most
        try:
            most = max(most, 1 + len(tree.children(recursive=True)))
        except psutil.NoSuchProcess:
            return True
        return process.poll() is not None

    eventually(ended, 60.0, "the script has ended")
    return process.wait(5.0), out.read_text(), err.read_text(), most


def test_training_at_the_top_of_a_script_starts_the_processes_of_one_run(tmp_path: Path):
    code, out, err, most = run(f"ENV = 'Memory/TMaze-v0'\n{TRAINS}", tmp_path)
    assert (code, out) == (0, "updates 4\n"), err
    assert most <= ACTORS + 3


@pytest.mark.parametrize("how", ["train", "train_serially"])
def test_a_script_that_is_the_module_of_its_own_env_is_told_of_the_main_guard(tmp_path: Path, how: str):
    trains = TRAINS.replace(
        " import TrainConfig, train", f" import TrainConfig\nfrom rollout_service.launch.train import {how} as train"
    )
    code, out, err, most = run(f"{ENV}ENV = 'script:Maze'\n{trains}", tmp_path)
    assert (code, out) == (1, "")
    assert 'if __name__ == "__main__":' in err
    assert "main guard" in err
    assert most <= ACTORS + 3
    log = tmp_path / "run" / "metrics.jsonl"
    assert not log.exists() or log.read_text() == ""


def test_an_actor_started_by_hand_does_not_begin_a_training_of_its_own():
    code = (
        "from rollout_service.lifeline import begin; begin('actor')\n"
        "from rollout_service import TrainConfig, train\n"
        "try:\n    train(TrainConfig())\nexcept ValueError as error:\n    print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert ran.stdout.startswith("a training was started inside the actor of another one")
