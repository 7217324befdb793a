"""A learner that dies or hangs, at whatever moment, is followed by one that goes on from the newest checkpoint.

The first run is killed from outside, at moments that its files show; the second one kills itself at points that no one
outside could hit, one per life of its learner.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import psutil
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollout_service import checkpoint
from tests.fixtures.machine import PROJECT, Pace, Service, eventually, run_command

STEPS = 8
STEPS_PER_UPDATE = 2 * 2 * STEPS
START_S = 60.0
"""Until a learner has started and done its first update, on a machine that is busy with other things."""
TINY = [
    *("--num-actors", "2", "--envs-per-actor", "2", "--num-steps", str(STEPS), "--epochs", "1"),
    *("--env", "Memory/TMaze-v0", "--env-kwargs", "corridor=3", "--hidden-dim", "8", "--envs-per-minibatch", "2"),
    *("--run-dir", "run", "--json"),
    # A budget that comes back at once: what is tested here is not the back-off.
    *("--restart-window", "0.2", "--checkpoint-interval", "2"),
]


def words(*more: str, updates: int) -> list[str]:
    return [*TINY, "--total-steps", str(updates * STEPS_PER_UPDATE), *more]


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def check_outcome(result: dict[str, Any], run_dir: Path, updates: int) -> None:
    """Every update once, in order, no version twice, and a last checkpoint of all of it."""
    assert (result["updates"], result["env_steps"]) == (updates, updates * STEPS_PER_UPDATE)
    logged = records(run_dir)
    assert [line["update"] for line in logged] == list(range(1, updates + 1))
    assert [line["env_steps"] for line in logged] == [update * STEPS_PER_UPDATE for update in range(1, updates + 1)]
    versions = [line["learner/version"] for line in logged]
    assert versions == sorted(set(versions))
    manifest = checkpoint.require(run_dir).checkpoint.manifest
    assert (manifest.update, manifest.env_steps) == (updates, updates * STEPS_PER_UPDATE)
    assert sorted(path.name for path in (run_dir / "logs").glob("actor*")) == ["actor-0.0.log", "actor-1.0.log"]


def learner(service: Service, but: set[int]) -> psutil.Process:
    """The learner process, once there is one whose pid is not in `but`."""

    def look() -> psutil.Process | None:
        found = service.child("-m", "learner")
        return found if found is not None and found.pid not in but else None

    found: psutil.Process = eventually(look, START_S, "there is a learner")
    return found


def actors(service: Service) -> set[int]:
    return {child.pid for child in service.children() if "workers" in child.cmdline()}


def test_a_learner_that_is_killed_again_and_again_costs_updates_and_nothing_else(tmp_path: Path):
    run_dir, updates, pace = tmp_path / "run", 200, Pace(tmp_path / "pace", 3 * STEPS + 4)
    paced = ["--env", "tests.fixtures.machine:FaultyEnv", "--env-kwargs", f"pace={pace.file}"]
    command = words(*paced, "--no-tensorboard", "--checkpoint-interval", "20", updates=updates)
    with Service(*command, cwd=tmp_path) as service:
        killed: set[int] = set()

        def kill() -> None:
            victim = learner(service, but=killed)
            killed.add(victim.pid)
            victim.kill()

        kill()
        eventually(lambda: service.updates(run_dir) == 3, START_S, "three updates")
        collecting = actors(service)
        kill()
        kill()
        pace.allow(100 * STEPS + 4)
        eventually(lambda: service.updates(run_dir) >= 60, START_S, "sixty updates")
        kill()
        eventually(lambda: service.stderr().count("goes on from") == 2, START_S, "the last learner is ready")
        assert actors(service) == collecting
        pace.free()
        assert service.wait(START_S) == 0, service.stderr()
        result, said = service.result(), service.stderr()
    check_outcome(result, run_dir, updates)
    for pid in killed:
        assert re.search(
            rf"^learner \(pid {pid}\) ended with signal 9 \(SIGKILL\); restarted (now|in 0\.5 s) ", said, re.M
        )
    origins = re.findall(r"from (the start|checkpoint-\d+) \(update (\d+), env step \d+\): (\d+) env steps are", said)
    assert len(origins) == len(killed)
    assert origins[0] == ("the start", "0", "0")
    assert int(origins[-1][1]) >= 60 - 20
    assert records(run_dir)[-1]["learner/restarts"] == len(killed)


def test_a_stop_while_the_next_learner_is_starting_ends_the_run_at_once(tmp_path: Path):
    run_dir = tmp_path / "run"
    with Service(*words("--no-tensorboard", updates=1_000_000), cwd=tmp_path) as service:
        eventually(lambda: service.updates(run_dir) >= 2, START_S, "two updates")
        first = learner(service, but=set())
        first.kill()
        learner(service, but={first.pid})
        service.signal_group(signal.SIGINT)
        assert service.wait(5.0) == 130
        said = service.stderr()
    assert "Traceback" not in said
    assert "was killed" not in said
    assert checkpoint.require(run_dir).checkpoint.manifest.update >= 2


LIVES = """
import os, pathlib, signal, sys, threading
if "learner" in sys.orig_argv:
    from rollout_service import checkpoint
    from rollout_service.control import client
    from rollout_service.control.messages import Publish
    from rollout_service.memory import weights

    lives = pathlib.Path("lives")
    life = len(lives.read_text()) if lives.exists() else 0
    lives.write_text("." * (life + 1))

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def before(module, name, holds, act=die):
        original = getattr(module, name)
        def wrapped(*args, **kwargs):
            if holds(*args):
                act()
            return original(*args, **kwargs)
        setattr(module, name, wrapped)

    def publishes(update):
        return lambda _, message: isinstance(message, Publish) and message.update == update

    def damage_and_die():
        (checkpoint.listed(pathlib.Path("run"))[-1] / "arrays.safetensors").write_bytes(b"")
        die()

    class Working(client.PulseState):
        '''Hangs at the sixth minibatch, the second of the third update.'''
        @property
        def progress(self):
            return self.minibatches
        @progress.setter
        def progress(self, minibatches):
            self.minibatches = minibatches
            if minibatches == 6:
                threading.Event().wait()

    match life:
        case 0:  # inside the stores of the weights of update 3, which are then neither closed nor announced
            before(weights, "_checksum", lambda version, bank: version == 4)
        case 1:  # weights of update 5 are out, PUBLISH is not; and the newest checkpoint has gone bad
            before(client.Client, "send", publishes(5), damage_and_die)
        case 2:  # the arrays of checkpoint 4 are on disk, its manifest is not
            before(checkpoint, "_write_flushed", lambda path, content: path.name == checkpoint.MANIFEST_FILE)
        case 3:  # inside update 5
            client.PulseState = Working
        case 4:  # all is learned and saved, and nobody knows
            before(client.Client, "send", publishes(12))
