"""The GPU script on a machine without a GPU: what it says, and that its parts run and are kept apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bench import gpu, gpu_checks, gpu_runs, gpu_timings, gpu_uploads
from bench.gpu import FAILED, PASSED, SKIPPED, Group, Result
from bench.gpu_checks import CheckFailed, require

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_names_what_it_skips_and_why_and_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--results", str(tmp_path)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"no GPU here: torch {torch.__version__} is built for the CPU only; ")
    assert len(rest) == sum(len(group.parts) for group in gpu.groups().values())
    assert all(text.startswith("skipped ") for text in rest)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "check",
    [
        gpu_checks.vtrace_scan, gpu_checks.gae_scan, gpu_uploads.device_batch, gpu_uploads.registration,
        gpu_uploads.beside_the_host, gpu_uploads.zero_length_field, gpu_uploads.refused_range,
    ],
)  # fmt: skip
def test_checks_hold_on_a_cpu_too(check: Any) -> None:
    figures = check(CPU)
    assert all(value < 1e-9 for name, value in figures.items() if name == "relative_error")
    assert figures.get("pinned_mib", 0.0) == 0.0


def test_the_network_and_the_ratio_law_hold_on_a_cpu_too() -> None:
    errors = gpu_checks.lstm_sequence(CPU, rows=4, steps=12, hidden_dim=8)
    assert errors["forward_error"] < 1e-6
    assert gpu_checks.ratio_law(CPU, updates=2)["ratio_deviation"] < 1e-4


def test_timings_have_their_figures() -> None:
    figures = gpu_timings.staging_times(CPU, 2, 8)
    assert figures["uploaded_mib"] == pytest.approx(2 * 8 * (64 * 4 + 8 + 3 * 4 + 3 + 4) / 2**20)
    assert {"upload_pageable_ms", "upload_pinned_ms", "gae_ms", "batch_ms", "all_here_ms"} <= figures.keys()
    assert gpu_timings.update_times(CPU, 4, 8, beside_cpu=False)["update_ms"] > 0.0


def test_a_process_without_the_drivers_memory_device_holds_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    own = psutil.Process()
    assert not gpu_runs.holds_context(own)
    with open("/dev/null"):
        monkeypatch.setattr(gpu_runs, "CONTEXT_DEVICE", "/dev/null")
        assert gpu_runs.holds_context(own)


def fails(device: torch.device) -> dict[str, float]:
    require(False, f"on {device} it does not hold")
    return {}


def test_a_part_that_fails_is_a_result_and_says_why() -> None:
    result = gpu.do_part("numbers", "a part", fails, CPU)
    assert result.status == FAILED
    assert "CheckFailed: on cpu it does not hold" in result.reason
    assert "on cpu it does not hold" in gpu.line(result)
    with pytest.raises(CheckFailed):
        fails(CPU)


def python(code: str, monkeypatch: pytest.MonkeyPatch, limit_s: float = 30.0, left_s: float = 40.0) -> list[Result]:
    """The results of a group of two parts whose process runs this code instead."""
    popen = gpu.subprocess.Popen
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda _, **rest: popen([sys.executable, "-c", code], **rest))
    group = Group(limit_s, {"one": fails, "two": fails})
    return gpu.in_a_process("numbers", group, CPU, small=True, left_s=left_s)


DONE = json.dumps({"group": "numbers", "part": "one", "status": PASSED, "seconds": 1.0, "figures": {"a": 2.0}})


def test_a_group_that_crashes_keeps_what_it_had_and_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import sys; print('noise'); print({DONE!r}, flush=True); sys.exit('illegal address')"
    first, second = python(code, monkeypatch)
    assert first == Result("numbers", "one", PASSED, 1.0, {"a": 2.0})
    assert (second.part, second.status) == ("two", FAILED)
    assert second.reason == "its process ended with exit code 1: illegal address"


def test_a_group_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import threading; print({DONE!r}, flush=True); threading.Event().wait()"
    first, second = python(code, monkeypatch, limit_s=1.0)
    assert first.status == PASSED
    assert second.status == FAILED
    assert second.reason.startswith("its process took longer than 1 s: ")
    assert "KeyboardInterrupt" in second.reason


def test_a_group_that_the_scripts_time_ends_before_its_own_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import threading; print({DONE!r}, flush=True); threading.Event().wait()"
    first, second = python(code, monkeypatch, left_s=1.0)
    assert (first.status, second.status) == (PASSED, SKIPPED)
    assert second.reason.startswith("its process took longer than 1 s: ")


def test_groups_whose_turn_comes_too_late_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    results = gpu.measure(CPU, small=True, budget_s=0.0)
    assert {result.status for result in results} == {SKIPPED}
    assert {result.reason for result in results} == {"the 0 s were over"}
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(results)


def test_results_are_kept_as_json_and_as_a_table(tmp_path: Path) -> None:
    results = [
        Result("timings", "update", PASSED, 2.0, {"update_ms": 12.5, "a_to_b": 0.5, "a_to_b_low": 0.4}),
        Result("uploads", "pinned", FAILED, reason="one\ntwo"),
    ]
    gpu.keep(results, {"gpu": "none"}, tmp_path)
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["machine"] == {"gpu": "none"}
    assert kept["parts"][0]["figures"]["a_to_b_low"] == 0.4
    page = (tmp_path / "gpu.md").read_text()
    assert "| passed | timings | update | 2.0 | update_ms 12.5, a_to_b 0.5 |" in page
    assert "| failed | uploads | pinned | 0.0 | one two |" in page
