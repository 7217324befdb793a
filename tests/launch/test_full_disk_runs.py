"""A whole run whose disk is full for a while, and once more at its end: it goes on, says what is lost, and owns up."""

from __future__ import annotations

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollout_service import checkpoint
from rollout_service.launch.status import running
from tests.fixtures.machine import Service, eventually, run_command

ENV = '''
import os, resource
from pathlib import Path
import psutil
from tests.fixtures.machine import HELD_S, FaultyEnv, argument, eventually

NO_LIMIT = resource.RLIM_INFINITY

def limit(pid, nbytes):
    """How large a file that process may write from now on."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, NO_LIMIT))

class Env(FaultyEnv):
    """Eight steps are an update. Env 1 of actor 0 fills the disk in update 3, once two are logged, until the test has
    looked, and in 9.
    """

    def step(self, action):
        outcome = super().step(action)
        if argument("--actor") == 0 and self.number == 1:
            print("step", self.steps)
            service = os.getppid()
            learner = next(p.pid for p in psutil.Process(service).children() if "learner" in p.cmdline())
            match self.steps:
                case 24:
                    two_updates = lambda: Path("run", "metrics.jsonl").read_bytes().count(b"\\n") == 2
                    eventually(two_updates, HELD_S, "two updates are logged")
                    limit(service, 4000), limit(learner, 1000), limit(os.getpid(), 0)
                case 48:
                    eventually(Path("go").exists, HELD_S, "the test has looked")
                    limit(service, NO_LIMIT), limit(learner, NO_LIMIT), limit(os.getpid(), NO_LIMIT)
                case 72:
                    limit(learner, 1000)
        return outcome
'''
UPDATES = 10
WORDS = ["--env", "leaky:Env", "--num-actors", "2", "--envs-per-actor", "2", "--num-steps", "8", "--epochs", "1"]
SAVING = ["--checkpoint-interval", "2", "--run-dir", "run", "--total-steps", f"{UPDATES * 2 * 2 * 8}"]


def test_a_run_survives_a_full_disk_and_does_not_end_as_if_nothing_were_lost(tmp_path: Path) -> None:
    (tmp_path / "leaky.py").write_text(ENV)
    run_dir = tmp_path / "run"
    with Service(*WORDS, *SAVING, cwd=tmp_path) as service:

        def lost(counter: str) -> int:
            reports = [run.report for run in running() if run.pid == service.process.pid and run.report]
            return max((report["counters"].get(counter, 0) for report in reports), default=0)

        eventually(lambda: "the log of actor 0 cannot be written" in service.stderr(), 40.0, "all losses are told")
        eventually(lambda: lost("checkpoint_failures") == 2, 40.0, "two checkpoints could not be written")
        eventually(lambda: lost("log_write_failures") >= 4, 40.0, "two updates could not be logged")
        runs = json.loads(run_command("status", "--json", cwd=tmp_path).stdout)["runs"]
        [run] = [run for run in runs if run["pid"] == service.process.pid]
        (tmp_path / "go").touch()
        code = service.wait(40.0)
        said = service.stderr()
    report = run["report"]
    assert report["checkpoint_missing_since"] == 4
    assert report["counters"]["checkpoint_failures"] == 2
    assert report["counters"]["log_write_failures"] >= 4, "metrics and events of two updates, and what actor 0 printed"
    assert code == 1
    for words in (
        "metrics.jsonl cannot be written (File too large)",
        "metrics.jsonl is written again",
        "checkpoint-00000004 could not be written: [Errno 27] File too large",
        "checkpoint-00000006 is written, after 2 that failed: updates 4 to 6 are saved",
        f"all {UPDATES} updates were made, but the last is not saved: checkpoint",
    ):
        assert words in said, said
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = [line["update"] for line in lines]
    assert logged == [1, 2, *range(logged[2], UPDATES + 1)]
    assert logged[2] > 4
    assert (lines[-1]["learner/checkpoint_missing_since"], lines[-1]["count/checkpoint_failures"]) == (10, 3)
    assert lines[-1]["count/log_write_failures"] > 0
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [event.step // 32 for event in events.Scalars("learner/loss")][-1] == UPDATES
    assert checkpoint.require(run_dir).checkpoint.manifest.update == 8
    assert "writes were lost here: [Errno 27] File too large]" in (run_dir / "logs" / "actor-0.0.log").read_text()
