"""A seeded request at temperature 1 draws the same tokens whatever happens around it."""

import pytest

from kilburn.v1 import inference_pb2 as api
from tests.e2e.calls import Answer, Running, ask, ask_all, greedy, seeded
from tests.e2e.corpus import Expected
from tests.e2e.place import wait_until
from tests.e2e.system import System

pytestmark = [pytest.mark.processes, pytest.mark.model]

SEED = 20_261_129
TOKENS = 40


@pytest.fixture(scope="module")
def prompt(chosen: list[Expected]) -> Expected:
    return next(prompt for prompt in chosen if prompt.name == "chat-turns")


@pytest.fixture(scope="module")
def alone(_ample: System, prompt: Expected) -> Answer:
    return ask(_ample.client, request(prompt))


def request(prompt: Expected, **rest: object) -> api.GenerateRequest:
    return seeded(prompt.prompt_ids, TOKENS, SEED, **rest)


def test_the_seed_decides(ample: System, prompt: Expected, alone: Answer) -> None:
    again = ask(ample.client, request(prompt))
    other = ask(ample.client, seeded(prompt.prompt_ids, TOKENS, SEED + 1))
    assert again.ids == alone.ids
    assert other.ids != alone.ids
    assert tuple(alone.ids) != prompt.output_ids[:TOKENS]  # greedy would be no test


def test_in_a_batch_of_16(ample: System, prompt: Expected, chosen: list[Expected], alone: Answer) -> None:
    others = [seeded(chosen[number % 5].prompt_ids, TOKENS - number, number) for number in range(14)]
    answers = ask_all(ample.client, [*others, request(prompt), request(prompt, cache_salt="cold")])
    assert answers[-1].ids == answers[-2].ids == alone.ids
    assert answers[-1].usage.cached_tokens == 0


def test_across_a_preemption(small: System, prompt: Expected, chosen: list[Expected], alone: Answer) -> None:
    """Requests of more importance come while it runs, and together they need more than there is."""
    others = sorted((one for one in chosen if one is not prompt), key=lambda one: len(one.prompt_ids))[:-1]
    mine = Running(small.client, request(prompt, priority=1))
    wait_until(lambda: mine.tokens >= 5, 60, "five tokens")
    urgent = ask_all(small.client, [greedy(one.prompt_ids, TOKENS, cache_salt="urgent") for one in others])
    answer = mine.wait()
    assert answer.usage.preemptions > 0
    assert answer.ids == alone.ids
    for one, other in zip(others, urgent, strict=True):
        assert other.usage.preemptions == 0
        assert tuple(other.ids) == one.output_ids[:TOKENS]
