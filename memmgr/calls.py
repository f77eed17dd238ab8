"""What all admin calls share: a question to the engine's thread, who asks, and how a call is refused."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn, TypeVar

import grpc
import grpc.aio

from kilburn.limits import MAX_NAME_CHARACTERS
from kilburn.v1 import admin_pb2_grpc
from memmgr.engine import Engine, EngineBusyError
from memmgr.session import Session

AnswerT = TypeVar("AnswerT")
Context = grpc.aio.ServicerContext[Any, Any]

#: How long a call waits for the engine. A step takes milliseconds; a frozen engine should show as one.
ANSWER_SECONDS: Final = 10.0


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
            await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many admin calls wait; try again")
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), ANSWER_SECONDS)
        except TimeoutError:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "the memory manager does not answer")

    async def ask_session(self, context: Context, question: Callable[[Session], AnswerT]) -> AnswerT:
        """Have a question about the pool answered between two steps; the call ends where there is none."""

        def with_session() -> AnswerT:
            if self.engine.session is None:
                raise NoExecutorError
            return question(self.engine.session)

        try:
            return await self.ask(context, with_session)
        except NoExecutorError:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "no executor is connected; try again")

    async def read_prefix(self, context: Context, token_ids: Iterable[int], **names: str) -> array[int]:
        """Return the tokens of a request about a prefix; the call ends where they, or a name beside them, are not valid."""
        tokens = array("I", token_ids)
        wrong = ""
        if not tokens:
            wrong = "token_ids is empty"
        for name, text in names.items():
            if len(text) > MAX_NAME_CHARACTERS:
                wrong = f"{name} has {len(text)} characters; at most {MAX_NAME_CHARACTERS} are taken"
        if not wrong:
            vocabulary = await self.ask_session(context, lambda session: session.model.vocab_size)
            if max(tokens) >= vocabulary:
                wrong = f"token id {max(tokens)} is outside the vocabulary of {vocabulary}"
        if wrong:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, wrong)
        return tokens


async def read_ttl(context: Context, seconds: float) -> float:
    """Return a time to live; the call ends where it is none."""
    if not (math.isfinite(seconds) and seconds >= 0):
        await abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"ttl_seconds is {seconds}; it must be a finite number, 0 or more")
    return seconds


async def caller(context: Context) -> str:
    """Return the tenant that a call is made for."""
    for key, value in context.invocation_metadata() or ():
        if key == "kilburn-tenant" and isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARACTERS:
            return value
    return "default"


async def abort(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    """End a call."""
    await context.abort(code, message)
    raise AssertionError("abort() raises")
