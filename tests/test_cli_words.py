"""The command line reads words into settings: precedence, one-line complaints, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_service.cli import main
from rollout_service.config import Core, TrainConfig
from rollout_service.errors import ConfigError
from rollout_service.launch.rundir import to_toml
from rollout_service.launch.settings import key_values, parse_train
from tests.fixtures.machine import environment


def test_stronger_sources_win_and_weaker_ones_fill_in(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text("num_steps = 64\nseed = 7\n[env_kwargs]\ncorridor = 12\n")
    config = parse_train(["--preset", "tmaze", "--config", str(file), "--seed", "9"])
    assert (config.chrono_max, config.num_steps, config.seed) == (128.0, 64, 9)
    assert config.env_kwargs == {"corridor": 12}
    assert parse_train([]) == TrainConfig()


def test_env_arguments_are_merged_key_by_key_for_the_same_env_only():
    assert parse_train(["--preset", "tmaze", "--env-kwargs", "x=1.5"]).env_kwargs == {"corridor": 20, "x": 1.5}
    other = parse_train(["--preset", "tmaze", "--env", "CartPole-v1", "--env-kwargs", "a=1"])
    assert other.env_kwargs == {"a": 1}


def test_env_arguments_are_json_where_they_are_json():
    words = ["a=3", "b=0.5", "c=true", "d=null", "e=[1, 2]", "f=plain text", "g=x=y"]
    expected = {"a": 3, "b": 0.5, "c": True, "d": None, "e": [1, 2], "f": "plain text", "g": "x=y"}
    assert key_values(words) == expected


def test_settings_that_only_fit_together_are_checked_after_merging(tmp_path: Path):
    file = tmp_path / "half.toml"
    file.write_text("envs_per_forward = 4\nenvs_per_actor = 6\n")
    assert parse_train(["--config", str(file), "--envs-per-actor", "12"]).rows_per_forward == 4


def test_the_words_for_switches_enums_and_unset_values():
    config = parse_train(
        [
            "--core",
            "none",
            "--num-actors",
            "auto",
            "--json",
            "--no-tensorboard",
            "--target-kl",
            "None",
            "--value-clip-range",
            "0.1",
        ]
    )
    assert (config.core, config.num_actors, config.json_output, config.tensorboard) == (Core.NONE, "auto", True, False)
    assert (config.target_kl, config.value_clip_range) == (None, 0.1)


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["--num-steps", "0"], "num_steps is 0"),
        (["--num-steps", "many"], "--num-steps"),
        (["--num-step", "3"], "--num-step"),
        (["--core", "gru"], "gru"),
        (["--preset", "nope"], "tmaze"),
        (["--env-kwargs", "corridor"], "key=value"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--num-actors", "2", "--total-steps", "100"], "total_steps 100 is less than one rollout of 2048"),
        (["--resume"], "run_dir"),
        (["--resume", "--run-dir", "not-there"], "nothing to resume"),
        (["--envs-per-actor", "6", "--envs-per-forward", "4"], "envs_per_forward 4 does not divide envs_per_actor 6"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], needle: str, capsys: pytest.CaptureFixture[str]):
    assert main(["train", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert needle in err
    assert "Traceback" not in err


def test_an_unknown_setting_in_a_file_is_named(tmp_path: Path):
    file = tmp_path / "odd.toml"
    file.write_text("learning_rat = 1\n")
    with pytest.raises(ConfigError, match="learning_rat"):
        parse_train(["--config", str(file)])


def test_a_saved_configuration_reads_back_the_same(tmp_path: Path):
    config = parse_train(
        ["--preset", "flickering", "--env-kwargs", 'text="a\\"b"', "list=[1,2.5]", 'table={"x y":true}', "--seed", "3"]
    )
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert parse_train(["--config", str(file)]) == config


@pytest.mark.filterwarnings("error")
def test_a_wrong_value_in_a_file_names_file_and_setting(tmp_path: Path):
    file = tmp_path / "wrong.toml"
    file.write_text('num_steps = "many"\n')
    with pytest.raises(ConfigError, match=r"wrong\.toml: num_steps is 'many'"):
        parse_train(["--config", str(file)])
    file.write_text('core = "none"\n')
    assert parse_train(["--config", str(file)]).core is Core.NONE


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]):
    assert main(["trian"]) == 2
    assert "train, serve, eval, status, clean, envs" in capsys.readouterr().err


def test_envs_lists_tasks_and_presets(capsys: pytest.CaptureFixture[str]):
    assert main(["envs"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("Memory/TMaze-v0", "Memory/Recall-v0", "position", "corridor=20"))


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "pwd", "resource", "grp", "_posixshmem"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
for name in ("fcntl", "pwd", "resource", "grp"):
    sys.modules.pop(name, None)
import rollout_service
from rollout_service.cli import main
assert main(["--help"]) == 0
try:
    main(["train", "--help"])
except SystemExit as leaving:
    assert leaving.code in (0, None)
assert main(["envs"]) == 0
assert "torch" not in sys.modules
print("ANSWER", main(["train", "--preset", "tmaze"]))
"""


def test_help_works_where_unix_modules_are_missing_and_a_run_is_refused_in_one_line():
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout.strip().endswith("ANSWER 2"), ran.stderr
    assert "fcntl" in ran.stderr
    assert ran.stderr.count("\n") == 1


LIGHT = """
import sys
from rollout_service.cli import main
main(["--help"]); main(["status"]); main(["status", "--json"]); main(["clean", "--dry-run"])
try:
    main(["train", "--help"])
except SystemExit:
    pass
import rollout_service.launch.train
print("HEAVY", sorted({"torch", "gymnasium", "tensorboard"} & set(sys.modules)))
"""


def test_help_and_status_and_the_parent_of_a_run_never_import_torch():
    ran = subprocess.run(
        [sys.executable, "-c", LIGHT], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout.strip().endswith("HEAVY []"), ran.stdout + ran.stderr
    assert "Seconds an env.step or reset may take" in ran.stdout
    assert "(default: 10)" in ran.stdout


def test_status_without_a_run_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout_service.launch.status.list_segments", list)
    assert main(["status"]) == 0
    assert "no run" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}


@pytest.mark.parametrize("words", [("--help",), ("status",), ("status", "--json"), ("bench", "--help")])
def test_a_quick_command_imports_nothing_slow(words: tuple[str, ...]):
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rollout_service", *words],
        env=environment(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines() if line.startswith("import time:")}
    assert "rollout_service.cli" in imported
    assert not imported & {"torch", "gymnasium", "tensorboard", "tyro", "rich", "matplotlib"}


def test_a_result_that_a_full_disk_does_not_take_is_no_success(tmp_path: Path):
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "rollout_service", "status", "--json"],
            cwd=tmp_path,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1), ran.stderr
    assert "the result could not be written to standard output: No space left on device" in ran.stderr


def test_a_complaint_that_a_full_disk_does_not_take_changes_no_exit_code(tmp_path: Path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "rollout_service", "train", "--nonsense"]
        assert subprocess.run(command, cwd=tmp_path, env=environment(), stderr=full, check=False).returncode == 2
