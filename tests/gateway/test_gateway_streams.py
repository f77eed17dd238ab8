"""One request's stream: however the tokens come in batches and however slowly they are read, the client gets the same."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from gateway import streams
from gateway.errors import CallError, Code
from gateway.streams import RequestStream
from gateway.tokenizer import Tokenizer
from gateway.validate import Checked, Sampling, Stopping
from kilburn.limits import MAX_GRPC_MESSAGE_BYTES
from kilburn.v1 import engine_pb2 as wire
from kilburn.v1 import inference_pb2 as api
from tests.gateway.gateway_support import byte_level_tokenizer

TOKENIZER = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token="<|end|>"))
END = 0
CHECKED = Checked(
    request_id="r",
    tenant="t",
    sampling=Sampling(0, 1, 0, 0, 0, None),
    stopping=Stopping(0, (), (END,), False),
    echo=False,
    keep_special_tokens=False,
    priority=0,
    cache_salt="",
    samples=1,
    beams=0,
    length_penalty=1.0,
)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, special_tokens=False)


class Clock:
    """Stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def stream_of(stop: Sequence[str] = (), include_stop: bool = False, keep: bool = False, n: int = 1) -> RequestStream:
    stopping = replace(CHECKED.stopping, stop=tuple(stop), include_stop=include_stop)
    stream = RequestStream(replace(CHECKED, stopping=stopping, samples=n), TOKENIZER.decoding(keep), 0.0, Clock())
    stream.handle = 1
    return stream


def tokens(ids: Sequence[int], offset: int = 0, **fields: Any) -> wire.SequenceTokens:
    return wire.SequenceTokens(handle=1, offset=offset, token_ids=ids, **fields)


def ready(stream: RequestStream) -> list[api.GenerateResponse]:
    """Return all that can be read without waiting."""
    return list(iter(stream.take, None))


def text_of(responses: Sequence[api.GenerateResponse]) -> str:
    return "".join(response.text for response in responses)


@given(
    text=st.text(alphabet="The kiln burns. é😀", max_size=30),
    cuts=st.lists(st.integers(1, 5)),
    reads=st.lists(st.booleans(), max_size=30),
    stop=st.lists(st.sampled_from(["burn", "k", "é", "s. T", "😀"]), max_size=2),
    include=st.booleans(),
)
def test_batches_and_readers_do_not_matter(text: str, cuts: list[int], reads: list[bool], stop: list[str], include: bool) -> None:
    """Against the plain case of one token a batch, each read at once: the same joined text at every offset that both have."""
    ids = [*ids_of(text), END]
    plain, plain_ids = _play(ids, [1] * len(ids), [True] * len(ids), stop, include)
    other, other_ids = _play(ids, cuts, reads, stop, include)
    assert other_ids == plain_ids
    assert {offset: plain[offset] for offset in other} == other


def _play(
    ids: list[int], cuts: list[int], reads: list[bool], stop: list[str], include: bool
) -> tuple[dict[int, str], tuple[list[int], str, int]]:
    """Return the joined text at each offset where a message ended, and what the stream said at its end."""
    stream, messages, offset = stream_of(stop, include), [], 0
    sizes, reading = iter([*cuts, *[1] * len(ids)]), iter([*reads, *[False] * len(ids)])
    while offset < len(ids):
        part = ids[offset : offset + next(sizes)]
        is_last = offset + len(part) == len(ids)
        finish = stream.feed(tokens(part, offset, finish_reason=api.FINISH_REASON_EOS if is_last else 0))
        offset += len(part)
        if next(reading):
            messages += ready(stream)
        if finish is not None:
            break
    stream.end(wire.RequestEnd(handle=1))
    messages += ready(stream)
    at: dict[int, str] = {}
    joined, sent = "", 0
    for message in messages:
        assert message.offset == sent
        sent += len(message.token_ids)
        joined += message.text
        at[sent] = joined
    assert [bool(message.finish_reason) for message in messages] == [False] * (len(messages) - 1) + [True]
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
    last = messages[-1]
    assert last.usage.completion_tokens == sent
    return at, ([token for message in messages for token in message.token_ids], last.stop_match, last.finish_reason)


def test_a_stop_string_is_told_to_the_engine_with_its_tokens() -> None:
    stream = stream_of(["ance is P"])
    ids = ids_of("The capital of France is Paris. And more")
    finish = stream.feed(tokens(ids))
    assert finish is not None
    assert "ance is P" in TOKENIZER.decode(ids[: finish.output_tokens])
    assert "ance is P" not in TOKENIZER.decode(ids[: finish.output_tokens - 1])
    before_the_end = ready(stream)
    assert text_of(before_the_end) == "The capital of Fr"
    assert not any(message.finish_reason for message in before_the_end)
    assert stream.feed(tokens([5, 6], len(ids))) is None, "tokens that were under way are ignored"
    stream.end(wire.RequestEnd(handle=1, cached_tokens=3))
    (last,) = ready(stream)
    assert (last.finish_reason, last.stop_match) == (api.FINISH_REASON_STOP, "ance is P")
    assert last.usage.completion_tokens == finish.output_tokens
    assert last.usage.cached_tokens == 3


