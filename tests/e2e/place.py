"""Where one system under test lives: a private folder, an environment with a mark, and the proof that nothing of it remains.

Every process that is started here, and all that those start, carries the mark in its environment, so that one that got away from
its parent is found too. Knows file names and processes, not what the services say.
"""

import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, get_args

import psutil

from cli import lifeline
from kilburn.config import Address
from kilburn.wire import endpoints

Role = Literal["memmgr", "executor", "gateway"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)

ROOT: Final = Path(__file__).parents[2]

_MARK: Final = "E2E_MARK"
_SHARED_MEMORY: Final = Path("/dev/shm")

#: A folder that torch makes for itself at its import, and keeps from one process to the next.
_TORCH_CACHE: Final = "torchinductor_"

_POLL_SECONDS: Final = 0.05
_KILL_SECONDS: Final = 10.0


def wait_until(condition: Callable[[], bool], timeout_seconds: float, what: str, log: Callable[[], str] | None = None) -> float:
    """Wait for a condition; return how long it took. `log` is called for more to say where it does not come.

    Raises:
        AssertionError: it took longer.
    """
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > timeout_seconds:
            raise AssertionError(f"not within {timeout_seconds} s: {what}{log() if log else ''}")
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - begun


class Place:
    """See the module. `name` is the runtime folder's."""

    def __init__(self, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kilburn-e2e-"))
        self.runtime_dir = self.folder / name
        self._temporary = self.folder / "tmp"
        self._temporary.mkdir()
        self._mark = secrets.token_hex(8)

    def environment(self, threads: int | None) -> dict[str, str]:
        """Return the environment of a process of this place: no setting of the caller's but where models are kept.

        What is started with it ends with us, however we end, if the thread that starts it lives as long as we do. `threads` is
        how many torch computes with; None leaves it to torch.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KILBURN_") or name == "KILBURN_CACHE"}
        chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        ours = {lifeline.SUPERVISED: str(os.getpid()), "TMPDIR": str(self._temporary), _MARK: self._mark}
        return kept | chosen | ours

    def processes(self) -> list[psutil.Process]:
        """Return what runs here."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def find(self, role: Role) -> psutil.Process | None:
        """Return the process of one service, if it runs."""
        for process in self.processes():
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if "cli" in command and command[command.index("cli") + 1 :][:1] == [role]:
                return process
        return None

    def pool_files(self) -> list[Path]:
        """Return the pool files of this place's instance in the system's shared memory."""
        return list(_SHARED_MEMORY.glob(f"*{endpoints.instance_id(self.runtime_dir)}*"))

    def leftovers(self, addresses: Iterable[Address]) -> list[str]:
        """Return what an instance left behind: empty if it has ended well."""
        return list(self._leftovers(addresses))

    def kill(self) -> None:
        """End at once what runs here, and what a supervisor starts meanwhile."""
        wait_until(self._kill_all, _KILL_SECONDS, "the end of killed processes")

    def remove(self) -> None:
        """Remove the folder, and the pool files if there are any."""
        for file in self.pool_files():
            file.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_all(self) -> bool:
        """Return whether nothing was left to kill."""
        processes = self.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        return not processes

    def _leftovers(self, addresses: Iterable[Address]) -> Iterator[str]:
        for process in self.processes():
            yield f"process {process.pid}: {_command_of(process)}"
        for folder in (self.runtime_dir, endpoints.socket_dir(self.runtime_dir)):
            if folder.exists():
                yield f"{folder}: {sorted(path.name for path in folder.rglob('*'))}"
        yield from (f"temporary file {path}" for path in self._temporary.rglob("*") if not path.name.startswith(_TORCH_CACHE))
        yield from (f"pool file {path}" for path in self.pool_files())
        for address in addresses:
            with socket.socket() as probe:
                if probe.connect_ex((address.host, address.port)) == 0:
                    yield f"somebody listens on {address}"

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False  # gone, a zombie, or another user's


def _command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error as error:
        return str(error)
