"""A pool of half of what is asked for: requests are set aside, on the host or to be computed again; nobody sees a difference."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kilburn.client import Client
from kilburn.v1 import inference_pb2 as api
from tests.e2e.calls import Answer, ask_all, from_ids
from tests.e2e.place import wait_until
from tests.e2e.system import Flag, System

pytestmark = pytest.mark.processes

REQUESTS = 16
PROMPT = 40
OUTPUTS = 56
BLOCK = 8
DEMAND = REQUESTS * (PROMPT + OUTPUTS) // BLOCK

#: Drawn at temperature 1 and greedy in turn, all of one length, so that all press on the pool at once.
ASKED = [
    from_ids(
        [(number * 31 + at * at * 7) % 251 for at in range(PROMPT)],
        OUTPUTS,
        sampling=api.Sampling(temperature=float(number % 2), seed=number),
    )
    for number in range(REQUESTS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model whose every token depends on all before it."""
    from tests.e2e.tiny import save

    return save(tmp_path_factory.mktemp("spread"), spread=0.3)


def flags(model: Path, blocks: int) -> dict[str, Flag]:
    return {
        "model": model,
        "device": "cpu",
        "dtype": "float32",
        "block_size": BLOCK,
        "num_blocks": blocks,
        "poison": True,
        "max_model_len": PROMPT + OUTPUTS,
    }


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> Iterator[list[Answer]]:
    """Return what each gets where there is room for all."""
    with System(flags(model, 2 * DEMAND), threads=1) as large:
        answers = ask_all(large.client, ASKED)
        assert large.admin.pool().counters.preemptions == 0
        yield answers


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_half_of_the_demand(preemption: str, model: Path, undisturbed: list[Answer]) -> None:
    more: dict[str, Flag] = {"preemption": "swap", "host_blocks": DEMAND} if preemption == "swap" else {}
    with System({**flags(model, DEMAND // 2), **more}, threads=1) as half:
        answers = ask_all(half.client, ASKED)
        assert [answer.code.name for answer in answers] == ["OK"] * REQUESTS
        assert [answer.ids for answer in answers] == [answer.ids for answer in undisturbed]
        counters = half.admin.pool().counters
        assert 0 < counters.preemptions <= REQUESTS
        assert max(answer.usage.preemptions for answer in answers) <= 4, "one request pays for the others"
        assert counters.preemptions == sum(answer.usage.preemptions for answer in answers)
        if preemption == "swap":
            assert counters.swapped_in_blocks > 0
            assert counters.recomputed_tokens == 0
            assert half.admin.pool().host_free_blocks == half.admin.pool().host_total_blocks == DEMAND
        else:
            assert counters.recomputed_tokens > 0
        assert list(half.admin.verify(with_executor=True).faults) == []
        half.settled()


def test_a_tenant_over_its_quota_disturbs_nobody_else(model: Path, undisturbed: list[Answer]) -> None:
    """One tenant asks for as much as the pool holds and may have a quarter of it; another one gets what it would get alone."""
    with System(flags(model, DEMAND), threads=1) as system:
        system.admin.set_quota("noisy", max_blocks=DEMAND // 4)
        with Client(str(system.gateway_address), tenant="noisy") as noisy, ThreadPoolExecutor(2) as threads:
            crowd = threads.submit(ask_all, noisy, ASKED)
            wait_until(lambda: system.admin.pool().counters.preemptions > 0, 60, "the noisy tenant at its limit")
            others = threads.submit(ask_all, system.client, ASKED[:6])
            most = 0
            while not others.done():
                most = max(most, *(quota.used_blocks for quota in system.admin.quotas() if quota.tenant == "noisy"))
            answers, heard = others.result(), crowd.result()
        assert [answer.ids for answer in answers] == [answer.ids for answer in undisturbed[:6]]
        assert [answer.usage.preemptions for answer in answers] == [0] * 6
        assert max(answer.usage.queue_seconds for answer in answers) < 1, "they did not wait for the other tenant"
        assert 0 < most <= DEMAND // 4
        assert [answer.ids for answer in heard] == [answer.ids for answer in undisturbed]
        assert sum(answer.usage.preemptions for answer in heard) > 0
        system.settled()
