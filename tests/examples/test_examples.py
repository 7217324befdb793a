"""The example programs run as their documentation says, on small budgets."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_service.launch.settings import parse_train
from tests.fixtures.machine import PROJECT, environment

EXAMPLES = PROJECT / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "__init__")


def run_example(name: str, *words: str) -> str:
    """What `python -m examples.<name> <words>` prints."""
    ran = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", *words],
        cwd=PROJECT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run directory with a checkpoint, and what the program that made it printed."""
    run_dir = tmp_path_factory.mktemp("examples") / "lock"
    words = ["--total-steps", "512", "--num-actors", "1", "--run-dir", str(run_dir)]
    return run_dir, run_example("train_from_python", *words)


def test_the_buffer_alone_gives_every_env_in_whole_sequences():
    out = run_example("buffer_only")
    assert "advantages [step, env] (16, 4)" in out
    batches = re.findall(r"minibatch of envs \[(\d), (\d)\] advantages \[env, step\] \(2, 16\)", out)
    assert sorted(env for pair in batches for env in pair) == ["0", "1", "2", "3"]


def test_the_own_learner_learns_its_maze_within_sixteen_updates():
    lines = run_example("own_learner", "--updates", "16", "--corridor", "3").splitlines()
    shares = [float(found[1]) for line in lines if (found := re.search(r"right turns +([\d.]+)%", line))]
    assert len(shares) == 4
    assert shares[0] < 85.0 < 90.0 < shares[-1]


def test_the_own_env_keeps_the_contract_and_cannot_be_beaten_blindly():
    found = re.search(r"mean return ([\d.]+), expected ([\d.]+)", run_example("own_env", "--episodes", "500"))
    assert found is not None
    assert float(found[2]) == pytest.approx(1 / 3, abs=1e-3)
    assert float(found[1]) == pytest.approx(1 / 3, abs=0.06)


def test_a_policy_that_remembers_opens_the_lock():
    from examples.own_env import make

    lock = make(digits=3, base=5)
    first, _ = lock.reset(seed=7)
    seen, total = [first], 0.0
    for _ in range(3):
        shown, reward, terminated, truncated, info = lock.step(0)
        seen.append(shown)
        total += reward
        assert (terminated, truncated, info) == (False, False, {})
    assert seen == [*lock.code, 5]
    for digit in lock.code:
        shown, reward, terminated, _, info = lock.step(digit)
        total += reward
    assert (shown, terminated, info) == (5, True, {"success": True})
    assert total == pytest.approx(1.0)


def test_a_run_that_a_program_starts_ends_with_a_checkpoint(short_run: tuple[Path, str]):
    run_dir, out = short_run
    assert out.startswith("finished: mean return ")
    assert (run_dir / "checkpoints" / "checkpoint-00000002").is_dir()


def test_a_checkpoint_plays_in_a_loop_of_ones_own(short_run: tuple[Path, str]):
    run_dir, out = short_run
    assert f"python -m examples.evaluate_policy {run_dir}" in out
    found = re.search(
        r"5 episodes: mean return ([\d.]+)", run_example("evaluate_policy", str(run_dir), "--episodes", "5")
    )
    assert found is not None
    assert 0.0 <= float(found[1]) <= 1.0


@pytest.mark.parametrize("text", ["README.md", "own_env.py"])
def test_documented_training_commands_are_understood(text: str):
    commands = re.findall(r"^ +rollout-service train (.+)$", (EXAMPLES / text).read_text(), re.MULTILINE)
    assert [parse_train(shlex.split(words)).env for words in commands] == ["examples.own_env:make"]


def test_the_readme_names_every_program():
    named = set(re.findall(r"^\| `(\w+)\.py`", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert named == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_does_nothing_when_it_is_imported(name: str):
    """Only definitions at the top level, and a main guard: a run imports the module of its env in every actor."""
    *body, guard = ast.parse((EXAMPLES / f"{name}.py").read_text()).body
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign)
    assert ast.get_docstring(ast.Module([*body, guard], [])) is not None
    assert all(isinstance(statement, allowed) for statement in body[1:])
    assert isinstance(guard, ast.If)
    assert ast.unparse(guard.test) == "__name__ == '__main__'"
