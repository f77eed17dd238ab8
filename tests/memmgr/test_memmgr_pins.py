"""Pins by themselves: when they end, what cuts them short, how much may be pinned."""

from __future__ import annotations

from array import array

import pytest

from memmgr.core.lineage import Lineage, root_hash
from memmgr.core.memory import Memory
from memmgr.core.table import Admission, MemoryCounters
from memmgr.session import PinRefusedError
from tests.memmgr.memmgr_messages import session


def lineage() -> Lineage:
    return Lineage(root_hash("m", "t", ""), "t")


def filled(memory: Memory, tokens: array[int]) -> None:
    """Leave a prompt in the cache."""
    admission = memory.plan_admission(lineage(), tokens, 0)
    assert admission is not None
    table = memory.admit("key", lineage(), admission)
    growth = memory.plan_growth(table, len(tokens) - table.planned)
    assert growth is not None
    memory.grow(growth)
    memory.end_step()
    memory.acknowledge(table, len(tokens), tokens)
    memory.release("key", tokens)
    memory.end_step()


def pinned() -> tuple[Memory, array[int], tuple[int, ...]]:
    """Return a memory with three blocks pinned until 5.0, their tokens and their numbers."""
    memory, tokens = Memory(8, 4, prefix_cache=True, counters=MemoryCounters()), array("I", range(12))
    filled(memory, tokens)
    blocks = memory.pins.pinnable(lineage(), tokens)
    assert len(blocks) == 3
    memory.pins.pin(blocks, "t", 5.0)
    memory.check_invariants()
    return memory, tokens, blocks


def test_a_pin_ends_when_its_time_comes() -> None:
    memory, _, _ = pinned()
    memory.pins.expire(4.999)
    assert memory.pool.pinned == 3
    memory.pins.expire(5.0)
    assert memory.pool.pinned == 0
    memory.check_invariants()


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_block_that_leaves_the_index_cuts_its_pins_short(kept: int) -> None:
    memory, tokens, blocks = pinned()
    table = memory.admit("again", lineage(), _admission(memory, tokens))
    del table.blocks[: kept or 0]  # the sequence that may be no numbers holds the later blocks alone
    for block in table.blocks:
        if memory.index.hash_of(block) is not None:
            memory._forget(block)
            break
    assert [memory.pool.pins[block] for block in blocks] == [1] * kept + [0] * (3 - kept)
    assert [pin.blocks for pin in memory.pins] == ([list(blocks[:kept])] if kept else [])
    assert memory.pool.pinned == kept


def _admission(memory: Memory, tokens: array[int]) -> Admission:
    admission = memory.plan_admission(lineage(), array("I", [*tokens, 0]), 0)
    assert admission is not None
    return admission


def test_no_more_is_pinned_than_lets_the_longest_request_run() -> None:
    one = session(total_blocks=20, block_size=4, context_length=64)
    memory = one.scheduler.memory
    tokens = array("I", range(20))
    admission = memory.plan_admission(one.scheduler.lineage("t", ""), tokens, 0)
    assert admission is not None
    table = memory.admit("key", one.scheduler.lineage("t", ""), admission)
    growth = memory.plan_growth(table, 20)
    assert growth is not None
    memory.grow(growth)
    memory.end_step()
    memory.acknowledge(table, 20, tokens)
    memory.release("key", tokens)
    assert one.scheduler.most_pinned == 4
    with pytest.raises(PinRefusedError, match="at most 4"):
        one.pin("t", "", tokens, 0.0, 0.0)
    assert memory.pool.pinned == 0
    one.pin("t", "", tokens[:16], 0.0, 0.0)
    assert memory.pool.pinned == 4
