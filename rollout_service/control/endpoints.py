"""Endpoints of the control plane: where sockets live, which ones a service may open, which ones a peer may connect to.

    made for a run     ipc://<root>/<SOCKET_PREFIX><hash>/c   a directory of its own, mode 0700, short in any TMPDIR
    chosen by hand     ipc:///DIRECTORY/NAME                  the directory exists, and nobody else may write there
    allowed by a flag  tcp://127.0.0.1:PORT                   this machine only, unless there are keys
    with keys          tcp://HOST:PORT                        whoever has a key that the service admits (keys)

Who uses it: `transport` checks what it binds, launch makes and removes endpoints, peers look whether they may connect.
What must never happen: a socket that another user can open (their mode is 0600), a peer that connects to another user's
socket (what the service says there decides which code the peer runs), or the socket or file of somebody else removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollout_service.errors import ConfigError

SOCKET_PREFIX: Final = "rs-sock-"
"""Name prefix of the directory that holds the socket of one run."""
SOCKET_DIR_VARIABLE: Final = "ROLLOUT_SERVICE_SOCKET_DIR"
"""Environment variable that overrides where socket directories are made."""
IPC: Final = "ipc://"
TCP: Final = "tcp://"
MAX_ENDPOINT_BYTES: Final = 100
"""sun_path holds 107 bytes on Linux and 103 on macOS, without "ipc://"; one limit with room for both."""

_UNBOUND_STALE_AFTER_S: Final = 60.0
"""A directory without a socket belongs to a run about to bind, unless it is older than this."""
_SILENT_STALE_AFTER_S: Final = 1.0
"""Between bind and listen a live socket refuses connections for a moment (microseconds); never take that for death."""


@dataclass(frozen=True)
class SocketAccess:
    """Who may connect on this machine: the user alone, or a group besides."""

    group: int | None = None
    """gid."""

    @property
    def directory_mode(self) -> int:
        return 0o700 if self.group is None else 0o750

    @property
    def socket_mode(self) -> int:
        return 0o600 if self.group is None else 0o660

    def give_to_group(self, path: Path) -> None:
        """Raises PermissionError if this user is not in the group."""
        if self.group is not None:
            os.chown(path, -1, self.group)


def socket_root() -> Path:
    """The directory in which socket directories are made: the first usable one whose endpoints stay short enough.

    Order: ROLLOUT_SERVICE_SOCKET_DIR (alone, if set), TMPDIR, XDG_RUNTIME_DIR, /tmp.
    Raises ConfigError naming the path and the limit.
    """
    override = os.environ.get(SOCKET_DIR_VARIABLE)
    if override:
        root = Path(override).absolute()
        if not _usable(root):
            raise ConfigError(f"{SOCKET_DIR_VARIABLE} is {override}: not a writable directory; create it or unset it")
        if _endpoint_bytes(root) > MAX_ENDPOINT_BYTES:
            raise ConfigError(
                f"{SOCKET_DIR_VARIABLE} is {override}: an endpoint there needs {_endpoint_bytes(root)} bytes, "
                f"the limit is {MAX_ENDPOINT_BYTES}; choose a shorter directory"
            )
        return root
    candidates = [os.environ.get("TMPDIR"), os.environ.get("XDG_RUNTIME_DIR"), "/tmp"]
    roots = [Path(text) for text in candidates if text and Path(text).is_absolute()]
    for root in roots:
        if _usable(root) and _endpoint_bytes(root) <= MAX_ENDPOINT_BYTES:
            return root
    tried = ", ".join(f"{root} ({_endpoint_bytes(root)} bytes)" for root in roots)
    raise ConfigError(
        f"no directory for the control socket: tried {tried}; it must be writable and give an endpoint of at most "
        f"{MAX_ENDPOINT_BYTES} bytes; set {SOCKET_DIR_VARIABLE} to a short one"
    )


def group_id(group: str) -> int:
    """The gid of a group, given by name or number. Raises ConfigError if this process is not in it."""
    import grp

    try:
        found = grp.getgrgid(int(group)) if group.isdecimal() else grp.getgrnam(group)
    except KeyError:
        raise ConfigError(f"there is no group {group!r} on this machine") from None
    if found.gr_gid not in (os.getegid(), *os.getgroups()):
        raise ConfigError(f"this process (uid {_user_id()}) is not in group {group}; choose one that `id` lists")
    return found.gr_gid


def socket_endpoint(token: str, access: SocketAccess | None = None) -> str:
    """`ipc://...` of the run with this token: its directory is made (0700), stale ones of crashed runs are removed.

    access: lets a group in (0750). Raises ConfigError if no directory fits, or if the directory exists and others than
    these may enter it.
    """
    access = access or SocketAccess()
    sweep_socket_directories()
    directory = socket_root() / _directory_name(token)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        access.give_to_group(directory)
        directory.chmod(access.directory_mode)  # whatever the umask is, which other threads may change
    found = directory.lstat()
    allowed = access.directory_mode
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != _user_id() or stat.S_IMODE(found.st_mode) != allowed:
        raise ConfigError(
            f"{directory} is not a directory of this user with mode {allowed:04o} (uid {found.st_uid}, "
            f"mode {stat.S_IMODE(found.st_mode):o}); remove it or set {SOCKET_DIR_VARIABLE}"
        )
    return f"ipc://{directory / 'c'}"


def prepare_endpoint(endpoint: str, *, allow_tcp: bool, authenticated: bool = False) -> None:
    """Makes sure that a service may listen at an endpoint chosen by hand. Removes the socket of a dead service there.

    Raises ConfigError: an endpoint for more than this machine (or, for ipc, this user), or one that is taken. An ipc
    socket needs a directory that exists, belongs to this user or to root, and in which nobody else may write.
    """
    check_endpoint(endpoint, allow_tcp=allow_tcp, authenticated=authenticated)
    if not endpoint.startswith(IPC):
        return
    path = Path(endpoint.removeprefix(IPC))
    if not path.is_absolute():
        raise ConfigError(f"{endpoint} has no absolute path; use {IPC}/DIRECTORY/NAME")
    directory = path.parent
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; create it with mode 0700, {path.name} is made in it")
    found = directory.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (_user_id(), 0) or mode & 0o022 or not _usable(directory):
        raise ConfigError(
            f"{directory} (uid {found.st_uid}, mode {mode:04o}) has to be a directory in which this user, uid "
            f"{_user_id()}, and nobody else may write; use one of mode 0700"
        )
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"{path} is there, and no socket; choose another name")
    if _listens(path):
        raise ConfigError(f"cannot listen on {endpoint}: another service does; choose another name")
    path.unlink()


def check_reachable(endpoint: str, group: int | None = None) -> None:
    """Raises ConfigError, naming uid and mode, if this process must not or cannot connect to an ipc socket.

    group: whose members are trusted like this user. A socket that is not there yet is fine.
    """
    path = Path(endpoint.removeprefix(IPC))
    if not endpoint.startswith(IPC) or not path.is_absolute():
        return
    try:
        found = path.stat()
    except PermissionError:
        raise ConfigError(_closed(next(each for each in path.parents if _visible(each)))) from None
    except OSError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path} is no socket; connect to what the service printed")
    trusted = found.st_uid == _user_id() or (group is not None and found.st_gid == group and not found.st_mode & 0o007)
    if not trusted or not os.access(path, os.R_OK | os.W_OK):
        raise ConfigError(_closed(path))


def remove_socket(endpoint: str) -> None:
    """Removes the socket file of an `ipc://` endpoint on which this process has listened."""
    if endpoint.startswith(IPC):
        Path(endpoint.removeprefix(IPC)).unlink(missing_ok=True)


def remove_socket_directory(endpoint: str) -> None:
    """Removes the directory of an `ipc://` endpoint made by `socket_endpoint`; anything else is left alone."""
    if not endpoint.startswith(IPC):
        return
    directory = Path(endpoint.removeprefix(IPC)).parent
    if directory.name.startswith(SOCKET_PREFIX):
        shutil.rmtree(directory, ignore_errors=True)


def sweep_socket_directories(*, dry_run: bool = False) -> list[Path]:
    """Removes this user's socket directories on which nobody listens any more; returns them."""
    stale = [path for path in sorted(socket_root().glob(f"{SOCKET_PREFIX}*")) if _is_stale(path)]
    if not dry_run:
        for path in stale:
            shutil.rmtree(path, ignore_errors=True)
    return stale


