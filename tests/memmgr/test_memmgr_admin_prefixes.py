"""The admin calls about prefixes: the tree, a block's history, a dry run, pins, flushing."""

from __future__ import annotations

import copy
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial

import grpc
import pytest

from kilburn.limits import MAX_PINS
from kilburn.v1 import admin_pb2 as admin
from kilburn.v1 import admin_pb2_grpc
from memmgr.calls import MAX_TTL_SECONDS
from memmgr.core.blocks import BlockPool
from memmgr.core.evicted import EvictedNames
from memmgr.schedule.probe import probe
from tests.memmgr.conftest import House
from tests.memmgr.memmgr_journal import pool_state
from tests.memmgr.memmgr_messages import submit
from tests.memmgr.memmgr_peers import PATIENCE_SECONDS, Background, Executor, Gateway
from tests.memmgr.memmgr_world import World
from tests.memmgr.test_memmgr_admin import MIB, address, fill_cache, get_pool, list_blocks, scheduler_of, stub

__all__ = ["address", "stub"]  # fixtures

#: A pool of 16 blocks of 4, of which 8 may be pinned.
SHORT = {"context_length": 32}

Stub = admin_pb2_grpc.AdminStub


@pytest.fixture
def working(house: House) -> Iterator[Executor]:
    executor = house.executor(**SHORT)
    background = Background(executor)
    yield executor
    background.stop()


def serve(house: House, *prompts: list[int], tenant: str = "default", gateway: Gateway | None = None) -> Gateway:
    """Have requests served, one after another; each leaves its prompt in the cache."""
    gateway = gateway or house.gateway()
    for prompt in prompts:
        handle = len(gateway.ends) + 1
        gateway.send(submit(handle, prompt_ids=prompt, max_tokens=1, tenant=tenant))
        gateway.wait_end(handle)
    return gateway


def tree(stub: Stub, **request: object) -> list[admin.PrefixNode]:
    pages = list(stub.GetPrefixTree(admin.GetPrefixTreeRequest(**request), timeout=30))  # type: ignore[arg-type]
    assert len({page.cursor for page in pages}) == 1
    return [node for page in pages for node in page.nodes]


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code(), raised.value.details() or ""


def pin(stub: Stub, tokens: range | list[int], **request: object) -> admin.Pin:
    return stub.PinPrefix(admin.PinPrefixRequest(token_ids=tokens, **request), timeout=PATIENCE_SECONDS)  # type: ignore[arg-type]


def pins(stub: Stub) -> list[admin.Pin]:
    return list(stub.ListPins(admin.ListPinsRequest(), timeout=PATIENCE_SECONDS))


def unpin(stub: Stub, pin_id: str) -> None:
    stub.UnpinPrefix(admin.UnpinPrefixRequest(pin_id=pin_id), timeout=PATIENCE_SECONDS)


def flush(stub: Stub, tenant: str = "") -> int:
    return stub.FlushPrefixCache(admin.FlushPrefixCacheRequest(tenant=tenant), timeout=PATIENCE_SECONDS).flushed_blocks


def ask_probe(stub: Stub, tokens: range | list[int], **request: object) -> admin.ProbeResponse:
    return stub.Probe(admin.ProbeRequest(token_ids=tokens, **request), timeout=PATIENCE_SECONDS)  # type: ignore[arg-type]


def test_without_an_executor(stub: Stub) -> None:
    assert tree(stub) == []
    assert pins(stub) == []
    assert flush(stub) == 0
    for call in partial(pin, stub, [1]), partial(ask_probe, stub, [1]):
        assert refused(call)[0] is grpc.StatusCode.UNAVAILABLE
    for missing in partial(unpin, stub, "x"), partial(stub.ExplainBlock, admin.ExplainBlockRequest(block=0)):
        assert refused(missing)[0] is grpc.StatusCode.NOT_FOUND


# ----------------------------------------------------------------------------------------------------------- reading


