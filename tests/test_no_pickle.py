"""Nothing that arrives runs code: no module of the project pickles, and pickles on socket or disk are only bytes."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import pickle
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_service import checkpoint as checkpoints
from rollout_service.control.client import Client
from rollout_service.control.endpoints import remove_socket_directory, socket_endpoint
from rollout_service.control.messages import Hello, Role, Status, StatusReport, decode, encode
from rollout_service.control.server import Server
from rollout_service.control.transport import Dealer, Router
from rollout_service.errors import CheckpointError, MessageRejected
from tests.control.world import make_coordinator, make_spec
from tests.test_checkpoint import save
from tests.test_floors import ROOT, imported_modules, source_files

DEADLINE_S = 10.0
PICKLERS = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
PICKLING_CALLS = {
    "recv_pyobj", "send_pyobj", "allow_pickle", "torch.load", "torch.save", "np.load", "np.save", "np.savez",
}  # fmt: skip
PIPES = {"rollout_service/bench/handover.py", "rollout_service/bench/handover_role.py"}
"""They time a pickle through a pipe, to compare it with shared memory."""


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self.mark), os.O_CREAT)


def mentioning(words: set[str]) -> list[Path]:
    """Files of the project in whose text one of these stands; only they have to be parsed."""
    files = [*source_files(), *(ROOT / "bench").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    return [path for path in files if any(word in path.read_text() for word in words)]


def words_of(path: Path) -> set[str]:
    """Attributes (`send_pyobj`, `torch.load`) and names of arguments that a file uses."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                found |= {name, f"{owner}.{name}"}
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                found.add(name)
    return found


def test_no_module_pickles_anything() -> None:
    found = {
        str(path.relative_to(ROOT)): sorted(used)
        for path in mentioning(PICKLERS | PICKLING_CALLS)
        if (used := PICKLERS & set(imported_modules(path)) | PICKLING_CALLS & words_of(path))
    }
    assert found == {}


def test_processes_talk_by_nothing_of_multiprocessing() -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in mentioning({"multiprocessing"})
        for name in imported_modules(path)
        if name.startswith("multiprocessing") and not name.startswith("multiprocessing.shared_memory")
    }
    assert users == PIPES


def test_a_pickle_on_the_socket_is_a_bad_message_and_nothing_else(tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    bombs = [pickle.dumps(Bomb(mark), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for bomb in bombs:
        with pytest.raises(MessageRejected):
            decode(bomb)
    endpoint = socket_endpoint(f"pickle-{os.getpid()}")
    server = Server(Router(endpoint), make_coordinator(make_spec()))
    server.start()
    try:
        with closing(Dealer(endpoint)) as hostile:
            for bomb in bombs:
                hostile.send(bomb)
            hostile.send(encode(Status()))
            refusals = 0
            while not isinstance(decode(hostile.receive(DEADLINE_S) or b""), StatusReport):
                refusals += 1
        assert (refusals, server.report()["counters"]) == (len(bombs), {"rejected_messages": len(bombs)})
        with closing(Client(endpoint, Hello(role=Role.OBSERVER, pid=1), connect_deadline_s=DEADLINE_S)) as client:
            client.connect()
    finally:
        server.stop()
        server.join()
        remove_socket_directory(endpoint)
    assert not mark.exists()
    pickle.loads(bombs[-1])
    assert mark.exists(), "the bomb is one"


def test_a_pickle_in_the_place_of_arrays_is_no_checkpoint_whatever_its_checksum(tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    as_torch_saves = io.BytesIO()
    torch.save({"weights": Bomb(mark)}, as_torch_saves)
    as_numpy_saves = io.BytesIO()
    np.save(as_numpy_saves, np.array([Bomb(mark)], dtype=object))
    for content in (pickle.dumps(Bomb(mark)), as_torch_saves.getvalue(), as_numpy_saves.getvalue()):
        path = save(tmp_path, update=1)
        (path / checkpoints.ARRAYS_FILE).write_bytes(content)
        manifest = json.loads((path / checkpoints.MANIFEST_FILE).read_text())
        manifest |= {"arrays_bytes": len(content), "arrays_sha256": hashlib.sha256(content).hexdigest()}
        (path / checkpoints.MANIFEST_FILE).write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="is not a safetensors file"):
            checkpoints.load(path)
    assert not mark.exists()
