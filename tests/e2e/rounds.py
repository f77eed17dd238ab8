"""Exactness rounds: the prompts sent to a system in several ways, each token compared with `transformers`.

`exact.py` runs all of them, the tests a few.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kilburn.v1 import inference_pb2 as api
from tests.e2e.calls import Answer, ask, ask_all, greedy
from tests.e2e.corpus import Expected, Turn
from tests.e2e.system import Flag, Instance

#: How far a log-probability may be from that of transformers.
LOGPROB_TOLERANCE: Final = 1e-4

Way = Literal["alone", "together", "warm"]


@dataclass(frozen=True, slots=True)
class Round:
    """What one round compared. All its tokens were equal, or there would be no Round."""

    way: Way
    prompts: int
    tokens: int
    cached_tokens: int
    preemptions: int
    logprobs: int
    largest_error: float  # of the log-probabilities


def flags(block_size: int, num_blocks: int, poison: bool = False) -> dict[str, Flag]:
    """Return the flags of a system whose answers equal those of transformers."""
    exact: dict[str, Flag] = {"dtype": "float32", "device": "cpu", "block_size": block_size, "num_blocks": num_blocks}
    return exact | ({"poison": True} if poison else {})


def smallest_pool(prompts: Iterable[Expected], block_size: int) -> int:
    """Return how many blocks hold the longest of the prompts with its answer, and no token more."""
    return max(math.ceil((len(prompt.prompt_ids) + len(prompt.output_ids)) / block_size) for prompt in prompts)


def ample_pool(prompts: Iterable[Expected], block_size: int) -> int:
    """Return how many blocks hold three rounds of all of them at once."""
    return 3 * sum(math.ceil((len(prompt.prompt_ids) + len(prompt.output_ids)) / block_size) for prompt in prompts)


def run(system: Instance, prompts: Sequence[Expected], way: Way, salt: str) -> Round:
    """Send the prompts in one way, compare every token, and insist that nothing is held afterwards.

    alone: one after the other, in the form that each was written in. together: all at once. warm: all at once, after another
    round with the same salt, which is the cache's name for whose blocks may be shared.

    Raises:
        AssertionError: a token or a log-probability differs, or something is held.
    """
    before = system.admin.pool().counters.preemptions
    if way == "alone":
        answers = [ask(system.client, _request(prompt, salt, as_written=True)) for prompt in prompts]
    else:
        requests = [_request(prompt, salt) for prompt in prompts]
        # The longest goes last: in the smallest pool it would part the others into two halves that fit, and preempt nobody.
        max(requests, key=lambda request: len(request.token_ids.ids)).priority = 1
        answers = ask_all(system.client, requests)
    errors = [error for prompt, answer in zip(prompts, answers, strict=True) for error in compare(prompt, answer)]
    system.settled()
    return Round(
        way=way,
        prompts=len(prompts),
        tokens=sum(len(answer.ids) for answer in answers),
        cached_tokens=sum(answer.usage.cached_tokens for answer in answers),
        preemptions=system.admin.pool().counters.preemptions - before,
        logprobs=len(errors),
        largest_error=max(errors),
    )


def compare(prompt: Expected, answer: Answer) -> list[float]:
    """Compare an answer with the expected one; return the errors of its log-probabilities.

    Raises:
        AssertionError: they differ.
    """
    assert answer.code.name == "OK", f"{prompt.name}: {answer.code.name}: {answer.details}"
    assert answer.usage.prompt_tokens == len(prompt.prompt_ids), f"{prompt.name}: other prompt tokens"
    expected = list(prompt.output_ids)
    if answer.ids != expected:
        same = next(
            (at for at, (got, want) in enumerate(zip(answer.ids, expected, strict=False)) if got != want), len(answer.ids)
        )
        raise AssertionError(
            f"{prompt.name}: {len(answer.ids)} tokens, the first {same} of {len(expected)} as expected, "
            f"then {answer.ids[same : same + 4]} in the place of {expected[same : same + 4]}; {answer.usage}"
        )
    assert answer.finish == api.FINISH_REASON_LENGTH, prompt.name
    errors = list(_logprob_errors(prompt, answer))
    assert max(errors) <= LOGPROB_TOLERANCE, f"{prompt.name}: a log-probability is off by {max(errors)}"
    return errors


def _logprob_errors(prompt: Expected, answer: Answer) -> Iterable[float]:
    for step, got in zip(prompt.steps, answer.logprobs, strict=False):
        assert got.token_id == step.token_id
        yield abs(got.logprob - step.logprob)
        # By token, not by place: two alternatives that are as good as equal may change places.
        alternatives = {other.token_id: other.logprob for other in got.top}
        yield from (abs(alternatives[token] - logprob) for token, logprob in step.top if token in alternatives)
        assert len(alternatives.keys() & {token for token, _ in step.top}) >= len(step.top) - 1, prompt.name


def _request(prompt: Expected, salt: str, as_written: bool = False) -> api.GenerateRequest:
    request = greedy(prompt.prompt_ids, len(prompt.output_ids), cache_salt=salt)
    request.output.logprobs = len(prompt.steps[0].top)
    if as_written and prompt.text is not None:
        request.text = prompt.text
    elif as_written and prompt.chat is not None:
        request.chat.CopyFrom(api.Chat(messages=[_message(turn) for turn in prompt.chat]))
    return request


def _message(turn: Turn) -> api.ChatMessage:
    return api.ChatMessage(role=turn.role, content=turn.content)
