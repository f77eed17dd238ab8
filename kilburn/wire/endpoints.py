"""The private folder where the processes of one instance meet: its sockets, its locks, their paths.

A Unix socket's path is at most 107 bytes. Where the runtime folder's own path is longer, the sockets lie in a short folder
beside it, named by a hash of the long path, so that all processes find it.
"""

import fcntl
import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import IO, Final, Self

from kilburn.errors import StartError
from kilburn.limits import MAX_SOCKET_PATH_BYTES

#: supervisord binds `up.sock` under a name that ends in its process id, and renames it.
_LONGEST_NAME: Final = "up.sock.4194304"


def default_runtime_dir() -> Path:
    """Return the folder under XDG_RUNTIME_DIR, else the temporary folder with the user's id in its name."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "kilburn"
    return Path(tempfile.gettempdir()) / f"kilburn-{os.getuid()}"


def instance_id(runtime_dir: Path) -> str:
    """Return 12 hex digits that name the instance of this runtime folder: for files that lie elsewhere."""
    return hashlib.sha256(os.fsencode(runtime_dir.absolute())).hexdigest()[:12]


def private_dir(path: Path) -> Path:
    """Make a folder that only this user can enter, or check that it is one.

    Raises:
        StartError: it can't be made, or it belongs to someone else or is open to others.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise StartError(f"can't make the runtime folder {path}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise StartError(f"the runtime folder {path} is not a folder")
    if status.st_uid != os.getuid():
        raise StartError(f"the runtime folder {path} belongs to another user; name one of yours with --runtime-dir")
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return path


def socket_dir(runtime_dir: Path) -> Path:
    """Return the folder for the sockets of an instance: the runtime folder, or a short one where its path is too long."""
    longest = len(os.fsencode(runtime_dir.absolute())) + 1 + len(_LONGEST_NAME)
    if longest <= MAX_SOCKET_PATH_BYTES:
        return runtime_dir.absolute()
    return Path("/tmp") / f"kilburn-{os.getuid()}-{instance_id(runtime_dir)}"  # noqa: S108 - checked by private_dir


def gateway_endpoint(runtime_dir: Path) -> str:
    """Return where memmgr hears gateways."""
    return f"ipc://{socket_dir(runtime_dir)}/gateway.sock"


def executor_endpoint(runtime_dir: Path) -> str:
    """Return where memmgr hears executors."""
    return f"ipc://{socket_dir(runtime_dir)}/executor.sock"


def check_endpoint(endpoint: str) -> str:
    """Return an endpoint that can be used.

    Raises:
        StartError: it is not ipc://, or its path is too long for a Unix socket.
    """
    scheme, separator, path = endpoint.partition("://")
    if not separator or not path:
        raise StartError(f"{endpoint!r} is no endpoint; write ipc:// and the path of a socket")
    if scheme != "ipc":
        raise StartError(f"{endpoint}: only ipc:// endpoints can be used; share the folder between containers as a volume")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise StartError(f"{endpoint}: a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes")
    return endpoint


def ipc_folder(endpoint: str) -> Path:
    """Return the folder in which a checked ipc:// endpoint's socket lies."""
    return Path(endpoint.removeprefix("ipc://")).parent


class RoleLock:
    """Held by the one process that has a role in an instance; nobody holds it after a crash, whatever file is left.

    A context manager that gives the role up, and removes the file, at its end.
    """

    def __init__(self, file: IO[str], path: Path) -> None:
        self._file = file
        self._path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


def lock(runtime_dir: Path, role: str) -> RoleLock:
    """Take the lock of one role of an instance.

    Raises:
        StartError: another process has the role.
    """
    path = private_dir(runtime_dir) / f"{role}.lock"
    while True:
        file = path.open("a+", encoding="ascii")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read(20).strip() or "unknown"
            file.close()
            raise StartError(
                f"a kilburn {role} (process {holder}) already uses {runtime_dir}; stop it, or name another --runtime-dir"
            ) from error
        if _is_at(path, file):
            break
        file.close()  # its last holder removed it between our open and our lock
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return RoleLock(file, path)


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def publish_address(runtime_dir: Path, role: str, address: str) -> Path:
    """Write the address that a role serves at into its file, so that nobody reads half of it; return the file."""
    path = runtime_dir / f"{role}.address"
    temporary = path.with_suffix(".new")
    temporary.write_text(address + "\n", encoding="ascii")
    temporary.replace(path)
    return path
