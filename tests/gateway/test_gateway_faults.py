"""What goes wrong around a gateway: memmgr lost or of another model, ports taken, models that are not there yet, its own end."""

import asyncio
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.service import SERVER_OPTIONS, Gateway
from kilburn import log
from kilburn.client import CHANNEL_OPTIONS, KEEPALIVE_OPTIONS, Client
from kilburn.config import Address, GatewayConfig, LogConfig
from kilburn.errors import StartError
from kilburn.limits import PEER_TIMEOUT_SECONDS
from kilburn.v1 import engine_pb2 as wire
from kilburn.v1 import inference_pb2 as api
from tests.gateway.gateway_support import (
    VOCAB_SIZE,
    Peer,
    Running,
    error_code,
    gateway_config,
    model_info,
    running,
    write_model,
)

REQUEST = api.GenerateRequest(text="The capital")
LENGTH = api.FINISH_REASON_LENGTH


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def gateway(folder: Path, tmp_path: Path) -> AsyncIterator[Running]:
    async with running(folder, tmp_path) as found:
        yield found


async def status(gateway: Running, service: str = "") -> int:
    """Return what a health checker hears."""
    stub: Any = health_pb2_grpc.HealthStub(gateway.channel)
    answer: health_pb2.HealthCheckResponse = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return answer.status


async def refused(gateway: Running) -> grpc.aio.AioRpcError:
    """Return the error that a new request gets, which must come at once."""
    began = time.perf_counter()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.stub.Generate(REQUEST).read()
    assert time.perf_counter() - began < 2
    return caught.value


async def serve_one(gateway: Running) -> None:
    """Have one request answered."""
    call = gateway.stub.Generate(REQUEST)
    submit = await gateway.peer.next(wire.Submit)
    gateway.peer.tokens(submit.handle, [5], finish=LENGTH, end=True)
    messages = [message async for message in call]
    assert messages[-1].finish_reason == LENGTH


# --------------------------------------------------------------------------------------------------- memmgr is lost


async def test_a_silent_memmgr_ends_all_streams_and_is_found_again(gateway: Running) -> None:
    reading = gateway.stub.Generate(REQUEST)
    submit = await gateway.peer.next(wire.Submit)
    queued = gateway.stub.Generate(REQUEST)  # not before: two calls at once arrive in any order
    await gateway.peer.next(wire.Submit)
    gateway.peer.tokens(submit.handle, gateway.encode("a"))
    assert (await reading.read()).text == "a"
    gateway.peer.frozen = True
    began = time.perf_counter()
    for call in (reading, queued):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error_code(caught.value) == "memmgr-lost"
    assert time.perf_counter() - began < 5
    assert (await refused(gateway)).code() is grpc.StatusCode.UNAVAILABLE
    assert await status(gateway) == health_pb2.HealthCheckResponse.NOT_SERVING
    gateway.peer.frozen = False
    await gateway.until(lambda: gateway.serving)
    await serve_one(gateway)


async def test_a_memmgr_that_restarts_at_once_ends_what_the_old_one_had(gateway: Running) -> None:
    call = gateway.stub.Generate(REQUEST)
    await gateway.peer.next(wire.Submit)
    await gateway.peer.close()
    gateway.peer = Peer(gateway.config.gateway_endpoint, gateway.peer.state)
    began = time.perf_counter()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), 20)
    assert time.perf_counter() - began < PEER_TIMEOUT_SECONDS
    assert error_code(caught.value) == "memmgr-lost"
    await gateway.until(lambda: gateway.serving)
    await serve_one(gateway)


async def test_a_memmgr_that_takes_nothing_in_is_not_waited_for(gateway: Running) -> None:
    """Its queue fills, then the gateway's; calls are refused, and those that are cancelled still are, in order, later."""
    backend = gateway.gateway._inference.backend
    assert backend is not None
    engine = backend.engine
    sent = engine._send
    engine._send = lambda frame: False  # type: ignore[method-assign]
    call = gateway.stub.Generate(REQUEST)
    await gateway.until(lambda: gateway.live == 1)
    await gateway.until(lambda: len(engine._outbox) == 1)
    call.cancel()
    await gateway.until(lambda: gateway.live == 0)
    engine._send = sent  # type: ignore[method-assign]
    submit = await gateway.peer.next(wire.Submit)
    assert (await gateway.peer.next(wire.Cancel)).handle == submit.handle


# ------------------------------------------------------------------------------------------------- what is served