def _directory_name(token: str) -> str:
    return SOCKET_PREFIX + hashlib.sha256(token.encode()).hexdigest()[:12]


def _endpoint_bytes(root: Path) -> int:
    return len(os.fsencode(f"ipc://{root / _directory_name('') / 'c'}"))


def _usable(root: Path) -> bool:
    return root.is_dir() and os.access(root, os.W_OK | os.X_OK)


def _user_id() -> int:
    getuid: Callable[[], int] | None = getattr(os, "getuid", None)
    return getuid() if getuid is not None else 0


def _visible(path: Path) -> bool:
    try:
        path.stat()
    except PermissionError:
        return False
    return True


def _closed(path: Path) -> str:
    found = path.stat()
    return (
        f"{path} belongs to uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; this process is uid "
        f"{_user_id()}: run all processes of a run under one uid"
    )


def _is_stale(directory: Path) -> bool:
    try:
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != _user_id():
            return False
        age = time.time() - found.st_mtime
        path = directory / "c"
        if not path.exists():
            return age > _UNBOUND_STALE_AFTER_S
        return age > _SILENT_STALE_AFTER_S and not _listens(path)
    except OSError:
        return False


def _listens(path: Path) -> bool:
    """Does anyone accept connections on this socket file? A doubt counts as yes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def check_endpoint(endpoint: str, *, allow_tcp: bool, authenticated: bool = False) -> None:
    """Raises ConfigError unless only this machine can reach a service bound there, or only holders of a key.

    authenticated: the service has keys, and admits nobody else on tcp.
    """
    scheme, _, address = endpoint.partition("://")
    match scheme:
        case "ipc":
            if len(os.fsencode(endpoint)) > MAX_ENDPOINT_BYTES:
                raise ConfigError(
                    f"the endpoint {endpoint} is {len(os.fsencode(endpoint))} bytes long, the limit is "
                    f"{MAX_ENDPOINT_BYTES}; set {SOCKET_DIR_VARIABLE} to a shorter directory"
                )
            if authenticated:
                raise ConfigError(f"{endpoint} needs no keys: file modes say who may connect; keys are for tcp://")
        case "tcp" if not allow_tcp:
            raise ConfigError(f"{endpoint} listens on tcp, open to every local user; use ipc://, or allow tcp")
        case "tcp":
            host = address.rpartition(":")[0].strip("[]")
            if not authenticated and host != "localhost" and not _is_loopback(host):
                raise ConfigError(
                    f"{endpoint} would listen beyond this machine without authentication; bind 127.0.0.1 instead, or "
                    "give the service a key file (rollout-service keygen)"
                )
        case _:
            raise ConfigError(
                f"{endpoint!r} is not an endpoint of this service; use ipc://PATH or tcp://127.0.0.1:PORT"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
