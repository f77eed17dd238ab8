"""The memory manager as a process: what it leaves behind, who may start, what it says when it can't."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kilburn.v1 import admin_pb2 as admin
from kilburn.v1 import admin_pb2_grpc
from kilburn.v1 import engine_pb2 as engine
from kilburn.wire.endpoints import executor_endpoint, gateway_endpoint
from tests.memmgr.memmgr_messages import hello, submit
from tests.memmgr.memmgr_peers import PATIENCE_SECONDS, Background, Context, Executor, Gateway

pytestmark = pytest.mark.processes

PROGRAM = """
import json, sys
from pathlib import Path
from kilburn.config import Address, MemmgrConfig
from kilburn.errors import StartError
from memmgr.service import run
runtime_dir, gateway, executor, port = json.loads(sys.argv[1])
try:
    run(MemmgrConfig(Path(runtime_dir), gateway, executor, Address("127.0.0.1", port)))
except StartError as error:
    print(f"start: {error}")
    sys.exit(2)
"""

#: A start that fails should not take longer: half of it is Python's imports.
START_SECONDS = 20.0


class Process:
    """A memory manager of its own."""

    def __init__(self, runtime_dir: Path, port: int = 0) -> None:
        self.runtime_dir = runtime_dir
        self.gateway_endpoint, self.executor_endpoint = gateway_endpoint(runtime_dir), executor_endpoint(runtime_dir)
        told = json.dumps([str(runtime_dir), self.gateway_endpoint, self.executor_endpoint, port])
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, told], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    @property
    def address_file(self) -> Path:
        return self.runtime_dir / "admin.address"

    def wait_ready(self) -> str:
        """Return the admin address once it serves."""
        end = time.monotonic() + START_SECONDS
        while not self.address_file.exists():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, "it does not start"
            time.sleep(0.02)
        return self.address_file.read_text().strip()

    def pool(self) -> admin.Pool:
        with grpc.insecure_channel(self.address_file.read_text().strip()) as channel:
            return admin_pb2_grpc.AdminStub(channel).GetPool(admin.GetPoolRequest(), timeout=PATIENCE_SECONDS)

    def wait_end(self) -> int:
        return self.process.wait(START_SECONDS)

    def output(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


Start = Callable[..., Process]


@pytest.fixture
def start(runtime_dir: Path) -> Iterator[Start]:
    processes: list[Process] = []

    def start_one(folder: Path = runtime_dir, port: int = 0) -> Process:
        processes.append(Process(folder, port))
        return processes[-1]

    yield start_one
    for process in processes:
        process.close()


def until_serving(gateway: Gateway, executor: Executor) -> None:
    """Connect both."""
    executor.connect()
    working = Background(executor)
    gateway.until(lambda: gateway.serving, "an executor")
    working.stop()


def test_a_signal_ends_it_and_nothing_is_left(start: Start, runtime_dir: Path) -> None:
    memmgr = start()
    memmgr.wait_ready()
    assert {path.name for path in runtime_dir.iterdir()} == {"gateway.sock", "executor.sock", "memmgr.lock", "admin.address"}
    memmgr.process.send_signal(signal.SIGTERM)
    assert memmgr.wait_end() == 0
    assert list(runtime_dir.iterdir()) == []


def test_signals_that_come_twice_do_no_harm(start: Start, runtime_dir: Path) -> None:
    """As with Ctrl-C under a supervisor: the terminal tells the whole group, the supervisor tells it again."""
    memmgr = start()
    memmgr.wait_ready()
    end = time.monotonic() + START_SECONDS
    while memmgr.process.poll() is None:
        assert time.monotonic() < end
        memmgr.process.send_signal(signal.SIGINT)
        memmgr.process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    assert memmgr.wait_end() == 0, memmgr.output()
    assert list(runtime_dir.iterdir()) == []


def test_a_second_one_on_the_same_folder_is_refused_and_the_first_goes_on(start: Start, context: Context) -> None:
    first = start()
    first.wait_ready()
    second = start()
    assert second.wait_end() == 2
    assert f"start: a kilburn memmgr (process {first.process.pid}) already uses" in second.output()
    gateway = Gateway(context, first.gateway_endpoint)
    gateway.connect()
    gateway.close()
    assert first.pool().memmgr_incarnation


def test_two_on_two_folders(start: Start, tmp_path: Path) -> None:
    first, second = start(), start(tmp_path / ("a path longer than that of a Unix socket may be " * 3))
    assert first.wait_ready() != second.wait_ready()
    assert first.pool().memmgr_incarnation != second.pool().memmgr_incarnation
    for memmgr in (first, second):
        memmgr.process.terminate()
        assert memmgr.wait_end() == 0
    for endpoint in (second.gateway_endpoint, second.executor_endpoint):
        path = Path(endpoint.removeprefix("ipc://"))
        assert not path.exists()
    Path(second.gateway_endpoint.removeprefix("ipc://")).parent.rmdir()


def test_a_port_in_use_is_one_clear_line(start: Start, runtime_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        memmgr = start(port=port)
        assert memmgr.wait_end() == 2
    lines = [line for line in memmgr.output().splitlines() if line.startswith("start: ")]
    assert lines == [f"start: --admin 127.0.0.1:{port}: the address can't be listened on; is its port in use?"]
    assert list(runtime_dir.iterdir()) == []


def test_a_socket_that_cannot_be_bound_is_one_clear_line(start: Start, runtime_dir: Path) -> None:
    name = "executor.sock"  # the second one: the first is bound by then
    (runtime_dir / name).mkdir()
    memmgr = start()
    assert memmgr.wait_end() == 2
    assert f"start: can't bind ipc://{runtime_dir / name}" in memmgr.output()
    assert [path.name for path in runtime_dir.iterdir()] == [name]


def test_after_a_crash_the_next_one_starts_and_peers_find_it(start: Start, context: Context) -> None:
    first = start()
    first.wait_ready()
    executor = Executor(context, first.executor_endpoint, hello())
    gateway = Gateway(context, first.gateway_endpoint)
    until_serving(gateway, executor)
    incarnation = gateway.link.peer
    first.process.kill()
    first.wait_end()
    first.address_file.unlink()
    gateway.states.clear()  # what the first one said of itself
    second = start()
    second.wait_ready()
    working = Background(executor)
    gateway.until(lambda: gateway.link.peer not in (0, incarnation) and gateway.serving, "the second one")
    gateway.send(submit(1))
    assert gateway.wait_end(1).error == engine.ERROR_CODE_OK
    working.stop()
    assert executor.link.losses == gateway.link.losses == 1
    executor.close()
    gateway.close()


def test_peers_may_be_there_first(start: Start, runtime_dir: Path, context: Context) -> None:
    gateway = Gateway(context, gateway_endpoint(runtime_dir))
    executor = Executor(context, executor_endpoint(runtime_dir), hello())
    working = Background(executor)
    gateway.pump(0.3)
    start()
    gateway.until(lambda: gateway.serving, "the memory manager")
    gateway.send(submit(1))
    assert gateway.wait_end(1).error == engine.ERROR_CODE_OK
    working.stop()
    executor.close()
    gateway.close()


def test_a_stop_ends_what_is_running(start: Start, context: Context) -> None:
    memmgr = start()
    memmgr.wait_ready()
    executor = Executor(context, memmgr.executor_endpoint, hello())
    executor.frozen = True
    gateway = Gateway(context, memmgr.gateway_endpoint)
    until_serving(gateway, executor)
    gateway.send(submit(1))
    gateway.pump(0.1)
    executor.until(lambda: executor.plans, "a plan")
    os.kill(memmgr.process.pid, signal.SIGTERM)
    end = gateway.wait_end(1)
    assert end.error == engine.ERROR_CODE_UNAVAILABLE
    assert "stopping" in end.message
    assert memmgr.wait_end() == 0
    executor.close()
    gateway.close()
