"""The container files agree with each other and with the programs: one owner of memory, one user, one socket.

Nothing is built or started here; what can be known without Docker is checked.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rollout_service.cli import COMMANDS
from rollout_service.control.endpoints import SOCKET_DIR_VARIABLE, check_endpoint
from rollout_service.launch.ending import PATIENCE
from rollout_service.launch.settings import parse_serve
from rollout_service.launch.status import RunStatus

ROOT = Path(__file__).parent.parent
SCHEMA = Path(__file__).parent / "data" / "compose_schema.json"
SERVE = "serve"


def compose(**variables: str) -> dict[str, Any]:
    """docker-compose.yml with its `${NAME:-default}` filled in, as Compose does before it reads the file."""
    text = (ROOT / "docker-compose.yml").read_text()
    loaded: dict[str, Any] = yaml.safe_load(
        re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1], found[2]), text)
    )
    return loaded


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, arguments), continuation lines joined, comments dropped."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(words[0], words[1].strip()) for line in joined.splitlines() if len(words := line.split(maxsplit=1)) == 2]


def arguments_of(instruction: str) -> list[str]:
    return [arguments for name, arguments in instructions() if name == instruction]


SERVICES: dict[str, dict[str, Any]] = compose()["services"]
OWNERS = [name for name, service in SERVICES.items() if service["ipc"] == "shareable"]
GUESTS = [name for name in SERVICES if name not in OWNERS]
OWNER = OWNERS[0]
ENTRYPOINT: list[str] = json.loads(arguments_of("ENTRYPOINT")[0])


def words_of(service: Mapping[str, Any]) -> list[str]:
    """What runs in a container of this service, from the program on."""
    return [*service.get("entrypoint", ENTRYPOINT), *service["command"]]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def mounts(service: Mapping[str, Any]) -> dict[str, str]:
    """Volume -> where it is mounted."""
    return dict(mount.split(":")[:2] for mount in service["volumes"])


# docker-compose.yml


def test_the_file_follows_the_compose_format_and_uses_nothing_else():
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(compose())
    assert set(mounts(SERVICES[OWNER])) == set(compose()["volumes"])


def test_one_container_owns_the_shared_memory_and_all_others_join_it():
    assert len(OWNERS) == 1
    assert {SERVICES[name]["ipc"] for name in GUESTS} == {f"service:{OWNER}"}
    assert [name for name, service in SERVICES.items() if "shm_size" in service] == OWNERS


def test_all_roles_share_one_socket_in_one_volume_and_its_endpoint_is_short_enough():
    endpoints = {option(words_of(SERVICES[name]), "--connect") for name in GUESTS}
    endpoints.add(option(words_of(SERVICES[OWNER]), "--endpoint"))
    assert len(endpoints) == 1
    endpoint = endpoints.pop()
    check_endpoint(endpoint, allow_tcp=False)
    directory = str(Path(endpoint.removeprefix("ipc://")).parent)
    assert {mounts(service)["socket"] for service in SERVICES.values()} == {directory}
    assert {service["environment"][SOCKET_DIR_VARIABLE] for service in SERVICES.values()} == {directory}


def test_all_roles_run_as_the_user_of_the_image_and_it_is_not_root():
    uid = re.search(r"useradd --uid (\d+)", " ".join(arguments_of("RUN")))
    assert uid is not None
    assert {service["user"] for service in SERVICES.values()} == {f"{uid[1]}:{uid[1]}"}
    assert uid[1] != "0"


def test_every_container_has_an_init_and_longer_to_stop_than_a_run_needs():
    longest = max(patience.kill_s for patience in PATIENCE.values())
    for service in SERVICES.values():
        assert service["init"] is True
        assert float(service["stop_grace_period"].removesuffix("s")) > longest


def test_guests_wait_until_the_service_answers():
    assert SERVICES[OWNER]["healthcheck"]["test"][0] == "CMD-SHELL"
    assert {json.dumps(SERVICES[name]["depends_on"]) for name in GUESTS} == {
        json.dumps({OWNER: {"condition": "service_healthy"}})
    }


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_profile_has_the_service_one_learner_and_actors(profile: str):
    programs = [words_of(service)[:3] for service in SERVICES.values() if profile in service["profiles"]]
    assert sorted(programs) == [
        ["python", "-m", "learner"],
        ["python", "-m", "workers"],
        [*ENTRYPOINT, SERVE, "--endpoint"],
    ]


def test_only_the_learner_of_the_gpu_profile_asks_for_a_gpu_and_for_torch_with_cuda():
    asking = [name for name, service in SERVICES.items() if "resources" in service.get("deploy", {})]
    with_cuda = [
        name for name, service in SERVICES.items() if service["build"].get("args", {}).get("TORCH_INDEX") == ""
    ]
    assert asking == with_cuda == [name for name, service in SERVICES.items() if service["profiles"] == ["gpu"]]
    images = {service["image"] for name, service in SERVICES.items() if name not in with_cuda}
    assert len(images) == 1
    assert images.isdisjoint(SERVICES[name]["image"] for name in with_cuda)


@pytest.mark.parametrize("actors", ["2", "7"])
def test_there_are_as_many_actor_containers_as_the_service_expects(actors: str):
    services = compose(ROLLOUT_ACTORS=actors)["services"]
    assert services["actor"]["deploy"]["replicas"] == int(actors)
    assert option(services[OWNER]["command"], "--num-actors") == actors


def test_service_and_learner_write_into_one_run_directory_that_is_kept():
    services = compose(ROLLOUT_RUN="mine")["services"]
    assert option(services[OWNER]["command"], "--run-dir") == "runs/mine"
    writers = [name for name, service in services.items() if words_of(service)[:3] != ["python", "-m", "workers"]]
    assert {mounts(services[name])["runs"] for name in writers} == {f"{arguments_of('WORKDIR')[-1]}/runs"}
    assert [name for name, service in services.items() if "runs" in mounts(service)] == writers


def test_every_variable_of_the_file_is_explained_with_its_default():
    text = (ROOT / "docker-compose.yml").read_text()
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    in_the_file = dict(re.findall(r"^#     (ROLLOUT_\w+) .*?\(([^()]+)\)", text, re.MULTILINE))
    in_the_docs = re.findall(
        r"^\| `(ROLLOUT_\w+)` \| (\S+) \|", (ROOT / "docs" / "running.md").read_text(), re.MULTILINE
    )
    assert in_the_file.keys() == used.keys()
    assert dict(in_the_docs) == used


class BehindTheParser(Exception):
    """The words were understood."""


@pytest.mark.parametrize("name", GUESTS)
def test_learner_and_actor_understand_their_commands(name: str, monkeypatch: pytest.MonkeyPatch):
    import learner.__main__
    import workers.__main__

    understand = argparse.ArgumentParser.parse_args

    def stop_behind(parser: argparse.ArgumentParser, *given: Any) -> None:
        understand(parser, *given)
        raise BehindTheParser

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop_behind)
    python, _, module, *words = words_of(SERVICES[name])
    assert python == "python"
    main = {"learner": learner.__main__.main, "workers": workers.__main__.main}[module]
    with pytest.raises(BehindTheParser):
        main(words)
    with pytest.raises(SystemExit):
        main([*words, "--no-such-option"])


def test_the_service_understands_its_command():
    program, command, *words = words_of(compose(ROLLOUT_ACTORS="3", ROLLOUT_PRESET="recall")["services"][OWNER])
    assert (program, command) == ("rollout-service", SERVE)
    assert SERVE in COMMANDS
    config, door = parse_serve(words)
    assert (config.num_actors, config.env, str(config.run_dir)) == (3, "Memory/Recall-v0", "runs/compose")
    assert (door.endpoint, door.allow_tcp) == ("ipc:///run/rollout/service.sock", False)


# Dockerfile


def test_the_image_starts_the_program_itself_as_an_ordinary_user():
    assert ENTRYPOINT == ["rollout-service"]
    assert json.loads(arguments_of("CMD")[0]) == ["--help"]
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert arguments_of("USER") == ["rollout"]
    assert arguments_of("STOPSIGNAL") == ["SIGTERM"]


def test_every_installation_in_the_image_keeps_to_the_constraints():
    installs = [arguments for arguments in arguments_of("RUN") if "pip install" in arguments]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in arguments for arguments in installs)


def test_what_the_image_copies_exists_and_is_sent_to_the_build():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copies = [arguments for arguments in arguments_of("COPY") if not arguments.startswith("--from=")]
    sources = [word for arguments in copies for word in shlex.split(arguments)[:-1]]
    assert sorted(sources) == sorted(kept)
    assert all((ROOT / source).exists() for source in sources)
    assert not any(fnmatch.fnmatch(secret, pattern) for secret in (".git", "runs", ".venv") for pattern in kept)


def health_commands() -> list[str]:
    return [SERVICES[OWNER]["healthcheck"]["test"][1], arguments_of("HEALTHCHECK")[0].partition("CMD ")[2]]


@pytest.mark.parametrize("command", health_commands())
@pytest.mark.parametrize(("report", "healthy"), [({"state": "running"}, True), (None, False)])
def test_a_container_is_healthy_once_a_run_answers(command: str, report: dict[str, Any] | None, healthy: bool):
    program, _, test = command.partition(" | ")
    assert program.split()[0] == "rollout-service"
    assert program.split()[1] in COMMANDS
    run = RunStatus("0" * 16, "/runs/compose", 7, "ipc:///run/rollout/service.sock", 1.0, 1024, report)
    for runs, expected in (([run.to_json()], healthy), ([], False)):
        shown = json.dumps({"runs": runs})
        assert (subprocess.run(["sh", "-c", test], input=shown, text=True, check=False).returncode == 0) is expected
