"""Events: what the ring holds and what it gives up, and that they tell everything."""

from __future__ import annotations

from array import array
from random import Random
from types import SimpleNamespace
from typing import cast

import hypothesis.strategies as st
from hypothesis import given, settings

from kilburn.v1 import admin_pb2 as admin
from memmgr.core import events
from memmgr.core.events import Record
from memmgr.core.lineage import Lineage, root_hash
from memmgr.core.memory import Memory
from memmgr.core.table import MemoryCounters
from memmgr.dumps import Dump
from memmgr.engine import Engine
from memmgr.events import EventLog, history, read_page
from memmgr.schedule.plans import EndCode
from memmgr.views import block_pages, snapshot_blocks
from tests.memmgr.memmgr_rebuild import Rebuilt
from tests.memmgr.memmgr_world import World
from tests.memmgr.test_memmgr_simulation import COMMON, EXAMPLES, GAMES, TURNS, Play, Wish, worlds

PAGE_BYTES = 2000


def records(count: int, kind: int = events.ALLOCATED, first: int = 0) -> list[Record]:
    return [(kind, first + block, ("tenant", "request", 0), None) for block in range(count)]


def read_all(log: EventLog, cursor: int, kinds: frozenset[int] = frozenset()) -> list[admin.Event]:
    """Read as a watcher does."""
    read: list[admin.Event] = []
    lost = 0
    while cursor != log.cursor:
        page, cursor, lost = read_page(log, cursor, lost, kinds, "0a", PAGE_BYTES)
        assert page.ByteSize() < 2 * PAGE_BYTES
        read.extend(page.events)
    return read


# ---------------------------------------------------------------------------------------------------------- the ring


def test_events_are_numbered_from_one_and_stamped() -> None:
    log = EventLog()
    assert (log.cursor, log.oldest) == (0, 1)
    log.take([], 1.0, 1, 16)
    new = records(2)
    log.take(new, 5.0, 3, 16)
    assert new == []
    log.take(records(1, first=7), 6.0, 4, 16)
    told = read_all(log, 0)
    assert [(e.cursor, e.block, e.unix_time, e.step) for e in told] == [(1, 0, 5.0, 3), (2, 1, 5.0, 3), (3, 7, 6.0, 4)]
    assert {(e.memmgr_incarnation, e.tenant, e.request_id, e.kind) for e in told} == {
        ("0a", "tenant", "request", admin.EVENT_KIND_ALLOCATED)
    }
    assert [event.cursor for event in read_all(log, 1)] == [2, 3]
    assert read_all(log, 3) == []


def test_who_is_late_hears_how_much_is_lost() -> None:
    log = EventLog(most=10)
    for _ in range(10):
        log.take(records(3), 0.0, 0, 16)
    assert 10 <= log.cursor - log.oldest + 1 < 13
    told = read_all(log, 4)
    assert told[0].cursor == log.oldest
    assert told[0].lost == log.oldest - 5
    assert [event.lost for event in told[1:]] == [0] * (len(told) - 1)
    assert [event.cursor for event in told] == list(range(log.oldest, 31))


def test_what_is_lost_is_told_with_the_first_event_that_is_sent() -> None:
    log = EventLog(most=10)
    log.take(records(20), 0.0, 0, 16)
    wanted = frozenset({events.FREED})
    page, cursor, lost = read_page(log, 0, 0, wanted, "", PAGE_BYTES)
    assert (list(page.events), cursor, lost) == ([], 20, 10)
    log.take(records(2, events.FREED), 0.0, 0, 16)
    page, cursor, lost = read_page(log, cursor, lost, wanted, "", PAGE_BYTES)
    assert ([event.lost for event in page.events], cursor, lost) == ([10, 0], 22, 0)


def test_more_at_once_than_the_ring_holds() -> None:
    log = EventLog(most=10)
    log.take(records(4), 0.0, 0, 16)
    log.take(records(25), 0.0, 0, 16)
    assert (log.oldest, log.cursor) == (20, 29)
    assert [event.cursor for event in read_all(log, 2)] == list(range(20, 30))
    assert read_all(log, 2)[0].lost == 17


def test_large_blocks_have_long_events_and_the_ring_holds_fewer() -> None:
    log = EventLog(most=64)
    for _ in range(100):
        log.take(records(1), 0.0, 0, 1024)
    assert log.cursor - log.oldest + 1 == 4


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 50), st.integers(0, 60))
def test_the_ring_against_a_list(sizes: list[int], most: int, behind: int) -> None:
    log, told, cursor = EventLog(most), 0, 0
    for size in sizes:
        log.take(records(size), 0.0, 0, 16)
        told += size
        assert log.cursor == told
        held = log.cursor - log.oldest + 1
        assert min(told, most) <= held < 2 * most + 30
        if told - cursor > behind:
            read = read_all(log, cursor)
            assert [event.cursor for event in read] == list(range(max(cursor + 1, log.oldest), told + 1))
            assert sum(event.lost for event in read) == max(0, log.oldest - cursor - 1)
            cursor = told


def test_the_history_of_a_block() -> None:
    log = EventLog()
    log.take(records(3), 0.0, 1, 16)
    log.take([(events.COPIED, 2, ("t", "r", 0), 1), (events.RELEASED, 1, ("t", "r", 0), None)], 0.0, 2, 16)
    everything = log.after(0)
    assert [(e.cursor, e.kind) for e in history(everything, 1, 10, "")] == [
        (5, admin.EVENT_KIND_RELEASED),
        (4, admin.EVENT_KIND_COPIED),
        (2, admin.EVENT_KIND_ALLOCATED),
    ]
    assert [event.cursor for event in history(everything, 1, 2, "")] == [5, 4]
    assert history(everything, 9, 10, "") == []


