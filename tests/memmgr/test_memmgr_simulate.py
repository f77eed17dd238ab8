"""Simulations of small traces, known to the last slot; and of the published ones, where they are there."""

from __future__ import annotations

import os
import random
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from memmgr.core.memory import Memory
from memmgr.core.table import DEFAULT_ORDER, MemoryCounters
from memmgr.simulate import saturated
from memmgr.simulate.eviction import RecencyMemory, unbounded
from memmgr.simulate.policies import Policy, reservation
from memmgr.simulate.prefixes import OneByOne, Prompt, cache, prompts_of, simulate_one_by_one
from memmgr.simulate.saturated import NeverFitsError, Report, Setup, prompt_of, simulate
from memmgr.simulate.traces import MOONCAKE_BLOCK, TraceRequest, read_trace

DATA = Path(os.environ.get("KILBURN_TEST_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))


def setup(
    policy: Policy = Policy.PAGED, num_blocks: int = 8, block_size: int = 4, context_length: int = 16, **rest: int
) -> Setup:
    return Setup(policy, num_blocks, block_size, context_length, rest.get("max_running", 64), rest.get("max_step_tokens", 64))


def lengths(count: int, seed: int, longest: int) -> list[TraceRequest]:
    source = random.Random(seed)
    return [TraceRequest(source.randint(1, longest), source.randint(1, longest)) for _ in range(count)]


def shares(report: Report) -> tuple[float, ...]:
    return (
        report.utilization,
        report.reserved,
        report.internal_fragmentation,
        report.external_fragmentation,
        report.free,
    )


# ------------------------------------------------------------------------------------------------- every slot


def test_paged_slots_are_known_one_by_one() -> None:
    """Two blocks of four. One request of 5 and 3 holds both for its 3 steps, with 5, 6, 7 tokens, while the next waits."""
    report = simulate(setup(num_blocks=2, context_length=8), [TraceRequest(5, 3), TraceRequest(5, 3)])
    assert (report.requests, report.steps, report.mean_running, report.max_waste_tokens) == (2, 6, 1.0, 3)
    assert report.utilization == pytest.approx((5 + 6 + 7) / 24)
    assert report.reserved == pytest.approx((2 + 1 + 0) / 24), "the last token is never stored: there are 7 slots to fill"
    assert report.internal_fragmentation == pytest.approx(3 / 24)
    assert report.external_fragmentation == report.free == 0


def test_contiguous_slots_are_known_one_by_one() -> None:
    """Sixteen slots and four. A context of 12 takes the sixteen, rounded up from 12; the four are too few for the next."""
    trace = [TraceRequest(5, 3), TraceRequest(5, 3)]
    report = simulate(setup(Policy.CONTIGUOUS_MAX, num_blocks=5, context_length=12), trace)
    assert (report.requests, report.steps, report.mean_running, report.max_waste_tokens) == (2, 6, 1.0, 11)
    assert report.utilization == pytest.approx((5 + 6 + 7) / 60)
    assert report.reserved == pytest.approx((2 + 1 + 0) / 60)
    assert report.internal_fragmentation == pytest.approx(3 * 5 / 60), "12 - 7"
    assert report.external_fragmentation == pytest.approx(3 * 4 / 60), "16 - 12"
    assert report.free == pytest.approx(3 * 4 / 60)


def test_free_slots_in_pieces_are_external_fragmentation() -> None:
    """Sixteen slots in quarters; every second one's request ends, and eight slots would do for the next but lie apart."""
    short, long = TraceRequest(3, 1), TraceRequest(1, 3)
    trace = [short, long, short, long, TraceRequest(7, 1)]
    report = simulate(setup(Policy.CONTIGUOUS_ORACLE, num_blocks=4), trace)
    assert report.requests == 5
    assert report.steps == 4, "the last one begins when the third step has ended"
    assert report.external_fragmentation == pytest.approx(2 * 8 / (3 * 16)), "in steps 2 and 3"
    assert report.free == 0


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(Policy.CONTIGUOUS_MAX, 100), (Policy.CONTIGUOUS_POW2, 10 + 32), (Policy.CONTIGUOUS_ORACLE, 10 + 25)],
)
def test_what_is_reserved(policy: Policy, expected: int) -> None:
    assert reservation(policy, 10, 25, 100) == expected
    assert reservation(policy, 10, 90, 100) == 100, "never more than the context"


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("seed", range(3))
def test_the_shares_sum_to_one_and_nothing_is_lost(policy: Policy, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0

    def feed(run: saturated._Run) -> None:
        nonlocal steps
        steps += 1
        run._world.scheduler.check_invariants()
        original(run)

    original = saturated._Run._feed
    monkeypatch.setattr(saturated._Run, "_feed", feed)
    trace = lengths(80, seed, 20)
    report = simulate(setup(policy, num_blocks=25, context_length=40, max_step_tokens=70), trace)
    assert steps == report.steps + 2, "at the start, and after the plan that closes the last slots"
    assert (report.requests, report.refused) == (80, 0)
    assert sum(shares(report)) == pytest.approx(1)
    assert all(share >= 0 for share in shares(report))
    assert 0 < report.mean_running <= 64
    assert report.evictions == report.block_hit_rate == 0
    if policy is Policy.PAGED:
        assert report.external_fragmentation == 0
        assert report.max_waste_tokens < 4
    else:
        assert report.preemptions == 0


def test_the_policies_come_in_their_order() -> None:
    trace = lengths(300, 5, 60)
    reports = [simulate(setup(policy, 100, 4, 128), trace) for policy in Policy]
    paged, longest, pow2, oracle = (report.utilization for report in reports)
    assert longest < pow2 < oracle < paged
    assert paged > 0.9
    running = [report.mean_running for report in reports]
    assert running[1] < running[2] < running[3] < running[0]


def test_reserving_the_context_is_so_many_seats_and_their_mean_is_known() -> None:
    """Three seats of 128 that are never empty: the mean over time of what one of them holds does not depend on the order."""
    trace = lengths(1000, 1, 64)
    report = simulate(setup(Policy.CONTIGUOUS_MAX, 24, 16, 128, max_step_tokens=1024), trace)
    held = sum(sum(range(one.prompt_tokens, one.prompt_tokens + one.output_tokens)) for one in trace)
    expected = 3 * held / sum(one.output_tokens for one in trace) / (24 * 16)
    assert report.mean_running == 3
    assert report.utilization == pytest.approx(expected, rel=0.02)


# ------------------------------------------------------------------------------------------- who can't run, or must


@pytest.mark.parametrize("policy", Policy)
def test_what_can_never_run_is_left_out(policy: Policy) -> None:
    trace = [TraceRequest(3, 2), TraceRequest(16, 1), TraceRequest(15, 90), TraceRequest(400, 1), TraceRequest(2, 1)]
    done: list[int] = []
    report = simulate(setup(policy), trace, done.append)
    assert (report.requests, report.refused) == (3, 2), "one is cut at the context, two have no room for any output"
    assert done[-1] == 5


def test_a_trace_of_which_nothing_fits_is_an_error() -> None:
    with pytest.raises(NeverFitsError, match="none of 2 requests fits; the context is 12 tokens, the longest run of slots is 8"):
        simulate(setup(Policy.CONTIGUOUS_MAX, num_blocks=3, context_length=12), [TraceRequest(2, 2)] * 2)
    with pytest.raises(NeverFitsError):
        simulate(setup(num_blocks=1, context_length=4), [TraceRequest(4, 2)] * 2)


def test_a_lone_request_may_fill_the_pool() -> None:
    report = simulate(setup(num_blocks=4), [TraceRequest(9, 7), TraceRequest(15, 1), TraceRequest(1, 15)])
    assert (report.requests, report.refused) == (3, 0)


def test_short_memory_preempts() -> None:
    report = simulate(setup(num_blocks=8), [TraceRequest(1, 15)] * 30)
    assert report.requests == 30
    assert report.preemptions > 0
    assert report.max_waste_tokens == 3


# ------------------------------------------------------------------------------------------------------- prefixes


def mooncake(*prompts: tuple[int, Sequence[int]]) -> list[TraceRequest]:
    return [TraceRequest(tokens, 1, tuple(ids)) for tokens, ids in prompts]


def test_equal_ids_give_equal_tokens() -> None:
    first = prompt_of(0, TraceRequest(1000, 1, (5, 6)))
    second = prompt_of(1, TraceRequest(1024, 1, (5, 9)))
    assert len(first) == 1000
    assert first[:512] == second[:512]
    assert set(first[512:]).isdisjoint(second)
    assert set(prompt_of(3, TraceRequest(4, 1))).isdisjoint(prompt_of(4, TraceRequest(4, 1)))


def test_a_saturated_queue_finds_prefixes_too() -> None:
    trace = mooncake((600, [1, 2]), (700, [1, 3]), (1400, [1, 3, 4]))
    report = simulate(Setup(Policy.PAGED, 256, 16, 2048, 1, 512, prefix_cache=True), trace)
    assert report.requests == 3
    assert report.block_hit_rate == pytest.approx((32 + 43) / (38 + 44 + 88)), "700 tokens end inside of a block"
    assert report.evictions == 0


def test_whole_blocks_are_found_and_partial_ones_asked_for() -> None:
    trace = mooncake((1100, [1, 2, 3]), (1100, [1, 2, 3]), (1024, [1, 2]), (500, [1]), (1536, [1, 9, 3]))
    report = simulate_one_by_one(16, 512, trace)
    assert (report.requests, report.refused, report.steps) == (5, 0, 4)
    assert report.block_hit_rate == pytest.approx((0 + 2 + 2 + 0 + 1) / (3 + 3 + 2 + 1 + 3))
    assert sum(shares(report)) == pytest.approx(1)


def test_a_prompt_longer_than_the_cache_is_left_out() -> None:
    report = simulate_one_by_one(2, 512, mooncake((1536, [1, 2, 3]), (1024, [1, 2]), (600, [1, 2])))
    assert (report.requests, report.refused) == (2, 1)
    assert report.block_hit_rate == pytest.approx(1 / 4)


TREES = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).flatmap(
        lambda ids: st.tuples(st.integers(1, 512).map(lambda rest: (len(ids) - 1) * 512 + rest), st.just(ids))
    ),
    min_size=1,
    max_size=30,
)


