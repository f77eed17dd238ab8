"""Other orders of eviction keep the memory whole, and nothing beats the bound."""

from __future__ import annotations

import random
from functools import cache as cached
from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from memmgr.core.memory import Memory
from memmgr.core.table import StepMemory
from memmgr.simulate import saturated
from memmgr.simulate.eviction import BriefFrequencyMemory, FrequencyMemory, RecencyMemory, bound, unbounded
from memmgr.simulate.policies import CountingMemory, Policy
from memmgr.simulate.prefixes import Prompt, cache, prompts_of
from memmgr.simulate.saturated import Setup
from memmgr.simulate.traces import TraceRequest

KINDS = [Memory, RecencyMemory, FrequencyMemory, BriefFrequencyMemory]

CHAINS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=40)


def prompts(chains: list[list[int]]) -> list[Prompt]:
    return list(prompts_of((TraceRequest(512 * len(ids), 1, tuple(ids)) for ids in chains), 512))


@settings(max_examples=100, deadline=None)
@given(chains=CHAINS, capacity=st.integers(5, 12), kind=st.sampled_from(KINDS))
def test_every_order_keeps_the_memory_whole_and_below_the_bound(
    chains: list[list[int]], capacity: int, kind: type[Memory]
) -> None:
    asked = prompts(chains)
    runner = cache(capacity, 512, kind)
    for prompt in asked:
        evicted = runner.memory.counters.evicted_blocks
        found = runner.run(prompt)
        runner.memory.check_invariants()
        short = max(0, len(prompt.tokens) - found)
        assert runner.memory.counters.evicted_blocks - evicted <= short, "only leaves go, one at a time"
    best = bound(asked, 1, capacity)
    assert runner.hits.found <= best.found <= unbounded(asked, 1).found
    assert runner.hits.asked == best.asked


def best_of_all(chains: list[list[int]], capacity: int) -> int:
    """The most hits of whole runs from the start that any choice of what to keep can have, by trying all."""
    names = [[tuple(ids[: end + 1]) for end in range(len(ids))] for ids in chains]

    @cached
    def best(number: int, kept: frozenset[tuple[int, ...]]) -> int:
        if number == len(names):
            return 0
        chain = names[number]
        found = next((depth for depth, name in enumerate(chain) if name not in kept), len(chain))
        pool = kept | set(chain)
        choices = map(frozenset, combinations(sorted(pool), min(capacity, len(pool))))
        return found + max(best(number + 1, choice) for choice in choices)

    return best(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(
    chains=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=2), min_size=1, max_size=6),
    capacity=st.integers(1, 3),
)
def test_the_bound_is_one(chains: list[list[int]], capacity: int) -> None:
    assert best_of_all(chains, capacity) <= bound(prompts(chains), 1, capacity).found


def test_the_bound_is_reached_where_the_future_is_plain() -> None:
    asked = prompts([[0], [1], [2], [0], [1], [2], [0]])
    assert bound(asked, 1, 1).found == 2, "0 is kept all the time"
    assert bound(asked, 1, 2).found == 3
    assert bound(asked, 1, 3).found == unbounded(asked, 1).found == 4


def test_what_came_back_is_kept_longer() -> None:
    """Two prompts that come again and again, among many that come once: recency alone loses them."""
    source = random.Random(1)
    chains: list[list[int]] = []
    for number in range(400):
        chains.append([100 + number, 100 + number])
        if number % 6 == 0:
            chains.append([source.randint(0, 1), 5])
    rates = {}
    for kind in KINDS:
        runner = cache(8, 512, kind)
        for prompt in prompts(chains):
            runner.run(prompt)
        rates[kind] = runner.hits.rate
    assert rates[RecencyMemory] == 0
    assert rates[Memory] > 0.05
    assert rates[FrequencyMemory] > 0.08


def test_another_order_serves_a_batch_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted requests, blocks of several holders, and prefixes that end inside of a block and are cloned."""

    class Counting(CountingMemory, FrequencyMemory):
        def end_step(self) -> StepMemory:
            step = super().end_step()
            self.check_invariants()
            return step

    monkeypatch.setattr(saturated, "CountingMemory", Counting)
    source = random.Random(3)
    trace = []
    for _ in range(60):
        ids = [source.randint(0, 2) for _ in range(source.randint(1, 3))]
        trace.append(TraceRequest(512 * len(ids) - source.randint(0, 500), source.randint(1, 90), tuple(ids)))
    report = saturated.simulate(Setup(Policy.PAGED, 30, 100, 2000, 16, 600, prefix_cache=True), trace)
    assert report.requests == 60
    assert report.evictions > 0
    assert report.preemptions > 0
    assert report.block_hit_rate > 0


@pytest.mark.parametrize("capacity", [4, 50])
def test_nothing_old_piles_up(capacity: int) -> None:
    memory = cache(capacity, 512, FrequencyMemory)
    for prompt in prompts([[number % 3] for number in range(2000)]):
        memory.run(prompt)
    assert isinstance(memory.memory, FrequencyMemory)
    assert len(memory.memory._heap) <= 2 * 3 + 64 + 1
    assert len(memory.memory._names_seen) == 3
