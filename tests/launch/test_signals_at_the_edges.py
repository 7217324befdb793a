"""A stop signal that comes before a command's run has begun, or after it has ended, does not kill the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fixtures.machine import PROJECT, environment

STOPPED = """
import os, signal, sys
from rollout_service import cli
def stopped(words):
    '''Is sent a signal where no run listens for it.'''
    exec("os.kill(os.getpid(), getattr(signal, words[0]))", globals() | locals())
    return 0
cli.COMMANDS["stopped"] = stopped
sys.exit(cli.main())
"""
ENDED = """
import os, signal, sys
from rollout_service import cli
cli.COMMANDS["ended"] = lambda words: 3
code = cli.main()
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
sys.exit(code)
"""


def run(code: str, *words: str, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=PROJECT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **settings,
    )


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_outside_of_a_run_a_stop_signal_is_an_exit_code(name: str, code: int) -> None:
    ran = run(STOPPED, "stopped", name)
    assert (ran.returncode, ran.stderr) == (code, "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_behind_the_end_of_a_command_a_stop_signal_changes_nothing(name: str) -> None:
    ran = run(ENDED, "ended", name)
    assert (ran.returncode, ran.stderr) == (3, "")


def test_a_signal_that_was_ignored_before_stays_ignored() -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    assert run(ignoring + STOPPED, "stopped", "SIGHUP").returncode == 0
