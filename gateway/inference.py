"""What each call of `kilburn.v1.Inference` does: joins validation, tokenizer, streams and engine. Knows no sockets.

Work that could hold up the event loop (a long prompt's tokenizing, a long text's decoding, a chat template) is done by a few
threads; what waits for one is bounded by the calls that the server takes at all.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc

from gateway import validate
from gateway.engine import Engine
from gateway.errors import CallError, Code
from gateway.guard import Context, Guard
from gateway.model import TextModel
from gateway.streams import RequestStream
from gateway.tokenizer import Tokenizer
from gateway.validate import Checked, ModelLimits
from kilburn.limits import MAX_BEAM_WIDTH, MAX_GRPC_MESSAGE_BYTES, MAX_SAMPLES
from kilburn.v1 import engine_pb2 as wire
from kilburn.v1 import inference_pb2 as api

ResultT = TypeVar("ResultT")

SERVICE_NAME: Final = api.DESCRIPTOR.services_by_name["Inference"].full_name

#: Characters or ids below which work is done in place: a millisecond at most, and a thread's hand-over costs a tenth of one.
_SMALL: Final = 1024

#: From here on one at a time, in a thread of its own, so that prompts of ordinary length do not wait behind them: two million
#: tokens, the most that a message can hold, take seconds and 800 MB.
_HUGE: Final = 256 * 1024

#: Threads for work of ordinary size: it runs outside Python's lock, and the machine's processors are the executor's.
_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Backend:
    """What calls need; it is there once the model's folder was read."""

    text: TextModel
    engine: Engine


@dataclass(frozen=True, slots=True)
class Sources:
    """Where time and chance come from."""

    clock: Callable[[], float]  # monotonic seconds
    unix_time: Callable[[], float]
    draw_id: Callable[[], str]
    draw_seed: Callable[[], int]  # 64 bits


