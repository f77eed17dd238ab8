"""The admin API: each answer is one instant, pages are bounded, and steps go on meanwhile."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kilburn.config import Address
from kilburn.errors import StartError
from kilburn.limits import MAX_WATCHERS
from kilburn.v1 import admin_pb2 as admin
from kilburn.v1 import admin_pb2_grpc
from kilburn.v1 import engine_pb2 as engine
from memmgr.admin import AdminServer
from memmgr.core.events import RELEASED
from memmgr.core.lineage import Lineage, root_hash
from memmgr.dumps import Dump
from memmgr.schedule.scheduler import Scheduler
from memmgr.views import block_pages, snapshot_blocks
from tests.memmgr.conftest import House
from tests.memmgr.memmgr_messages import submit
from tests.memmgr.memmgr_peers import PATIENCE_SECONDS, Background, Executor, Gateway
from tests.memmgr.memmgr_rebuild import Rebuilt

MIB = 1024 * 1024


@pytest.fixture
def address(house: House) -> Iterator[Address]:
    server = AdminServer(house.engine, Address("127.0.0.1", 0), structlog.get_logger())
    yield server.start()
    server.stop()


@pytest.fixture
def stub(address: Address) -> Iterator[admin_pb2_grpc.AdminStub]:
    with grpc.insecure_channel(str(address)) as channel:
        yield admin_pb2_grpc.AdminStub(channel)


def scheduler_of(house: House) -> Scheduler:
    assert house.engine.session is not None
    return house.engine.session.scheduler


def get_pool(stub: admin_pb2_grpc.AdminStub) -> admin.Pool:
    return stub.GetPool(admin.GetPoolRequest(), timeout=PATIENCE_SECONDS)


def list_blocks(stub: admin_pb2_grpc.AdminStub, **request: int) -> list[admin.Block]:
    pages = list(stub.ListBlocks(admin.ListBlocksRequest(**request), timeout=30))  # type: ignore[arg-type]
    return [block for page in pages for block in page.blocks]


def list_sequences(stub: admin_pb2_grpc.AdminStub, request: admin.ListSequencesRequest) -> list[admin.Sequence]:
    return [sequence for page in stub.ListSequences(request, timeout=PATIENCE_SECONDS) for sequence in page.sequences]


def standing_still(house: House, prompt: int) -> tuple[Executor, Gateway]:
    """Have a request running of which the first step is done, and two more are out."""
    executor, gateway = house.executor(), house.gateway()
    executor.frozen = True
    gateway.send(submit(1, prompt_ids=range(prompt), max_tokens=20))
    executor.until(lambda: executor.plans, "a plan")
    executor.send(executor.do(executor.plans[0]))
    executor.until(lambda: len(executor.plans) == 3, "two more")
    return executor, gateway


# ----------------------------------------------------------------------------------------------------------- reading


def test_without_an_executor_everything_is_empty(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    pool = get_pool(stub)
    assert pool.memmgr_incarnation == f"{house.engine.incarnation:016x}"
    assert (pool.executor_connected, pool.total_blocks, pool.gateways_connected) == (False, 0, 0)
    assert (pool.utilization, pool.contiguous_utilization) == (1.0, 1.0)
    assert list_blocks(stub) == []
    assert list_sequences(stub, admin.ListSequencesRequest()) == []
    assert stub.Verify(admin.VerifyRequest(), timeout=PATIENCE_SECONDS).ok
    assert not stub.Verify(admin.VerifyRequest(with_executor=True), timeout=PATIENCE_SECONDS).ok
    assert not stub.CancelRequest(admin.CancelRequestRequest(request_id="x"), timeout=PATIENCE_SECONDS).found


def test_the_figures_of_a_pool(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    gateway.send(submit(1, prompt_ids=range(9), max_tokens=1))
    working = Background(executor)
    gateway.wait_end(1)
    working.stop()
    executor.frozen = True
    plans = len(executor.plans)
    for handle in (2, 3):
        gateway.send(submit(handle, prompt_ids=[*range(8), 50 + handle], max_tokens=10))
    executor.until(lambda: len(executor.plans) >= plans + 2, "two plans")
    house.ask(lambda: None)
    pool = get_pool(stub)
    assert (pool.block_size, pool.bytes_per_block, pool.total_blocks) == (4, 1024, 16)
    assert pool.free_blocks + pool.live_blocks + pool.cached_blocks == pool.total_blocks
    assert pool.counters.allocated_blocks - pool.counters.freed_blocks == pool.live_blocks + pool.cached_blocks
    assert pool.running + pool.waiting == 2
    sequences = list_sequences(stub, admin.ListSequencesRequest(with_block_tables=True))
    slots = {(entry.block, number) for s in sequences for entry in s.table for number in range(entry.filled)}
    assert pool.live_tokens == len(slots)
    assert pool.logical_tokens == sum(entry.filled for s in sequences for entry in s.table)
    assert pool.shared_blocks == (2 if pool.running == 2 else 0)
    assert pool.utilization == pytest.approx(pool.live_tokens / (pool.live_blocks * 4))
    assert pool.contiguous_utilization == pytest.approx(pool.logical_tokens / (pool.running * 19))
    assert (pool.executor_connected, pool.gateways_connected) == (True, 1)
    assert pool.step == len(executor.plans)
    assert pool.counters.steps == len(executor.plans) - 2


def test_sequences_and_their_tables(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    standing_still(house, 9)
    (sequence,) = list_sequences(stub, admin.ListSequencesRequest())
    assert (sequence.request_id, sequence.tenant, sequence.index) == ("request-1", "default", 0)
    assert sequence.state == admin.SEQUENCE_STATE_DECODE
    assert (sequence.prompt_tokens, sequence.output_tokens, sequence.computed_tokens) == (9, 1, 9)
    assert (sequence.block_count, list(sequence.table)) == (3, [])
    assert 0 <= sequence.age_seconds < PATIENCE_SECONDS
    full = stub.GetSequence(admin.GetSequenceRequest(request_id="request-1"), timeout=PATIENCE_SECONDS)
    assert [(entry.logical, entry.block, entry.filled, entry.references) for entry in full.table] == [
        (0, 0, 4, 1),
        (1, 1, 4, 1),
        (2, 2, 3, 1),
    ]
    with_tables = list_sequences(stub, admin.ListSequencesRequest(with_block_tables=True))
    assert [list(s.table) for s in with_tables] == [list(full.table)]
    assert list_sequences(stub, admin.ListSequencesRequest(tenant="other")) == []
    assert list_sequences(stub, admin.ListSequencesRequest(state=admin.SEQUENCE_STATE_WAITING)) == []
    assert len(list_sequences(stub, admin.ListSequencesRequest(state=admin.SEQUENCE_STATE_DECODE, tenant="default"))) == 1


@pytest.mark.parametrize(
    "request_", [{"request_id": "other"}, {"request_id": "request-1", "tenant": "x"}, {"request_id": "request-1", "index": 1}]
)
def test_a_sequence_that_is_not_there(stub: admin_pb2_grpc.AdminStub, house: House, request_: dict[str, str]) -> None:
    standing_still(house, 3)
    with pytest.raises(grpc.RpcError) as raised:
        stub.GetSequence(admin.GetSequenceRequest(**request_), timeout=PATIENCE_SECONDS)  # type: ignore[arg-type]
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_caller_may_say_its_tenant(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    executor.frozen = True
    gateway.send(submit(1, tenant="a/b"))
    executor.until(lambda: executor.plans, "a plan")
    named = (("kilburn-tenant", "a/b"),)
    request = admin.GetSequenceRequest(request_id="request-1")
    assert stub.GetSequence(request, metadata=named, timeout=PATIENCE_SECONDS).tenant == "a/b"
    blocks = [block for block in list_blocks(stub) if block.references]
    assert [(block.tenant, list(block.holders)) for block in blocks] == [("a/b", ["a/b/request-1/0"])]
    cancel = admin.CancelRequestRequest(request_id="request-1")
    assert not stub.CancelRequest(cancel, timeout=PATIENCE_SECONDS).found
    assert stub.CancelRequest(cancel, metadata=named, timeout=PATIENCE_SECONDS).found


def test_blocks_and_what_is_asked_of_them(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    working = Background(executor)
    gateway.send(submit(1, prompt_ids=range(10), max_tokens=1))
    gateway.wait_end(1)
    working.stop()
    blocks = list_blocks(stub)
    assert [block.block for block in blocks] == list(range(16))
    assert [block.state for block in blocks[:4]] == [admin.BLOCK_STATE_CACHED] * 3 + [admin.BLOCK_STATE_FREE]
    assert [(block.depth, block.filled, block.generation) for block in blocks[:4]] == [(0, 4, 1), (1, 4, 1), (2, 2, 1), (0, 0, 0)]
    assert [bool(block.prefix_hash) for block in blocks[:4]] == [True, True, True, False]
    assert [block.tenant for block in blocks[:4]] == ["default"] * 3 + [""]
    assert all(not block.holders for block in blocks)
    assert len(list_blocks(stub, state=admin.BLOCK_STATE_CACHED)) == 3
    assert list_blocks(stub, state=admin.BLOCK_STATE_LIVE) == list_blocks(stub, min_references=1) == []
    assert [block.block for block in list_blocks(stub, first=2, limit=3)] == [2, 3, 4]
    assert [block.block for block in list_blocks(stub, first=14)] == [14, 15]
    assert list_blocks(stub, first=99) == []
    assert list_blocks(stub, first=2**32 - 1, limit=2**32 - 1) == []


# ------------------------------------------------------------------------------------------------------------ events


def most_ended(gateway: Gateway, count: int) -> bool:
    return len(gateway.ends) > count


class Watch:
    """A stream of events, read up to a cursor at a time."""

    def __init__(self, stub: admin_pb2_grpc.AdminStub, request: admin.WatchEventsRequest) -> None:
        self.stream = stub.WatchEvents(request, timeout=60)
        self.read: list[admin.Event] = []

    def up_to(self, cursor: int) -> list[admin.Event]:
        while not self.read or self.read[-1].cursor < cursor:
            page = next(self.stream)
            assert page.events
            assert page.ByteSize() < MIB
            self.read.extend(page.events)
        told = [event for event in self.read if event.cursor <= cursor]
        del self.read[: len(told)]
        return told


def test_events_from_a_snapshot_rebuild_the_blocks_while_steps_go_on(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    executor, gateway = house.executor(total_blocks=32), house.gateway()
    working = Background(executor)
    gateway.send(submit(0, prompt_ids=[9] * 11, max_tokens=50))
    gateway.until(lambda: gateway.tokens.get(0), "a token")
    rebuilt = Rebuilt(stub.ListBlocks(admin.ListBlocksRequest(), timeout=PATIENCE_SECONDS))
    watch = Watch(stub, admin.WatchEventsRequest(cursor=rebuilt.cursor))
    handle = 0
    while handle < 60:
        handle += 1
        gateway.send(submit(handle, prompt_ids=[handle % 3] * (1 + handle % 40), max_tokens=1 + handle % 17))
        if handle % 12 == 0:
            gateway.until(partial(most_ended, gateway, handle - 8), "most of the ends")
            pages = list(stub.ListBlocks(admin.ListBlocksRequest(), timeout=PATIENCE_SECONDS))
            rebuilt.follow(watch.up_to(pages[0].cursor))
            rebuilt.check(pages)
    gateway.until(lambda: len(gateway.ends) == 61, "the ends")
    working.stop()
    pages = list(stub.ListBlocks(admin.ListBlocksRequest(), timeout=PATIENCE_SECONDS))
    assert pages[0].cursor == get_pool(stub).cursor
    assert next(stub.ListSequences(admin.ListSequencesRequest(), timeout=PATIENCE_SECONDS)).cursor == pages[0].cursor
    rebuilt.follow(watch.up_to(pages[0].cursor))
    rebuilt.check(pages)
    executor.lose()  # a new pool
    executor.connect()
    pages = list(stub.ListBlocks(admin.ListBlocksRequest(), timeout=PATIENCE_SECONDS))
    rebuilt.follow(watch.up_to(pages[0].cursor))
    rebuilt.check(pages)
    assert {block.state for page in pages for block in page.blocks} == {admin.BLOCK_STATE_FREE}


def test_what_a_watcher_asks_for(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    working = Background(house.executor())
    gateway = house.gateway()
    gateway.send(submit(1, prompt_ids=range(10), max_tokens=1, tenant="a"))
    gateway.wait_end(1)
    last = get_pool(stub).cursor
    oldest = Watch(stub, admin.WatchEventsRequest(from_oldest=True)).up_to(last)
    assert [event.cursor for event in oldest] == list(range(1, last + 1))
    assert oldest[0].kind == admin.EVENT_KIND_STARTED
    assert {event.memmgr_incarnation for event in oldest} == {f"{house.engine.incarnation:016x}"}
    now = Watch(stub, admin.WatchEventsRequest())
    kinds = [admin.EVENT_KIND_INDEXED, admin.EVENT_KIND_FREED]
    indexed = Watch(stub, admin.WatchEventsRequest(cursor=1, kinds=kinds)).stream
    assert [event.cursor for event in next(indexed).events] == [e.cursor for e in oldest if e.kind == admin.EVENT_KIND_INDEXED]
    assert [list(e.token_ids) for e in oldest if e.kind == admin.EVENT_KIND_INDEXED] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    time.sleep(0.2)  # until both watch
    gateway.send(submit(2, prompt_ids=[7], max_tokens=1))
    gateway.wait_end(2)
    working.stop()
    new = now.up_to(get_pool(stub).cursor)
    assert [event.cursor for event in new] == list(range(last + 1, last + 1 + len(new)))
    assert {event.kind for event in next(indexed).events} == {admin.EVENT_KIND_INDEXED}
    with pytest.raises(grpc.RpcError) as raised:
        Watch(stub, admin.WatchEventsRequest(cursor=10**6)).up_to(1)
    assert raised.value.code() is grpc.StatusCode.OUT_OF_RANGE


def test_watchers_are_bounded_and_their_places_are_free_once_they_go(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    house.executor()
    request = admin.WatchEventsRequest(from_oldest=True)
    for _ in range(2):
        watchers = [Watch(stub, request) for _ in range(MAX_WATCHERS)]
        for watcher in watchers:
            watcher.up_to(1)
        with pytest.raises(grpc.RpcError) as raised:
            Watch(stub, request).up_to(1)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for watcher in watchers:
            watcher.stream.cancel()
        until(lambda: stub_takes_a_watcher(stub, request))


def stub_takes_a_watcher(stub: admin_pb2_grpc.AdminStub, request: admin.WatchEventsRequest) -> bool:
    watcher = Watch(stub, request)
    try:
        watcher.up_to(1)
    except grpc.RpcError:
        return False
    watcher.stream.cancel()
    time.sleep(0.2)  # all have gone by then
    return True


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_watcher_that_does_not_read_hears_what_it_lost(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    working = Background(house.executor(total_blocks=512, block_size=1, context_length=400))
    slow = stub.WatchEvents(admin.WatchEventsRequest(from_oldest=True), timeout=60)
    assert next(slow).events[0].cursor == 1
    for part in range(40):
        house.ask(partial(flood, house, 20_000, part))
    last = get_pool(stub).cursor
    cursor, lost, size = 1, 0, 0
    while cursor < last:
        page = next(slow)
        assert page.ByteSize() < MIB
        for event in page.events:
            assert event.cursor == cursor + 1 + event.lost
            cursor, lost = event.cursor, lost + event.lost
        size += len(page.events)
    assert lost > 100_000
    assert lost + size == last - 1
    working.stop()


def flood(house: House, count: int, part: int) -> None:
    """Have many events."""
    house.engine._records.extend((RELEASED, block % 512, ("tenant", f"request-{part}", 0), None) for block in range(count))
    house.engine.take_events()


# ------------------------------------------------------------------------------------------------------------ acting


def test_an_administrator_cancels(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    _, gateway = standing_still(house, 3)
    request = admin.CancelRequestRequest(request_id="request-1")
    assert stub.CancelRequest(request, timeout=PATIENCE_SECONDS).found
    assert get_pool(stub).live_blocks == 0
    assert gateway.wait_end(1).error == engine.ERROR_CODE_CANCELLED
    assert not stub.CancelRequest(request, timeout=PATIENCE_SECONDS).found


def test_verify_asks_the_executor_and_finds_a_difference(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    executor.pause_seconds = 0.02
    working = Background(executor)
    gateway.send(submit(1, max_tokens=60))
    gateway.until(lambda: gateway.tokens.get(1), "a token")
    request = admin.VerifyRequest(with_executor=True)
    verdict = stub.Verify(request, timeout=PATIENCE_SECONDS)
    assert (verdict.ok, list(verdict.faults)) == (True, [])
    assert verdict.checks > 50
    executor.lie = 1
    verdict = stub.Verify(request, timeout=PATIENCE_SECONDS)
    assert not verdict.ok
    assert len(verdict.faults) == 1
    assert "slot 0" in verdict.faults[0]
    executor.lie = 0
    assert 1 not in gateway.ends
    working.stop()


def test_verify_finds_a_broken_invariant(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    standing_still(house, 3)
    references = scheduler_of(house).memory.pool.references
    house.ask(lambda: references.__setitem__(9, 1))
    verdict = stub.Verify(admin.VerifyRequest(), timeout=PATIENCE_SECONDS)
    assert not verdict.ok
    assert len(verdict.faults) == 1
    house.ask(lambda: references.__setitem__(9, 0))
    assert stub.Verify(admin.VerifyRequest(), timeout=PATIENCE_SECONDS).ok


# ----------------------------------------------------------------------------------------------------- size and load


def fill_cache(scheduler: Scheduler, tokens: int, tenant: str, salt: str) -> None:
    """Leave a long sequence in the prefix cache."""
    memory = scheduler.memory
    lineage = Lineage(root_hash("f" * 64, tenant, salt), tenant)
    prompt = array("I", (number % 97 for number in range(tokens)))
    admission = memory.plan_admission(lineage, prompt, 0)
    assert admission is not None
    table = memory.admit("filler", lineage, admission)
    growth = memory.plan_growth(table, tokens)
    assert growth is not None
    memory.grow(growth)
    memory.end_step()
    memory.acknowledge(table, tokens, prompt)
    memory.release("filler", prompt)


@pytest.mark.parametrize(("total", "known", "tenant"), [(200_000, 50_000, "default"), (20_000, 19_000, "🦀" * 128)])
def test_two_hundred_thousand_blocks_come_in_pages_under_a_mebibyte(
    stub: admin_pb2_grpc.AdminStub, house: House, total: int, known: int, tenant: str
) -> None:
    working = Background(house.executor(total_blocks=total, block_size=1, context_length=100))
    for part in range(known // 1000):  # in parts, each shorter than a peer's patience
        house.ask(partial(fill_cache, scheduler_of(house), 1000, tenant, f"{part}"))
    seen = 0
    for page in stub.ListBlocks(admin.ListBlocksRequest(), timeout=60):
        assert page.ByteSize() < MIB
        assert [block.block for block in page.blocks] == list(range(seen, seen + len(page.blocks)))
        seen += len(page.blocks)
    assert seen == total
    assert len(list_blocks(stub, state=admin.BLOCK_STATE_CACHED, first=known - 100)) == 100
    working.stop()


def test_pages_of_blocks_that_many_hold(house: House) -> None:
    """The longest names, every block held by eight sequences."""
    executor = house.executor(total_blocks=512, block_size=1, context_length=400, max_step_tokens=512)
    gateway, tenant = house.gateway(), "🦀" * 128
    executor.pause_seconds = 0.01
    working = Background(executor)
    gateway.send(submit(99, tenant=tenant, prompt_ids=range(90), max_tokens=1))
    gateway.wait_end(99)
    for handle in range(8):
        name = f"{handle}" + "ü" * 127
        gateway.send(submit(handle, tenant=tenant, request_id=name, prompt_ids=[*range(90), handle], max_tokens=300))
    gateway.until(lambda: len(gateway.tokens) == 9, "all to run")
    snapshot = house.ask(lambda: snapshot_blocks(house.engine, Dump(0, 0), 0.0))
    assert snapshot is not None
    pages = list(block_pages(snapshot, 0, 0))
    working.stop()
    assert max(len(block.holders) for page in pages for block in page.blocks) == 8
    assert sum(len(page.blocks) for page in pages) == 512
    assert max(page.ByteSize() for page in pages) < MIB


def test_answers_are_instants_while_steps_go_on(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    executor, gateway = house.executor(total_blocks=32), house.gateway()
    working = Background(executor)
    handle, calls = 0, 0
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        while handle - len(gateway.ends) < 12:
            handle += 1
            gateway.send(submit(handle, prompt_ids=[handle % 3] * (1 + handle % 40), max_tokens=1 + handle % 17))
        gateway.pump(0.001)
        pool = get_pool(stub)
        assert pool.free_blocks + pool.live_blocks + pool.cached_blocks == 32
        assert pool.counters.allocated_blocks - pool.counters.freed_blocks == pool.live_blocks + pool.cached_blocks
        blocks = list_blocks(stub)
        held = [block for block in blocks if block.state == admin.BLOCK_STATE_LIVE]
        assert all(len(block.holders) == block.references > 0 for block in held), "tables and references of one instant"
        for sequence in list_sequences(stub, admin.ListSequencesRequest(with_block_tables=True)):
            assert len(sequence.table) == sequence.block_count
            assert sum(entry.filled for entry in sequence.table) >= sequence.computed_tokens
        verdict = stub.Verify(admin.VerifyRequest(with_executor=True), timeout=PATIENCE_SECONDS)
        assert list(verdict.faults) == []
        calls += 1
    while len(gateway.ends) < handle:
        gateway.pump(0.02)
    working.stop()
    assert {end.error for end in gateway.ends.values()} == {engine.ERROR_CODE_OK}
    assert calls > 3
    pool = get_pool(stub)
    assert (pool.live_blocks, pool.running, pool.waiting) == (0, 0, 0)
    assert pool.counters.finished_requests == handle


def test_readers_that_go_away_do_no_harm(stub: admin_pb2_grpc.AdminStub, house: House) -> None:
    house.executor(total_blocks=20_000, block_size=1, context_length=100)
    for _ in range(20):
        stream = stub.ListBlocks(admin.ListBlocksRequest())
        stream.cancel()
        stub.GetPool.future(admin.GetPoolRequest()).cancel()
        stub.Verify.future(admin.VerifyRequest(with_executor=True)).cancel()
        with contextlib.suppress(grpc.RpcError):  # the answer may be faster than its deadline
            stub.GetPool(admin.GetPoolRequest(), timeout=1e-6)
    assert get_pool(stub).total_blocks == 20_000


# ------------------------------------------------------------------------------------------------------ the server


def test_health(address: Address) -> None:
    with grpc.insecure_channel(str(address)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "kilburn.v1.Admin"):
            request = health_pb2.HealthCheckRequest(service=name)
            answer = health.Check(request, timeout=PATIENCE_SECONDS)  # type: ignore[attr-defined]
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_taken_port_is_a_start_error(house: House, address: Address) -> None:
    second = AdminServer(house.engine, address, structlog.get_logger())
    with pytest.raises(StartError, match="is its port in use"):
        second.start()
    second.stop()
