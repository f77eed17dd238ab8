"""Swapping: what is preempted waits on the host and goes on where it was, nothing of it computed again."""

from __future__ import annotations

from array import array
from collections.abc import Hashable

import pytest

from memmgr.core.lineage import Lineage, root_hash
from memmgr.core.swap import SwappingMemory
from memmgr.core.table import MemoryCounters
from memmgr.schedule.drafts import Draft
from memmgr.schedule.plans import EndCode
from memmgr.schedule.requests import State
from tests.memmgr.memmgr_world import World


def crowded(**options: int) -> World:
    """A pool for two of three requests, and room for all on the host."""
    return World(**{"blocks": 12, "block_size": 4, "host_blocks": 40, "vocabulary": 30, **options})  # type: ignore[arg-type]


def test_nothing_is_computed_again_and_the_tokens_are_the_same() -> None:
    world = crowded()
    keys = [world.submit(range(first, first + 6), max_tokens=24) for first in (12, 40, 70)]
    world.run()
    for key in keys:
        world.check_answer(key)
    world.check_idle()
    counted = world.memory.counters
    assert world.scheduler.counters.preemptions > 0
    assert world.scheduler.counters.recomputed_tokens == 0
    assert counted.swapped_out_blocks > 0
    assert counted.swapped_in_blocks > 0


def test_where_the_host_is_full_it_is_computed_again() -> None:
    world = crowded(host_blocks=1)
    keys = [world.submit(range(first, first + 6), max_tokens=24) for first in (12, 40, 70)]
    world.run()
    for key in keys:
        world.check_answer(key)
    world.check_idle()
    assert world.scheduler.counters.recomputed_tokens > 0


def test_samples_go_out_and_come_back_together_and_share_as_before() -> None:
    world = World(blocks=24, block_size=4, host_blocks=60, vocabulary=200, prefix_cache=False)
    first = world.submit(range(12, 30), max_tokens=16, samples=3)
    second = world.submit(range(50, 68), max_tokens=16, samples=3)
    most_saved = 0
    for _ in range(400):
        if world.plan() is None and not world.complete():
            break
        held: list[int] = [place for table in world.memory.swapped.values() for place in table.blocks]
        assert len(set(held)) == world.memory.host.used
        most_saved = max(most_saved, len(held) - len(set(held)))
        world.scheduler.check_invariants()
    # Four whole blocks of the prompt, held by three sequences.
    assert most_saved == 8
    assert world.scheduler.counters.recomputed_tokens == 0
    for key in (first, second):
        world.check_answer(key)
    world.check_idle()


def test_what_leaves_comes_back_in_a_later_step() -> None:
    """No host block is written and read in one step: the executor would refuse the plan."""
    memory = SwappingMemory(8, 4, prefix_cache=True, counters=MemoryCounters(), host_blocks=8)
    tokens = array("I", range(10))
    lineage = Lineage(root_hash("m", "t", ""), "t")
    admission = memory.plan_admission(lineage, tokens, 0)
    assert admission is not None
    growth = memory.plan_growth(memory.admit("a", lineage, admission), 10)
    assert growth is not None
    memory.grow(growth)
    memory.end_step()
    swap = memory.plan_swap_out({"a": 10})
    assert swap is not None
    memory.swap_out(swap, {"a": tokens})
    assert memory.plan_swap_in(["a"], {"a": tokens}, 3) is None
    assert len(memory.end_step().outs) == 3
    back = memory.plan_swap_in(["a"], {"a": tokens}, 3)
    assert back is not None
    memory.swap_in(back)
    assert len(memory.end_step().ins) == 3
    memory.check_invariants()


