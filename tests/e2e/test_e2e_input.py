"""Bad input: one clear error with a stable name, at once; nothing is leaked, and the next request is fine."""

import math
from typing import cast

import grpc
import pytest

from kilburn.v1 import inference_pb2 as api
from tests.e2e.calls import ANSWER_SECONDS, ask, from_ids, greedy
from tests.e2e.system import System
from tests.e2e.tiny import CONTEXT

pytestmark = pytest.mark.processes

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_BUILT = grpc.StatusCode.UNIMPLEMENTED

VOCABULARY = 257


def sampled(**fields: float) -> api.GenerateRequest:
    return from_ids([1, 2, 3], 4, sampling=api.Sampling(**fields))  # type: ignore[arg-type]


BAD = {
    "no prompt": (api.GenerateRequest(), INVALID, "empty-prompt"),
    "empty text": (api.GenerateRequest(text=""), INVALID, "empty-prompt"),
    "no ids": (api.GenerateRequest(token_ids=api.TokenIds()), INVALID, "empty-prompt"),
    "empty chat": (api.GenerateRequest(chat=api.Chat()), INVALID, "empty-prompt"),
    "id past the vocabulary": (greedy([1, VOCABULARY], 4), INVALID, "unknown-token"),
    "id of 32 bits": (greedy([2**32 - 1], 4), INVALID, "unknown-token"),
    "prompt as long as the context": (greedy([7] * CONTEXT, 4), INVALID, "prompt-too-long"),
    "prompt far too long": (greedy([7] * 500_000, 4), INVALID, "prompt-too-long"),
    "negative temperature": (sampled(temperature=-0.5), INVALID, "invalid-value"),
    "temperature NaN": (sampled(temperature=math.nan), INVALID, "invalid-value"),
    "temperature infinite": (sampled(temperature=math.inf), INVALID, "invalid-value"),
    "top_p 0": (sampled(top_p=0), INVALID, "invalid-value"),
    "top_p 2": (sampled(top_p=2), INVALID, "invalid-value"),
    "min_p -1": (sampled(min_p=-1), INVALID, "invalid-value"),
    "empty stop string": (api.GenerateRequest(text="x", stopping=api.Stopping(stop=[""])), INVALID, "invalid-value"),
    "a repetition penalty of 0": (sampled(repetition_penalty=0), INVALID, "invalid-value"),
    "10000 stop strings": (api.GenerateRequest(text="x", stopping=api.Stopping(stop=["x"] * 10_000)), INVALID, "invalid-value"),
    "a million log-probabilities": (api.GenerateRequest(text="x", output=api.Output(logprobs=10**6)), INVALID, "invalid-value"),
    "21 log-probabilities": (api.GenerateRequest(text="x", output=api.Output(logprobs=21)), INVALID, "invalid-value"),
    "request id in Greek": (api.GenerateRequest(text="x", request_id="λ"), INVALID, "invalid-value"),
    "n": (greedy([1], 4, n=1_000_000), INVALID, "invalid-value"),
    "beams with a temperature": (greedy([1], 4, beam_width=3), INVALID, "invalid-value"),
    "too many beams": (from_ids([1], 4, beam_width=1000), INVALID, "invalid-value"),
    "more returned than searched": (from_ids([1], 4, beam_width=3, n=4), INVALID, "invalid-value"),
    "resume_seconds": (greedy([1], 4, resume_seconds=10), NOT_BUILT, "not-built"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_by_name(tiny_system: System, name: str) -> None:
    request, code, reason = BAD[name]
    answer = ask(tiny_system.client, request, timeout=5)
    assert (answer.code, answer.reason) == (code, reason)
    assert answer.details
    assert "\n" not in answer.details
    good = ask(tiny_system.client, greedy([1, 2, 3], 4))
    assert good.code is grpc.StatusCode.OK
    assert len(good.ids) == 4


STRANGE = {
    "spaces": api.GenerateRequest(text="   "),
    "a special token": api.GenerateRequest(text="<|end|>"),
    "NUL": api.GenerateRequest(text="\x00"),
    "unfinished bytes": greedy([200, 255], 1),
    "the last id": greedy([VOCABULARY - 1], 1),
    "the least temperature": sampled(temperature=1e-45),
    "a huge temperature": sampled(temperature=1e6, top_p=1e-45, top_k=2**31 - 1),
    "max_tokens of 32 bits": greedy([5] * (CONTEXT - 5), 2**32 - 1),
    "no max_tokens": greedy([6] * (CONTEXT - 5), 0),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_request_is_answered(tiny_system: System, name: str) -> None:
    request = api.GenerateRequest()
    request.CopyFrom(STRANGE[name])
    if not request.HasField("stopping"):
        request.stopping.max_tokens = 4
    for request.output.logprobs in (0, 20):
        answer = ask(tiny_system.client, request)
        assert answer.code is grpc.StatusCode.OK, answer.details
        assert 1 <= len(answer.ids) == len(answer.logprobs) <= 5
        assert all(len(one.top) == request.output.logprobs and math.isfinite(one.logprob) for one in answer.logprobs)
    assert len(ask(tiny_system.client, greedy([1, 2, 3], 4)).ids) == 4


def test_the_longest_prompt_that_fits_is_answered_until_the_context_ends(tiny_system: System) -> None:
    answer = ask(tiny_system.client, greedy([number % 200 for number in range(CONTEXT - 3)], 10))
    assert answer.code is grpc.StatusCode.OK
    assert len(answer.ids) == 3
    assert answer.finish == api.FINISH_REASON_CONTEXT


def test_a_second_request_of_the_same_id_is_refused_and_the_first_goes_on(tiny_system: System) -> None:
    stream = tiny_system.client.generate(greedy([1, 2], 200, request_id="twice"), ANSWER_SECONDS)
    next(stream)
    second = ask(tiny_system.client, greedy([3, 4], 5, request_id="twice"))
    assert (second.code, second.reason) == (grpc.StatusCode.ALREADY_EXISTS, "duplicate-request")
    responses = list(stream)
    assert responses[-1].finish_reason == api.FINISH_REASON_LENGTH
    assert responses[-1].usage.completion_tokens == 200


def test_what_is_no_message_at_all_is_refused(tiny_system: System) -> None:
    with grpc.insecure_channel(str(tiny_system.gateway_address)) as channel:
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/kilburn.v1.Inference/Generate")
        with pytest.raises(grpc.RpcError) as failure:
            list(call(b"\xff\xff\xff\xff", timeout=5))
    assert cast(grpc.Call, failure.value).code() is INVALID
    assert ask(tiny_system.client, greedy([1, 2, 3], 4)).code is grpc.StatusCode.OK
