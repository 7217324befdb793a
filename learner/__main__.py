"""`python -m learner --connect ENDPOINT [--run-dir DIR] [--resume]`: the learner's process, a child or started by hand.

What it does is in `learner/session.py`; here are its ties to the outside. A child leaves SIGINT to its parent: Ctrl-C
reaches every process of a terminal at once, and the parent says STOP. SIGTERM stops after the minibatch that is under
way; before there is anything to save it ends the process. What must never happen: an exit without a word. An error
goes out as BYE with its traceback.

    exit code   0 told to leave   1 an error, or the service was lost   2 wrong words
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_service.control.attendance import Attendance
from rollout_service.control.messages import Hello, Role
from rollout_service.lifeline import begin, leave, role_parser

if TYPE_CHECKING:
    from rollout_service.control.client import Client
    from rollout_service.control.messages import Welcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = role_parser("python -m learner", "The learner of one run.")
    parser.add_argument("--run-dir", type=Path, help="where checkpoints go; default: where the service's run has them")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the run directory")
    chosen = parser.parse_args(arguments)
    by_hand = begin("learner", on_death=signal.SIGTERM)
    # Torch takes seconds to import: only after the ties to the parent are in place. Until then SIGTERM has its default
    # effect, at once: a stop must not wait for an import to end.
    from learner.session import LearnerSession, take_seat
    from learner.staging import keep_freed_memory

    keep_freed_memory()

    def take_part(client: Client, welcome: Welcome) -> None:
        with closing(LearnerSession(client, welcome, chosen.run_dir)) as session:
            session.prepare(chosen.resume or session.goes_on)
            session.run()

    attendance = Attendance(
        chosen.connect,
        Hello(role=Role.LEARNER, pid=os.getpid()),
        by_hand,
        wait_s=chosen.wait_for_service,
        reconnect_s=chosen.reconnect,
        key_file=chosen.key_file,
        group=chosen.share_with_group,
    )
    return attendance.attend(take_part, take_seat)


if __name__ == "__main__":
    leave(main())
