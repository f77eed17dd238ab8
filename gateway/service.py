"""The gateway's process: binds its port, finds its model, keeps the link, says whether it serves, and drains at the end.

Everything runs on one event loop: grpc.aio's calls, the ZeroMQ link, the timers. The port is bound first, so that clients of a
starting gateway get UNAVAILABLE at once and not a refused connection; it serves once the model's folder was read and the memory
manager has said that an executor is there.

Clients may send keepalive pings every ten seconds or more, also without calls (the limit is half of that, for pings that arrive
early). A message has at most 4 MiB either way.
"""

import asyncio
import itertools
import secrets
import signal
import time
from pathlib import Path
from typing import Final

import grpc.aio
import zmq
import zmq.asyncio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gateway.engine import Engine
from gateway.errors import CallError, Code
from gateway.guard import Guard
from gateway.inference import SERVICE_NAME, Backend, Inference, Sources
from gateway.model import TextModel, keep_torch_out, load
from kilburn import log
from kilburn.config import Address, GatewayConfig
from kilburn.errors import StartError
from kilburn.limits import MAX_GRPC_MESSAGE_BYTES, PROTOCOL
from kilburn.log import Logger
from kilburn.models import find_model
from kilburn.v1.engine_pb2 import GatewayHello
from kilburn.wire.endpoints import check_endpoint, lock, publish_address
from kilburn.wire.envelope import new_incarnation
from kilburn.wire.link import Link
from kilburn.wire.sockets import dealer

#: Calls at once; more get RESOURCE_EXHAUSTED. Far above what a memory manager queues, far below what memory can hold.
_MAX_CALLS: Final = 4096

#: How long running calls may go on after a SIGTERM: less than the ten seconds after which supervisors and Docker kill.
DRAIN_SECONDS: Final = 7.0

#: For the last messages of calls that a drain has ended to leave.
_FLUSH_SECONDS: Final = 0.5

#: How often to look for a model that is not there yet.
_MODEL_POLL_SECONDS: Final = 0.5

SERVER_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_BYTES),
    # Without this a second server on a taken port starts, and gets some of the calls.
    ("grpc.so_reuseport", 0),
    # A client that vanished without a word is found within 30 seconds, and its requests are freed.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Our own pings go on while a request waits in the queue and no data flows; so may the clients'.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


def run(config: GatewayConfig) -> None:
    """Run until SIGTERM or SIGINT, then drain. A second signal ends the drain.

    Raises:
        StartError: the port, the model or the configuration does not allow a start, or the memory manager refuses this gateway.
    """
    keep_torch_out()
    logger = log.configure(config.log, "gateway")
    check_endpoint(config.gateway_endpoint)
    with lock(config.runtime_dir, "gateway"):
        asyncio.run(_run(config, logger))


async def _run(config: GatewayConfig, logger: Logger) -> None:
    gateway = Gateway(config, logger)
    loop = asyncio.get_running_loop()
    signals = itertools.count(1)

    def on_signal() -> None:
        if next(signals) == 1:
            gateway.stop()
        else:
            gateway.hurry()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await gateway.serve()


