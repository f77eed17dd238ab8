"""supervisord as a child: started, asked, ended. It keeps the three services running (supervisord.conf); this keeps it.

Knows supervisord's interface, not what the services do.
"""

import base64
import http.client
import os
import secrets
import socket
import subprocess
import sys
import threading
import xmlrpc.client
from dataclasses import fields
from pathlib import Path
from typing import IO, Final

import psutil

from cli import lifeline
from cli.options import ENVIRONMENT_PREFIX, ServerOptions
from kilburn.wire import endpoints

CONFIGURATION: Final = Path(__file__).with_name("supervisord.conf")

#: All three programs' stopwaitsecs and a margin; then what is left is killed.
STOP_TIMEOUT_SECONDS: Final = 60.0

#: supervisord answers between two looks at its programs, of which there are three.
_CALL_TIMEOUT_SECONDS: Final = 2.0

#: Of a call that supervisord does not answer, or not as it was asked.
_CALL_ERRORS: Final = (OSError, http.client.HTTPException, xmlrpc.client.Error)

#: How long killed processes may take to be gone.
_KILL_TIMEOUT_SECONDS: Final = 5.0


def control_socket(runtime_dir: Path) -> Path:
    """Return the path of the socket on which supervisord is asked."""
    return endpoints.socket_dir(runtime_dir) / "up.sock"


class Supervision:
    """One supervisord and its three programs. Their logs are written to `log` by a thread of ours.

    A pipe and a thread, because supervisord opens its log by name, and a standard error that is a socket or a file can't be
    opened a second time without harm.
    """

    def __init__(self, options: ServerOptions, log: IO[bytes]) -> None:
        self._password = secrets.token_hex(16)
        self._socket = control_socket(options.runtime_dir)
        lifeline.adopt_orphans()
        self._process = subprocess.Popen(
            # supervisord wants to be told that it is meant to keep root's rights.
            [sys.executable, "-m", "cli.daemon", "-c", str(CONFIGURATION), *(["-u", "root"] if os.getuid() == 0 else [])],
            env=lifeline.environment_of_child() | environment(options) | self._own_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,  # a terminal's Ctrl-C is for us alone: we end the others in their order
        )
        assert self._process.stderr is not None
        self._forwarder = threading.Thread(target=_forward, args=(self._process.stderr, log), name="log", daemon=True)
        self._forwarder.start()

    def _own_environment(self) -> dict[str, str]:
        return {
            "KILBURN_PYTHON": sys.executable,
            "KILBURN_CONTROL_SOCKET": str(self._socket),
            "KILBURN_CONTROL_PASSWORD": self._password,
        }

    def alive(self) -> bool:
        """Return whether supervisord runs."""
        return self._process.poll() is None

    def given_up(self) -> list[str]:
        """Return the programs that supervisord no longer tries to start."""
        try:
            with self._server() as server:
                programs = server.supervisor.getAllProcessInfo()
        except _CALL_ERRORS:
            return []  # it is starting, ending or stopped; `alive` tells
        assert isinstance(programs, list)
        return [program["name"] for program in programs if program["statename"] == "FATAL"]

    def begin_stop(self) -> None:
        """Ask for the end of all: gateway, executor, memmgr, each in its time.

        By a call, where it takes one: a signal would be logged as a warning, as it should be where it is not ours.
        """
        if not self.alive():
            return
        try:
            with self._server() as server:
                server.supervisor.shutdown()
        except _CALL_ERRORS:
            self._process.terminate()

    def _server(self) -> xmlrpc.client.ServerProxy:
        return xmlrpc.client.ServerProxy("http://localhost", _UnixTransport(self._socket, self._password))

    def kill(self) -> None:
        """End at once what is left of supervisord and of everything below it."""
        self._process.kill()
        self._process.wait()
        below = psutil.Process().children(recursive=True)  # those whose parent ended are ours by now
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(below, timeout=_KILL_TIMEOUT_SECONDS)
        self._forwarder.join(_KILL_TIMEOUT_SECONDS)


class _UnixTransport(xmlrpc.client.Transport):
    """XML-RPC over supervisord's Unix socket. supervisord has one too, which waits without end for a stopped supervisord."""

    def __init__(self, path: Path, password: str) -> None:
        credentials = base64.b64encode(f"kilburn:{password}".encode()).decode()
        super().__init__(headers=[("Authorization", f"Basic {credentials}")])
        self._path = path

    def make_connection(self, host: object) -> http.client.HTTPConnection:
        """Return the connection on which the call is made."""
        return _UnixConnection(self._path)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_CALL_TIMEOUT_SECONDS)
        self.sock.connect(str(self._path))


def environment(options: ServerOptions) -> dict[str, str]:
    """Return the variables that give a service command these options."""
    texts = {field.name: getattr(options, field.name) for field in fields(options)}
    log = texts.pop("log")
    texts |= {"log_format": log.format, "log_level": log.level, "kv_memory": texts.pop("kv_memory_bytes")}
    # An empty variable counts as an absent one, and hides what the caller's environment says.
    return {ENVIRONMENT_PREFIX + name.upper(): _text(value) for name, value in texts.items()}


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _forward(source: IO[bytes], log: IO[bytes]) -> None:
    """Copy what arrives until the last writer is gone. Whoever reads our log may go; its writers must not block for that."""
    broken = False
    while chunk := os.read(source.fileno(), 65536):
        if broken:
            continue
        try:
            log.write(chunk)
            log.flush()
        except OSError:
            broken = True
