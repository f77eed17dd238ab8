"""What runs at once shares: requests a prefix that nobody has computed yet, the samples of one request their prompt."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kilburn.v1 import inference_pb2 as api
from tests.e2e.calls import Running, ask, ask_samples, from_ids, greedy, seeded
from tests.e2e.corpus import read_candidates
from tests.e2e.place import wait_until
from tests.e2e.system import Flag, System

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


@pytest.mark.model
def test_four_samples_of_one_prompt_compute_it_once_and_copy_three_blocks(ample: System) -> None:
    texts, _ = read_candidates()
    prompt = ample.client.tokenize("\n\n".join(texts.values()))[:805]
    assert len(prompt) == 805
    request = seeded(prompt, 24, seed=7, n=4, cache_salt="samples")
    before = ample.admin.pool().counters
    first = ask_samples(ample.client, request)
    after = ample.admin.pool().counters
    assert after.prefill_tokens - before.prefill_tokens == len(prompt)
    assert after.forks - before.forks == 3
    # Each but the last writer of the block that the prompt fills in part.
    assert after.copied_blocks - before.copied_blocks == 3
    assert len({answer.text for answer in first}) == 4
    again = ask_samples(ample.client, request)
    assert [answer.ids for answer in again] == [answer.ids for answer in first]
    alone = ask(ample.client, seeded(prompt, 24, seed=7, cache_salt="alone"))
    assert alone.ids == first[0].ids, "the first sample is what a request for one gets"


def test_samples_are_preempted_and_come_back_together(tiny: Path) -> None:
    """The pool holds four such requests only at their beginning; what they get is what each gets alone."""
    request = from_ids(range(1, 20), 40, sampling=api.Sampling(temperature=1, seed=3), n=3)
    flags: dict[str, Flag] = {
        "model": tiny,
        "device": "cpu",
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 44,
        "poison": True,
    }
    with System(flags, threads=1) as small, ThreadPoolExecutor(4) as threads:
        expected = [answer.ids for answer in ask_samples(small.client, request)]
        assert small.admin.pool().counters.preemptions == 0
        answers = list(threads.map(lambda _: ask_samples(small.client, request), range(4)))
        assert small.admin.pool().counters.preemptions > 0
        assert all([answer.ids for answer in each] == expected for each in answers)
        assert list(small.admin.verify(with_executor=True).faults) == []
        small.settled()
