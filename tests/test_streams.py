"""What a role prints may be lost; it never ends the role."""

from __future__ import annotations

from pathlib import Path

from rollout_service.streams import Dropped, lenient
from tests.fixtures.limits import largest_file
from tests.memory.other_process import run_python


def test_what_is_dropped_is_counted_and_said_in_the_stream_once_it_takes_something_again(tmp_path: Path) -> None:
    dropped = Dropped()
    with (tmp_path / "log").open("w") as file:
        stream = lenient(file, dropped.note)
        print("one", file=stream)
        with largest_file(6):
            stream.write("two is too long\n")
        print("three \udc80", file=stream)
    text = (tmp_path / "log").read_text()
    assert text == "one\ntw\n[1 writes were lost here: [Errno 27] File too large]\nthree \\udc80\n"
    assert dropped.writes == 1


def test_a_role_on_a_full_disk_prints_and_lives_and_exits_as_it_should() -> None:
    code = (
        "import os, sys\n"
        "full = os.open('/dev/full', os.O_WRONLY)\n"
        "answer = os.dup(1)\n"
        "os.dup2(full, 1), os.dup2(full, 2)\n"
        "from rollout_service.lifeline import OUTPUT, begin, leave\n"
        "begin('actor')\n"
        "print('an env that talks', flush=True)\n"
        "sys.stderr.write('x' * 10_000_000)\n"
        "os.write(answer, str(OUTPUT.writes > 1).encode())\n"
        "leave(3)\n"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout) == (3, "True")
