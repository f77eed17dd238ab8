"""What the prefix cache finds, and that what is shared is held once."""

import pytest

from kilburn.client import Client
from kilburn.v1 import inference_pb2 as api
from tests.e2e.calls import Running, ask, greedy
from tests.e2e.corpus import read_candidates
from tests.e2e.place import wait_until
from tests.e2e.system import System

pytestmark = [pytest.mark.processes, pytest.mark.model]

SYSTEM_PROMPT_TOKENS = 800
REQUESTS = 30
BLOCK = 16


@pytest.fixture
def system_prompt(ample: System) -> list[int]:
    texts, _ = read_candidates()
    ids = ample.client.tokenize("\n\n".join(texts.values()))
    assert len(ids) >= SYSTEM_PROMPT_TOKENS
    return ids[:SYSTEM_PROMPT_TOKENS]


def question(number: int) -> list[int]:
    """Return some ids, different for each number from the first on."""
    return [1000 + number, 2000 + number, 3000 + number]


def test_thirty_requests_share_one_system_prompt(ample: System, system_prompt: list[int]) -> None:
    def request(number: int, tokens: int) -> api.GenerateRequest:
        return greedy(system_prompt + question(number), tokens, cache_salt="thirty")

    assert ask(ample.client, request(REQUESTS, 1)).usage.cached_tokens == 0
    before = ample.admin.pool()
    calls = [Running(ample.client, request(number, 24)) for number in range(REQUESTS)]
    wait_until(lambda: ample.admin.pool().running == REQUESTS, 60, "all of them in the batch")
    sequences = ample.admin.sequences(tables=True)
    blocks = ample.admin.blocks(min_references=REQUESTS)
    during = ample.admin.pool()
    answers = [call.wait() for call in calls]

    assert all(answer.usage.cached_tokens >= SYSTEM_PROMPT_TOKENS - BLOCK for answer in answers)
    shared = SYSTEM_PROMPT_TOKENS // BLOCK
    prefixes = {tuple(entry.block for entry in sequence.table[:shared]) for sequence in sequences}
    assert len(sequences) == REQUESTS
    assert len(prefixes) == 1, "the prefix is in the pool more than once"
    assert {block.block for block in blocks} == set(prefixes.pop())
    assert all(block.references == REQUESTS and len(block.holders) == REQUESTS for block in blocks)
    # Each request has its own question and answer besides: 27 tokens in two blocks.
    assert during.live_blocks <= shared + 2 * REQUESTS
    assert during.counters.prefill_tokens - before.counters.prefill_tokens <= REQUESTS * BLOCK


@pytest.mark.parametrize("answer_tokens", [1, 5, 16, 27])
def test_the_second_turn_of_a_chat_finds_the_first(ample: System, answer_tokens: int) -> None:
    chat = api.Chat(messages=[api.ChatMessage(role="user", content=f"Tell me {answer_tokens} things about bridges.")])
    first = ample.client.tokenize_chat(chat)
    salt = f"turns-{answer_tokens}"
    answer = ask(ample.client, greedy(first, answer_tokens, cache_salt=salt))
    second = [*first, *answer.ids, *ample.client.tokenize("<|im_end|>\n<|im_start|>user\nAnd about tunnels?<|im_end|>\n")]
    warm = ask(ample.client, greedy(second, 8, cache_salt=salt))
    cold = ask(ample.client, greedy(second, 8, cache_salt=f"{salt}-cold"))
    # All but the answer's last token, which was given to the client and never computed.
    assert warm.usage.cached_tokens == len(first) + answer_tokens - 1
    assert cold.usage.cached_tokens == 0
    assert warm.ids == cold.ids


def test_nothing_is_found_across_salts(ample: System) -> None:
    ids = ample.client.tokenize("The same words in three houses, each of which keeps its own memory of them, and no other's.")
    assert len(ids) > BLOCK
    found = {}
    # A tenant of its own: what others have sent without a salt begins with the same word.
    with Client(str(ample.gateway_address), "three-houses") as client:
        for salt in ("", "x", "y"):
            for time in ("first", "again"):
                found[salt, time] = ask(client, greedy(ids, 4, cache_salt=salt)).usage.cached_tokens
    assert {found[salt, "first"] for salt in ("", "x", "y")} == {0}
    assert {found[salt, "again"] for salt in ("", "x", "y")} == {len(ids) - 1}
