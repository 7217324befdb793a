"""The compiled parts are optional: with a compiler they are built and work, without one the build goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("learner", "rollout_service", "rollout_service/policy")
pytest.importorskip("setuptools", "77")


def build(tree: Path, compiler: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    """Builds the extensions in a copy of what they are built from; the result, and what came out."""
    sources = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).glob("_*.[ch]")]
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", *sources):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    for package in PACKAGES:
        (tree / package / "__init__.py").touch()
    ran = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", "out", "--force"],
        cwd=tree,
        env=os.environ | {"CC": compiler},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return ran, sorted((tree / "out").rglob("*.so"))


def test_without_a_compiler_the_installation_goes_on_without_it(tmp_path: Path) -> None:
    ran, built = build(tmp_path, "no-such-compiler")
    assert ran.returncode == 0, ran.stderr
    for module in ("learner._single_pass", "rollout_service.policy._layers"):
        assert f'building extension "{module}" failed' in ran.stderr
    assert built == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_with_one_it_compiles_without_a_warning_and_fits_every_later_python(tmp_path: Path) -> None:
    ran, built = build(tmp_path, "cc -Wall -Wextra -Werror")
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in built] == ["_single_pass.abi3.so", "_layers.abi3.so"], ran.stderr
    for path, code in zip(
        built,
        ("callable(_single_pass.estimate)", "_layers.supported() <= hasattr(_layers, 'lstm_forward')"),
        strict=True,
    ):
        answer = subprocess.run(
            [sys.executable, "-c", f"import {path.name.partition('.')[0]}; print({code})"],
            cwd=path.parent,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert answer.stdout.strip() == "True", answer.stderr
