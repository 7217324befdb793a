"""Where runs are not supported every command that would start one says so at once, and what to use instead."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollout_service.cli import main
from rollout_service.launch import serial, settings, train  # noqa: F401  while the platform is what it is

TINY = ["--num-actors", "1", "--envs-per-actor", "1", "--num-steps", "8", "--total-steps", "8", "--run-dir", "run"]


@pytest.mark.parametrize("platform", ["win32", "darwin"])
@pytest.mark.parametrize("words", [["train"], ["train", "--serial"], ["serve"]], ids=" ".join)
def test_a_run_stops_before_it_starts_and_says_what_to_use(
    words: list[str],
    platform: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", platform)
    assert main([*words, *TINY]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"this is {platform}" in said
    assert all(word in said for word in ("need Linux", "container", "WSL 2"))
    assert list(tmp_path.iterdir()) == []