def test_no_more_is_found_than_was_there() -> None:
    """Meanwhile another has computed the same prompt to its end."""
    memory = SwappingMemory(12, 4, prefix_cache=True, counters=MemoryCounters(), host_blocks=8)
    tokens = array("I", range(12))
    lineages = [Lineage(root_hash("m", "t", ""), "t") for _ in range(2)]
    for key, lineage, count in zip("ab", lineages, (5, 12), strict=True):
        admission = memory.plan_admission(lineage, tokens, 0)
        assert admission is not None
        table = memory.admit(key, lineage, admission)
        growth = memory.plan_growth(table, count - table.planned)
        assert growth is not None
        memory.grow(growth)
        memory.end_step()
        memory.acknowledge(table, count, tokens)
        if key == "a":
            swap = memory.plan_swap_out({"a": 5})
            assert swap is not None
            memory.swap_out(swap, {"a": tokens})
            memory.end_step()
    back = memory.plan_swap_in(["a"], {"a": tokens}, 2)
    assert back is not None
    table = memory.swap_in(back)["a"]
    assert (table.planned, table.computed, len(table.blocks)) == (5, 4, 2)
    assert table.blocks[0] == memory.tables["b"].blocks[0]
    assert table.blocks[1] != memory.tables["b"].blocks[1]
    memory.check_invariants()


def test_what_is_still_cached_is_not_brought_in() -> None:
    counters = MemoryCounters()
    memory = SwappingMemory(8, 4, prefix_cache=True, counters=counters, host_blocks=8)
    tokens = array("I", range(10))
    lineage = Lineage(root_hash("m", "t", ""), "t")
    admission = memory.plan_admission(lineage, tokens, 0)
    assert admission is not None
    table = memory.admit("a", lineage, admission)
    growth = memory.plan_growth(table, 10)
    assert growth is not None
    memory.grow(growth)
    memory.end_step()
    memory.acknowledge(table, 10, tokens)
    out = memory.plan_swap_out({"a": 10})
    assert out is not None
    memory.swap_out(out, {"a": tokens})
    assert len(memory.end_step().outs) == counters.swapped_out_blocks == 3
    assert memory.pool.live == 0
    back = memory.plan_swap_in(["a"], {"a": tokens}, 3)
    assert back is not None
    tables = memory.swap_in(back)
    assert tables["a"].planned == 10
    assert tables["a"].computed == tables["a"].committed * 4 == 8
    assert len(memory.end_step().ins) == counters.swapped_in_blocks == 1
    memory.check_invariants()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_block_that_this_steps_copies_fill_goes_out_as_what_it_was_to_be(prefix_cache: bool) -> None:
    memory = SwappingMemory(8, 4, prefix_cache=prefix_cache, counters=MemoryCounters(), host_blocks=8)
    tokens = array("I", range(6))
    lineage = Lineage(root_hash("m", "t", ""), "t")
    admission = memory.plan_admission(lineage, tokens, 0)
    assert admission is not None
    parent = memory.admit("a", lineage, admission)
    growth = memory.plan_growth(parent, 6)
    assert growth is not None
    memory.grow(growth)
    memory.end_step()
    child = memory.fork("a", "b")
    shared = child.blocks[1]
    clone = memory.plan_growth(child, 1)
    assert clone is not None
    assert clone.clone
    memory.grow(clone)
    out = memory.plan_swap_out({"b": 6})  # preempted in the step that would have computed its next token
    assert out is not None
    memory.swap_out(out, {"b": tokens})
    step = memory.end_step()
    assert step.copies == ()
    assert [block for block, _ in step.outs] == [parent.blocks[0], shared]
    memory.check_invariants()


def test_a_host_block_that_is_read_is_not_written_in_the_same_step() -> None:
    memory = SwappingMemory(8, 4, prefix_cache=False, counters=MemoryCounters(), host_blocks=2)
    tokens = array("I", range(4))
    lineage = Lineage(root_hash("m", "t", ""), "t")
    for key in "ab":
        admission = memory.plan_admission(lineage, tokens, 0)
        assert admission is not None
        growth = memory.plan_growth(memory.admit(key, lineage, admission), 4)
        assert growth is not None
        memory.grow(growth)
    memory.end_step()
    first = memory.plan_swap_out({"a": 4})
    assert first is not None
    memory.swap_out(first, {"a": tokens})
    memory.end_step()
    back = memory.plan_swap_in(["a"], {"a": tokens}, 2)
    assert back is not None
    memory.swap_in(back)
    second = memory.plan_swap_out({"b": 4})
    assert second is not None
    memory.swap_out(second, {"b": tokens})
    step = memory.end_step()
    assert {place for place, _ in step.ins}.isdisjoint(place for _, place in step.outs)
    memory.check_invariants()
    assert memory.plan_swap_out({"a": 4}) is not None


