"""Systems under test: `System` is `kilburn up`, `Processes` the three services one by one, in any order.

Both are context managers that end what they started and then insist that nothing is left. A block that raised ends at once, its
processes killed, so that the first failure is the one that is reported.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kilburn.client import AdminClient, Client
from kilburn.config import Address, parse_address
from kilburn.v1.admin_pb2 import Pool
from tests.e2e.place import ROLES, ROOT, Place, Role, wait_until

Flag = str | int | float | bool | Path

#: From the start to `ready:`, on a slow and busy machine with cold files.
START_SECONDS: Final = 240.0

#: From the death of a process to its next start.
RESTART_SECONDS: Final = 10.0

#: From SIGTERM to the end of all.
STOP_SECONDS: Final = 60.0

#: How long after the last answer everything may take to be free: a heartbeat's worth of steps.
SETTLE_SECONDS: Final = 5.0

_LOG_TAIL_CHARACTERS: Final = 4000


def arguments(flags: Mapping[str, Flag]) -> list[str]:
    """Return flags as words of a command line: block_size=7 is --block-size 7, poison=True --poison, x=False --no-x."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if value is True:
            words.append(f"--{flag}")
        elif value is False:
            words.append(f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


class Instance:
    """What both kinds have in common: one place, one gateway, one memory manager.

    `folder` is the name of its runtime folder. `threads` is how many torch computes with: one is best for a tiny model, whose
    threads would only wait for one another.
    """

    def __init__(self, flags: Mapping[str, Flag], threads: int | None, folder: str) -> None:
        self.place = Place(folder)
        self.flags = flags
        self._threads = threads
        self._log = self.place.folder / "log"
        self._address: dict[str, Address] = {}
        self._children: list[subprocess.Popen[bytes]] = []
        self._open: list[Client | AdminClient | grpc.Channel] = []

    @property
    def client(self) -> Client:
        """The gateway's client."""
        return self._client

    @property
    def admin(self) -> AdminClient:
        """memmgr's client."""
        return self._admin

    @property
    def gateway_address(self) -> Address:
        """Where the gateway listens."""
        return self._address["gateway"]

    @property
    def admin_address(self) -> Address:
        """Where memmgr's admin API listens."""
        return self._address["admin"]

    def log(self) -> str:
        """Return the end of what the processes have logged, as the end of a failure's text."""
        return f"; the log ends:\n{self.whole_log()[-_LOG_TAIL_CHARACTERS:]}"

    def whole_log(self) -> str:
        """Return all that the processes have logged."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    # ------------------------------------------------------------------------------------------------- processes

    def pid(self, role: Role) -> int:
        """Return the process id of a service.

        Raises:
            AssertionError: it does not run.
        """
        process = self.place.find(role)
        assert process is not None, f"there is no {role}"
        return process.pid

    def signal(self, role: Role, number: int) -> psutil.Process:
        """Send a signal to a service and return the process."""
        process = psutil.Process(self.pid(role))
        process.send_signal(number)
        return process

    # ---------------------------------------------------------------------------------------------------- health

    def serving(self) -> bool:
        """Return whether the gateway says that a request would succeed now."""
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_serving(self, timeout_seconds: float = START_SECONDS) -> float:
        """Wait until requests succeed; return how long it took."""
        return wait_until(self.serving, timeout_seconds, "a gateway that serves", self.log)

    # ------------------------------------------------------------------------------------------------- the blocks

    def settled(self) -> None:
        """Insist that nothing is held: no request, no live block, every block free or cached, no fault on either side.

        Raises:
            AssertionError: something is.
        """
        wait_until(self._idle, SETTLE_SECONDS, "an idle pool")
        pool = self.admin.pool()
        assert pool.live_blocks == pool.running == pool.waiting == pool.swapped == 0, pool
        assert pool.free_blocks + pool.cached_blocks == pool.total_blocks, pool
        counters = pool.counters
        assert counters.allocated_blocks - counters.freed_blocks == pool.cached_blocks, pool
        assert not self.admin.sequences()
        verdict = self.admin.verify(with_executor=True)
        assert verdict.ok, list(verdict.faults)
        assert not verdict.faults
        assert verdict.checks > 0

    def _idle(self) -> bool:
        pool = self.admin.pool()
        return pool.live_blocks == pool.running == pool.waiting == 0

    # ----------------------------------------------------------------------------------------------- begin and end

    def _connect(self) -> None:
        self._client = Client(str(self._address["gateway"]))
        self._admin = AdminClient(str(self._address["admin"]))
        channel = grpc.insecure_channel(str(self._address["gateway"]), options=[("grpc.max_reconnect_backoff_ms", 500)])
        self._health: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs lack the calls
        self._open = [self._client, self._admin, channel]

    def _arguments(self, **more: Flag) -> list[str]:
        """Return the words of a server command in this place: free ports, our flags, and more."""
        here: dict[str, Flag] = {"runtime_dir": self.place.runtime_dir, "listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
        return arguments({**here, **self.flags, **more})

    def _spawn(self, words: Sequence[str], output: Path | None = None) -> "subprocess.Popen[bytes]":
        log = self._log.open("ab")
        stdout = output.open("wb") if output else log
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "cli", *words],
                cwd=ROOT,
                env=self.place.environment(self._threads),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=log,
                process_group=0,
            )
        finally:
            stdout.close()
            log.close()
        self._children.append(child)
        return child

    def stop(self) -> None:
        """End everything as a user would.

        Raises:
            AssertionError: something did not end, ended badly, or is left behind.
        """
        raise NotImplementedError

    def abandon(self) -> None:
        """End everything at once, and remove what there is of it. Does nothing where all has ended well."""
        for connection in self._open:
            connection.close()
        self._open = []
        self.place.kill()
        for child in self._children:
            child.wait()
        self.place.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.stop()
            elif error is not None:
                error.add_note(f"the log of the system ends{self.log()}")
        finally:
            self.abandon()


class System(Instance):
    """`kilburn up`, ready for requests once it is entered."""

    def __init__(self, flags: Mapping[str, Flag], threads: int | None = None, folder: str = "run") -> None:
        super().__init__(flags, threads, folder)
        self._output = self.place.folder / "output"
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def __enter__(self) -> Self:
        try:
            if self._process is None:
                self.begin()
            self._wait_ready()
        except BaseException:
            self.abandon()
            raise
        return self

    def begin(self) -> None:
        """Start it and return at once; entering it waits until it is ready."""
        self._process = self._spawn(["up", *self._arguments()], self._output)

    def ended(self) -> int:
        """Wait for the end of a start that fails, and return its exit status."""
        assert self._process is not None
        return self._process.wait(START_SECONDS)

    def _wait_ready(self) -> None:
        """Wait for the line that says so.

        Raises:
            AssertionError: it does not come.
        """
        process = self._process
        assert process is not None
        wait_until(lambda: self._ready_line() or process.poll() is not None, START_SECONDS, "ready", self.log)
        assert self._ready_line(), f"up ended with {process.returncode}{self.log()}"
        line = self._output.read_text(encoding="utf-8").splitlines()[0]
        words = [part.split(" ", 1) for part in line.removeprefix("ready: ").split(", ")]
        assert [word for word, _ in words] == ["gateway", "admin", "model"], line
        self._address = {word: parse_address(value) for word, value in words[:2]}
        self._connect()

    @contextmanager
    def restart(self, role: Role) -> Iterator[psutil.Process]:
        """Kill a service for the block; after it, wait until another process has its role and all three know one another."""
        before = self.admin.pool()
        killed = self.signal(role, signal.SIGKILL)
        yield killed
        wait_until(lambda: self.place.find(role) not in (None, killed), RESTART_SECONDS, f"another {role}", self.log)
        wait_until(lambda: self._joined(role, before), START_SECONDS, f"a {role} that is known to the others", self.log)
        self.wait_serving()

    def _joined(self, role: Role, before: Pool) -> bool:
        try:
            now = self.admin.pool()
        except grpc.RpcError:
            return False
        renewed = {
            "memmgr": now.memmgr_incarnation != before.memmgr_incarnation,
            "executor": now.executor_incarnation != before.executor_incarnation,
            "gateway": True,
        }
        return renewed[role] and now.executor_connected and now.gateways_connected == 1

    def stop(self) -> None:
        """Send SIGTERM, wait for the end, and look for what is left. Does nothing where it was stopped before."""
        if self._stopped:
            return
        self._stopped = True
        pool_files = self.place.pool_files()
        assert self._process is not None
        self._process.terminate()
        status = self._process.wait(STOP_SECONDS)
        assert status == 0, f"up ended with {status}{self.log()}"
        left = self.place.leftovers(self._address.values())
        assert not left, f"{left}{self.log()}"
        assert pool_files, "there was no pool file, so its absence proves nothing"
        assert self._output.read_text(encoding="utf-8").count("\n") == 1, "more than the ready line on standard output"

    def _ready_line(self) -> bool:
        return self._output.exists() and self._output.read_text(encoding="utf-8").startswith("ready: ")


class Processes(Instance):
    """The three services without a supervisor, each started by `start`; `connect` once the gateway and memmgr run."""

    def __init__(self, flags: Mapping[str, Flag], threads: int | None = None, folder: str = "run") -> None:
        super().__init__(flags, threads, folder)
        self._running: dict[Role, subprocess.Popen[bytes]] = {}

    def start(self, role: Role, **more: Flag) -> None:
        """Start one service and return at once; `more` are flags for it alone."""
        self._running[role] = self._spawn([role, *self._arguments(**more)])

    def connect(self) -> None:
        """Find the addresses that gateway and memmgr took, and connect to them.

        Raises:
            AssertionError: one of them does not come up.
        """
        for name in ("gateway", "admin"):
            file = self.place.runtime_dir / f"{name}.address"
            wait_until(file.is_file, START_SECONDS, file.name, self.log)
            self._address[name] = parse_address(file.read_text(encoding="ascii").strip())
        self._connect()

    def stop(self) -> None:
        """End gateway, executor, memmgr, in this order."""
        for role in reversed(ROLES):
            process = self._running.pop(role, None)
            if process is None:
                continue
            process.terminate()
            status = process.wait(STOP_SECONDS)
            assert status == 0, f"{role} ended with {status}{self.log()}"
        with suppress(OSError):  # not empty: a leftover
            self.place.runtime_dir.rmdir()  # whoever starts services by hand owns the folder
        left = self.place.leftovers(self._address.values())
        assert not left, f"{left}{self.log()}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a start ended that could not succeed."""

    status: int
    text: str  # of standard error
    leftovers: tuple[str, ...]

    @property
    def last_line(self) -> str:
        """What a user reads last."""
        return self.text.rstrip("\n").rpartition("\n")[2]


def refusal(flags: Mapping[str, Flag]) -> Refusal:
    """Run `kilburn up` with flags that it can't start with, and return how it ended."""
    system = System(flags, threads=1)
    try:
        system.begin()
        status = system.ended()
        return Refusal(status, system.whole_log(), tuple(system.place.leftovers([])))
    finally:
        system.abandon()