class Inference:
    """See the module. `backend` is set, once, by the service."""

    def __init__(self, sources: Sources) -> None:
        self.backend: Backend | None = None
        self._sources = sources
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")
        self._thread_for_huge = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-huge")

    def close(self) -> None:
        """Let the threads end; what they are doing has nobody left to wait for it."""
        for threads in (self._threads, self._thread_for_huge):
            threads.shutdown(wait=False, cancel_futures=True)

    def handlers(self, guard: Guard) -> grpc.GenericRpcHandler:
        """Return the service for a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Generate": guard.stream(self.generate, api.GenerateRequest),
                "Attach": guard.stream(self.attach, api.AttachRequest),
                "Cancel": guard.unary(self.cancel, api.CancelCall),
                "Tokenize": guard.unary(self.tokenize, api.TokenizeRequest),
                "Detokenize": guard.unary(self.detokenize, api.DetokenizeRequest),
                "GetModel": guard.unary(self.get_model, api.GetModelRequest),
            },
        )

    async def generate(self, request: api.GenerateRequest, context: Context) -> None:
        """Run one request and write its stream."""
        arrived = self._sources.clock()
        tenant = validate.tenant_of(context.invocation_metadata())
        backend = self._backend()
        text, engine = backend.text, backend.engine
        limits = _limits(text, engine.served_model())
        checked = validate.check(request, tenant, limits, self._sources.draw_id, self._sources.draw_seed)
        stream = RequestStream(checked, text.tokenizer.decoding(checked.keep_special_tokens), arrived, self._sources.clock)
        engine.open(stream)
        try:
            submit, echo = await self._prepare(request, checked, text.tokenizer, limits)
            submit.deadline_unix_seconds = self._deadline(context)
            stream.begin(len(submit.prompt_ids), echo)
            engine.submit(stream, submit)
            del submit  # a long stream has no use for its prompt
            while (response := await stream.next()) is not None:
                await context.write(response)
        finally:
            engine.close(stream)

    async def attach(self, request: api.AttachRequest, context: Context) -> None:
        """Go on with a kept request: none is kept yet."""
        validate.tenant_of(context.invocation_metadata())
        validate.check_request_id(request.request_id)
        raise CallError(Code.NOT_BUILT, "Attach is not built yet")

    async def cancel(self, request: api.CancelCall, context: Context) -> api.CancelCallResponse:
        """End a request that came through this gateway."""
        tenant = validate.tenant_of(context.invocation_metadata())
        request_id = validate.check_request_id(request.request_id)
        return api.CancelCallResponse(found=self._backend().engine.cancel(tenant, request_id))

    async def tokenize(self, request: api.TokenizeRequest, context: Context) -> api.TokenizeResponse:
        """Return a text's ids."""
        tokenizer = self._backend().text.tokenizer
        if request.WhichOneof("input") == "chat":
            validate.check_chat(request.chat)
            text = await self._render(tokenizer, request.chat)
        else:
            text = request.text
        wants_special = request.WhichOneof("input") == "text" and not request.no_special_tokens
        ids = await self._work(len(text), lambda: tokenizer.encode(text, wants_special))
        return _bounded(api.TokenizeResponse(ids=ids), "ids")

    async def detokenize(self, request: api.DetokenizeRequest, context: Context) -> api.DetokenizeResponse:
        """Return ids' text."""
        text = self._backend().text
        validate.check_ids(request.ids, _vocab_size(self._backend()), "ids")
        decoded = await self._work(
            len(request.ids), lambda: text.tokenizer.decode(list(request.ids), request.keep_special_tokens)
        )
        return _bounded(api.DetokenizeResponse(text=decoded), "text")

    async def get_model(self, request: api.GetModelRequest, context: Context) -> api.Model:
        """Return what is served, or was served last."""
        backend = self._backend()
        model = backend.engine.model or backend.engine.served_model()
        return api.Model(
            name=model.name,
            context_length=model.context_length,
            vocab_size=model.vocab_size,
            block_size=model.block_size,
            total_blocks=model.total_blocks,
            dtype=model.dtype,
            device=model.device,
            attention_backend=model.attention_backend,
            has_chat_template=backend.text.tokenizer.has_chat_template,
            max_n=MAX_SAMPLES,
            max_beam_width=MAX_BEAM_WIDTH,
            max_message_bytes=MAX_GRPC_MESSAGE_BYTES,
        )

    def _backend(self) -> Backend:
        if self.backend is None:
            raise CallError(Code.NOT_SERVING, "not serving: the model is not loaded yet; try again")
        return self.backend

    async def _prepare(
        self, request: api.GenerateRequest, checked: Checked, tokenizer: Tokenizer, limits: ModelLimits
    ) -> tuple[wire.Submit, str]:
        """Return what goes to the engine, and the prompt's text where it is to be echoed.

        The echo of a text is the text as it was given; of ids, and of a chat, what they decode to.
        """
        kind = request.WhichOneof("input")
        if kind == "token_ids":
            ids = list(request.token_ids.ids)
        else:
            # A template writes the special tokens itself.
            text = request.text if kind == "text" else await self._render(tokenizer, request.chat)
            validate.check_least_tokens(tokenizer.least_tokens(text), limits)
            ids = await self._work(len(text), lambda: tokenizer.encode(text, special_tokens=kind == "text"))
        validate.check_prompt(ids, limits)
        echo = ""
        if checked.echo:
            echo = request.text or await self._work(len(ids), lambda: tokenizer.decode(ids, checked.keep_special_tokens))
        return _submit(checked, ids), echo

    async def _render(self, tokenizer: Tokenizer, chat: api.Chat) -> str:
        return await self._work(chat.ByteSize(), lambda: tokenizer.render(chat))

    async def _work(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        """Do what takes time in proportion to `size`, characters or ids, without holding up the event loop."""
        if size < _SMALL:
            return work()
        threads = self._threads if size < _HUGE else self._thread_for_huge
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def _deadline(self, context: Context) -> float:
        """Return the call's deadline in Unix seconds, 0 for none."""
        remaining: float | None = context.time_remaining()
        return 0.0 if remaining is None else self._sources.unix_time() + remaining


def _limits(text: TextModel, model: wire.ModelInfo) -> ModelLimits:
    eos_ids = tuple(token for token in text.eos_ids if token < model.vocab_size)
    return ModelLimits(model.context_length, model.vocab_size, eos_ids, text.defaults)


def _vocab_size(backend: Backend) -> int:
    """Return the served model's, or before one was served the folder's."""
    model = backend.engine.model
    return model.vocab_size if model else (backend.text.vocab_size or backend.text.tokens)


def _submit(request: Checked, ids: list[int]) -> wire.Submit:
    sampling, stopping = request.sampling, request.stopping
    return wire.Submit(
        tenant=request.tenant,
        request_id=request.request_id,
        prompt_ids=ids,
        sampling=wire.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            with_logprobs=sampling.top_logprobs is not None,
            top_logprobs=sampling.top_logprobs or 0,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=dict(sampling.logit_bias),
            min_tokens=stopping.min_tokens,
            unwanted_ids=stopping.stop_token_ids if stopping.min_tokens else (),
        ),
        max_tokens=stopping.max_tokens,
        stop_token_ids=stopping.stop_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
        samples=request.samples,
        beam_width=request.beams,
        length_penalty=request.length_penalty,
        prompt_logprobs=request.prompt_logprobs,
    )


MessageT = TypeVar("MessageT", api.TokenizeResponse, api.DetokenizeResponse)


def _bounded(response: MessageT, what: str) -> MessageT:
    size = response.ByteSize()
    if size > MAX_GRPC_MESSAGE_BYTES:
        raise CallError(
            Code.ANSWER_TOO_LONG,
            f"the answer's {what} would be {size} bytes; a message has at most {MAX_GRPC_MESSAGE_BYTES}: ask in parts",
        )
    return response
