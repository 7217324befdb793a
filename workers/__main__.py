"""`python -m workers --connect ENDPOINT`: one actor's process, a child of a run or started by hand.

What it does is in `workers/session.py`; here are its ties to the outside. An actor computes on one thread and sees no
GPU, and that has to stand in the environment before numpy and torch are imported: so nothing heavy is imported here.
Which place it takes is up to the service; a supervisor names it (`--actor N --incarnation K`). A child leaves SIGINT to
its parent: Ctrl-C reaches every process of a terminal at once, and the parent says STOP.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from rollout_service.lifeline import begin, leave, role_parser

QUIET_NEIGHBOUR: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}
"""Pools sized to the machine in every actor would fight for its cores. A variable that is set already is left alone."""
NO_GPU: Final = {"CUDA_VISIBLE_DEVICES": ""}
"""A context in every actor would take hundreds of MB of the learner's GPU. Shells and schedulers set this variable for
whole jobs, so what it says is no wish about actors."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = role_parser("python -m workers", "One actor of a run.")
    parser.add_argument("--actor", type=int, metavar="N", help="the place to take; default: the next free one")
    parser.add_argument(
        "--incarnation", type=int, default=0, metavar="K", help="how often that place was filled before"
    )
    chosen = parser.parse_args(arguments)
    by_hand = begin("actor")
    for name, value in QUIET_NEIGHBOUR.items():
        os.environ.setdefault(name, value)
    os.environ.update(NO_GPU)
    from rollout_service.control.attendance import Attendance
    from rollout_service.control.messages import Hello, Role
    from workers.session import run

    hello = Hello(role=Role.ACTOR, pid=os.getpid(), requested_actor=chosen.actor, incarnation=chosen.incarnation)
    attendance = Attendance(
        chosen.connect,
        hello,
        by_hand,
        wait_s=chosen.wait_for_service,
        reconnect_s=chosen.reconnect,
        key_file=chosen.key_file,
        group=chosen.share_with_group,
    )
    return run(attendance)


if __name__ == "__main__":
    leave(main())