class Gateway:
    """See the module. `serve` does all of it; `stop` and `hurry` may be called at any time."""

    def __init__(self, config: GatewayConfig, logger: Logger, drain_seconds: float = DRAIN_SECONDS) -> None:
        self.address: Address | None = None  # as bound
        self._config = config
        self._logger = logger
        self._drain_seconds = drain_seconds
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._changed = asyncio.Event()  # whether we serve
        self._guard = Guard(logger)
        self._health = health.aio.HealthServicer()
        sources = Sources(time.monotonic, time.time, lambda: secrets.token_hex(16), lambda: secrets.randbits(64))
        self._inference = Inference(sources)

    def stop(self) -> None:
        """Take no more calls, let the running ones finish for a while, then end."""
        self._stop.set()

    def hurry(self) -> None:
        """Wait for no call any longer."""
        self._hurry.set()

    async def serve(self) -> None:
        """Serve until stopped.

        Raises:
            StartError: as `run`.
        """
        server = await self._start_server()
        published: Path | None = None
        try:
            published = publish_address(self._config.runtime_dir, "gateway", str(self.address))
            self._logger.info("listening", address=str(self.address))
            await self._serve_until_stopped(server)
        finally:
            await server.stop(None)
            self._inference.close()
            if published is not None:
                published.unlink(missing_ok=True)
        self._logger.info("stopped")

    async def _start_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
        server.add_generic_rpc_handlers((self._inference.handlers(self._guard),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await self._set_health()
        listen = self._config.listen
        try:
            port = server.add_insecure_port(str(listen))
        except RuntimeError as error:
            raise StartError(f"can't listen on {listen}: the port is taken, or the address is not of this machine") from error
        self.address = Address(listen.host, port)
        await server.start()
        return server

    async def _serve_until_stopped(self, server: grpc.aio.Server) -> None:
        """Run the parts side by side; the first that fails ends all."""
        running = asyncio.create_task(self._run_engine())
        saying = asyncio.create_task(self._say_health())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({running, saying, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for part in (running, saying):
                if part.done():
                    part.result()
            await self._drain(server)
        finally:
            for task in (running, saying, stopping):
                task.cancel()
            await asyncio.gather(running, saying, stopping, return_exceptions=True)

    async def _run_engine(self) -> None:
        text = await self._find_model()
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        try:
            dealer(socket, self._config.gateway_endpoint)
            link = Link(new_incarnation(), GatewayHello(protocol=PROTOCOL, model_fingerprint=text.fingerprint))
            engine = Engine(socket, link, text.fingerprint, text.tokens, time.monotonic, self._logger, self._changed.set)
            self._inference.backend = Backend(text, engine)
            self._changed.set()
            try:
                await engine.run()
            finally:
                engine.say_goodbye()
        finally:
            socket.close()
            context.term()

    async def _find_model(self) -> TextModel:
        """Wait for the model's folder, which another process may be making, and read it."""
        folder = await asyncio.to_thread(find_model, self._config.model)
        if folder is None:
            self._logger.info("waiting for the model to be fetched", model=self._config.model)
        while folder is None:
            await asyncio.sleep(_MODEL_POLL_SECONDS)
            folder = await asyncio.to_thread(find_model, self._config.model)
        text = await asyncio.to_thread(load, folder)
        self._logger.info("tokenizer loaded", folder=str(folder), tokens=text.tokens, eos_ids=list(text.eos_ids))
        if text.not_applied:
            self._logger.warning("generation_config asks for what is not built, and not applied", fields=list(text.not_applied))
        return text

    async def _say_health(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            reason = await self._set_health()
            if reason:
                self._logger.info("not serving", reason=reason)
            else:
                self._logger.info("serving", address=str(self.address))

    async def _set_health(self) -> str:
        """Tell health checkers whether a request would succeed now; return why not."""
        backend = self._inference.backend
        reason = backend.engine.why_not if backend else "the model is not loaded yet"
        status = health_pb2.HealthCheckResponse.NOT_SERVING if reason else health_pb2.HealthCheckResponse.SERVING
        for service in ("", SERVICE_NAME):
            await self._health.set(service, status)
        return reason

    async def _drain(self, server: grpc.aio.Server) -> None:
        """End the server: new calls are refused from here on, running ones have their time, then an error of their own."""
        self._logger.info("draining", seconds=self._drain_seconds)
        stopping = asyncio.create_task(server.stop(self._drain_seconds + _FLUSH_SECONDS))
        await asyncio.sleep(0)  # it refuses new calls from its first step on: before anyone hears that we do
        await self._health.enter_graceful_shutdown()
        idle = asyncio.create_task(self._guard.idle.wait())
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({idle, hurry}, timeout=self._drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done() and self._inference.backend:
            self._inference.backend.engine.end_all(CallError(Code.STOPPING, "the gateway is stopping; try again"))
        # Calls of other services (a health watch) have no end of their own.
        await server.stop(_FLUSH_SECONDS)
        await stopping
        for task in (idle, hurry):
            task.cancel()
