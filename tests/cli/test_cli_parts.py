"""The parts of the launcher, one by one: ports, signals, health, leftovers, fetching the default model; how the demo begins."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import grpc
import pytest

from cli import demo, leftovers, ready
from cli.instance import InstanceError
from cli.ports import KeptPorts
from cli.signals import Signals
from kilburn.config import Address
from kilburn.errors import StartError
from kilburn.wire import endpoints
from tests.cli.cli_help import ROOT, environment
from tests.cli.test_cli_options import read

# ----------------------------------------------------------------------------------------------- the demonstration


def test_the_demonstration_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def never(runtime_dir: Path) -> NoReturn:
        said.append(capsys.readouterr().out)
        raise InstanceError("it does not start")

    monkeypatch.setattr(demo, "instance", never)
    assert demo.main() == 1
    assert said[0].startswith("starting kilburn up")
    assert capsys.readouterr().err == "demo: it does not start\n"


# ---------------------------------------------------------------------------------------------------------- ports


def test_a_kept_port_is_given_to_nobody_else_and_can_be_served_on_again_and_again() -> None:
    with KeptPorts() as ports:
        address = ports.keep(Address("127.0.0.1", 0), "--listen")
        assert address.port != 0
        for _ in range(2):
            server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
            assert server.add_insecure_port(str(address)) == address.port
            server.start()
            with socket.create_connection((address.host, address.port), timeout=5):
                pass
            server.stop(0).wait()
    with socket.create_server((address.host, address.port)):
        pass  # given back


def test_a_port_in_use_is_refused() -> None:
    refused = pytest.raises(StartError, match=r"^--admin 127\.0\.0\.1:\d+: the port is in use")
    with socket.create_server(("127.0.0.1", 0)) as server, KeptPorts() as ports, refused:
        ports.keep(Address("127.0.0.1", server.getsockname()[1]), "--admin")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_ours_is_refused(host: str) -> None:
    with KeptPorts() as ports, pytest.raises(StartError, match="can't listen there"):
        ports.keep(Address(host, 0), "--listen")


# -------------------------------------------------------------------------------------------------------- signals


def test_signals_are_waited_for_in_their_order() -> None:
    with Signals({signal.SIGUSR1, signal.SIGUSR2}) as signals:
        assert signals.wait(0.01) is None
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.wait(5) == signal.SIGUSR2
        assert signals.wait(5) == signal.SIGUSR1
        assert signals.wait(0.01) is None
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


# --------------------------------------------------------------------------------------------------------- health


def write_health(folder: Path, **changes: object) -> None:
    health = {"pid": 1, "phase": "running", "connected": True, "unix_time": 1000.0} | changes
    (folder / "executor.health").write_text(json.dumps(health))


def test_the_executor_is_healthy_while_it_says_so(tmp_path: Path) -> None:
    assert "there is none" in ready.executor_health(tmp_path, 1000.0)
    write_health(tmp_path)
    assert ready.executor_health(tmp_path, 1004.0) == ""
    assert "old" in ready.executor_health(tmp_path, 1006.0)
    write_health(tmp_path, phase="loading")
    assert ready.executor_health(tmp_path, 1000.0) == "the executor is loading"
    write_health(tmp_path, connected=False)
    assert "not connected" in ready.executor_health(tmp_path, 1000.0)
    for damaged in (b"", b"{", b"[]", b'{"phase": 1}', b"\xff"):
        (tmp_path / "executor.health").write_bytes(damaged)
        assert "can't be read" in ready.executor_health(tmp_path, 1000.0)


def test_where_a_server_is_reached(tmp_path: Path) -> None:
    assert ready.reachable(Address("0.0.0.0", 5)) == "127.0.0.1:5"
    assert ready.reachable(Address("::", 5)) == "[::1]:5"
    file = endpoints.publish_address(tmp_path, "gateway", "127.0.0.1:77")
    assert ready.listening(Address("127.0.0.1", 0), file) == "127.0.0.1:77"
    assert ready.listening(Address("127.0.0.1", 5), file) == "127.0.0.1:5"
    with pytest.raises(StartError):
        ready.listening(Address("127.0.0.1", 0), tmp_path / "admin.address")


# ---------------------------------------------------------------------------------------------------- supervisord


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_supervisord_logs_as_the_services_do(tmp_path: Path, log_format: str) -> None:
    """A program that ends with a status that was not expected, and another line of its own."""
    configuration = tmp_path / "supervisord.conf"
    configuration.write_text(
        f"""[supervisord]
nodaemon = true
silent = true
logfile = /dev/stderr
logfile_maxbytes = 0
loglevel = warn
pidfile = {tmp_path}/pid
minfds = 128

[program:brief]
command = sh -c "echo '{{""own"": 1}}' >&2; exit 3"
startsecs = 0
startretries = 0
autorestart = false
exitcodes = 0
stderr_logfile = /dev/stderr
stderr_logfile_maxbytes = 0
"""
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.daemon", "-c", str(configuration), *(["-u", "root"] if os.getuid() == 0 else [])],
        cwd=ROOT,
        env=environment(KILBURN_LOG_FORMAT=log_format),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(2)]
    process.terminate()
    process.communicate(timeout=30)
    own, told = sorted(lines, key=lambda line: "exited" in line)
    assert "own" in own
    if log_format == "json":
        assert json.loads(told)["event"] == "exited: brief (exit status 3; not expected)"
        assert (json.loads(told)["process"], json.loads(told)["level"]) == ("supervisord", "warning")
    else:
        assert " WARN exited: brief (exit status 3; not expected)" in told


# ------------------------------------------------------------------------------------------------------ leftovers


def test_only_the_files_of_roles_that_nobody_has_are_removed(tmp_path: Path) -> None:
    runtime_dir, pool_dir = tmp_path / "run", tmp_path / "pool"
    runtime_dir.mkdir(mode=0o700)
    pool_dir.mkdir()
    options = read(["--runtime-dir", str(runtime_dir), "--pool-dir", str(pool_dir)])
    pool = pool_dir / f"kilburn-{endpoints.instance_id(runtime_dir)}.pool"
    other = pool_dir / f"kilburn-{endpoints.instance_id(tmp_path)}.pool"
    names = ("gateway.sock", "executor.sock", "executor.health", "gateway.address", "admin.address", "memmgr.failed")
    files = [pool, other, *(runtime_dir / name for name in names)]
    for file in files:
        file.touch()
    with endpoints.lock(runtime_dir, "executor"):
        leftovers.remove(options)
        assert pool.exists()
        assert {path.name for path in runtime_dir.iterdir()} == {"executor.health", "executor.lock"}
    leftovers.remove(options)
    assert not pool.exists()
    assert other.exists()
    leftovers.remove_folders(runtime_dir)
    assert not runtime_dir.exists()
