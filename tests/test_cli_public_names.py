"""What programs may import from the package, and that importing it costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rollout_service
from rollout_service.config import TrainConfig
from rollout_service.launch.train import train
from tests.fixtures.machine import environment


def test_the_public_names_are_these():
    assert rollout_service.__all__ == ["Outcome", "RolloutServiceError", "TrainConfig", "train"]
    assert (rollout_service.TrainConfig, rollout_service.train) == (TrainConfig, train)
    assert [name for name in rollout_service.__all__ if not hasattr(rollout_service, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rollout_service.nothing  # noqa: B018


def test_importing_the_package_imports_nothing_else():
    code = "import sys; before = set(sys.modules); import rollout_service; print(*sorted(set(sys.modules) - before))"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=20, check=True
    )
    assert not {"numpy", "pydantic", "zmq", "torch", "rollout_service.config"} & set(ran.stdout.split())
