"""Keys on tcp: who has none, or the wrong one, is refused, counted, and told so; key files are nobody else's."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from rollout_service.cli import main
from rollout_service.control.client import Client
from rollout_service.control.keys import CLIENT_FILE, SERVICE_FILE, Keys, generate
from rollout_service.control.messages import Hello, Role, Status, StatusReport
from rollout_service.control.server import Server
from rollout_service.control.transport import Dealer, Router
from rollout_service.errors import ConfigError, HandshakeRefused, WaitTimedOut
from tests.control.world import make_coordinator, make_spec
from tests.fixtures.machine import eventually

DEADLINE_S = 10.0
ANYWHERE = "tcp://127.0.0.1:*"


@pytest.fixture
def service_keys(tmp_path: Path) -> Keys:
    return Keys.read(generate(tmp_path / "keys")[0])


@pytest.fixture
def client_keys(service_keys: Keys, tmp_path: Path) -> Keys:
    return Keys.read(tmp_path / "keys" / CLIENT_FILE)


def strangers_keys(tmp_path: Path, service: bytes) -> Keys:
    """A key pair that the service was not told of, together with its right public key."""
    path = generate(tmp_path / "strangers")[1]
    return Keys.read(path).model_copy(update={"service": service})


@contextmanager
def serving(keys: Keys) -> Iterator[Server]:
    server = Server(Router(ANYWHERE, allow_tcp=True, keys=keys), make_coordinator(make_spec()))
    server.start()
    try:
        yield server
    finally:
        server.stop()
        server.join()


def connect(server: Server, keys: Keys | None, deadline_s: float = DEADLINE_S) -> Client:
    client = Client(server._router.endpoint, Hello(role=Role.OBSERVER, pid=1), connect_deadline_s=deadline_s, keys=keys)
    try:
        client.connect()
    except BaseException:
        client.close()
        raise
    return client


def refusal(server: Server, keys: Keys | None) -> str:
    """Why the service does not let a client with these keys speak, once that has come back."""

    def told() -> str:
        with pytest.raises((HandshakeRefused, WaitTimedOut)) as refused:
            connect(server, keys, deadline_s=0.5)
        return str(refused.value) if refused.errisinstance(HandshakeRefused) else ""

    found: str = eventually(told, DEADLINE_S, "a refusal")
    return found


def counted(server: Server, name: str) -> int:
    """A counter of the report, once it is there."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if count := server.report()["counters"].get(name, 0):
            return int(count)
    return 0


def test_a_client_with_the_right_key_is_welcome(service_keys: Keys, client_keys: Keys) -> None:
    with serving(service_keys) as server, closing(connect(server, client_keys)) as client:
        assert client.run_id == server.report()["run_id"]
        assert "refused_keys" not in server.report()["counters"]


def test_a_client_with_another_key_is_refused_counted_and_told(
    service_keys: Keys, client_keys: Keys, tmp_path: Path
) -> None:
    with serving(service_keys) as server:
        assert "does not know this client's key" in refusal(server, strangers_keys(tmp_path, service_keys.public))
        refused = counted(server, "refused_keys")
        assert refused >= 1
        with closing(connect(server, client_keys)) as client:
            answer = client.exchange(Status(), StatusReport, resend_every_s=1.0, deadline_s=DEADLINE_S)
            assert answer is not None
            assert answer.report["counters"]["refused_keys"] >= refused, "and whoever asks for the status sees it"


def test_a_client_without_keys_is_refused_and_counted(service_keys: Keys) -> None:
    with serving(service_keys) as server:
        assert "--key-file" in refusal(server, None)
        assert counted(server, "failed_handshakes") >= 1


def test_a_client_does_not_speak_to_a_service_with_another_key(
    service_keys: Keys, client_keys: Keys, tmp_path: Path
) -> None:
    other = Keys.read(generate(tmp_path / "other")[0])
    with serving(service_keys) as server, pytest.raises((HandshakeRefused, WaitTimedOut)):
        connect(server, client_keys.model_copy(update={"service": other.public}), deadline_s=0.5)


def test_tcp_beyond_this_machine_needs_keys(service_keys: Keys) -> None:
    with pytest.raises(ConfigError, match="keygen"):
        Router("tcp://0.0.0.0:*", allow_tcp=True)
    Router("tcp://0.0.0.0:*", allow_tcp=True, keys=service_keys).close()
    with pytest.raises(ConfigError, match="open to every local user"):
        Router("tcp://0.0.0.0:*", keys=service_keys)


def test_the_two_files_cannot_be_mixed_up(service_keys: Keys, client_keys: Keys) -> None:
    with pytest.raises(ConfigError, match="a client's key file, here a service's is needed"):
        Router(ANYWHERE, allow_tcp=True, keys=client_keys)
    with pytest.raises(ConfigError, match="a service's key file, here a client's is needed"):
        Dealer("tcp://127.0.0.1:1", keys=service_keys)


def test_keygen_makes_two_files_for_this_user_alone_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "new"
    assert main(["keygen", str(directory)]) == 0
    shown = capsys.readouterr().out
    for name in (SERVICE_FILE, CLIENT_FILE):
        assert str(directory / name) in shown
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    service, client = (json.loads((directory / name).read_text()) for name in (SERVICE_FILE, CLIENT_FILE))
    assert (service["clients"], client["service"]) == ([client["public"]], service["public"])
    assert client["secret"] not in shown


def test_keygen_replaces_nothing_unless_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = generate(tmp_path)[0]
    before = path.read_text()
    assert main(["keygen", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == before
    assert main(["keygen", str(tmp_path), "--force"]) == 0
    assert path.read_text() != before
    assert sorted(each.name for each in tmp_path.iterdir()) == [CLIENT_FILE, SERVICE_FILE]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = generate(tmp_path)[1]
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        Keys.read(path)


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "client"}', '{"kind": "client", "public": "short"}', "\0"])
def test_what_is_no_key_file_says_so_without_repeating_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "k"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is no key file"):
        Keys.read(path)


def test_a_secret_is_in_no_text(client_keys: Keys, tmp_path: Path) -> None:
    assert client_keys.secret.decode() not in f"{client_keys} {client_keys!r}"
    broken = json.loads((tmp_path / "keys" / CLIENT_FILE).read_text())
    broken["secret"] += "x"
    path = tmp_path / "broken"
    path.write_text(json.dumps(broken))
    path.chmod(0o600)
    with pytest.raises(ConfigError) as error:
        Keys.read(path)
    assert client_keys.secret.decode() not in str(error.value)


def test_a_zeromq_without_encryption_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(ConfigError, match="without CURVE"):
        generate(tmp_path / "keys")
    assert not (tmp_path / "keys").exists()


def test_keys_are_for_tcp(service_keys: Keys) -> None:
    with pytest.raises(ConfigError, match="keys are for tcp"):
        Router(f"ipc:///tmp/rs-keys-{os.getpid()}", keys=service_keys)
