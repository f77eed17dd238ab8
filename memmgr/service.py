"""The memory manager as a process: its lock, its signals, its address file, its end."""

import signal
from pathlib import Path
from typing import Final

import zmq

from kilburn import log
from kilburn.config import MemmgrConfig
from kilburn.wire.endpoints import check_endpoint, ipc_folder, lock, private_dir, publish_address
from kilburn.wire.envelope import new_incarnation
from memmgr.admin import AdminServer
from memmgr.engine import Engine

#: What ends the process. A terminal's Ctrl-C and a supervisor's SIGTERM may come together.
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


def run(config: MemmgrConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        StartError: the runtime folder, an endpoint or the admin address can't be used.
    """
    logger = log.configure(config.log, "memmgr")
    private_dir(config.runtime_dir)
    for endpoint in (config.gateway_endpoint, config.executor_endpoint):
        private_dir(ipc_folder(check_endpoint(endpoint)))
    with lock(config.runtime_dir, "memmgr"):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            _serve(config, context, logger)
        finally:
            context.term()


def _serve(config: MemmgrConfig, context: "zmq.Context[zmq.Socket[bytes]]", logger: log.Logger) -> None:
    engine = Engine(config, new_incarnation(), context, logger)
    server = AdminServer(engine, config.admin, logger)
    for number in _ENDING:
        signal.signal(number, lambda *_: engine.stop())
    published: Path | None = None
    try:
        address = server.start()
        published = publish_address(config.runtime_dir, "admin", str(address))
        logger.info("memmgr serves", admin=str(address), incarnation=f"{engine.incarnation:016x}")
        engine.run()
        logger.info("memmgr ends")
    finally:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)  # a second one, while this closes or Python ends, changes nothing
        server.stop()
        if published is not None:
            published.unlink(missing_ok=True)
        engine.close()
