"""tianshou's compiled GAE, timed in its own environment, one measurement per line of input.

    python gae_peers.py ENVS STEPS        writes READY {"version": ...}; then for each line read, seconds per call

Its inner function `_gae` alone, on flat float32 arrays: next values and ends are ready-made, the returns are not added,
nothing is checked. What it allocates is kept by the allocator (`rollout_service.bench.gae` sees to it): its best case.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import numpy as np
from tianshou.algorithm.algorithm_base import _gae

LEAST_S = 0.02
END_PROBABILITY = 0.01
GAMMA, LAMBDA = 0.99, 0.95


def main() -> None:
    rows = int(sys.argv[1]) * int(sys.argv[2])
    generator = np.random.default_rng(0)
    values, next_values, rewards = (generator.standard_normal(rows, np.float32) for _ in range(3))
    ended = generator.random(rows) < END_PROBABILITY

    def seconds(calls: int) -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            _gae(values, next_values, rewards, ended, GAMMA, LAMBDA)
        return (time.perf_counter() - begun) / calls

    seconds(1)  # the first call compiles
    calls = max(1, int(LEAST_S / seconds(3)))
    print("READY", json.dumps({"version": version("tianshou")}), flush=True)
    for _ in sys.stdin:
        print(seconds(calls), flush=True)


if __name__ == "__main__":
    main()
