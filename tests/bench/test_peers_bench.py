"""The comparison with peers: turns, ratios, and that missing and broken peers are said. No peer is needed here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rollout_service.bench import peers, runners
from rollout_service.bench.peers import LOCKSTEP, STREAMING, Measured, Setting, measure
from rollout_service.bench.report import plain
from rollout_service.bench.timing import Figures
from rollout_service.bench.train import Case
from rollout_service.bench.windows import Mark
from rollout_service.cli import main
from rollout_service.errors import ConfigError, RunFailed
from rollout_service.launch.settings import parse_train

ANSWERS = """
print('SIDE {"version": "puf 9", "settings": "quick"}')
for number in range(6):
    print('MARK {"time": %f, "env_steps": %d}' % (number * 1.0, number * 500), flush=True)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Gives a peer's environment an interpreter that runs our program instead of its runner."""
    monkeypatch.setenv(runners.HOME_VARIABLE, str(tmp_path))

    def do(peer: str, program: str) -> None:
        script = tmp_path / f"{peer}.py"
        script.write_text(program)
        python = tmp_path / peer / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
        python.chmod(0o755)

    return do


@pytest.fixture
def our_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Our runs take no time: streaming makes 1000 steps a second, lockstep 800. Gives their names, in order."""
    ran: list[str] = []

    def watched(case: Case, seconds: float) -> tuple[list[Mark], Figures]:
        ran.append(case.name.partition(" ")[0])
        rate = 1000 if case.max_policy_lag else 800
        return [Mark(float(number), number * rate) for number in range(6)], {"learner_update_share": 0.75}

    monkeypatch.setattr(peers, "watched", watched)
    return ran


def test_sides_take_turns_and_every_ratio_is_to_a_neighbour(install, our_runs) -> None:
    install("puf", ANSWERS)
    (report,) = measure(["puf", "sb3"], envs=["cartpole"], sizes=[16], parts=["speed"])
    assert our_runs == [STREAMING, STREAMING, STREAMING, LOCKSTEP, STREAMING], "two trials, then the round"
    figures = report.cases["cartpole, 16 envs"]
    assert figures["pufferlib_steps_per_s"] == 500.0
    assert figures["streaming_over_pufferlib_times"] == 2.0
    assert figures["streaming_over_lockstep_times"] == 1.25
    assert figures["lockstep_over_fastest_peer_times"] == 1.6
    assert figures["streaming_learner_update_share"] == 0.75
    shown = plain(report)
    assert "PufferLib: puf 9, quick" in shown
    assert "not installed: sb3-contrib (sb3); bench/peers/install.sh NAME" in shown


def test_streaming_takes_the_number_of_actors_that_is_faster_in_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(case: Case, seconds: float) -> tuple[list[Mark], Figures]:
        return [Mark(float(number), number * 100 * case.num_actors) for number in range(6)], {}

    monkeypatch.setattr(peers, "watched", watched)
    assert peers.fastest(Setting("null", 16), (1, 4, 2)) == 4
    assert peers.fastest(Setting("null", 16), (2,)) == 2


def test_a_peer_that_breaks_is_said_with_its_last_words(install, our_runs) -> None:
    install("puf", "raise SystemExit('no such thing')")
    (report,) = measure(["puf"], envs=["null"], sizes=[16], parts=["speed"])
    assert "PufferLib broke: no such thing" in plain(report)
    assert not any("pufferlib" in name for name in report.cases["null, 16 envs"])


def test_what_a_peer_started_ends_with_its_turn(install, tmp_path: Path) -> None:
    install(
        "sb3",
        f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True,
                         stdout=subprocess.DEVNULL)
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
{ANSWERS}
print(end="", flush=True)
sys.stdout.close()
import os; os.close(1)
child.wait()
""",
    )
    heard = runners.run_peer("sb3", "null", 16, 1.0)
    assert (heard.version, len(heard.marks)) == ("puf 9", 6)
    left = psutil.pid_exists(pid := int((tmp_path / "pid").read_text())) and psutil.Process(pid)
    assert not left or left.status() == psutil.STATUS_ZOMBIE


def test_a_peer_that_is_not_there_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runners.HOME_VARIABLE, str(tmp_path))
    with pytest.raises(RunFailed, match=r"RLlib is not installed; .*install\.sh rllib"):
        runners.run_peer("rllib", "null", 16, 1.0)


def test_our_runs_have_the_sizes_of_the_comparison_in_both_modes() -> None:
    for mode, lag in ((STREAMING, 1), (LOCKSTEP, 0)):
        config = parse_train(Setting("null", 64).case(mode, 2).words()[1:])
        assert isinstance(config.num_actors, int)
        assert (config.env, config.num_actors * config.envs_per_actor) == ("peer_envs:make_null", 64)
        assert (config.hidden_dim, config.encoder_dim, config.num_steps, config.epochs) == (128, 64, 128, 4)
        assert (config.envs_per_minibatch, config.learning_rate, config.max_policy_lag) == (16, 2.5e-4, lag)


def test_the_fastest_peer_is_the_one_with_the_lowest_ratio() -> None:
    found = Measured(rates={STREAMING: [10.0], "puf": [5.0], "sf": [2.0]}, ratios={"puf": [2.0, 2.2, 2.4], "sf": [5.0]})
    assert found.figures()["streaming_over_fastest_peer_times"] == 2.2


def test_the_command_keeps_both_files_and_prints_one_document(
    install, our_runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("puf", ANSWERS)
    results = tmp_path / "results"
    words = ["--only", "puf", "--env", "null", "--envs", "16", "--part", "speed", "--json", "--results", str(results)]
    assert main(["bench", "peers", *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    kept = json.loads((results / "peers.json").read_text())
    assert printed["subjects"] == kept["subjects"]
    assert kept["command"] == " ".join(["rollout-service bench peers", *words])
    page = (results / "peers.md").read_text()
    assert kept["date"] in page
    assert "| streaming over pufferlib | 2.00x |" in page


@pytest.mark.parametrize(
    ("keywords", "needle"),
    [
        ({"repetitions": 0}, "repetitions is 0"),
        ({"seconds": 0.0}, "seconds 0"),
        ({"sizes": [18]}, "18 envs"),
        ({"actors": [0]}, "actors is 0"),
        ({"actors": [3]}, "multiple of 12"),
    ],
)
def test_wrong_numbers_are_refused_before_anything_runs(keywords: dict, needle: str) -> None:
    with pytest.raises(ConfigError, match=needle):
        measure(["puf"], **keywords)


def test_nothing_tuned_for_another_blas_reaches_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    from rollout_service.bench.whole_run import ROOT, environment

    found = environment({"PYTHONPATH": "/somewhere"})
    assert "OPENBLAS_CORETYPE" not in found
    assert found["PYTHONPATH"].split(os.pathsep)[:2] == ["/somewhere", str(ROOT)]
