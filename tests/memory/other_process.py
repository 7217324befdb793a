"""A second interpreter that a test talks to line by line.

Each answer has a deadline, and leaving the block ends the process.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parent.parent.parent
ANSWER_DEADLINE_S = 30.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class OtherProcess:
    """Runs `code`; the code prints its answers and reads what `say` sends from stdin."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=ENVIRONMENT,
        )

    def answer(self) -> str:
        """The next line the process prints. Fails if it ends or stays silent."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_DEADLINE_S)
        assert ready, f"no answer within {ANSWER_DEADLINE_S} s"
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate(timeout=ANSWER_DEADLINE_S)
            raise AssertionError(f"the other process ended with {self.process.returncode}: {errors}")
        return line.strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def leave(self) -> tuple[int, str]:
        """Ends its stdin and waits for it. Returns exit status and everything it wrote to stderr."""
        _, errors = self.process.communicate(timeout=ANSWER_DEADLINE_S)
        return self.process.returncode, errors

    def kill(self) -> None:
        """SIGKILL: no clean-up of any kind runs in it."""
        self.process.kill()
        self.process.wait(ANSWER_DEADLINE_S)

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and not stream.closed:
                stream.close()


def run_python(code: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """One interpreter from start to end, behind `prefix` (unshare, ...)."""
    return subprocess.run(
        [*prefix, sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=ANSWER_DEADLINE_S,
        env=ENVIRONMENT,
        check=False,
    )


def can_run(*command: str) -> bool:
    """Whether this machine lets the tests use a privileged tool."""
    try:
        return subprocess.run(command, capture_output=True, timeout=ANSWER_DEADLINE_S, check=False).returncode == 0
    except FileNotFoundError:
        return False
