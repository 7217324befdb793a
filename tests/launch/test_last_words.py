"""An update whose PUBLISH is the last thing that a stopped learner sends is in the log as it is in the checkpoint."""

from __future__ import annotations

import signal
from pathlib import Path

from rollout_service import checkpoint
from tests.fixtures.machine import PROJECT, Service, eventually

SLOW_SERVICE = """
import sys, time
if "train" in sys.orig_argv:
    from rollout_service.control import server

    turn = server.Server._turn

    def slowly(self):
        # As on a machine that is busy: messages lie in the socket when their senders are gone already.
        if self._coordinator.stopped is not None:
            time.sleep(0.5)
        turn(self)

    server.Server._turn = slowly
"""
WORDS = (
    *("--env", "Memory/TMaze-v0", "--env-kwargs", "corridor=3", "--num-actors", "1", "--envs-per-actor", "2"),
    *("--num-steps", "8", "--hidden-dim", "8", "--epochs", "1", "--envs-per-minibatch", "2", "--max-policy-lag", "1"),
    *("--total-steps", "10000000", "--run-dir", "run", "--no-tensorboard"),
)


def test_an_update_that_was_saved_at_the_end_is_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_SERVICE)
    run_dir = tmp_path / "run"
    with Service(*WORDS, cwd=tmp_path, PYTHONPATH=f"{PROJECT}:{tmp_path}") as service:
        eventually(lambda: service.updates(run_dir) >= 20, 60.0, "twenty updates")
        service.signal_group(signal.SIGINT)
        assert service.wait(60.0) == 130, service.stderr()
        logged = service.updates(run_dir)
    newest = checkpoint.newest(run_dir).checkpoint
    assert newest is not None
    assert newest.manifest.update == logged


LATE_WORD = """
import sys, time
if "train" in sys.orig_argv:
    from rollout_service.control import server
    from rollout_service.control.effects import Send

    carry_out = server.Server._carry_out

    def late(self, effects):
        # Peers hear of the run's end, and leave, long before the supervisor does.
        effects = list(effects)
        if any(type(effect) is not Send and type(effect.event).__name__ == "RunFinished" for effect in effects):
            carry_out(self, [effect for effect in effects if type(effect) is Send])
            effects = [effect for effect in effects if type(effect) is not Send]
            time.sleep(1.0)
        carry_out(self, effects)

    server.Server._carry_out = late
"""


def test_an_actor_that_leaves_a_finished_run_has_not_failed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE_WORD)
    short = ["48" if word == "10000000" else word for word in WORDS]
    with Service(*short, "--on-actor-failure", "stop", cwd=tmp_path, PYTHONPATH=f"{PROJECT}:{tmp_path}") as service:
        assert service.wait(60.0) == 0, service.stderr()
