"""Children: how their end is described, what their logs keep, that they follow their parent and are deaf to Ctrl-C."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from rollout_service.launch.children import ChildEnded, describe_exit, start_interpreter, tail, watch
from rollout_service.lifeline import PARENT_VARIABLE
from tests.fixtures.machine import environment, eventually


def test_an_end_is_named_by_code_or_signal():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-11) == "signal 11 (SIGSEGV)"
    assert describe_exit(-60) == "signal 60"


def test_the_tail_is_this_childs_own_last_lines(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("of an earlier child\n")
    begin = log.stat().st_size
    with log.open("a") as file:
        file.writelines(f"line {number}\n" for number in range(100))
    assert tail(log, begin, lines=2) == "line 98\nline 99"
    assert "earlier" not in tail(log, begin, lines=1000)
    assert tail(tmp_path / "missing") == ""


def test_a_childs_end_arrives_in_the_inbox_and_its_pid_stays_until_it_is_reaped():
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    process = start_interpreter(["this"], {}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    watch(process, inbox)
    assert inbox.get(timeout=20) == ChildEnded(process)
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    assert process.wait(timeout=5) == 0


PARENT = f"""
import os, subprocess, sys
mine = {{**os.environ, "{PARENT_VARIABLE}": str(os.getpid())}}
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=mine).wait()
"""
CHILD = """
import os, pathlib, signal, threading
from rollout_service.lifeline import follow_parent
assert follow_parent({arguments})
signal.signal(signal.SIGTERM, lambda *_: None)
pathlib.Path({marker!r}).write_text(str(os.getpid()))
while True:
    threading.Event().wait(1)
"""


def orphan_a_child(tmp_path: Path, arguments: str) -> psutil.Process:
    marker = tmp_path / "child"
    child_code = CHILD.format(arguments=arguments, marker=str(marker))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, child_code], env=environment())
    try:
        pid = int(eventually(lambda: marker.exists() and marker.read_text(), 20, "the child has started"))
        child = psutil.Process(pid)
        child.send_signal(signal.SIGINT)
        assert child.is_running()
    finally:
        parent.kill()
        parent.wait()
    return child


def test_a_child_dies_with_its_parent(tmp_path: Path):
    child = orphan_a_child(tmp_path, "")
    assert eventually(lambda: not child.is_running(), 5, "the child is gone")


def test_a_child_that_ignores_sigterm_is_ended_after_its_grace(tmp_path: Path):
    child = orphan_a_child(tmp_path, "on_death=signal.SIGTERM, grace_s=0.3")
    assert eventually(lambda: not child.is_running(), 5, "the child is gone")


def test_a_role_started_by_hand_follows_nobody():
    code = "from rollout_service.lifeline import follow_parent; print(follow_parent())"
    clean = {name: value for name, value in environment().items() if name != PARENT_VARIABLE}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=20, check=True
    )
    assert ran.stdout == "False\n"
    assert PARENT_VARIABLE not in os.environ


def test_leaving_runs_exit_handlers_and_waits_for_no_thread():
    code = (
        "import atexit, threading\n"
        "from rollout_service.lifeline import leave\n"
        "atexit.register(lambda: print('handler'))\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "print('text', end=' ')\n"
        "leave(7)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=20, check=False
    )
    assert (ran.returncode, ran.stdout) == (7, "text handler\n")