@pytest.mark.usefixtures("working")
def test_the_tree_is_told_depth_first(stub: Stub, house: House) -> None:
    gateway = serve(house, list(range(9)), [*range(4), 30, 31, 32, 33, 34])
    serve(house, list(range(50, 55)), tenant="b", gateway=gateway)
    nodes = tree(stub, with_tokens=True, tenant="default")
    assert [(node.depth, list(node.token_ids)) for node in nodes] == [
        (0, [0, 1, 2, 3]),
        (1, [30, 31, 32, 33]),
        (2, [34]),
        (1, [4, 5, 6, 7]),
        (2, [8]),
    ]
    assert [nodes[i].parent_hash == nodes[j].prefix_hash for i, j in ((1, 0), (2, 1), (3, 0), (4, 3))] == [True] * 4
    assert [node.hits for node in nodes] == [1, 0, 0, 0, 0]
    assert {(node.block, node.prefix_hash) for node in tree(stub)} == {
        (block.block, block.prefix_hash) for block in list_blocks(stub, state=admin.BLOCK_STATE_CACHED)
    }
    assert len(tree(stub)) == 7
    assert len(tree(stub, tenant="b")) == 2
    assert tree(stub, tenant="c") == []
    assert [node.depth for node in tree(stub, max_depth=1)] == [0, 0]
    assert [node.depth for node in tree(stub, max_depth=2, tenant="default")] == [0, 1, 1]
    assert tree(stub, max_nodes=3, tenant="default") == tree(stub, tenant="default")[:3]
    assert not any(node.token_ids for node in tree(stub))


def test_a_large_tree_comes_in_pages_under_a_mebibyte(stub: Stub, house: House) -> None:
    background = Background(house.executor(total_blocks=40_000, block_size=1, context_length=100))
    for part in range(30):
        house.ask(partial(fill_cache, scheduler_of(house), 1000, "default", f"{part}"))
    pages = list(stub.GetPrefixTree(admin.GetPrefixTreeRequest(with_tokens=True), timeout=60))
    assert max(page.ByteSize() for page in pages) < MIB
    assert len(pages) > 1
    nodes = [node for page in pages for node in page.nodes]
    assert [node.depth for node in nodes] == list(range(1000)) * 30
    few = tree(stub, max_nodes=1500, with_tokens=True)
    # The domains come in another order, each of them as it is.
    assert [node.depth for node in few] == [*range(1000), *range(500)]
    by_hash = {node.prefix_hash: node for node in nodes}
    assert all(by_hash[node.prefix_hash] == node for node in few)
    background.stop()


@pytest.mark.usefixtures("working")
def test_a_blocks_history(stub: Stub, house: House) -> None:
    serve(house, list(range(9)))
    told = stub.ExplainBlock(admin.ExplainBlockRequest(block=0), timeout=PATIENCE_SECONDS)
    assert told.block.state == admin.BLOCK_STATE_CACHED
    kinds = [event.kind for event in told.events]
    assert kinds == [admin.EVENT_KIND_RELEASED, admin.EVENT_KIND_INDEXED, admin.EVENT_KIND_ALLOCATED]
    assert {event.request_id for event in told.events} == {"request-1"}
    flush(stub)
    told = stub.ExplainBlock(admin.ExplainBlockRequest(block=0), timeout=PATIENCE_SECONDS)
    assert [event.kind for event in told.events[:2]] == [admin.EVENT_KIND_FREED, admin.EVENT_KIND_FLUSHED]
    assert refused(partial(stub.ExplainBlock, admin.ExplainBlockRequest(block=16)))[0] is grpc.StatusCode.NOT_FOUND


# ------------------------------------------------------------------------------------------------------- a dry run


@pytest.mark.usefixtures("working")
def test_what_a_probe_tells(stub: Stub, house: House) -> None:
    gateway = serve(house, list(range(9)))
    serve(house, *([part] * 25 for part in range(40, 42)), gateway=gateway)
    cached = get_pool(stub).cached_blocks
    told = ask_probe(stub, [*range(8), 60, 61], max_tokens=5, n=2)
    assert (told.fits_now, told.fits_ever, told.cached_tokens, told.waiting_ahead) == (True, True, 8, 0)
    assert (told.new_blocks, told.worst_case_blocks) == (1, 2 + 2 * 2)
    told = ask_probe(stub, [1] * 20)
    assert (told.cached_tokens, told.new_blocks, told.worst_case_blocks) == (0, 5, 8)
    assert len(told.evicted_blocks) >= 5 - (16 - cached)
    before = {block.block for block in list_blocks(stub, state=admin.BLOCK_STATE_CACHED)}
    assert set(told.evicted_blocks) <= before
    assert not ask_probe(stub, [1] * 32).fits_ever
    assert ask_probe(stub, [1] * 31).fits_ever
    assert ask_probe(stub, list(range(9)), cache_salt="x").cached_tokens == 0
    assert ask_probe(stub, list(range(9)), tenant="x").cached_tokens == 0
    assert refused(partial(ask_probe, stub, [100]))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert refused(partial(ask_probe, stub, []))[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("n", [65, 2**32 - 1])
def test_a_probe_of_more_samples_than_any_request_may_have_is_refused(stub: Stub, house: House, n: int) -> None:
    house.executor()
    code, details = refused(partial(ask_probe, stub, [1], max_tokens=2**32 - 1, n=n))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert str(n) in details
    assert ask_probe(stub, [1], max_tokens=2**32 - 1, n=64).new_blocks == 1


def test_a_probe_foresees_evictions_and_changes_nothing() -> None:
    """Of many prompts on a full pool: everything is as before, and an admission takes exactly what was foretold."""
    for prompt in [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9, 9, 9, 9], [7] * 30, [1, 2, 3, 4, 5, 6], [5] * 3]:
        world = World(blocks=12, block_size=4, context_length=40)
        for served in [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9, 9, 1], [6] * 20, [8] * 9:
            world.submit(served, 1)
            world.run()
        scheduler, memory = world.scheduler, world.memory
        before = copy.deepcopy((state_of(memory), state_of(memory.pool), state_of(memory.index), memory.pins._made))
        told = probe(scheduler, "tenant", "", array("I", prompt), 4, 1)
        assert before == (state_of(memory), state_of(memory.pool), state_of(memory.index), memory.pins._made)
        assert told.fits_now
        known = {block for block in range(12) if memory.index.hash_of(block)}
        names = {block: memory.index.hash_of(block) for block in known}
        world.submit(prompt, 1)
        while (plan := world.step()) is not None and scheduler.running:
            assert plan.step < 100
        gone = {block for block in known if memory.index.hash_of(block) != names[block]}
        assert set(told.evicted_blocks) == gone