"""


def test_whatever_a_learner_was_doing_when_it_ended_the_next_one_goes_on(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(LIVES)
    ran = run_command(
        "train", *words("--learner-timeout", "2", updates=12), cwd=tmp_path, timeout=110, PYTHONPATH=f"{tmp_path}"
    )
    run_dir = tmp_path / "run"
    assert ran.returncode == 0, ran.stderr
    check_outcome(json.loads(ran.stdout), run_dir, 12)
    said = re.findall(r"^learner \(pid \d+\) (.+?); restarted .* from (\S+) \(.*: (\d+) env steps", ran.stderr, re.M)
    killed = "ended with signal 9 (SIGKILL)"
    assert said[0] == (killed, "checkpoint-00000002", "0")
    assert said[1] == (killed, "checkpoint-00000002", str(2 * STEPS_PER_UPDATE))
    assert said[2] == (killed, "checkpoint-00000002", str(STEPS_PER_UPDATE))
    assert said[3][1:] == ("checkpoint-00000004", "0")
    assert re.fullmatch(r"was stuck in updating for .* s \(learner_timeout 2 s\) and was killed", said[3][0])
    assert said[4] == (killed, "checkpoint-00000012", "0")
    assert len(said) == 5
    assert "in _between_minibatches" in ran.stderr, "no stack of the learner that hung"
    assert "checkpoint-00000004 is damaged" in ran.stderr
    assert "using checkpoint-00000002" in ran.stderr
    assert len(list((run_dir / "checkpoints").glob("damaged-*-checkpoint-00000004"))) == 1
    assert list((run_dir / "checkpoints").glob(".writing-*")) == []
    counted = {name.removeprefix("count/"): value for name, value in records(run_dir)[-1].items() if "count/" in name}
    assert counted["rolled_back_updates"] == 2 + 1
    assert counted["rolled_back_env_steps"] == 3 * STEPS_PER_UPDATE
    assert counted["dropped_rollouts"] == 4 * 2, "a batch was out each time, and the last one was learned from"
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("learner/version")] == [
        update * STEPS_PER_UPDATE for update in range(1, 13)
    ]


FAIL = """
import sys
if "learner" in sys.orig_argv:
    from rollout_service.memory.weights import WeightsMemory
    publish = WeightsMemory.publish
    def fail(self, version, arrays):
        if version == 3:
            raise RuntimeError("boom-9")
        publish(self, version, arrays)
    WeightsMemory.publish = fail
"""
END_S = 5.0
"""From the learner's exception until nothing of the run is left."""


def test_an_exception_in_the_learner_ends_the_run_at_once(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(FAIL)
    with Service(*words("--no-tensorboard", updates=20), cwd=tmp_path, PYTHONPATH=f"{PROJECT}:{tmp_path}") as service:
        log = tmp_path / "run" / "run.log"
        eventually(lambda: log.exists() and "ended with exit code 1" in log.read_text(), START_S, "the learner failed")
        children = service.children()
        assert service.wait(END_S) == 1
        assert psutil.wait_procs(children, timeout=0.5)[1] == []
        said, printed = service.stderr(), service.stdout()
    assert printed == ""
    assert said.count("Traceback (most recent call last)") == said.count("RuntimeError: boom-9\n") == 1, said
    assert "ended with exit code 1; the run stops: an error of the learner's own is not tried again" in said
    assert "restarted" not in said
