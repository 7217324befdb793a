"""What users may import, listed. A new public name is a decision; this test is where it is written down."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

SURFACE = {
    "rollout_service": {"Outcome", "RolloutServiceError", "TrainConfig", "train"},
    "learner": {"GaeRule", "RecurrentRolloutBuffer", "SequenceBatch"},
    "workers": set(),
}


@pytest.mark.parametrize("package", SURFACE)
def test_the_public_names_are_the_listed_ones_and_resolve(package: str) -> None:
    module = importlib.import_module(package)
    assert set(getattr(module, "__all__", ())) == SURFACE[package]
    for name in SURFACE[package]:
        assert getattr(module, name).__doc__, f"{package}.{name} has no docstring"


@pytest.mark.parametrize("package", SURFACE)
def test_importing_a_package_is_light(package: str) -> None:
    code = f"import sys, {package}; print(sorted({{'torch', 'gymnasium', 'zmq', 'tyro'}} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["rollout_service", "learner"])
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = importlib.import_module(package).no_such_name