# ---------------------------------------------------------------------------------------------------------- the core


def test_the_records_of_a_short_life() -> None:
    new: list[Record] = []
    memory = Memory(4, 2, prefix_cache=True, counters=MemoryCounters(), records=new)
    lineage = Lineage(root_hash("m", "t", ""), "t")
    tokens = array("I", [1, 2, 3])
    admission = memory.plan_admission(lineage, tokens, 0)
    assert admission is not None
    table = memory.admit("key", lineage, admission, "owner")
    growth = memory.plan_growth(table, 3)
    assert growth is not None
    memory.grow(growth)
    memory.end_step()
    memory.acknowledge(table, 3, tokens)
    memory.release("key", tokens)
    assert [(kind, block, owner) for kind, block, owner, _ in new] == [
        (events.ALLOCATED, 0, "owner"),
        (events.ALLOCATED, 1, "owner"),
        (events.INDEXED, 0, "owner"),
        (events.INDEXED, 1, "owner"),
        (events.RELEASED, 1, "owner"),
        (events.RELEASED, 0, "owner"),
    ]
    first, second = new[2][3], new[3][3]
    assert first == (lineage.names[0], lineage.root, array("I", [1, 2]).tobytes(), "t")
    assert isinstance(second, tuple)
    assert second[1:3] == (lineage.names[0], array("I", [3]).tobytes())
    new.clear()
    memory.flush()
    assert [(kind, block) for kind, block, _, _ in new] == [
        (events.FLUSHED, 1),
        (events.FREED, 1),
        (events.FLUSHED, 0),
        (events.FREED, 0),
    ]


# --------------------------------------------------------------------------------------------- they tell everything


class Watched:
    """A world, the log of its events, and what a reader makes of them from some turn on."""

    def __init__(self, world: World, snapshot_at: int) -> None:
        self.world, self.snapshot_at = world, snapshot_at
        self.log = EventLog()
        self.rebuilt: Rebuilt | None = None
        self.turns = 0

    def take_events(self) -> int:
        assert self.world.records is not None
        self.log.take(self.world.records, self.world.now, self.world.steps, self.world.memory.block_size)
        return self.log.cursor

    def snapshot(self) -> list[admin.BlockPage]:
        session = SimpleNamespace(scheduler=self.world.scheduler, memory=self.world.memory)
        engine = SimpleNamespace(session=session, take_events=self.take_events)
        blocks = snapshot_blocks(cast(Engine, engine), Dump(0, 0), self.world.now)
        assert blocks is not None
        return list(block_pages(blocks, 0, 0))

    def act(self, what: int) -> None:
        """Now and then, do what an administrator may."""
        memory, number = self.world.memory, what >> 3
        pins = memory.pins
        cached = [block for block in range(memory.pool.total) if memory.index.hash_of(block)]
        if what & 7 < 2 and cached:
            block, tokens, lineage = cached[number % len(cached)], array("I"), self.world.scheduler.lineage("tenant", "")
            chain = []
            while block >= 0:
                chain.append(block)
                block = memory.index.above(block)
            for known in reversed(chain):
                tokens.frombytes(memory.index.nodes(slice(known, known + 1)).tokens[0] or b"")
            blocks = pins.pinnable(lineage, tokens)
            if blocks and memory.pool.pinned + pins.new_blocks(blocks) <= self.world.scheduler.most_pinned:
                pins.pin(blocks, "tenant", self.world.now + 1 + number % 9)
        elif what & 7 == 2:
            for pin in list(pins)[:1]:
                pins.unpin(pin.number)
        elif what & 7 == 3 and number % 3 == 0:
            memory.flush_part(range(number % 5, memory.pool.total), "tenant")
        pins.expire(self.world.now)
        self.world.scheduler.check_invariants()

    def look(self) -> None:
        self.turns += 1
        self.take_events()
        if self.rebuilt is not None:
            self.rebuilt.follow(read_all(self.log, self.rebuilt.cursor))
            self.rebuilt.check(self.snapshot())
        elif self.turns >= self.snapshot_at:
            self.rebuilt = Rebuilt(self.snapshot())


@settings(COMMON, max_examples=EXAMPLES // 3)
@given(worlds(records=True), GAMES, TURNS, st.integers(0, 40), st.randoms(use_true_random=False))
def test_a_snapshot_and_the_events_after_it_rebuild_every_block(
    world: World, wishes: list[Wish], turns: list[str], snapshot_at: int, chance: Random
) -> None:
    """Whatever clients and administrators do; and pins change no answer, and let every request run."""
    game, watched = Play(world, wishes), Watched(world, snapshot_at)
    for turn in turns:
        game.take(turn)
        watched.act(chance.randrange(256))
        watched.look()
    game.drain()
    game.judge()
    watched.look()
    world.scheduler.abandon(EndCode.UNAVAILABLE, "over", world.now)
    watched.look()
    kinds = [event.kind for event in read_all(watched.log, 0)]
    assert kinds.count(admin.EVENT_KIND_ALLOCATED) == world.memory.counters.allocated_blocks
    assert kinds.count(admin.EVENT_KIND_EVICTED) == world.memory.counters.evicted_blocks
    assert kinds.count(admin.EVENT_KIND_EVICTED) + kinds.count(admin.EVENT_KIND_FREED) == world.memory.counters.freed_blocks
    assert kinds.count(admin.EVENT_KIND_PREEMPTED) == world.scheduler.counters.preemptions
