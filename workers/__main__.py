"""`python -m workers --connect ENDPOINT [--actor N --incarnation K]`: one actor's process.

What it does is in `workers/session.py`; here are its ties to the outside. An actor computes on one thread and sees no
GPU, and that has to stand in the environment before numpy and torch are imported: so nothing heavy is imported here.
SIGINT is left to the parent: Ctrl-C reaches every process of a terminal at once, and the parent says STOP.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Final

from rollout_service.lifeline import follow_parent, leave

QUIET_NEIGHBOUR: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
"""Pools sized to the machine in every actor would fight for its cores. A variable that is set already is left alone."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers", description="One actor of a run.")
    parser.add_argument("--connect", required=True, metavar="ENDPOINT", help="where the service listens")
    parser.add_argument("--actor", type=int, metavar="N", help="the place to take; default: the next free one")
    parser.add_argument(
        "--incarnation", type=int, default=0, metavar="K", help="how often that place was filled before"
    )
    chosen = parser.parse_args(arguments)
    follow_parent()
    for name, value in QUIET_NEIGHBOUR.items():
        os.environ.setdefault(name, value)
    from workers.session import run

    return run(chosen.connect, chosen.actor, chosen.incarnation)


if __name__ == "__main__":
    leave(main())
