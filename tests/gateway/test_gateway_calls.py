"""The calls of a running gateway, against the memory manager's side of the protocol over a real socket."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway import guard
from gateway.errors import CallError
from kilburn.limits import MAX_GRPC_MESSAGE_BYTES
from kilburn.v1 import engine_pb2 as wire
from kilburn.v1 import inference_pb2 as api
from tests.gateway.gateway_support import CONTEXT_LENGTH, END, VOCAB_SIZE, Running, error_code, running, write_model

EOS = api.FINISH_REASON_EOS
LENGTH = api.FINISH_REASON_LENGTH


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def gateway(folder: Path, tmp_path: Path) -> AsyncIterator[Running]:
    async with running(folder, tmp_path) as found:
        yield found


def request(**fields: Any) -> api.GenerateRequest:
    if not fields.keys() & {"text", "token_ids", "chat"}:
        fields["text"] = "The capital"
    return api.GenerateRequest(**fields)


def start(gateway: Running, message: api.GenerateRequest, **options: Any) -> "asyncio.Task[list[api.GenerateResponse]]":
    """Start a call; its task returns all of its messages."""

    async def read() -> list[api.GenerateResponse]:
        return [response async for response in gateway.stub.Generate(message, **options)]

    return asyncio.create_task(read())


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """Return the error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 20)
    return caught.value


def text_of(responses: Sequence[api.GenerateResponse]) -> str:
    return "".join(response.text for response in responses)


# ----------------------------------------------------------------------------------------------------------- generate


async def test_a_request_there_and_its_tokens_back(gateway: Running) -> None:
    call = start(
        gateway,
        request(
            request_id="mine",
            priority=-3,
            cache_salt="salt",
            sampling={
                "temperature": 0.5,
                "top_k": 7,
                "seed": 42,
                "repetition_penalty": 1.5,
                "presence_penalty": -2,
                "frequency_penalty": 0.5,
                "logit_bias": {7: -100, 2: 3.5, 4: 0},
            },
            stopping={"max_tokens": 9, "min_tokens": 4, "stop_token_ids": [3]},
            output={"logprobs": 2, "prompt_logprobs": True},
        ),
        metadata=(("kilburn-tenant", "acme"),),
    )
    submit = await gateway.peer.next(wire.Submit)
    assert list(submit.prompt_ids) == gateway.encode("The capital")
    assert (submit.tenant, submit.request_id, submit.priority, submit.cache_salt) == ("acme", "mine", -3, "salt")
    assert submit.sampling == wire.SamplingParams(
        temperature=0.5,
        top_p=1,
        top_k=7,
        min_p=0,
        seed=42,
        with_logprobs=True,
        top_logprobs=2,
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias={2: 3.5, 7: -100},
        min_tokens=4,
        unwanted_ids=[0, 3],
    )
    assert submit.prompt_logprobs
    assert (submit.max_tokens, list(submit.stop_token_ids), submit.deadline_unix_seconds) == (9, [0, 3], 0)
    ids = [*gateway.encode(" of France"), 0]
    logprobs = [api.TokenLogprob(token_id=token, logprob=-1, rank=1) for token in ids]
    gateway.peer.tokens(submit.handle, ids[:-1], logprobs=logprobs[:-1])
    gateway.peer.tokens(submit.handle, ids[-1:], len(ids) - 1, EOS, end=True, logprobs=logprobs[-1:], cached_tokens=1)
    messages = await call
    assert text_of(messages) == " of France"
    assert [token for message in messages for token in message.token_ids] == ids
    assert [entry.token_id for message in messages for entry in message.logprobs] == ids
    assert {message.request_id for message in messages} == {"mine"}
    assert messages[-1].finish_reason == EOS
    usage = messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (len(submit.prompt_ids), len(ids), 1)
    assert 0 < usage.first_token_seconds <= usage.total_seconds < 10