@pytest.mark.parametrize(
    ("include", "keep", "text"),
    [(False, False, "Paris"), (True, False, "Paris"), (False, True, "Paris"), (True, True, "Paris<|end|>")],
)
def test_the_text_of_a_stop_token(include: bool, keep: bool, text: str) -> None:
    stream = stream_of(include_stop=include, keep=keep)
    ids = [*ids_of("Paris"), END]
    stream.feed(tokens(ids, finish_reason=api.FINISH_REASON_EOS))
    stream.end(wire.RequestEnd(handle=1))
    (message,) = ready(stream)
    assert list(message.token_ids) == ids
    assert message.text == text
    assert message.finish_reason == api.FINISH_REASON_EOS


def test_an_ordinary_token_as_stop_id_is_cut_or_kept() -> None:
    ids = ids_of("Paris.")
    for include, text in ((False, "Paris"), (True, "Paris.")):
        stream = stream_of(include_stop=include)
        stream.feed(tokens(ids, finish_reason=api.FINISH_REASON_EOS))
        stream.end(wire.RequestEnd(handle=1))
        assert text_of(ready(stream)) == text


def test_what_was_held_back_comes_with_the_end() -> None:
    stream = stream_of(["burning"])
    stream.feed(tokens(ids_of("it burn")))
    assert "burn" not in text_of(ready(stream))
    stream.feed(tokens([], len(ids_of("it burn")), finish_reason=api.FINISH_REASON_LENGTH))
    stream.end(wire.RequestEnd(handle=1))
    (last,) = ready(stream)
    assert last.text.endswith("burn")
    assert last.finish_reason == api.FINISH_REASON_LENGTH


def test_an_end_without_tokens() -> None:
    stream = stream_of()
    stream.feed(tokens([], finish_reason=api.FINISH_REASON_CONTEXT))
    stream.end(wire.RequestEnd(handle=1))
    (last,) = ready(stream)
    assert last.finish_reason == api.FINISH_REASON_CONTEXT
    assert last.usage.completion_tokens == 0


def test_usage_counts_and_times() -> None:
    stream = stream_of()
    clock = stream._clock
    assert isinstance(clock, Clock)
    stream.begin(11, "")
    clock.now = 1.5
    stream.feed(tokens(ids_of("a")))
    clock.now = 4.0
    stream.feed(tokens([END], len(ids_of("a")), finish_reason=api.FINISH_REASON_EOS))
    stream.end(wire.RequestEnd(handle=1, cached_tokens=8, preemptions=2, queue_seconds=0.25))
    usage = ready(stream)[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.preemptions) == (11, 2, 8, 2)
    assert (usage.queue_seconds, usage.first_token_seconds, usage.total_seconds) == (0.25, 1.5, 4.0)


def test_log_probabilities_stay_with_their_tokens() -> None:
    stream = stream_of()
    ids = ids_of("The kiln")
    given_ones = [
        api.TokenLogprob(token_id=token, logprob=-number, rank=number, top=[api.Alternative(token_id=1, logprob=-0.5)])
        for number, token in enumerate(ids, start=1)
    ]
    stream.feed(tokens(ids[:1], logprobs=given_ones[:1]))
    stream.feed(tokens(ids[1:], 1, logprobs=given_ones[1:]))
    (message,) = ready(stream)
    assert list(message.logprobs) == given_ones


def test_the_echo_comes_first_and_only_with_the_first_tokens() -> None:
    stream = stream_of()
    stream.begin(1, "Prompt: ")
    assert ready(stream) == []
    stream.feed(tokens(ids_of("a")))
    first, second = ready(stream)
    assert (first.text, first.offset, len(first.token_ids)) == ("Prompt: ", 0, 0)
    assert second.text == "a"


def test_a_long_echo_and_many_tokens_are_cut_into_messages_below_the_limit() -> None:
    stream = stream_of()
    echo = "😀" * 600_000
    stream.begin(1, echo)
    ids = ids_of("a") * 10_000
    many = [api.TokenLogprob(token_id=1, top=[api.Alternative(token_id=2, logprob=-1)] * 20)]
    for offset in range(0, len(ids), 5000):
        stream.feed(tokens(ids[offset : offset + 5000], offset, logprobs=many * 5000))
    stream.feed(tokens([], len(ids), finish_reason=api.FINISH_REASON_LENGTH))
    stream.end(wire.RequestEnd(handle=1))
    messages = ready(stream)
    assert text_of(messages) == echo + "a" * 10_000
    assert sum(len(message.token_ids) for message in messages) == 10_000
    assert max(message.ByteSize() for message in messages) < MAX_GRPC_MESSAGE_BYTES // 2
    assert messages[-1].finish_reason == api.FINISH_REASON_LENGTH