def naive_hits(prompts: Iterable[Prompt], capacity: int) -> list[int]:
    """Hits of a least-recently-used cache of prefixes, each a tuple, the end of a prompt older than its start."""
    kept: OrderedDict[tuple[int, ...], None] = OrderedDict()
    found = []
    for prompt in prompts:
        chain = [tuple(prompt.tokens[: end + 1]) for end in range(len(prompt.tokens))]
        hits = next((depth for depth, name in enumerate(chain) if name not in kept), len(chain))
        for name in chain:
            kept.pop(name, None)
        while len(kept) + len(chain) > capacity:
            kept.popitem(last=False)
        for name in reversed(chain):
            kept[name] = None
        found.append(hits)
    return found


def naive_hits_of_the_core(prompts: Iterable[Prompt], capacity: int) -> list[int]:
    """The same of the core's order: what was used twice, or comes back after it was evicted, lies in a segment of its own."""
    fresh: list[tuple[int, ...]] = []
    proven: list[list[tuple[int, ...]]] = []
    favoured: set[tuple[int, ...]] = set()
    older: set[tuple[int, ...]] = set()  # the names of what was evicted lately, in two generations
    younger: set[tuple[int, ...]] = set()
    found = []
    for prompt in prompts:
        chain = [tuple(prompt.tokens[: end + 1]) for end in range(len(prompt.tokens))]
        kept = {*fresh, *(name for run in proven for name in run)}
        hits = next((depth for depth, name in enumerate(chain) if name not in kept), len(chain))
        favoured |= set(chain[:hits])
        fresh = [name for name in fresh if name not in chain[:hits]]
        proven = [run for run in ([name for name in run if name not in chain[:hits]] for run in proven) if run]
        while len(fresh) + sum(map(len, proven)) + len(chain) > capacity:
            gone = fresh.pop(0) if fresh else proven[0].pop(0)
            proven = [run for run in proven if run]
            favoured.discard(gone)
            younger.add(gone)
            if len(younger) == DEFAULT_ORDER.names * capacity // 2:
                older, younger = younger, set()
        for name in chain[hits:]:
            if name not in younger | older:
                break
            (younger if name in younger else older).remove(name)
            favoured.add(name)
        fresh += [name for name in reversed(chain) if name not in favoured]
        proven.append([name for name in reversed(chain) if name in favoured])
        while sum(map(len, proven)) > int(capacity * DEFAULT_ORDER.proven_share):
            moved = proven[0].pop(0)
            proven = [run for run in proven if run]
            fresh.append(moved)
            favoured.discard(moved)
        found.append(hits)
    return found


