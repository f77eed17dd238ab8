"""An executor of two ranks: the tokens of one, what is shared and swapped included, and its end as a whole."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
import psutil
import pytest

from kilburn.v1 import inference_pb2 as api
from tests.e2e.calls import Answer, Running, ask, ask_all, ask_samples, from_ids, greedy, seeded
from tests.e2e.place import wait_until
from tests.e2e.system import START_SECONDS, Flag, System, refusal
from tests.e2e.tiny import save

pytestmark = pytest.mark.processes

#: 30 is no multiple of the block size: a prefix that ends inside of a block, which has to be cloned.
_PREFIX: Final = [number * number % 251 for number in range(30)]
_BLOCK: Final = 4

#: Room for three or four of the requests at their ends.
_BLOCKS: Final = 72

_NOTICED_SECONDS: Final = 5.0
_ENDLESS: Final = 280 - len(_PREFIX)

REQUESTS: Final = [
    *(greedy([*_PREFIX, number], 40) for number in range(5)),
    *(seeded([*_PREFIX, 7, number], 40, seed=number) for number in range(3)),
]
SAMPLES: Final = from_ids([*_PREFIX, 99], 24, sampling=api.Sampling(temperature=1, seed=11), n=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 query heads and 4 KV heads."""
    return save(tmp_path_factory.mktemp("parallel"), heads=8, spread=0.3)


def flags(model: Path, **more: Flag) -> dict[str, Flag]:
    return {"model": model, "device": "cpu", "dtype": "float32", "block_size": _BLOCK, "poison": True, **more}


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[list[list[int]], list[list[int]]]:
    """What one process says, each request by itself in a pool with room for it."""
    with System(flags(model, num_blocks=512), threads=1) as one:
        return [ids(ask(one.client, request)) for request in REQUESTS], [ids(each) for each in ask_samples(one.client, SAMPLES)]


@pytest.fixture(scope="module")
def two(model: Path, expected: object) -> Iterator[System]:
    """Two ranks in a pool in which not all requests fit; after `expected`, so that its process is gone."""
    more: dict[str, Flag] = {"num_blocks": _BLOCKS, "host_blocks": 256, "preemption": "swap", "tensor_parallel": 2}
    with System(flags(model, **more), threads=1) as system:
        yield system


def ids(answer: Answer) -> list[int]:
    assert answer.code is grpc.StatusCode.OK, answer.details
    return answer.ids


def rank(system: System, number: int) -> psutil.Process:
    """Return the process of a rank."""
    for process in system.place.processes():
        with suppress(psutil.Error):
            if process.environ().get("RANK") == str(number):
                return process
    raise AssertionError(f"there is no rank {number}{system.log()}")


def test_two_ranks_give_the_tokens_of_one(two: System, expected: tuple[list[list[int]], list[list[int]]]) -> None:
    before = two.admin.pool().counters
    found = [ids(answer) for answer in ask_all(two.client, REQUESTS)]
    samples = [ids(answer) for answer in ask_samples(two.client, SAMPLES)]
    after = two.admin.pool().counters
    assert (found, samples) == expected
    assert after.prefix_hit_tokens > before.prefix_hit_tokens, "nothing was shared"
    assert after.copied_blocks > before.copied_blocks, "nothing was cloned"
    assert after.swapped_out_blocks > before.swapped_out_blocks, "nothing was swapped out"
    assert after.swapped_in_blocks > before.swapped_in_blocks, "nothing was swapped in"
    assert len(two.place.pool_files()) == 2
    two.settled()


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_rank_ends_the_executor_which_comes_back(
    two: System, expected: tuple[list[list[int]], list[list[int]]], number: int
) -> None:
    incarnation = two.admin.pool().executor_incarnation
    pids = {rank(two, each).pid for each in range(2)}
    stream = Running(two.client, greedy(_PREFIX, _ENDLESS))
    wait_until(lambda: stream.tokens >= 2, 60, "tokens")
    since = time.monotonic()
    os.kill(rank(two, number).pid, signal.SIGKILL)
    answer = stream.wait(60)
    assert answer.code is grpc.StatusCode.UNAVAILABLE, answer.details
    assert answer.ended - since <= _NOTICED_SECONDS
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 10, "the end of all ranks", two.log)
    wait_until(lambda: two.admin.pool().executor_incarnation not in (0, incarnation), START_SECONDS, "a new executor", two.log)
    two.wait_serving()
    assert ids(ask(two.client, REQUESTS[0])) == expected[0][0]
    two.settled()


def test_heads_that_cannot_be_dealt_out_are_refused(model: Path) -> None:
    ended = refusal(flags(model, num_blocks=64, tensor_parallel=3))
    assert ended.status == 2
    assert ended.last_line == (
        "kilburn: executor: --tensor-parallel 3: this llama model has 4 KV heads, which can't be dealt out evenly"
    )
    assert ended.leftovers == ()
