"""`python -m learner --connect ENDPOINT --run-dir DIR [--resume]`: the learner's process.

What it does is in `learner/session.py`; here are its ties to the outside. SIGINT is left to the parent: Ctrl-C
reaches every process of a terminal at once, and the parent says STOP. SIGTERM stops after the minibatch that is under
way. What must never happen: an exit without a word. An error goes out as BYE with its traceback, and the exit code is
1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollout_service.control.client import Client
from rollout_service.control.messages import Hello, Role
from rollout_service.errors import RolloutServiceError
from rollout_service.lifeline import follow_parent, leave

if TYPE_CHECKING:
    from learner.session import LearnerSession

CONNECT_DEADLINE_S: Final = 30.0
"""The service listens before it starts children; a learner started by hand may come first."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m learner", description="The learner of one run.")
    parser.add_argument("--connect", required=True, metavar="ENDPOINT", help="where the service listens")
    parser.add_argument("--run-dir", required=True, type=Path, help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the run directory")
    chosen = parser.parse_args(arguments)
    follow_parent(on_death=signal.SIGTERM)
    client = Client(chosen.connect, Hello(role=Role.LEARNER, pid=os.getpid()), connect_deadline_s=CONNECT_DEADLINE_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: client.stop())
    session: LearnerSession | None = None
    try:
        # Torch takes seconds to import: only after the ties to the parent are in place.
        from learner.session import LearnerSession
        from learner.staging import keep_freed_memory

        keep_freed_memory()
        session = LearnerSession(client, client.connect(), chosen.run_dir)
        session.prepare(chosen.resume)
        session.run()
        client.bye(client.stop_reason or "finished")
        return 0
    except Exception as error:
        if session is None and client.stopping:
            return 0
        text = str(error) if isinstance(error, RolloutServiceError) else f"{type(error).__name__}: {error}"
        print(f"learner: {text}", file=sys.stderr, flush=True)
        client.bye(text, traceback.format_exc())
        return 1
    finally:
        if session is not None:
            session.close()
        client.close()


if __name__ == "__main__":
    leave(main())
