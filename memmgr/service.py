"""The memory manager as a process: its lock, its signals, its address file, its end."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import zmq

from kilburn import log
from kilburn.config import MemmgrConfig
from kilburn.wire.endpoints import check_endpoint, ipc_folder, lock, private_dir, publish_address
from kilburn.wire.envelope import new_incarnation
from memmgr.admin import AdminServer
from memmgr.compiled import why_interpreted
from memmgr.engine import Engine
from memmgr.journal.files import JournalFile
from memmgr.journal.recording import Journal

#: What ends the process. A terminal's Ctrl-C and a supervisor's SIGTERM may come together.
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)

#: How long a thread of this process waits for Python's lock before who has it must give it up.
_SWITCH_SECONDS: Final = 0.0005


def run(config: MemmgrConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        StartError: the runtime folder, an endpoint, the admin address or the journal can't be used.
    """
    logger = log.configure(config.log, "memmgr")
    if why := why_interpreted():
        logger.warning("the core is interpreted, at half its speed", why=why)
    private_dir(config.runtime_dir)
    for endpoint in (config.gateway_endpoint, config.executor_endpoint):
        private_dir(ipc_folder(check_endpoint(endpoint)))
    with lock(config.runtime_dir, "memmgr"), _journal(config, logger) as journal:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            _serve(config, context, logger, journal)
        finally:
            context.term()


@contextmanager
def _journal(config: MemmgrConfig, logger: log.Logger) -> Iterator[Journal | None]:
    """Open the journal, if one is wanted, and close it: it tells whether this process ended as it was asked to."""
    if config.journal is None:
        yield None
        return
    file = JournalFile(config.journal)
    journal = Journal(file, logger, time.time())
    logger.info("journal opened", journal=str(file.path), bytes=file.size, cut_bytes=file.cut_bytes)
    ended = False
    try:
        yield journal
        ended = True
    finally:
        journal.close(ended=ended)


def _serve(config: MemmgrConfig, context: "zmq.Context[zmq.Socket[bytes]]", logger: log.Logger, journal: Journal | None) -> None:
    # Each time that a step waits for a message it gives Python's lock up, and waits for it as long as this where the admin API's
    # thread has it. With the default of 5 ms a step was held up by 30 ms and more while a long answer was made.
    sys.setswitchinterval(_SWITCH_SECONDS)
    engine = Engine(config, new_incarnation(), context, logger, journal)
    server = AdminServer(engine, config.admin, logger)
    for number in _ENDING:
        signal.signal(number, lambda *_: engine.stop())
    published: Path | None = None
    try:
        address = server.start()
        published = publish_address(config.runtime_dir, "admin", str(address))
        logger.info("memmgr serves", admin=str(address), incarnation=f"{engine.incarnation:016x}", compiled=not why_interpreted())
        engine.run()
        logger.info("memmgr ends")
    finally:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)  # a second one, while this closes or Python ends, changes nothing
        server.stop()
        if published is not None:
            published.unlink(missing_ok=True)
        engine.close()
