"""Key files: who may speak to a service on tcp, and which service a client speaks to. CURVE, as ZeroMQ has it.

    service.key   the service's key pair, and the public keys of the clients it admits      stays with the service
    client.key    a client's key pair, and the service's public key                         goes to every role

Written by `rollout-service keygen`, mode 0600, JSON; keys in Z85, 40 characters each. Read by the service and by roles.
What must never happen: a key file that others can read being used as if it were a secret; a key in a message, a log or
an error; a key file written over another one unasked.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import ModuleType
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout_service.errors import ConfigError

KEY_CHARACTERS: Final = 40
SERVICE_FILE: Final = "service.key"
CLIENT_FILE: Final = "client.key"
MAX_FILE_BYTES: Final = 1 << 20

Key = Annotated[bytes, Field(min_length=KEY_CHARACTERS, max_length=KEY_CHARACTERS)]


class Keys(BaseModel):
    """What one side has: its own pair, and the public keys of the other side."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    kind: Literal["service", "client"]
    public: Key
    secret: Annotated[Key, Field(repr=False)]
    service: Key | None = None
    """Of a client: the public key of the service it speaks to."""
    clients: tuple[Key, ...] = ()
    """Of a service: the public keys it admits."""

    def require(self, kind: str) -> None:
        """Raises ConfigError for the other side's file."""
        if self.kind != kind:
            raise ConfigError(
                f"this is a {self.kind}'s key file, here a {kind}'s is needed: {SERVICE_FILE} belongs to the service, "
                f"{CLIENT_FILE} to learner, actors and status"
            )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigError for a file that cannot be read, that others can read or write, or that is no key file."""
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                mode, owner = found.st_mode, found.st_uid
                if not stat.S_ISREG(mode) or mode & 0o077 or owner not in (os.getuid(), 0):
                    raise ConfigError(
                        f"key file {path} has mode {stat.S_IMODE(mode):04o} and belongs to uid {owner}: it has to be a "
                        f"file of uid {os.getuid()} that nobody else can read; chmod 600 it"
                    )
                text = file.read(MAX_FILE_BYTES)
        except OSError as error:
            raise ConfigError(f"key file {path} cannot be read: {error.strerror}; make one with keygen") from None
        try:
            keys = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            what = f"{where or 'JSON'}: {first['msg']}"
            raise ConfigError(f"{path} is no key file ({what}); make one with keygen") from None
        if keys.kind == "client" and keys.service is None:
            raise ConfigError(f"{path} names no service: a client's key file needs the service's public key")
        _curve().require_curve()
        return keys


def _curve() -> ModuleType:
    """Imported late: it reads keys itself."""
    from rollout_service.control import zeromq

    return zeromq


def generate(directory: Path, *, force: bool = False) -> tuple[Path, Path]:
    """A new pair for a service and one for its clients, in two files. Returns their paths.

    Raises ConfigError if one of the files exists, unless `force`: whoever has the old ones is shut out by new ones.
    """
    _curve().require_curve()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths = directory / SERVICE_FILE, directory / CLIENT_FILE
    if not force and (there := [str(path) for path in paths if path.exists() or path.is_symlink()]):
        raise ConfigError(f"{' and '.join(there)} exist; choose another directory, or --force to replace both keys")
    (service, service_secret), (client, client_secret) = _curve().key_pair(), _curve().key_pair()
    own = Keys(kind="service", public=service, secret=service_secret, clients=(client,))
    theirs = Keys(kind="client", public=client, secret=client_secret, service=service)
    for path, keys in zip(paths, (own, theirs), strict=True):
        _write(path, keys, force)
    return paths


def _write(path: Path, keys: Keys, force: bool) -> None:
    """Under another name first: nobody sees half a file, and nothing is written through a link."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    text = json.dumps(keys.model_dump(mode="json", exclude_none=True), indent=2) + "\n"
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if force:
            fresh.replace(path)
        else:
            os.link(fresh, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    finally:
        fresh.unlink(missing_ok=True)