@settings(max_examples=150, deadline=None)
@given(drawn=TREES, capacity=st.integers(6, 12))
def test_the_hits_are_those_of_a_naive_cache(drawn: list[tuple[int, list[int]]], capacity: int) -> None:
    trace = mooncake(*drawn)
    prompts = list(prompts_of(trace, 512))
    for kind, naive in (RecencyMemory, naive_hits), (Memory, naive_hits_of_the_core):
        runner = cache(capacity, 512, kind)
        found = []
        for prompt in prompts:
            found.append(runner.run(prompt))
            runner.memory.check_invariants()
        assert found == naive(prompts, capacity)
        assert sum(found) <= unbounded(prompts, 1).found


@settings(max_examples=30, deadline=None)
@given(drawn=TREES, capacity=st.integers(6, 12))
def test_one_token_for_a_block_finds_what_its_512_tokens_find(drawn: list[tuple[int, list[int]]], capacity: int) -> None:
    trace = mooncake(*drawn)
    short = cache(capacity, 512)
    long = OneByOne(Memory(capacity, 512, prefix_cache=True, counters=MemoryCounters()))
    for prompt, request in zip(prompts_of(trace, 512), trace, strict=True):
        whole = request.prompt_tokens // MOONCAKE_BLOCK * MOONCAKE_BLOCK
        assert short.run(prompt) == long.run(Prompt(array("I", prompt_of(0, request)[:whole]), prompt.asked))
    assert short.memory.counters == long.memory.counters
    every = slice(None)
    assert short.memory.pool.stamps(every) == long.memory.pool.stamps(every)


