"""What all admin calls share: a question to the engine's thread, who asks, and how a call is refused."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn, TypeVar

import grpc.aio
from google.protobuf.descriptor import EnumDescriptor

from kilburn.limits import MAX_NAME_CHARACTERS
from kilburn.names import TENANT_KEY, fault_of_name, tenant_in
from kilburn.reasons import CallError
from kilburn.v1 import admin_pb2_grpc
from memmgr.engine import Engine
from memmgr.questions import EngineBusyError
from memmgr.reasons import Code
from memmgr.session import Session

AnswerT = TypeVar("AnswerT")
Context = grpc.aio.ServicerContext[Any, Any]

#: How long a call waits for the engine. A step takes milliseconds; a frozen engine should show as one.
ANSWER_SECONDS: Final = 10.0

#: How long a pin may be asked to last, ten years: more is a slip, or "until unpinned", which is said by 0.
MAX_TTL_SECONDS: Final = 10 * 365 * 24 * 3600


class NoExecutorError(Exception):
    """There is no pool to ask about."""


class Calls(admin_pb2_grpc.AdminServicer):
    """See the module."""

    def __init__(self, engine: Engine) -> None:
        self.engine: Final = engine

    async def ask(self, context: Context, question: Callable[[], AnswerT]) -> AnswerT:
        """Have a question answered between two steps; the call ends where that can't be."""
        try:
            answer = self.engine.ask(question)
        except EngineBusyError:
            await abort(context, Code.BUSY, "too many admin calls wait; try again")
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), ANSWER_SECONDS)
        except TimeoutError:
            await abort(context, Code.NO_ANSWER, "the memory manager does not answer")

    async def ask_session(self, context: Context, question: Callable[[Session], AnswerT]) -> AnswerT:
        """Have a question about the pool answered between two steps; the call ends where there is none."""

        def with_session() -> AnswerT:
            if self.engine.session is None:
                raise NoExecutorError
            return question(self.engine.session)

        try:
            return await self.ask(context, with_session)
        except NoExecutorError:
            await abort(context, Code.NOT_SERVING, "no executor is connected; try again")

    async def read_prefix(self, context: Context, token_ids: Iterable[int], cache_salt: str) -> array[int]:
        """Return the tokens of a request about a prefix; the call ends where they, or the salt beside them, are not valid."""
        tokens = array("I", token_ids)
        if not tokens:
            await abort(context, Code.EMPTY_PROMPT, "token_ids is empty", "token_ids")
        if len(cache_salt) > MAX_NAME_CHARACTERS:
            message = f"cache_salt has {len(cache_salt)} characters; at most {MAX_NAME_CHARACTERS} are taken"
            await abort(context, Code.INVALID_VALUE, message, "cache_salt")
        vocabulary = await self.ask_session(context, lambda session: session.model.vocab_size)
        if max(tokens) >= vocabulary:
            message = f"token id {max(tokens)} is outside the vocabulary of {vocabulary}"
            await abort(context, Code.UNKNOWN_TOKEN, message, "token_ids")
        return tokens


async def read_ttl(context: Context, seconds: float) -> float:
    """Return a time to live; the call ends where it is none."""
    if not 0 <= seconds <= MAX_TTL_SECONDS:  # so that no NaN passes
        message = f"ttl_seconds is {seconds}; it must be a number from 0 (until unpinned) to {MAX_TTL_SECONDS} (ten years)"
        await abort(context, Code.INVALID_VALUE, message, "ttl_seconds")
    return seconds


async def tenant_for(context: Context, named: str) -> str:
    """Return the tenant that a request names, else the caller's; the call ends where it can't be one."""
    if not named:
        tenant, fault = tenant_in(context.invocation_metadata())
        if fault:
            await abort(context, Code.INVALID_VALUE, fault, TENANT_KEY)
        return tenant
    fault = fault_of_name(named)
    if fault:
        await abort(context, Code.INVALID_VALUE, f"tenant {fault}", "tenant")
    return named


async def check_enum(context: Context, values: Iterable[int], kind: EnumDescriptor, field: str) -> None:
    """End the call where a value is none of an enum's: proto3 carries any number."""
    known = kind.values_by_number
    for value in values:
        if value not in known:
            message = f"{field} is {value}; {kind.name} has {min(known)} to {max(known)}"
            await abort(context, Code.INVALID_VALUE, message, field)


async def abort(context: Context, code: Code, message: str, field: str = "") -> NoReturn:
    """End a call. `field`: the one of the request that is at fault."""
    refusal = CallError(code, message, field)
    await context.abort(code.status, refusal.message, refusal.trailing_metadata)
    raise AssertionError("abort() raises")
