"""The second thread: says that this process lives, to memmgr and in a file, while the first one computes.

Knows Progress, its own socket and the health file; calls no torch, and sleeps all but a few microseconds of each half second.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Final

import zmq

from executor.progress import Phase, Progress
from kilburn.limits import HEARTBEAT_INTERVAL_SECONDS
from kilburn.log import Logger
from kilburn.v1.engine_pb2 import ExecutorHeartbeat
from kilburn.wire.envelope import Conversation
from kilburn.wire.sockets import dealer

#: The health file is written this often. `kilburn health` calls a file that is much older a dead process's.
HEALTH_INTERVAL_SECONDS: Final = 1.0

#: Frames read and dropped in one beat: memmgr answers heartbeats only to say that it does not know us.
_MAX_DROPPED: Final = 64

_JOIN_SECONDS: Final = 5.0

_WIRE_PHASE: Final = {Phase.LOADING: ExecutorHeartbeat.PHASE_LOADING, Phase.RUNNING: ExecutorHeartbeat.PHASE_RUNNING}


def health_path(runtime_dir: Path) -> Path:
    """Return where the health file of an instance lies."""
    return runtime_dir / "executor.health"


class Beats:
    """See the module. A context manager: the thread runs inside the block, the health file goes with its end."""

    def __init__(
        self,
        *,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        incarnation: int,
        runtime_dir: Path,
        progress: Progress,
        log: Logger,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._incarnation = incarnation
        self._path = health_path(runtime_dir)
        self._progress = progress
        self._log = log
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)

    def __enter__(self) -> "Beats":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(_JOIN_SECONDS)
        self._path.unlink(missing_ok=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs. It ends by itself only through a bug."""
        return self._thread.is_alive()

    def _run(self) -> None:
        talk = Conversation(self._incarnation)
        health_due = time.monotonic()
        with dealer(self._context.socket(zmq.DEALER), self._endpoint) as socket:
            while not self._ended.is_set():
                self._beat(talk, socket)
                if time.monotonic() >= health_due:
                    self._write_health()
                    health_due += HEALTH_INTERVAL_SECONDS
                self._ended.wait(HEARTBEAT_INTERVAL_SECONDS)

    def _beat(self, talk: Conversation, socket: "zmq.Socket[bytes]") -> None:
        peer = self._progress.peer
        talk.meet(peer)
        try:
            for _ in range(_MAX_DROPPED):
                socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            pass
        if peer == 0:
            return
        beat = ExecutorHeartbeat(phase=_WIRE_PHASE[self._progress.phase], step=self._progress.step, layer=self._progress.layer)
        try:
            socket.send(talk.seal(beat), zmq.NOBLOCK)
        except zmq.Again:
            return  # nobody is there; the main thread finds out

    def _write_health(self) -> None:
        state = {
            "pid": os.getpid(),
            "phase": self._progress.phase.value,
            "connected": self._progress.peer != 0,
            "unix_time": time.time(),
        }
        fresh = self._path.with_suffix(".health.new")
        try:
            fresh.write_text(json.dumps(state) + "\n", encoding="ascii")
            fresh.replace(self._path)
        except OSError as error:
            self._log.warning("can't write the health file", path=str(self._path), error=error.strerror)
