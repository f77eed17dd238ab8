"""Ctrl-C, once or twice, at any time: exit status 130 and no traceback."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kilburn.v1 import admin_pb2 as admin
from tests.cli.cli_help import ROOT, environment

#: Sends SIGINT to itself as a module is looked for.
_IMPORTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

from cli.main import main

sys.meta_path.insert(0, Interrupting())
sys.argv = ["kilburn", "pool"]
sys.exit(main())
"""


@pytest.fixture
def target() -> Iterator[str]:
    """A memory manager to whose blocks one thing happens, and nothing ever again."""
    ended = threading.Event()

    def watch(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield admin.EventPage(events=[admin.Event(cursor=1)]).SerializeToString()
        ended.wait()

    server = grpc.server(ThreadPoolExecutor(4))
    handlers: dict[str, Any] = {"WatchEvents": grpc.unary_stream_rpc_method_handler(watch)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kilburn.v1.Admin", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    ended.set()
    server.stop(0).wait()


@pytest.mark.processes
@pytest.mark.parametrize("gap_ms", [None, 0, 0.3, 1, 2, 10])
def test_two_in_a_row_end_as_one_does(target: str, gap_ms: float | None) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "events", "--admin-server", target],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() != ""
    process.send_signal(signal.SIGINT)
    if gap_ms is not None:
        time.sleep(gap_ms / 1000)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == ""


@pytest.mark.parametrize("module", ["cli.commands", "click", "kilburn.errors", "cli.admin", "grpc"])
def test_while_something_is_imported(module: str) -> None:
    script = _IMPORTING.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 130
    assert done.stderr.strip() == ""


def test_who_is_started_with_it_ignored_goes_on_ignoring_it() -> None:
    script = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + _IMPORTING.format(module="click")
    done = subprocess.run(
        [sys.executable, "-c", script.replace('"pool"', '"--help"')],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
