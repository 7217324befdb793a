"""`doctor` says what this machine lacks, never by failing itself, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from learner import single_pass
from rollout_service.control.endpoints import SOCKET_DIR_VARIABLE
from rollout_service.errors import RolloutServiceError, SegmentTooLarge
from rollout_service.launch import doctor
from rollout_service.launch.cpu import UsableCores
from rollout_service.launch.doctor import Check, Verdict
from rollout_service.policy import compiled
from tests.fixtures.machine import environment, run_command

Usage = namedtuple("Usage", "total used free")
TORCH = {"version": "2.9.0", "threads": 1, "cuda_build": None, "devices": []}


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch):
    """Two cores, and a torch that answers at once."""
    monkeypatch.setattr(doctor, "usable_cores", lambda: UsableCores(2, "for the test"))
    monkeypatch.setattr(doctor, "ask_torch", lambda: TORCH)


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


# What is looked at


def test_a_machine_that_runs_this_suite_has_no_problem():
    checks = doctor.examine()
    assert [check for check in checks if check.verdict is Verdict.PROBLEM] == []
    assert [check.name for check in checks] == list(doctor.CHECKS)
    found = {check.name: check.found for check in checks}
    assert "numpy" in found["libraries"]
    assert "gymnasium" in found["libraries"]
    assert "can be made and locked" in found["shared memory"]
    assert "at most 100 fit" in found["sockets"]
    assert "num_actors auto is 2" in found["cores"]


def test_torch_is_asked_in_a_child_so_that_the_parent_stays_light():
    code = (
        "import sys; from rollout_service.launch.doctor import main; code = main(['--json']); "
        "print('ANSWER', code, sorted({'torch', 'gymnasium'} & set(sys.modules)))"
    )
    ran = run_code(code)
    report, answer = ran.stdout.strip().splitlines()
    assert answer == "ANSWER 0 []", ran.stderr
    fields = json.loads(report)
    torch = next(check for check in fields["checks"] if check["name"] == "torch")
    assert set(torch) == {"name", "verdict", "found", "remedy"}
    assert "1 threads" in torch["found"]


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "pwd", "resource"}:
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Block())
for name in ("fcntl", "pwd", "resource"):
    sys.modules.pop(name, None)
from rollout_service.cli import main
print("ANSWER", main(["doctor"]))
"""


def test_where_unix_modules_are_missing_it_says_which_and_what_that_means():
    ran = run_code(BLOCKED)
    *lines, answer = ran.stdout.strip().splitlines()
    assert answer == "ANSWER 1", ran.stderr
    assert ran.stderr == ""
    platform = next(line for line in lines if " platform " in line)
    assert platform.startswith("problem")
    assert "without the modules fcntl, resource, pwd" in platform
    assert any("runs need Linux" in line for line in lines)
    assert next(line for line in lines if " open files " in line).startswith("problem")
    assert next(line for line in lines if " libraries " in line).startswith("ok")


@pytest.mark.parametrize("built", [True, False])
def test_it_says_whether_the_compiled_pass_is_there(built: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(single_pass, "BUILT", built)
    monkeypatch.setattr(compiled, "BUILT", True)
    verdict, found, remedy = doctor.check_compiled()
    assert verdict is Verdict.OK
    assert ("numpy" in found) is not built
    assert ("C compiler" in remedy) is not built


@pytest.mark.parametrize(
    ("built", "usable", "words"),
    [(True, True, "compiled layer"), (True, False, "AVX-512"), (False, False, "not built")],
)
def test_it_says_which_lstm_is_used(built: bool, usable: bool, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(single_pass, "BUILT", True)
    monkeypatch.setattr(compiled, "BUILT", built)
    monkeypatch.setattr(compiled, "USABLE", usable)
    verdict, found, remedy = doctor.check_compiled()
    assert verdict is Verdict.OK
    assert words in found
    assert ("torch's LSTM" in found) is not usable
    assert ("C compiler" in remedy) is not built


def test_the_command_is_one_of_the_program(tmp_path: Path):
    ran = run_command("doctor", "--help", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "--json" in ran.stdout


@pytest.mark.parametrize(
    ("free_mib", "verdict"), [(63, Verdict.WARNING), (255, Verdict.WARNING), (256, Verdict.OK), (4096, Verdict.OK)]
)
def test_a_small_shared_memory_is_a_warning_with_the_docker_option(
    free_mib: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free_mib << 20))
    came_to, found, remedy = doctor.check_shared_memory()
    assert came_to is verdict
    assert f"{free_mib / 1024:.1f} GiB" in found or f"{free_mib:.1f} MiB" in found
    assert ("--shm-size" in remedy) is (verdict is Verdict.WARNING)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SegmentTooLarge("no room"), "too little for anything"),
        (PermissionError(13, "Permission denied"), "no segment can be made: Permission denied"),
    ],
)
def test_a_shared_memory_that_takes_no_segment_is_a_problem(
    error: OSError, words: str, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*unused: object, **unused_too: object) -> None:
        raise error

    monkeypatch.setattr("rollout_service.memory.segment.Segment.create", refuse)
    verdict, found, remedy = doctor.check_shared_memory()
    assert verdict is Verdict.PROBLEM
    assert words in found
    assert remedy != ""


def test_too_few_open_files_for_an_actor_per_core_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 70))
    assert doctor.check_open_files() == (
        Verdict.WARNING,
        "up to 70 per process, room for about 1 actors",
        "raise the hard limit: ulimit -n 4096 as root, docker run --ulimit nofile=4096",
    )
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 72))
    assert doctor.check_open_files()[0] is Verdict.OK