async def test_ids_and_seeds_are_drawn_where_none_are_given(gateway: Running) -> None:
    calls = [start(gateway, request()) for _ in range(2)]
    submits = [await gateway.peer.next(wire.Submit) for _ in range(2)]
    assert len({submit.request_id for submit in submits} | {""}) == 3
    assert len({submit.sampling.seed for submit in submits}) == 2
    for submit in submits:
        gateway.peer.tokens(submit.handle, [5], finish=LENGTH, end=True)
    await asyncio.gather(*calls)


async def test_a_chat_and_ids_as_prompts(gateway: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    for prompt, ids in (
        ({"chat": chat}, gateway.encode("<|user|>Hello<|end|><|assistant|>")),
        ({"token_ids": {"ids": [0, VOCAB_SIZE - 1]}}, [0, VOCAB_SIZE - 1]),
    ):
        call = start(gateway, request(**prompt, output={"echo": True}))
        submit = await gateway.peer.next(wire.Submit)
        assert list(submit.prompt_ids) == ids
        gateway.peer.tokens(submit.handle, gateway.encode("x"), finish=LENGTH, end=True)
        assert text_of(await call) == ("Hellox" if "chat" in prompt else "x")


async def test_echo_is_the_text_as_it_was_given(gateway: Running) -> None:
    call = start(gateway, request(text=f"The{END} kiln\x00é", output={"echo": True}))
    submit = await gateway.peer.next(wire.Submit)
    gateway.peer.tokens(submit.handle, gateway.encode("!"), finish=LENGTH, end=True)
    assert text_of(await call) == f"The{END} kiln\x00é!"


async def test_a_stop_string_ends_the_index_and_is_never_seen(gateway: Running) -> None:
    seen: list[str] = []

    async def read() -> api.GenerateResponse:
        last = api.GenerateResponse()
        async for last in gateway.stub.Generate(request(stopping={"stop": ["nce is"]})):
            seen.append(last.text)
        return last

    call = asyncio.create_task(read())
    submit = await gateway.peer.next(wire.Submit)
    ids = gateway.encode(" of France is Paris")
    for offset, token in enumerate(ids):
        gateway.peer.tokens(submit.handle, [token], offset)
        await asyncio.sleep(0.002)
    finish = await gateway.peer.next(wire.Finish)
    assert (finish.handle, finish.index) == (submit.handle, 0)
    assert finish.output_tokens < len(ids)
    gateway.peer.end(submit.handle)
    last = await call
    assert "".join(seen) == " of Fra"
    assert (last.finish_reason, last.stop_match) == (api.FINISH_REASON_STOP, "nce is")
    assert last.usage.completion_tokens == finish.output_tokens
    assert not any(isinstance(message, wire.Cancel) for message in gateway.peer.heard)


async def test_unicode_split_over_tokens(gateway: Running) -> None:
    text = "👩‍👩‍👧 東京都 é"
    ids = gateway.encode(text)
    assert len(ids) > len(text) / 2
    call = start(gateway, request())
    submit = await gateway.peer.next(wire.Submit)
    for offset, token in enumerate(ids):
        gateway.peer.tokens(submit.handle, [token], offset)
        await asyncio.sleep(0.001)
    gateway.peer.tokens(submit.handle, [], len(ids), LENGTH, end=True)
    messages = await call
    assert text_of(messages) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in message.text for message in messages)


async def test_invalid_bytes_in_the_output_are_text_that_can_be_sent(gateway: Running) -> None:
    byte = gateway.encode("😀")[0]
    call = start(gateway, request())
    submit = await gateway.peer.next(wire.Submit)
    gateway.peer.tokens(submit.handle, [byte] * 40, finish=LENGTH, end=True)
    assert set(text_of(await call)) == {"\N{REPLACEMENT CHARACTER}"}


