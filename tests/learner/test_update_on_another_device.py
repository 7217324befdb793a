"""Everything an update touches is moved to its device first: shown on a device that is none, in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_updates_of_every_kind_never_mix_devices_and_end_with_the_weights_of_a_cpu() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.pretend_gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert shown.returncode == 0, shown.stderr[-3000:]
    refusal, *distances = (json.loads(line) for line in shown.stdout.splitlines())
    assert "two devices" in refusal["refusal"]
    assert [name for distance in distances for name in distance] == [
        "plain",
        "vtrace",
        "two layers, statistics",
        "no memory",
        "streaming",
    ]
    assert max(value for distance in distances for value in distance.values()) < 1e-4