async def test_health_follows_the_executor(gateway: Running) -> None:
    for service in ("", "kilburn.v1.Inference"):
        assert await status(gateway, service) == health_pb2.HealthCheckResponse.SERVING
    stub: Any = health_pb2_grpc.HealthStub(gateway.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    gateway.peer.set_state(wire.ModelState(serving=False, reason="the executor is compiling"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    error = await refused(gateway)
    assert (error.code(), error_code(error)) == (grpc.StatusCode.UNAVAILABLE, "not-serving")
    assert "the executor is compiling" in str(error.details())
    assert (await gateway.stub.GetModel(api.GetModelRequest())).name == "kiln", "what was served last"
    assert (await gateway.stub.Tokenize(api.TokenizeRequest(text="a"))).ids
    gateway.peer.set_state(wire.ModelState(serving=True, model=model_info(gateway.folder)))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    await serve_one(gateway)
    watch.cancel()


async def test_another_model_than_the_tokenizer_s_is_not_served(gateway: Running, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", {"hidden_size": 5})
    for model, words in (
        (model_info(other), "another model"),
        (model_info(gateway.folder, vocab_size=100), "the model only 100"),
    ):
        gateway.peer.set_state(wire.ModelState(serving=True, model=model))
        await gateway.until(lambda: not gateway.serving)
        assert words in str((await refused(gateway)).details())
        gateway.peer.set_state(wire.ModelState(serving=True, model=model_info(gateway.folder)))
        await gateway.until(lambda: gateway.serving)
    assert model_info(gateway.folder).vocab_size == VOCAB_SIZE


# ------------------------------------------------------------------------------------------------- starts and ends


def quiet(config: GatewayConfig, drain_seconds: float = 0.5) -> Gateway:
    return Gateway(config, log.configure(LogConfig(level="error"), "gateway"), drain_seconds)


async def test_a_gateway_alone_refuses_at_once(folder: Path, tmp_path: Path) -> None:
    gateway = quiet(gateway_config(tmp_path, folder))
    serving = asyncio.create_task(gateway.serve())
    while gateway.address is None:
        await asyncio.sleep(0.005)
    async with grpc.aio.insecure_channel(str(gateway.address)) as channel:
        peer: Any = None
        found = Running(folder, gateway_config(tmp_path, folder), gateway, peer, channel)
        assert await status(found) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await refused(found)).code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await found.stub.GetModel(api.GetModelRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    gateway.stop()
    await asyncio.wait_for(serving, 20)


async def test_a_memmgr_that_refuses_ends_the_process(folder: Path, tmp_path: Path) -> None:
    config = gateway_config(tmp_path, folder)
    async with Peer(config.gateway_endpoint, refusal="start one version"):
        with pytest.raises(StartError, match="start one version"):
            await asyncio.wait_for(quiet(config).serve(), 60)


async def test_a_damaged_model_ends_the_process(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StartError, match=r"tokenizer.json is missing"):
        await asyncio.wait_for(quiet(gateway_config(tmp_path, folder)).serve(), 60)
    with pytest.raises(StartError, match="there is no such folder"):
        await asyncio.wait_for(quiet(gateway_config(tmp_path, "./nowhere")).serve(), 60)


async def test_a_taken_port_is_a_start_error(gateway: Running, folder: Path, tmp_path: Path) -> None:
    assert gateway.gateway.address is not None
    config = GatewayConfig(
        runtime_dir=tmp_path / "second",
        gateway_endpoint=gateway.config.gateway_endpoint,
        listen=gateway.gateway.address,
        model=str(folder),
    )
    with pytest.raises(StartError, match=f"can't listen on {gateway.gateway.address}"):
        await quiet(config).serve()
    await serve_one(gateway)


async def test_a_model_that_is_not_there_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILBURN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "models" / "smollm2-135m-instruct"
    config = gateway_config(tmp_path, "smollm2-135m-instruct")
    gateway = quiet(config)
    serving = asyncio.create_task(gateway.serve())
    await asyncio.sleep(0.7)
    assert not serving.done()
    write_model(folder)
    state = wire.ModelState(serving=True, model=model_info(folder))
    async with Peer(config.gateway_endpoint, state) as peer, grpc.aio.insecure_channel(str(gateway.address)) as channel:
        await asyncio.sleep(0.7)
        assert gateway._inference.backend is None, "the folder is not marked as complete"
        (folder / "kilburn-complete").touch()
        found = Running(folder, config, gateway, peer, channel)
        await found.until(lambda: found.serving, 30)
        await serve_one(found)
        gateway.stop()
        await asyncio.wait_for(serving, 20)


async def ended(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 20)
    return caught.value


async def test_a_drain_lets_calls_finish_and_takes_no_new_ones(folder: Path, tmp_path: Path) -> None:
    async with running(folder, tmp_path, drain_seconds=5) as gateway:
        watch: Any = health_pb2_grpc.HealthStub(gateway.channel)
        watching = watch.Watch(health_pb2.HealthCheckRequest())
        await watching.read()
        call = gateway.stub.Generate(REQUEST)
        submit = await gateway.peer.next(wire.Submit)
        gateway.gateway.stop()
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await ended(gateway.stub.Generate(REQUEST).read())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        gateway.peer.tokens(submit.handle, gateway.encode("done"), finish=LENGTH, end=True)
        assert "".join([message.text async for message in call]) == "done"
        began = time.perf_counter()
    assert time.perf_counter() - began < 3, "a health watch does not hold it up"


@pytest.mark.parametrize("hurry", [False, True])
async def test_a_drain_ends_calls_that_do_not(folder: Path, tmp_path: Path, hurry: bool) -> None:
    async with running(folder, tmp_path, drain_seconds=60 if hurry else 0.3) as gateway:
        call = gateway.stub.Generate(REQUEST)
        submit = await gateway.peer.next(wire.Submit)
        gateway.peer.tokens(submit.handle, gateway.encode("a"))
        await call.read()
        gateway.gateway.stop()
        if hurry:
            await asyncio.sleep(0.05)
            gateway.gateway.hurry()
        error = await ended(call.read())
        assert (error.code(), error_code(error)) == (grpc.StatusCode.UNAVAILABLE, "stopping")
        assert (await gateway.peer.next(wire.Cancel)).handle == submit.handle


# ---------------------------------------------------------------------------------------------------- as a process


@contextmanager
def process(config: GatewayConfig) -> Iterator["subprocess.Popen[str]"]:
    """Run the gateway as a process of its own, and leave none behind."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom gateway.service import run\nfrom kilburn.config import *\n"
        "from kilburn.errors import StartError\n"
        f"config = GatewayConfig(Path({str(config.runtime_dir)!r}), {config.gateway_endpoint!r}, "
        f"Address({config.listen.host!r}, {config.listen.port}), {config.model!r})\n"
        "try:\n    run(config)\nexcept StartError as error:\n    print(error, file=sys.stderr)\n    sys.exit(2)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program], stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=10)


async def address_of(config: GatewayConfig) -> str:
    """Wait for the address that a gateway says it has."""
    path = config.runtime_dir / "gateway.address"
    async with asyncio.timeout(30):
        while not path.exists():
            await asyncio.sleep(0.02)
    return path.read_text(encoding="ascii").strip()


async def healthy(address: str) -> None:
    """Wait until a gateway says that it serves."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(30):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        watch.cancel()


@pytest.mark.processes
async def test_a_process_from_start_to_end(folder: Path, tmp_path: Path) -> None:
    config = gateway_config(tmp_path, folder)
    state = wire.ModelState(serving=True, model=model_info(folder))
    async with Peer(config.gateway_endpoint, state) as peer:
        with process(config) as child:
            address = await address_of(config)
            await healthy(address)
            answer = asyncio.create_task(asyncio.to_thread(ask, address))
            submit = await peer.next(wire.Submit)
            assert (submit.tenant, submit.max_tokens, submit.sampling.temperature) == ("acme", 3, 0)
            peer.tokens(submit.handle, [266, 5], finish=LENGTH, end=True)
            assert await answer
            leaving = asyncio.create_task(asyncio.to_thread(ask_and_leave, address))
            submit = await peer.next(wire.Submit)
            peer.tokens(submit.handle, [266])
            assert (await peer.next(wire.Cancel)).handle == submit.handle
            await leaving
            child.send_signal(signal.SIGTERM)
            _, errors = await asyncio.to_thread(child.communicate, None, 30)
        assert child.returncode == 0
        for words in (f"listening address={address}", f"serving address={address}", "stopped"):
            assert words in errors
        assert "Traceback" not in errors
        assert sorted(path.name for path in tmp_path.iterdir()) == ["gateway.sock"], "only the peer's socket is left"


def ask(address: str) -> str:
    with Client(address, tenant="acme") as client:
        return "".join(client.generate_text("The capital", max_tokens=3, temperature=0))


def ask_and_leave(address: str) -> None:
    with Client(address) as client:
        pieces = client.generate_text("The capital")
        assert next(pieces)
        pieces.close()


@pytest.mark.processes
async def test_a_process_on_a_taken_port(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = gateway_config(tmp_path, folder)
        config = GatewayConfig(config.runtime_dir, config.gateway_endpoint, Address("127.0.0.1", port), config.model)
        with process(config) as child:
            _, errors = await asyncio.to_thread(child.communicate, None, 30)
    assert child.returncode == 2
    assert f"can't listen on 127.0.0.1:{port}" in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_every_option_is_one_that_grpc_knows() -> None:
    """gRPC ignores a name that it does not know, without a word."""
    path = importlib.import_module("grpc._cython.cygrpc").__file__
    assert path is not None
    library = Path(path).read_bytes()
    unknown = [name for name, _ in (*SERVER_OPTIONS, *CHANNEL_OPTIONS, *KEEPALIVE_OPTIONS) if name.encode() not in library]
    assert unknown == []
    assert b"grpc.no_such_option" not in library
