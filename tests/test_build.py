"""The compiled part is optional: with a compiler it is built and works, without one the build goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("setuptools", "77")


def build(tree: Path, compiler: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    """Builds the extension in a copy of what it is built from; the result, and what came out."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "learner/_single_pass.c", "learner/__init__.py"):
        (tree / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
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
    assert 'building extension "learner._single_pass" failed' in ran.stderr
    assert built == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_with_one_it_compiles_without_a_warning_and_fits_every_later_python(tmp_path: Path) -> None:
    ran, built = build(tmp_path, "cc -Wall -Wextra -Werror")
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in built] == ["_single_pass.abi3.so"], ran.stderr
    answer = subprocess.run(
        [sys.executable, "-c", "import _single_pass; print(callable(_single_pass.estimate))"],
        cwd=built[0].parent,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert answer.stdout.strip() == "True", answer.stderr
