"""The files of one instance, and their removal when nobody uses them: after a run, and before one where an earlier was killed.

Knows the files' names; the services make them.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

from cli.services import ROLES
from cli.supervision import control_socket
from kilburn.errors import StartError
from kilburn.wire import endpoints

_DEFAULT_POOL_DIR: Final = Path("/dev/shm")  # noqa: S108 - only files of this instance's name are touched

#: In the runtime folder, by the role that makes them.
_FILES: Final = {
    "memmgr": ("memmgr.failed", "memmgr.partial", "admin.address", "admin.new"),
    "executor": ("executor.failed", "executor.partial", "executor.health"),
    "gateway": ("gateway.failed", "gateway.partial", "gateway.address", "gateway.new"),
}


def remove(runtime_dir: Path, pool_dir: Path | None) -> None:
    """Remove the files of all roles that no process has. The caller holds the lock of `up`.

    Raises:
        StartError: the runtime folder is not ours.
    """
    for role in ROLES:
        # Where a process of that role was started by hand in this folder, its files are its own.
        with suppress(StartError), endpoints.lock(runtime_dir, role):
            _remove_files(role, runtime_dir, pool_dir)
    control = control_socket(runtime_dir)
    for path in (control, *control.parent.glob(f"{control.name}.*"), runtime_dir / "supervisord.pid"):
        path.unlink(missing_ok=True)


def _remove_files(role: str, runtime_dir: Path, pool_dir: Path | None) -> None:
    for name in _FILES[role]:
        (runtime_dir / name).unlink(missing_ok=True)
    if role == "memmgr":
        sockets = endpoints.socket_dir(runtime_dir)
        (sockets / "gateway.sock").unlink(missing_ok=True)
        (sockets / "executor.sock").unlink(missing_ok=True)
    if role == "executor":
        for pool in (pool_dir or _DEFAULT_POOL_DIR).glob(f"kilburn-{endpoints.instance_id(runtime_dir)}*"):
            pool.unlink(missing_ok=True)


def remove_folders(runtime_dir: Path) -> None:
    """Remove the runtime folder and the sockets' folder where they are empty."""
    for folder in {endpoints.socket_dir(runtime_dir), runtime_dir}:
        try:
            folder.rmdir()
        except OSError:
            continue  # not empty: someone else's files, or another process's
