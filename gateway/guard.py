"""How a call ends: what a method raises becomes one status, and nothing of ours reaches the client by accident.

Knows gRPC's rules for handlers; not what the methods do.

    the method raises         the client gets
    CallError                   its status, its line, its code in the trailing metadata
    CancelledError            CANCELLED; nothing if gRPC has cancelled the call, whose client has gone
    an error of gRPC's own    what gRPC makes of it: the call is over already
    anything else             INTERNAL without its text, which goes to the log

Each line repairs a default: a handler that lets CancelledError escape from a living call leaves the client waiting for ever; an
uncaught exception's text is sent to the client; a message that can't be parsed is answered with UNKNOWN and logged as an error of
the server.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from gateway.errors import CallError, Code
from kilburn.log import Logger

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


#: Between a failed write and the word that its client has gone.
_CANCELLATION_SECONDS: Final = 1.0


class _Malformed:
    """Stands for a request that could not be parsed."""


class Guard:
    """See the module. Also counts the calls that run, so that a drain knows when they have ended."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._running = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def unary(
        self, method: Callable[[RequestT, Context], Awaitable[Message]], request_type: type[RequestT]
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Return the handler of a method that returns one message."""

        async def call(request: RequestT | _Malformed, context: Context) -> Message:
            return await self._run(method, request, context)

        return grpc.unary_unary_rpc_method_handler(
            call,
            request_deserializer=_parser(request_type),
            response_serializer=_serialize,
        )

    def stream(
        self, method: Callable[[RequestT, Context], Awaitable[None]], request_type: type[RequestT]
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Return the handler of a method that writes its messages to the context."""

        async def call(request: RequestT | _Malformed, context: Context) -> None:
            await self._run(method, request, context)

        return grpc.unary_stream_rpc_method_handler(
            call,
            request_deserializer=_parser(request_type),
            response_serializer=_serialize,
        )

    async def _run(
        self,
        method: Callable[[RequestT, Context], Awaitable[ResponseT]],
        request: RequestT | _Malformed,
        context: Context,
    ) -> ResponseT:
        with self._counted():
            try:
                if isinstance(request, _Malformed):
                    raise CallError(Code.MALFORMED_MESSAGE, "the message can't be parsed: damaged, or text that is not UTF-8")
                return await _until_gone(method(request, context))
            except CallError as refusal:
                await _abort(context, refusal)
            except grpc.aio.BaseError:
                raise
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise  # by gRPC: the call is over. A status for it would stay in memory, some 250 bytes each
                await _abort(context, CallError(Code.CANCELLED, "the call was cancelled"))
            except Exception:
                number = secrets.token_hex(4)
                self._logger.exception("call failed", error_id=number)
                await _abort(context, CallError(Code.INTERNAL, f"internal error; the gateway's log has it as {number}"))
        raise AssertionError("abort does not return")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self.idle.set()


async def _until_gone(call: Awaitable[ResponseT]) -> ResponseT:
    """Await a call; where a write fails, wait for the cancellation that says why: its client has gone."""
    try:
        return await call
    except grpc.aio.InternalError:
        await asyncio.sleep(_CANCELLATION_SECONDS)
        raise


async def _abort(context: Context, refusal: CallError) -> None:
    await context.abort(refusal.code.status, refusal.message, refusal.trailing_metadata)


def _parser(request_type: type[RequestT]) -> Callable[[bytes], RequestT | _Malformed]:
    def parse(data: bytes) -> RequestT | _Malformed:
        try:
            return request_type.FromString(data)
        except DecodeError:
            return _Malformed()

    return parse


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