def test_a_socket_directory_whose_path_is_too_long_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setenv(SOCKET_DIR_VARIABLE, str(deep))
    check = next(check for check in doctor.examine() if check.name == "sockets")
    assert check.verdict is Verdict.PROBLEM
    assert "the limit is 100; choose a shorter directory" in check.found


def test_leftovers_of_a_dead_run_are_named_and_left_alone():
    code = (
        "import os; from rollout_service.memory.segment import Segment; segment = Segment.create(64, kind='rollout'); "
        "segment.mark_ready(); print(segment.name, flush=True); os._exit(0)"
    )
    name = run_code(code).stdout.strip()
    try:
        verdict, found, remedy = doctor.check_leftovers()
        assert verdict is Verdict.WARNING
        assert f"segment {name}" in found
        assert remedy == "rollout-service clean"
        assert Path("/dev/shm", name).exists()
    finally:
        os.unlink(Path("/dev/shm", name))


def test_more_torch_threads_than_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "ask_torch", lambda: {**TORCH, "threads": 64})
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    verdict, found, remedy = doctor.check_torch()
    assert verdict is Verdict.WARNING
    assert "64 threads" in found
    assert "OMP_NUM_THREADS=2" in remedy


def test_a_gpu_that_torch_cannot_use_is_a_warning_and_one_that_it_can_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    verdict, found, remedy = doctor.check_torch()
    assert verdict is Verdict.WARNING
    assert "this build of torch is for the CPU only" in found
    assert "--gpus all" in remedy
    facts = {**TORCH, "cuda_build": "12.8", "devices": ["Model X", "Model X"]}
    monkeypatch.setattr(doctor, "ask_torch", lambda: facts)
    assert doctor.check_torch() == (Verdict.OK, "2.9.0, 1 threads, CUDA 12.8: Model X, Model X", "")


@pytest.mark.parametrize(
    ("question", "deadline", "words"),
    [
        ("import no_such_module", 30.0, "torch cannot be imported: ModuleNotFoundError: No module named"),
        ("raise SystemExit(7)", 30.0, "torch cannot be imported: exit code 7"),
        ("while True: pass", 0.2, "torch could not be imported within 0.2 s"),
    ],
)
def test_a_torch_that_does_not_answer_is_a_problem(
    question: str, deadline: float, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "TORCH_QUESTION", question)
    monkeypatch.setattr(doctor, "TORCH_DEADLINE_S", deadline)
    with pytest.raises(RolloutServiceError) as raised:
        doctor.ask_torch()
    assert str(raised.value).startswith(words)


def test_too_little_memory_for_the_roles_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout_service.memory.room.available_memory", lambda: 1 << 30)
    monkeypatch.setattr(doctor, "memory_limit", lambda: 2 << 30)
    verdict, found, remedy = doctor.check_memory()
    assert verdict is Verdict.WARNING
    assert "1.0 GiB left of" in found
    assert "the cgroup's limit is 2.0 GiB" in found
    assert "2 actors and a learner take about 1.0 GiB" in remedy


def test_an_old_or_missing_library_is_a_problem_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch):
    versions = {"numpy": "1.25.9", "torch": "2.10.0+cpu", "gymnasium": None}
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(doctor, "_least_versions", lambda: {"numpy": "1.26", "torch": "2.4", "gymnasium": "1.0"})
    verdict, found, remedy = doctor.check_libraries()
    assert verdict is Verdict.PROBLEM
    assert "torch 2.10.0+cpu" in found
    assert remedy == "pip install 'numpy>=1.26' 'gymnasium>=1.0'"


def test_the_strictest_memory_cgroup_counts(tmp_path: Path):
    membership = tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    assert doctor.memory_limit(root=tmp_path, membership=membership) is None
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("3000\n")
    (tmp_path / "memory.max").write_text("5000\n")
    assert doctor.memory_limit(root=tmp_path, membership=membership) == 3000
    membership.write_text("7:memory:/job\n3:cpu:/other\n")
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text("2000\n")
    assert doctor.memory_limit(root=tmp_path, membership=membership) == 2000


# What is said


def replace_checks(monkeypatch: pytest.MonkeyPatch, **findings: tuple[Verdict, str, str]) -> None:
    checks = {name: (lambda finding=finding: finding) for name, finding in findings.items()}
    monkeypatch.setattr(doctor, "CHECKS", checks)


def test_only_a_problem_makes_the_exit_code_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    replace_checks(monkeypatch, one=doctor.ok("fine"), other=doctor.warning("so so", "do this"))
    assert doctor.main([]) == 0
    replace_checks(monkeypatch, one=doctor.ok("fine"), other=doctor.problem("bad", "do that"))
    assert doctor.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["verdict"] == "problem"
    assert report["checks"][1] == {"name": "other", "verdict": "problem", "found": "bad", "remedy": "do that"}


def test_a_check_that_raises_has_found_a_problem(monkeypatch: pytest.MonkeyPatch):
    def broken() -> doctor.Finding:
        raise ZeroDivisionError("nothing to divide")

    monkeypatch.setattr(doctor, "CHECKS", {"odd": broken})
    assert doctor.examine() == [
        Check("odd", Verdict.PROBLEM, "cannot be looked at: ZeroDivisionError: nothing to divide")
    ]


def test_plain_lines_put_what_to_do_under_what_was_found():
    checks = [Check("one", Verdict.OK, "fine"), Check("longer", Verdict.WARNING, "so so", "do this")]
    assert doctor.plain_lines(checks) == [
        "ok       one     fine",
        "warning  longer  so so",
        "                 -> do this",
    ]


def test_on_a_terminal_there_is_a_table():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    doctor.show([Check("one", Verdict.WARNING, "so so [x]", "do this")], terminal)
    text = terminal.getvalue()
    assert all(word in text for word in ("what to do", "one", "warning", "so so [x]", "do this"))
    assert text.count("\n") >= 4
