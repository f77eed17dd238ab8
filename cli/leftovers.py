"""The files of one instance, and their removal when nobody uses them: after a run, and before one where an earlier was killed.

Knows the files' names; the services make them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cli.options import ServerOptions
from cli.services import ROLES
from cli.supervision import control_socket
from kilburn.errors import StartError
from kilburn.wire import endpoints

_DEFAULT_POOL_DIR: Final = Path("/dev/shm")  # noqa: S108 - only files of this instance's name are touched

#: In the runtime folder, by the role that makes them.
_FILES: Final = {
    "memmgr": ("memmgr.failed", "memmgr.partial", "admin.address", "admin.new"),
    "executor": ("executor.failed", "executor.partial", "executor.health", "executor.health.new"),
    "gateway": ("gateway.failed", "gateway.partial", "gateway.address", "gateway.new"),
}


def remove(options: ServerOptions) -> None:
    """Remove the files of all roles that no process has. The caller holds the lock of `up`.

    Raises:
        StartError: the runtime folder is not ours.
    """
    runtime_dir = options.runtime_dir
    for role in ROLES:
        try:
            lock = endpoints.lock(runtime_dir, role)
        except StartError:
            continue  # a process of that role was started by hand in this folder: its files are its own
        with lock:
            for path in (*(runtime_dir / name for name in _FILES[role]), *_elsewhere(role, options)):
                path.unlink(missing_ok=True)
    control = control_socket(runtime_dir)
    for path in (control, *control.parent.glob(f"{control.name}.*"), runtime_dir / "supervisord.pid"):
        path.unlink(missing_ok=True)


def _elsewhere(role: str, options: ServerOptions) -> Iterator[Path]:
    """Yield the files of a role that may lie outside the runtime folder."""
    if role == "memmgr":
        for endpoint in (options.gateway_endpoint, options.executor_endpoint):
            yield Path(endpoint.removeprefix("ipc://"))
    if role == "executor":
        for pattern in ("executor-*.failed", "executor-*.partial", "executor.ranks", "executor.rendezvous*"):
            yield from options.runtime_dir.glob(pattern)
        yield from (options.pool_dir or _DEFAULT_POOL_DIR).glob(f"kilburn-{endpoints.instance_id(options.runtime_dir)}*")


def remove_folders(runtime_dir: Path) -> None:
    """Remove the runtime folder and the sockets' folder where they are empty."""
    for folder in {endpoints.socket_dir(runtime_dir), runtime_dir}:
        try:
            folder.rmdir()
        except OSError:
            continue  # not empty: someone else's files, or another process's