async def test_a_reader_that_stalls_gets_everything_in_few_messages(gateway: Running) -> None:
    call = gateway.stub.Generate(request())
    submit = await gateway.peer.next(wire.Submit)
    count = 3000
    for offset in range(count):
        gateway.peer.tokens(submit.handle, [5], offset)
        if offset % 100 == 0:
            await asyncio.sleep(0.001)
    gateway.peer.tokens(submit.handle, [], count, LENGTH, end=True)
    messages = [message async for message in call]
    assert sum(len(message.token_ids) for message in messages) == count
    assert messages[-1].usage.completion_tokens == count


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fields", "status", "code", "words"),
    [
        ({"text": ""}, "INVALID_ARGUMENT", "empty-prompt", "empty"),
        ({"text": "kiln " * 200}, "INVALID_ARGUMENT", "prompt-too-long", "the context holds"),
        ({"text": "kiln " * 20_000}, "INVALID_ARGUMENT", "prompt-too-long", "the context holds"),
        ({"token_ids": {"ids": [1, VOCAB_SIZE]}}, "INVALID_ARGUMENT", "unknown-token", str(VOCAB_SIZE)),
        ({"token_ids": {"ids": [2**31 - 1]}}, "INVALID_ARGUMENT", "unknown-token", str(2**31 - 1)),
        ({"token_ids": {"ids": [1] * CONTEXT_LENGTH}}, "INVALID_ARGUMENT", "prompt-too-long", "64 tokens"),
        ({"token_ids": {"ids": [1] * 1_000_000}}, "INVALID_ARGUMENT", "prompt-too-long", "1000000 tokens"),
        ({"chat": {"messages": [{"role": "robot"}]}}, "INVALID_ARGUMENT", "bad-chat", "no robots here"),
        ({"sampling": {"temperature": float("nan")}}, "INVALID_ARGUMENT", "invalid-value", "temperature is nan"),
        ({"request_id": "é" * 1_000_000}, "INVALID_ARGUMENT", "invalid-value", "request_id"),
        ({"beam_width": 2, "sampling": {"seed": 1}}, "INVALID_ARGUMENT", "invalid-value", "sampling.seed has no meaning"),
        ({"resume_seconds": 5}, "UNIMPLEMENTED", "not-built", "resume_seconds"),
        ({"sampling": {"logit_bias": {VOCAB_SIZE: 1}}}, "INVALID_ARGUMENT", "unknown-token", "sampling.logit_bias"),
    ],
)
async def test_bad_input_has_one_clear_error(
    gateway: Running, fields: dict[str, Any], status: str, code: str, words: str
) -> None:
    began = time.perf_counter()
    error = await failure(start(gateway, request(**fields)))
    assert time.perf_counter() - began < 5
    assert error.code() is grpc.StatusCode[status]
    assert error_code(error) == code
    assert words in str(error.details())
    assert not any(isinstance(message, wire.Submit) for message in gateway.peer.heard)
    call = start(gateway, request())
    submit = await gateway.peer.next(wire.Submit)
    gateway.peer.tokens(submit.handle, [5], finish=LENGTH, end=True)
    assert (await call)[-1].finish_reason == LENGTH


async def test_bytes_that_are_no_message_and_text_that_is_no_utf_8(gateway: Running) -> None:
    generate: Any = gateway.channel.unary_stream("/kilburn.v1.Inference/Generate")
    tokenize: Any = gateway.channel.unary_unary("/kilburn.v1.Inference/Tokenize")
    for data in (b"\x12\x02\xff\xfe", b"\xff\xff\xff", b"\x12\x7f"):

        async def read(data: bytes = data) -> None:
            async for _ in generate(data):
                pass

        for error in (await failure(read()), await failure(tokenize(data))):
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error_code(error) == "malformed-message"
    assert (await gateway.stub.Tokenize(api.TokenizeRequest(text="The"))).ids


