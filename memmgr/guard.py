"""How an admin call ends that no method has ended: its client gets a status with a code, and nothing of ours by accident.

An uncaught exception's text would be sent to the client, and a message that can't be parsed be answered with UNKNOWN. Only the
admin API's own methods are wrapped: those that take one message.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kilburn.log import Logger
from memmgr.calls import Context, abort
from memmgr.reasons import Code

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

#: Stands for a request that could not be parsed.
_MALFORMED: Final = object()


class Guard(grpc.aio.ServerInterceptor):
    """See the module. `service` is the full name of the one whose methods are wrapped."""

    def __init__(self, service: str, log: Logger) -> None:
        self._prefix = f"/{service}/"
        self._log = log

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        """Wrap one method."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        parse = handler.request_deserializer
        assert parse is not None

        def tolerant(data: bytes) -> Any:  # noqa: ANN401 - a message, or what stands for none
            try:
                return parse(data)
            except DecodeError:
                return _MALFORMED

        if handler.unary_unary is not None:
            answer: Any = handler.unary_unary

            async def unary(request: object, context: Context) -> Any:  # noqa: ANN401
                await self._refuse_malformed(request, context)
                try:
                    return await answer(request, context)
                except (grpc.aio.BaseError, asyncio.CancelledError):
                    raise
                except Exception:
                    await self._fail(context)

            return grpc.unary_unary_rpc_method_handler(unary, tolerant, handler.response_serializer)
        stream: Any = handler.unary_stream

        async def pages(request: object, context: Context) -> AsyncIterator[Any]:
            await self._refuse_malformed(request, context)
            try:
                async for page in stream(request, context):
                    yield page
            except (grpc.aio.BaseError, asyncio.CancelledError):
                raise
            except Exception:
                await self._fail(context)

        return grpc.unary_stream_rpc_method_handler(pages, tolerant, handler.response_serializer)

    async def _refuse_malformed(self, request: object, context: Context) -> None:
        if request is _MALFORMED:
            await abort(context, Code.MALFORMED_MESSAGE, "the message can't be parsed: damaged, or text that is not UTF-8")

    async def _fail(self, context: Context) -> None:
        number = secrets.token_hex(4)
        self._log.exception("admin call failed", error_id=number)
        await abort(context, Code.INTERNAL, f"internal error; the memory manager's log has it as {number}")