def state_of(owner: object) -> dict[str, object]:
    """Everything that an object of the core has, but for the objects beside it."""
    if isinstance(owner, BlockPool):
        return pool_state(owner)
    names = getattr(type(owner), "__slots__", None) or vars(owner)
    state = {
        name: getattr(owner, name) for name in names if not hasattr(getattr(owner, name), "check_invariants") and name != "_pins"
    }
    return {name: value.names if isinstance(value, EvictedNames) else value for name, value in state.items()}


# ------------------------------------------------------------------------------------------------------------- pins


@pytest.mark.usefixtures("working")
def test_a_pinned_prefix_outlives_flush_and_pressure(stub: Stub, house: House) -> None:
    gateway = serve(house, list(range(9)))
    made = pin(stub, range(9))
    assert (made.tokens, made.blocks, made.expires_in_seconds, made.tenant) == (8, 2, 0, "default")
    assert pins(stub) == [made]
    pool = get_pool(stub)
    assert (pool.pinned_blocks, pool.cached_blocks) == (2, 3)
    assert flush(stub) == 1
    serve(house, *([part] * 25 for part in range(40, 46)), gateway=gateway)
    assert [block.block for block in list_blocks(stub) if block.pinned] == [0, 1]
    assert [(node.pinned, node.depth) for node in tree(stub) if node.pinned] == [(True, 0), (True, 1)]
    assert ask_probe(stub, range(9)).cached_tokens == 8
    assert stub.Verify(admin.VerifyRequest(), timeout=PATIENCE_SECONDS).ok
    unpin(stub, made.pin_id)
    assert refused(partial(unpin, stub, made.pin_id))[0] is grpc.StatusCode.NOT_FOUND
    pool = get_pool(stub)
    assert pool.pinned_blocks == 0
    assert flush(stub) == pool.cached_blocks
    assert get_pool(stub).free_blocks == 16


