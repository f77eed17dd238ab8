"""An engine in a thread of its own, with real sockets in a private folder, and peers to talk to it."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import structlog
import zmq

from kilburn.config import Address, MemmgrConfig
from kilburn.wire.endpoints import executor_endpoint, gateway_endpoint
from kilburn.wire.envelope import new_incarnation
from memmgr.engine import Engine
from tests.memmgr.memmgr_messages import hello
from tests.memmgr.memmgr_peers import PATIENCE_SECONDS, Context, Executor, Gateway, Peer

AnswerT = TypeVar("AnswerT")


class House:
    """A running engine and what was connected to it."""

    def __init__(self, runtime_dir: Path, context: Context, **changes: Any) -> None:
        self.context = context
        self.config = MemmgrConfig(
            runtime_dir=runtime_dir,
            gateway_endpoint=gateway_endpoint(runtime_dir),
            executor_endpoint=executor_endpoint(runtime_dir),
            admin=Address("127.0.0.1", 0),
            **changes,
        )
        structlog.reset_defaults()  # another test may have configured it to be silent
        self.engine = Engine(self.config, new_incarnation(), context, structlog.get_logger())
        self._peers: list[Peer] = []
        self._thread = threading.Thread(target=self.engine.run, name="engine")
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def gateway(self) -> Gateway:
        """Return a connected gateway."""
        gateway = Gateway(self.context, self.config.gateway_endpoint)
        self._peers.append(gateway)
        gateway.connect()
        return gateway

    def executor(self, **changes: Any) -> Executor:
        """Return a connected executor."""
        executor = Executor(self.context, self.config.executor_endpoint, hello(**changes))
        self._peers.append(executor)
        executor.connect()
        return executor

    def ask(self, question: Callable[[], AnswerT]) -> AnswerT:
        """Have a question answered between two steps."""
        return self.engine.ask(question).result(PATIENCE_SECONDS)

    def close(self, *, stopped: bool = False) -> None:
        """Stop everything; the engine must still have been alive, unless it was `stopped`."""
        alive = self.alive or stopped
        self.engine.stop()
        self._thread.join(PATIENCE_SECONDS)
        for peer in self._peers:
            peer.close()
        self.engine.close()
        assert alive, "the engine's thread has died"
        assert not self._thread.is_alive()


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Return a private folder with a short name: a socket's path has 107 bytes at most."""
    folder = Path(tempfile.mkdtemp(prefix="kilburn-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)  # term() would wait for ever for the sockets of a test that failed


@pytest.fixture
def house(runtime_dir: Path, context: Context) -> Iterator[House]:
    house = House(runtime_dir, context)
    yield house
    house.close()