async def test_messages_over_the_limit(gateway: Running) -> None:
    for size in (MAX_GRPC_MESSAGE_BYTES, 5 * MAX_GRPC_MESSAGE_BYTES):
        error = await failure(start(gateway, request(text="x" * size)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = await failure(start(gateway, request(text="x " * (MAX_GRPC_MESSAGE_BYTES // 2 - 1000))))
    assert error_code(error) == "prompt-too-long"


async def test_non_ascii_in_an_error_s_details(gateway: Running) -> None:
    error = await failure(start(gateway, request(chat={"messages": [{"role": "robot", "content": "東京"}]})))
    assert error_code(error) == "bad-chat"
    assert "ロボット" in str(error.details())


async def test_a_tenant_that_can_not_be(gateway: Running) -> None:
    for call in (
        start(gateway, request(), metadata=(("kilburn-tenant", "x" * 129),)),
        gateway.stub.Cancel(api.CancelCall(request_id="r"), metadata=(("kilburn-tenant", ""),)),
    ):
        error = await failure(call)
        assert (error.code(), error_code(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid-value")


# ---------------------------------------------------------------------------------------------------------- its end


async def test_a_cancelled_call_is_cancelled_in_the_engine(gateway: Running) -> None:
    for moment in ("queued", "running"):
        call = gateway.stub.Generate(request(request_id="r"))
        submit = await gateway.peer.next(wire.Submit)
        if moment == "running":
            gateway.peer.tokens(submit.handle, gateway.encode("a"))
            assert (await call.read()).text == "a"
        call.cancel()
        assert (await gateway.peer.next(wire.Cancel)).handle == submit.handle
        gateway.peer.end(submit.handle, wire.ERROR_CODE_CANCELLED)
    assert gateway.live == 0


async def test_a_lost_connection_is_a_cancel(gateway: Running) -> None:
    async with grpc.aio.insecure_channel(str(gateway.gateway.address)) as channel:
        stub: Any = type(gateway.stub)(channel)
        call = stub.Generate(request())
        submit = await gateway.peer.next(wire.Submit)
        gateway.peer.tokens(submit.handle, gateway.encode("a"))
        await call.read()
    assert (await gateway.peer.next(wire.Cancel)).handle == submit.handle


async def test_a_client_that_has_gone_is_told_nothing(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC never frees a status that it is given for a closed call."""
    told: list[object] = []
    abort = guard._abort

    async def note(context: guard.Context, refusal: CallError) -> None:
        told.append(refusal)
        await abort(context, refusal)

    monkeypatch.setattr(guard, "_abort", note)
    for _ in range(5):
        call = gateway.stub.Generate(request())
        submit = await gateway.peer.next(wire.Submit)
        gateway.peer.tokens(submit.handle, gateway.encode("a"))
        await call.read()
        call.cancel()
        assert (await gateway.peer.next(wire.Cancel)).handle == submit.handle
    await gateway.until(gateway.gateway._guard.idle.is_set)
    assert told == []


async def test_a_deadline_goes_to_the_engine_and_ends_the_call(gateway: Running) -> None:
    began = time.time()
    call = start(gateway, request(), timeout=0.3)
    submit = await gateway.peer.next(wire.Submit)
    assert 0 < submit.deadline_unix_seconds - began < 0.4
    gateway.peer.tokens(submit.handle, [5])
    error = await failure(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await gateway.peer.next(wire.Cancel)).handle == submit.handle


async def test_a_deadline_that_the_engine_notices_first(gateway: Running) -> None:
    call = start(gateway, request(), timeout=5)
    submit = await gateway.peer.next(wire.Submit)
    gateway.peer.end(submit.handle, wire.ERROR_CODE_DEADLINE)
    error = await failure(call)
    assert (error.code(), error_code(error)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline")
    assert not any(isinstance(message, wire.Cancel) for message in gateway.peer.heard)


@pytest.mark.parametrize(
    ("code", "status", "slug"),
    [
        (wire.ERROR_CODE_CANCELLED, "CANCELLED", "cancelled"),
        (wire.ERROR_CODE_DUPLICATE, "ALREADY_EXISTS", "duplicate-request"),
        (wire.ERROR_CODE_QUEUE_FULL, "RESOURCE_EXHAUSTED", "queue-full"),
        (wire.ERROR_CODE_NEVER_FITS, "INVALID_ARGUMENT", "never-fits"),
        (wire.ERROR_CODE_UNAVAILABLE, "UNAVAILABLE", "executor-lost"),
        (wire.ERROR_CODE_INVALID, "INTERNAL", "internal"),
    ],
)
async def test_each_end_has_its_status(gateway: Running, code: wire.ErrorCode.ValueType, status: str, slug: str) -> None:
    for message in ("", "in the engine's words"):
        call = start(gateway, request())
        submit = await gateway.peer.next(wire.Submit)
        gateway.peer.end(submit.handle, code, message)
        error = await failure(call)
        assert (error.code(), error_code(error)) == (grpc.StatusCode[status], slug)
        assert error.details()
        if slug != "internal":
            assert message in str(error.details())


async def test_cancel_by_another_call(gateway: Running) -> None:
    acme = (("kilburn-tenant", "acme"),)
    call = start(gateway, request(request_id="r"), metadata=acme)
    submit = await gateway.peer.next(wire.Submit)
    cancel = gateway.stub.Cancel
    assert not (await cancel(api.CancelCall(request_id="r"))).found, "it is another tenant's"
    assert not (await cancel(api.CancelCall(request_id="other"), metadata=acme)).found
    assert (await cancel(api.CancelCall(request_id="r"), metadata=acme)).found
    assert (await gateway.peer.next(wire.Cancel)).handle == submit.handle
    gateway.peer.end(submit.handle, wire.ERROR_CODE_CANCELLED)
    error = await failure(call)
    assert (error.code(), error_code(error)) == (grpc.StatusCode.CANCELLED, "cancelled")
    assert not (await cancel(api.CancelCall(request_id="r"), metadata=acme)).found


async def test_a_second_live_request_of_an_id_is_refused_and_the_first_is_not_touched(gateway: Running) -> None:
    first = start(gateway, request(request_id="r"))
    submit = await gateway.peer.next(wire.Submit)
    error = await failure(start(gateway, request(request_id="r")))
    assert (error.code(), error_code(error)) == (grpc.StatusCode.ALREADY_EXISTS, "duplicate-request")
    other = start(gateway, request(request_id="r"), metadata=(("kilburn-tenant", "other"),))
    theirs = await gateway.peer.next(wire.Submit)
    for handle in (submit.handle, theirs.handle):
        gateway.peer.tokens(handle, [5], finish=LENGTH, end=True)
    assert (await first)[-1].finish_reason == (await other)[-1].finish_reason == LENGTH
    assert not any(isinstance(message, wire.Cancel) for message in gateway.peer.heard)


async def test_tokens_out_of_order_fail_one_call_and_cancel_it(gateway: Running) -> None:
    call = start(gateway, request())
    submit = await gateway.peer.next(wire.Submit)
    gateway.peer.tokens(submit.handle, [5], offset=3)
    error = await failure(call)
    assert (error.code(), error_code(error)) == (grpc.StatusCode.INTERNAL, "internal")
    assert (await gateway.peer.next(wire.Cancel)).handle == submit.handle


async def test_a_fault_of_ours_does_not_show_its_text(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = gateway.gateway._inference.backend
    assert backend is not None

    def broken(*_: object) -> list[int]:
        raise RuntimeError("secret")

    monkeypatch.setattr(backend.text.tokenizer, "encode", broken)
    for call in (start(gateway, request()), gateway.stub.Tokenize(api.TokenizeRequest(text="x"))):
        error = await failure(call)
        assert (error.code(), error_code(error)) == (grpc.StatusCode.INTERNAL, "internal")
        assert "secret" not in str(error.details())
    assert gateway.live == 0


async def test_many_cancelled_calls_leave_nothing(gateway: Running) -> None:
    before = len(asyncio.all_tasks())
    for _ in range(50):
        call = gateway.stub.Generate(request())
        submit = await gateway.peer.next(wire.Submit)
        gateway.peer.tokens(submit.handle, gateway.encode("a"))
        await call.read()
        call.cancel()
    await gateway.until(lambda: gateway.live == 0)
    await gateway.until(lambda: len(asyncio.all_tasks()) <= before)
    assert sum(isinstance(message, wire.Cancel) for message in gateway.peer.heard) == 50


# ------------------------------------------------------------------------------------------------------- other calls


async def test_tokenize_and_detokenize(gateway: Running) -> None:
    stub = gateway.stub
    ids = list((await stub.Tokenize(api.TokenizeRequest(text=f"The kiln{END}é"))).ids)
    assert ids == gateway.encode(f"The kiln{END}é")
    assert (await stub.Detokenize(api.DetokenizeRequest(ids=ids))).text == "The kilné"
    assert (await stub.Detokenize(api.DetokenizeRequest(ids=ids, keep_special_tokens=True))).text == f"The kiln{END}é"
    assert list((await stub.Tokenize(api.TokenizeRequest())).ids) == []
    assert (await stub.Detokenize(api.DetokenizeRequest())).text == ""
    assert (await stub.Detokenize(api.DetokenizeRequest(ids=[VOCAB_SIZE - 1]))).text == ""
    chat = api.Chat(messages=[api.ChatMessage(role="user", content="Hello")])
    ids = list((await stub.Tokenize(api.TokenizeRequest(chat=chat))).ids)
    assert ids == gateway.encode("<|user|>Hello<|end|><|assistant|>")


async def test_what_tokenize_and_detokenize_refuse(gateway: Running) -> None:
    stub = gateway.stub
    error = await failure(stub.Detokenize(api.DetokenizeRequest(ids=[3, 2**31])))
    assert error_code(error) == "unknown-token"
    assert str(2**31) in str(error.details())
    error = await failure(stub.Detokenize(api.DetokenizeRequest(ids=gateway.encode(" capital") * 1_000_000)))
    assert (error.code(), error_code(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "answer-too-long")
    error = await failure(stub.Tokenize(api.TokenizeRequest(chat=api.Chat())))
    assert error_code(error) == "empty-prompt"


async def test_get_model(gateway: Running) -> None:
    model = await gateway.stub.GetModel(api.GetModelRequest())
    assert model == api.Model(
        name="kiln",
        context_length=CONTEXT_LENGTH,
        vocab_size=VOCAB_SIZE,
        block_size=16,
        total_blocks=32,
        dtype="float32",
        device="cpu",
        attention_backend="reference",
        has_chat_template=True,
        max_n=64,
        max_beam_width=16,
        max_message_bytes=MAX_GRPC_MESSAGE_BYTES,
    )


async def test_attach_is_not_built(gateway: Running) -> None:
    async def read(request_id: str) -> None:
        async for _ in gateway.stub.Attach(api.AttachRequest(request_id=request_id)):
            pass

    error = await failure(read("r"))
    assert (error.code(), error_code(error)) == (grpc.StatusCode.UNIMPLEMENTED, "not-built")
    assert (await failure(read(""))).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_health_and_reflection(gateway: Running) -> None:
    health: Any = health_pb2_grpc.HealthStub(gateway.channel)
    for service in ("", "kilburn.v1.Inference"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert (await failure(health.Check(health_pb2.HealthCheckRequest(service="x")))).code() is grpc.StatusCode.NOT_FOUND
    channel: Any = gateway.channel
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    (answer,) = [response async for response in call]
    names = {service.name for service in answer.list_services_response.service}
    assert names == {"kilburn.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