@pytest.mark.usefixtures("working")
def test_pins_are_bounded_so_that_the_longest_request_can_run(stub: Stub, house: House) -> None:
    gateway = serve(house, [1] * 25)
    assert pin(stub, [1] * 25).blocks == 6
    serve(house, [2] * 14, gateway=gateway)
    code, message = refused(lambda: pin(stub, [2] * 14))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "at most 8 of 16" in message
    assert pin(stub, [2] * 8).blocks == 2
    assert pin(stub, [1] * 9).blocks == 2  # pinned already
    assert get_pool(stub).pinned_blocks == 8
    gateway.send(submit(99, prompt_ids=[3] * 5, max_tokens=27))
    gateway.wait_end(99)
    assert len(gateway.tokens[99]) == 27
    assert get_pool(stub).pinned_blocks == 8
    for _ in range(MAX_PINS - 3):
        pin(stub, [1] * 4)
    code, message = refused(lambda: pin(stub, [1] * 4))
    assert (code, f"{MAX_PINS} pins" in message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


@pytest.mark.usefixtures("working")
def test_a_pin_ends_by_itself(stub: Stub, house: House) -> None:
    serve(house, list(range(9)))
    made = pin(stub, range(4), ttl_seconds=0.5)
    assert 0 < made.expires_in_seconds <= 0.5
    end = time.monotonic() + PATIENCE_SECONDS
    while get_pool(stub).pinned_blocks:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert pins(stub) == []
    kinds = {event.kind for event in stub.ExplainBlock(admin.ExplainBlockRequest(block=0)).events}
    assert {admin.EVENT_KIND_PINNED, admin.EVENT_KIND_UNPINNED} <= kinds


@pytest.mark.usefixtures("working")
def test_what_can_not_be_pinned(stub: Stub, house: House) -> None:
    serve(house, list(range(9)))
    for request in {"cache_salt": "x"}, {"tenant": "x"}:
        assert refused(partial(pin, stub, range(9), **request))[0] is grpc.StatusCode.NOT_FOUND
    assert refused(lambda: pin(stub, range(3)))[0] is grpc.StatusCode.NOT_FOUND
    for wrong in {"tenant": "x" * 129}, {"cache_salt": "x" * 129}:
        assert refused(partial(pin, stub, range(9), **wrong))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert refused(lambda: pin(stub, [100]))[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.usefixtures("working")
@pytest.mark.parametrize("seconds", [-1.0, MAX_TTL_SECONDS + 1.0, 1e308, float("inf"), float("nan")])
def test_a_pin_that_would_last_too_long_or_no_time(stub: Stub, house: House, seconds: float) -> None:
    serve(house, list(range(9)))
    code, message = refused(partial(pin, stub, range(9), ttl_seconds=seconds))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith(f"ttl_seconds is {seconds}; it must be a number from 0")
    assert message.endswith(f"to {MAX_TTL_SECONDS} (ten years)")
    assert pins(stub) == []


@pytest.mark.usefixtures("working")
def test_a_pin_for_ten_years(stub: Stub, house: House) -> None:
    serve(house, list(range(9)))
    assert abs(pin(stub, range(9), ttl_seconds=MAX_TTL_SECONDS).expires_in_seconds - MAX_TTL_SECONDS) < PATIENCE_SECONDS


def test_pins_go_with_the_executor(stub: Stub, house: House) -> None:
    executor = house.executor(**SHORT)
    background = Background(executor)
    serve(house, list(range(9)))
    made = pin(stub, range(9))
    background.stop()
    executor.lose()
    executor.connect()
    assert pins(stub) == []
    assert get_pool(stub).pinned_blocks == 0
    assert refused(partial(unpin, stub, made.pin_id))[0] is grpc.StatusCode.NOT_FOUND
    counters = get_pool(stub).counters
    assert counters.allocated_blocks == counters.freed_blocks


def test_a_pin_is_cut_short_by_distrust_alone() -> None:
    world = World(blocks=12, block_size=2, context_length=8)
    world.submit([1, 2, 3, 4, 5], 1)
    world.run()
    memory, lineage = world.memory, world.scheduler.lineage("tenant", "")
    blocks = memory.pins.pinnable(lineage, array("I", [1, 2, 3, 4, 5]))
    memory.pins.pin(blocks, "tenant", float("inf"))
    memory.pins.pin(blocks[:1], "tenant", float("inf"))
    memory.flush()
    assert [pin.blocks for pin in memory.pins] == [list(blocks), list(blocks[:1])]
    memory.check_invariants()
    memory._forget(blocks[1])
    assert [pin.blocks for pin in memory.pins] == [[blocks[0]], [blocks[0]]]
    memory.check_invariants()
    memory.distrust_cached(lineage, array("I", [1, 2, 3, 4, 5]))
    assert (len(memory.pins), memory.pool.pinned, memory.pool.cached) == (0, 0, 0)
    memory.check_invariants()


# ---------------------------------------------------------------------------------------------------------- flushing


@pytest.mark.usefixtures("working")
def test_a_flush_of_one_tenant(stub: Stub, house: House) -> None:
    gateway = serve(house, list(range(9)))
    serve(house, list(range(9)), tenant="b", gateway=gateway)
    assert flush(stub, "c") == 0
    assert flush(stub, "b") == 3
    assert {block.tenant for block in list_blocks(stub, state=admin.BLOCK_STATE_CACHED)} == {"default"}
    assert flush(stub) == 3
    assert get_pool(stub).free_blocks == 16


def test_a_large_flush_is_done_in_parts(stub: Stub, house: House) -> None:
    background = Background(house.executor(total_blocks=40_000, block_size=1, context_length=100))
    for part in range(30):
        house.ask(partial(fill_cache, scheduler_of(house), 1000, "default", f"{part}"))
    assert flush(stub) == 30_000
    assert get_pool(stub).free_blocks == 40_000
    background.stop()