def test_a_reader_that_stalls_costs_little() -> None:
    stream = stream_of()
    ids = ids_of("a") * 20_000
    for offset, token in enumerate(ids):
        stream.feed(tokens([token], offset))
    output = stream._outputs[0]
    held = [output._ids, output._lengths, output._pieces]
    assert sum(sys.getsizeof(part) for part in held) < 24 * len(ids)
    assert len(ready(stream)) < 50


def test_tokens_that_came_before_a_failure_are_read_first() -> None:
    stream = stream_of()
    stream.feed(tokens(ids_of("a")))
    stream.fail(CallError(Code.MEMMGR_LOST, "lost"))
    stream.fail(CallError(Code.CANCELLED, "too late"))

    async def read() -> None:
        response = await stream.next()
        assert response is not None
        assert response.text == "a"
        with pytest.raises(CallError) as caught:
            await stream.next()
        assert caught.value.code is Code.MEMMGR_LOST

    asyncio.run(read())


@pytest.mark.parametrize("bad", [tokens([5], 1), tokens([5], index=1), tokens([5, 6], logprobs=[api.TokenLogprob()])])
def test_tokens_that_do_not_follow_are_refused(bad: wire.SequenceTokens) -> None:
    with pytest.raises(CallError) as caught:
        stream_of().feed(bad)
    assert caught.value.code is Code.INTERNAL


def test_an_end_without_a_finish_is_a_fault() -> None:
    stream = stream_of()
    stream.feed(tokens(ids_of("a")))
    stream.end(wire.RequestEnd(handle=1))
    with pytest.raises(CallError) as caught:
        stream.check()
    assert caught.value.code is Code.INTERNAL


def test_each_index_has_one_finish_and_the_last_message_the_usage() -> None:
    stream = stream_of(["stop"], n=3)
    stream.begin(1, "P:")
    for index in (2, 0, 1):
        stream.feed(tokens(ids_of("abc"[index]), index=index))
    stream.feed(tokens(ids_of("stop"), 1, index=2))
    stream.feed(tokens([], 1, index=0, finish_reason=api.FINISH_REASON_LENGTH))
    early = ready(stream)
    stream.feed(tokens([END], 1, index=1, finish_reason=api.FINISH_REASON_EOS))
    assert not any(message.HasField("usage") for message in [*early, *ready(stream)])
    stream.end(wire.RequestEnd(handle=1))
    messages = early + ready(stream)
    assert {message.index for message in early if message.finish_reason} == {0, 2}, "two need not wait for the third"
    for index, text in enumerate(["P:a", "P:b", "P:c"]):
        own = [message for message in messages if message.index == index]
        assert text_of(own) == text
        assert [bool(message.finish_reason) for message in own] == [False] * (len(own) - 1) + [True]


def test_the_limits_leave_room_below_grpc_s() -> None:
    assert 4 * streams._MAX_MESSAGE_CHARACTERS + 300 * streams._MAX_MESSAGE_TOKENS < MAX_GRPC_MESSAGE_BYTES // 2


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("count", [1, 2048, 5000])
def test_what_is_told_of_a_prompt_comes_first_and_in_several_messages_where_it_is_long(count: int, n: int) -> None:
    stream = stream_of(n=n)
    stream.begin(count + 1, "an echo")
    told = [api.TokenLogprob(token_id=number, logprob=-number, rank=1) for number in range(count)]
    for start in range(0, count, 128):
        assert stream.feed(wire.SequenceTokens(handle=1, prompt_logprobs=told[start : start + 128])) is None
    assert ready(stream) == []  # it goes with the first token
    for index in reversed(range(n)):
        stream.feed(tokens(ids_of("kiln"), index=index, finish_reason=api.FINISH_REASON_LENGTH))
    stream.end(wire.RequestEnd(handle=1))
    found = ready(stream)
    assert [one for response in found if response.index == 0 for one in response.prompt_logprobs] == told
    assert all(response.index == 0 and not response.offset for response in found if response.prompt_logprobs)
    first = next(response for response in found if response.index == 0)
    assert (first.text, len(first.prompt_logprobs)) == ("an echo", min(count, 2048))
    assert text_of([response for response in found if response.index == 0]) == "an echokiln"
    assert [response.finish_reason for response in found if response.finish_reason] == [api.FINISH_REASON_LENGTH] * n
