"""Requests and their answers, for tests: a call of Generate read to its end, checked against what the stream promises.

Knows the public API and nothing of what serves it.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, cast

import grpc

from kilburn.client import Client
from kilburn.v1 import inference_pb2 as api

#: For a whole answer on a slow and busy machine; what hangs is ended by the timeout of its test before that.
ANSWER_SECONDS: Final = 600.0


@dataclass(slots=True)
class Answer:
    """What came back: the tokens of index 0 with the times of their arrival, and how the call ended."""

    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    reason: str = ""  # the stable name of the error
    ids: list[int] = field(default_factory=list)
    text: str = ""
    arrivals: list[float] = field(default_factory=list)  # one a token, of time.monotonic()
    logprobs: list[api.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[api.TokenLogprob] = field(default_factory=list)
    finish: api.FinishReason.ValueType = api.FINISH_REASON_UNSPECIFIED
    stop_match: str = ""
    usage: api.Usage = field(default_factory=api.Usage)
    ended: float = 0.0

    def gaps(self) -> list[float]:
        """Return the seconds between one token and the next."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


def greedy(ids: Sequence[int], max_tokens: int, **rest: Any) -> api.GenerateRequest:
    """Return a request for the likeliest tokens, through ends of sequence."""
    return from_ids(ids, max_tokens, sampling=api.Sampling(temperature=0), **rest)


def seeded(ids: Sequence[int], max_tokens: int, seed: int, **rest: Any) -> api.GenerateRequest:
    """Return a request at temperature 1 that draws from a seed, through ends of sequence."""
    return from_ids(ids, max_tokens, sampling=api.Sampling(temperature=1, seed=seed), **rest)


def from_ids(ids: Sequence[int], max_tokens: int, **rest: Any) -> api.GenerateRequest:
    """Return a request of so many tokens, through ends of sequence; `rest` are fields of GenerateRequest."""
    return api.GenerateRequest(
        token_ids=api.TokenIds(ids=ids), stopping=api.Stopping(max_tokens=max_tokens, ignore_eos=True), **rest
    )


def ask(client: Client, request: api.GenerateRequest, timeout: float = ANSWER_SECONDS) -> Answer:
    """Send a request and read its stream to the end, whatever the end is."""
    return read(client.generate(request, timeout))


def read(stream: Iterable[api.GenerateResponse], answer: Answer | None = None) -> Answer:
    """Read a stream to its end, into `answer` if it is given (another thread can watch it grow).

    Raises:
        AssertionError: the stream breaks a promise: a token twice or missing, something after the finish, a finish without usage.
    """
    answer = Answer() if answer is None else answer
    try:
        for response in stream:
            assert response.index == 0
            _take(answer, response)
    except grpc.RpcError as error:
        call = cast(grpc.Call, error)  # grpc raises one object that is both
        answer.code, answer.details = call.code(), call.details() or ""
        answer.reason = str(dict(call.trailing_metadata() or ()).get("kilburn-error", ""))
    answer.ended = time.monotonic()
    if answer.code is grpc.StatusCode.OK:
        assert answer.finish != api.FINISH_REASON_UNSPECIFIED, "a stream ended well without a finish"
        assert answer.usage.completion_tokens == len(answer.ids)
    return answer


def ask_samples(client: Client, request: api.GenerateRequest, timeout: float = ANSWER_SECONDS) -> list[Answer]:
    """Send a request for several sequences and read its stream to a good end; return one answer for each index.

    Raises:
        AssertionError: the stream breaks a promise.
    """
    answers = [Answer() for _ in range(request.n)]
    for response in client.generate(request, timeout):
        _take(answers[response.index], response)
    assert all(answer.finish != api.FINISH_REASON_UNSPECIFIED for answer in answers)
    (usage,) = [answer.usage for answer in answers if answer.usage.prompt_tokens]
    assert usage.completion_tokens == sum(len(answer.ids) for answer in answers)
    return answers


def ask_all(client: Client, requests: Sequence[api.GenerateRequest], timeout: float = ANSWER_SECONDS) -> list[Answer]:
    """Send requests at once; return their answers in the same order."""
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda request: ask(client, request, timeout), requests))


class Running:
    """A request that is read by a thread while the test goes on."""

    def __init__(self, client: Client, request: api.GenerateRequest, timeout: float = ANSWER_SECONDS) -> None:
        self.answer = Answer()
        self.call = client.generate(request, timeout)
        self._threads = ThreadPoolExecutor(1)
        self._reading = self._threads.submit(read, self.call, self.answer)

    @property
    def tokens(self) -> int:
        """How many have arrived."""
        return len(self.answer.ids)

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        return self._reading.done()

    def wait(self, timeout: float = ANSWER_SECONDS) -> Answer:
        """Wait for the end of the call.

        Raises:
            TimeoutError: it does not end: it hangs.
        """
        try:
            return self._reading.result(timeout)
        finally:
            self.call.cancel()
            self._threads.shutdown(wait=False)


def _take(answer: Answer, response: api.GenerateResponse) -> None:
    now = time.monotonic()
    assert answer.finish == api.FINISH_REASON_UNSPECIFIED, "a message after the last one"
    assert response.offset == len(answer.ids), "a token was lost or sent twice"
    answer.ids += response.token_ids
    answer.arrivals += [now] * len(response.token_ids)
    answer.text += response.text
    answer.logprobs += response.logprobs
    assert not response.prompt_logprobs or not response.offset, "something of the prompt after the first token"
    answer.prompt_logprobs += response.prompt_logprobs
    answer.finish = response.finish_reason
    answer.stop_match = response.stop_match
    answer.usage.CopyFrom(response.usage)
