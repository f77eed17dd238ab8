"""What requests that run at once share: a prefix that nobody has computed yet is computed by one of them."""

import pytest

from tests.e2e.calls import Running, greedy
from tests.e2e.place import wait_until
from tests.e2e.system import System

pytestmark = pytest.mark.processes

SYSTEM_PROMPT = [number * number % 251 for number in range(1024)]
REQUESTS = 32
BLOCK = 16


def test_simultaneous_requests_with_one_system_prompt_compute_it_once_and_hold_it_once(tiny_system: System) -> None:
    admin, client = tiny_system.admin, tiny_system.client
    before = admin.pool().counters
    requests = [greedy([*SYSTEM_PROMPT, number, 7], 64, cache_salt="simultaneous") for number in range(REQUESTS)]
    calls = [Running(client, request) for request in requests]
    wait_until(lambda: admin.pool().running == REQUESTS, 60, "all of them in the batch")
    prefixes = {tuple(entry.block for entry in one.table[: len(SYSTEM_PROMPT) // BLOCK]) for one in admin.sequences(tables=True)}
    answers = [call.wait() for call in calls]
    after = admin.pool().counters
    assert len(prefixes) == 1, "the prefix is in the pool more than once"
    assert after.prefill_tokens - before.prefill_tokens == len(SYSTEM_PROMPT) + 2 * REQUESTS
    assert sorted(answer.usage.cached_tokens for answer in answers) == [0] + [len(SYSTEM_PROMPT)] * (REQUESTS - 1)