def test_a_request_that_ends_on_the_host_leaves_nothing_there() -> None:
    world = crowded()
    keys = [world.submit(range(first, first + 6), max_tokens=24) for first in (12, 40, 70)]
    while not world.memory.swapped:
        if world.plan() is None:
            world.complete()
    waiting = next(request for request in world.scheduler.waiting if request.swapped)
    assert waiting.state is State.WAITING
    assert world.scheduler.cancel(waiting.submission.key, EndCode.CANCELLED, "enough", world.now)
    world.listen()
    world.scheduler.check_invariants()
    assert not world.memory.swapped
    world.run()
    for key in keys:
        if key != waiting.submission.key:
            world.check_answer(key)
    world.check_idle()


def test_beams_wait_on_the_host_too() -> None:
    world = World(blocks=18, block_size=4, host_blocks=90, vocabulary=30, max_running=16)
    keys = [world.submit(range(first, first + 9), max_tokens=14, beam_width=4, samples=2) for first in (12, 40, 70, 100)]
    world.run()
    for key in keys:
        world.check_answer(key)
    world.check_idle()
    assert world.memory.counters.swapped_in_blocks > 0
    assert world.scheduler.counters.recomputed_tokens == 0


def test_what_arrives_does_not_leave_in_the_same_step_nor_what_is_copied_from_it() -> None:
    """What goes out is read before anything is brought in."""
    memory = SwappingMemory(8, 2, prefix_cache=False, counters=MemoryCounters(), host_blocks=8)
    lineage, tokens = Lineage(root_hash("model", "tenant", ""), "tenant"), array("I", [5, 6])
    admission = memory.plan_admission(lineage, tokens[:1], 0)
    assert admission is not None
    table = memory.admit("one", lineage, admission)
    growth = memory.plan_growth(table, 1)
    assert growth is not None
    memory.grow(growth)
    memory.end_step()
    memory.acknowledge(table, 1, tokens)
    memory.fork("one", "two")
    both: dict[Hashable, array[int]] = {"one": tokens[:1], "two": tokens[:1]}
    out = memory.plan_swap_out({"one": 1, "two": 1})
    assert out is not None
    memory.swap_out(out, both)
    memory.end_step()
    back = memory.plan_swap_in(["one", "two"], both, 2)
    assert back is not None
    tables = memory.swap_in(back)
    growth = memory.plan_growth(tables["two"], 1)
    assert growth is not None
    assert growth.clone
    memory.grow(growth)
    assert memory.plan_swap_out({"one": 1}) is None
    assert memory.plan_swap_out({"two": 2}) is None
    memory.end_step()
    assert memory.plan_swap_out({"two": 2}) is not None


def test_a_trunk_on_the_host_is_not_forgotten_when_another_sample_ends() -> None:
    """Preempted once when the host was full, and once more, to the host, before its prompt was there again."""
    world = World(blocks=64, block_size=2, max_step_tokens=8, host_blocks=16, prefix_cache=False)
    wished = world.submit(range(1, 25), 12, samples=2)
    while len(world.clients[wished].outputs.get(1, [])) < 2:
        world.step()
    request = world.scheduler.find("tenant", "request-1")
    assert request is not None
    preempt(world, None)
    world.step()
    preempt(world, world.memory)
    assert request.swapped
    assert not request.forked
    world.scheduler.finish(wished, 1, 2, world.now)
    world.scheduler.check_invariants()
    assert request.swapped
    world.step()
    assert not set(world.memory.tables) & set(world.memory.swapped)
    world.run()
    assert world.memory.host.used == 0
    assert len(world.clients[wished].outputs[0]) == 12


def preempt(world: World, swap: SwappingMemory | None) -> None:
    """Preempt the request that runs, as one does that needs its blocks; to the host where `swap` is the memory."""
    [request] = world.scheduler.running
    Draft(8, world.memory, swap, world.scheduler._queues, world.scheduler.counters)._preempt(request)