@pytest.mark.parametrize("block_size", [16, 24, 512, 1024])
def test_any_block_size_will_do(block_size: int) -> None:
    trace = mooncake((2000, [1, 2, 3, 4]), (2048, [1, 2, 3, 4]), (1600, [1, 2, 3, 5]))
    report = simulate_one_by_one(1000, block_size, trace)
    asked = sum(-(-request.prompt_tokens // block_size) for request in trace)
    assert report.block_hit_rate == pytest.approx((2000 // block_size + 1536 // block_size) / asked)


# -------------------------------------------------------------------------------------------- the published traces


def published(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


def test_the_published_lengths_fill_paged_memory() -> None:
    trace = list(islice(read_trace(published("sharegpt_lengths.csv.gz")), 300))
    paged, longest = (simulate(Setup(policy, 981, 16, 2048, 256, 2048), trace) for policy in list(Policy)[:2])
    assert paged.utilization > 0.96
    assert paged.max_waste_tokens < 16
    assert longest.mean_running == 7
    assert 0.14 < longest.utilization < 0.2


@pytest.mark.parametrize(("name", "blocks", "expected"), [("synthetic", 1_000, 0.090), ("synthetic", 10_000, 0.443)])
def test_published_prefixes_are_found_as_often_as_they_should(name: str, blocks: int, expected: float) -> None:
    report = simulate_one_by_one(blocks, 512, read_trace(published(f"mooncake_{name}.jsonl.gz")))
    assert report.block_hit_rate == pytest.approx(expected, abs=0.002)
