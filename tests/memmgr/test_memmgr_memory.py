"""The memory, in small exact examples: admission, growth, copy-on-write, tails, eviction, generations, copies."""

from __future__ import annotations

from array import array

import pytest

from memmgr.core.blocks import BlockState
from memmgr.core.lineage import Lineage, root_hash
from memmgr.core.memory import Memory
from memmgr.core.prefix import Match
from memmgr.core.table import Admission, MemoryCounters, Table

ROOT = root_hash("model", "tenant", "")


def make(total: int, size: int, *, prefix_cache: bool = True) -> Memory:
    return Memory(total, size, prefix_cache=prefix_cache, counters=MemoryCounters())


def admit(memory: Memory, key: str, *prompt: int, root: bytes = ROOT) -> Table:
    lineage = Lineage(root, "tenant")
    admission = memory.plan_admission(lineage, array("I", prompt), 0)
    assert admission is not None
    table = memory.admit(key, lineage, admission)
    memory.check_invariants()
    return table


def grow(memory: Memory, table: Table, length: int) -> None:
    growth = memory.plan_growth(table, length - table.planned)
    assert growth is not None
    memory.grow(growth)
    memory.check_invariants()


def fill(memory: Memory, key: str, *tokens: int, root: bytes = ROOT) -> Table:
    """Admit a sequence and compute all of its tokens, in one step."""
    table = admit(memory, key, *tokens, root=root)
    grow(memory, table, len(tokens))
    memory.end_step()
    memory.acknowledge(table, len(tokens), array("I", tokens))
    memory.check_invariants()
    return table


def release(memory: Memory, key: str, *tokens: int) -> None:
    memory.release(key, array("I", tokens))
    memory.check_invariants()


# ----------------------------------------------------------------------------------------------------- admission


def test_admission_needs_room_for_all_known_tokens_and_one_more() -> None:
    memory = make(3, 2)
    assert memory.plan_admission(Lineage(ROOT, ""), array("I", range(5)), 0) is not None
    assert memory.plan_admission(Lineage(ROOT, ""), array("I", range(6)), 0) is None
    assert memory.plan_admission(Lineage(ROOT, ""), array("I", range(4)), 1) is None
    assert memory.plan_admission(Lineage(ROOT, ""), array("I", range(3)), 1) is not None
    assert memory.pool.free == 3, "a planner changes nothing"
    assert not memory.tables


def test_blocks_are_taken_as_the_table_grows() -> None:
    memory = make(4, 2)
    table = admit(memory, "a", 1, 2, 3, 4, 5)
    assert table.blocks == []
    grow(memory, table, 3)
    assert (table.blocks, table.planned, table.computed) == ([0, 1], 3, 0)
    grow(memory, table, 4)
    assert table.blocks == [0, 1]
    grow(memory, table, 5)
    assert table.blocks == [0, 1, 2]
    assert memory.plan_growth(table, 3) is not None
    assert memory.plan_growth(table, 4) is None
    assert memory.counters.allocated_blocks == 3


def test_a_cached_prefix_is_shared_and_counts_as_room_only_once() -> None:
    memory = make(4, 2)
    fill(memory, "a", 1, 2, 3, 4)
    release(memory, "a", 1, 2, 3, 4)
    assert (memory.pool.cached, memory.pool.free) == (2, 2)
    # Whole: 2 cached + 2 free; with 2 blocks cached of the prompt, 7 tokens and one more still fit, 8 do not.
    admission = memory.plan_admission(Lineage(ROOT, ""), array("I", [1, 2, 3, 4, 5, 6, 7]), 0)
    assert admission is not None
    assert (admission.match, admission.cached_tokens) == (Match((0, 1)), 4)
    assert memory.plan_admission(Lineage(ROOT, ""), array("I", [1, 2, 3, 4, 5, 6, 7, 8]), 0) is None
    table = admit(memory, "b", 1, 2, 3, 4, 5, 6, 7)
    assert (table.blocks, table.planned, table.computed, table.committed) == ([0, 1], 4, 4, 2)
    assert [memory.pool.references[block] for block in (0, 1)] == [1, 1]
    second = admit(memory, "c", 1, 2, 3, 4, 5)
    assert second.blocks == [0, 1]
    assert memory.pool.shared == 2


def test_a_sequence_has_one_table() -> None:
    memory = make(4, 2)
    admit(memory, "a", 1, 2)
    with pytest.raises(AssertionError, match="already"):
        admit(memory, "a", 1, 2)
    with pytest.raises(AssertionError, match="already"):
        memory.fork("a", "a")


def test_other_domains_are_not_seen() -> None:
    memory = make(8, 2)
    fill(memory, "a", 1, 2, 3)
    assert admit(memory, "b", 1, 2, 3, root=root_hash("model", "tenant", "salt")).blocks == []
    assert admit(memory, "c", 1, 2, 3).blocks == [0]


def test_without_a_prefix_cache_nothing_is_kept_or_shared() -> None:
    memory = make(4, 2, prefix_cache=False)
    fill(memory, "a", 1, 2, 3)
    assert admit(memory, "b", 1, 2, 3).blocks == []
    release(memory, "a", 1, 2, 3)
    assert (memory.pool.cached, memory.pool.free, len(memory.index)) == (0, 4, 0)
    assert set(memory.end_step().freed) == {0, 1}


# ----------------------------------------------------------------------------------------- what enters the index


def test_a_block_is_found_once_it_is_full_and_acknowledged() -> None:
    memory = make(8, 2)
    table = admit(memory, "a", 1, 2, 3)
    grow(memory, table, 3)
    memory.end_step()
    assert memory.index.match(Lineage(ROOT, ""), array("I", [1, 2, 3]), 2).blocks == ()
    memory.acknowledge(table, 1, array("I", [1, 2, 3]))
    assert memory.index.match(Lineage(ROOT, ""), array("I", [1, 2, 3]), 2).blocks == ()
    memory.acknowledge(table, 3, array("I", [1, 2, 3]))
    assert memory.index.match(Lineage(ROOT, ""), array("I", [1, 2, 3]), 2).blocks == (0,)
    assert (table.computed, table.committed, table.node) == (3, 1, memory.index.node(0))


def test_only_what_was_planned_can_be_acknowledged_and_never_less_than_before() -> None:
    memory = make(8, 2)
    table = admit(memory, "a", 1, 2, 3)
    grow(memory, table, 2)
    memory.acknowledge(table, 2, array("I", [1, 2, 3]))
    for wrong in (1, 3):
        with pytest.raises(AssertionError):
            memory.acknowledge(table, wrong, array("I", [1, 2, 3]))


def test_two_that_compute_the_same_at_once_are_held_twice_and_found_once() -> None:
    memory = make(8, 2)
    tables = [admit(memory, key, 1, 2, 3) for key in "ab"]
    for table in tables:
        grow(memory, table, 3)
    memory.end_step()
    for table in tables:
        memory.acknowledge(table, 3, array("I", [1, 2, 3]))
    assert tables[0].blocks == [0, 1]
    assert tables[1].blocks == [2, 3]
    assert memory.index.hash_of(2) is None
    release(memory, "a", 1, 2, 3)
    release(memory, "b", 1, 2, 3)
    assert (memory.pool.cached, memory.pool.free) == (2, 6)  # the duplicates are not kept


def test_the_outputs_are_cached_too() -> None:
    memory = make(8, 2)
    table = fill(memory, "a", 1, 2)
    grow(memory, table, 5)
    memory.end_step()
    memory.acknowledge(table, 5, array("I", [1, 2, 7, 8, 9, 10]))  # the last output is known and not computed
    release(memory, "a", 1, 2, 7, 8, 9, 10)
    assert admit(memory, "b", 1, 2, 7, 8, 9, 10, 4).computed == 5


# ------------------------------------------------------------------------------------------------ tails, partial


def test_a_partly_filled_last_block_is_cloned_by_who_comes_back_with_more() -> None:
    memory = make(8, 4)
    fill(memory, "a", 1, 2, 3, 4, 5, 6)
    release(memory, "a", 1, 2, 3, 4, 5, 6)
    memory.end_step()
    table = admit(memory, "b", 1, 2, 3, 4, 5, 6, 7)
    assert table.blocks == [0, 2]
    assert (table.planned, table.computed, table.committed) == (6, 6, 1)
    assert memory.pool.references[1] == 1, "the source is held until the copy has left"
    step = memory.end_step()
    assert step.copies == ((1, 2),)
    assert memory.pool.state(1) is BlockState.CACHED
    assert (memory.counters.partial_copies, memory.counters.copied_blocks) == (1, 0)
    grow(memory, table, 7)
    assert table.blocks == [0, 2], "the clone is its own: it is written in place"
    assert memory.end_step().copies == ()


def test_a_part_of_a_whole_block_is_cloned() -> None:
    memory = make(8, 4)
    fill(memory, "a", 1, 2, 3, 4)
    table = admit(memory, "b", 1, 2, 3, 9, 9)
    assert (table.blocks, table.computed) == ([1], 3)
    assert memory.end_step().copies == ((0, 1),)


def test_a_tail_is_left_where_its_source_would_be_in_the_way() -> None:
    memory = make(2, 4)
    fill(memory, "a", 1, 2, 3, 4, 5)
    release(memory, "a", 1, 2, 3, 4, 5)
    memory.end_step()
    assert (memory.pool.cached, memory.pool.free) == (2, 0)
    # [1, 2, 9, 9] needs 2 blocks for 5 tokens: both are there, but not with the source kept beside them.
    admission = memory.plan_admission(Lineage(ROOT, ""), array("I", [1, 2, 9, 9]), 0)
    assert admission is not None
    assert (admission.match, admission.cached_tokens) == (Match(), 0)
    admission = memory.plan_admission(Lineage(ROOT, ""), array("I", [1, 2, 9, 9][:3]), 0)
    assert admission is not None  # shorter than a block: not matched, fits


def test_a_live_source_costs_no_room() -> None:
    memory = make(4, 4)
    fill(memory, "a", 1, 2, 3, 4, 5)
    table = admit(memory, "b", 1, 2, 9, 9)  # 2 blocks of 2: the source is live anyhow
    assert (table.computed, memory.pool.free) == (2, 1)


def test_a_tail_that_another_holds_is_not_indexed() -> None:
    memory = make(8, 4)
    fill(memory, "a", 1, 2)
    memory.fork("a", "b")
    release(memory, "a", 1, 2)
    assert len(memory.index) == 0, "b goes on writing in that block"
    release(memory, "b", 1, 2)
    assert memory.index.filled(0) == 2


def test_a_clone_whose_copy_has_not_left_is_no_tail() -> None:
    """Else it could be cloned in the same step: source and destination at once."""
    memory = make(8, 4)
    fill(memory, "a", 1, 2)
    memory.fork("a", "b")
    memory.acknowledge(memory.tables["b"], 2, array("I", [1, 2]))
    grow(memory, memory.tables["b"], 3)
    release(memory, "b", 1, 2, 3)
    assert len(memory.index) == 0
    table = admit(memory, "c", 1, 2, 5, 6, 7)
    assert table.computed == 0
    assert memory.end_step().copies == ()


# -------------------------------------------------------------------------------------------------- copy-on-write


def test_a_fork_shares_every_block_and_the_first_writer_clones() -> None:
    memory = make(8, 4)
    parent = fill(memory, "a", 1, 2, 3, 4, 5, 6)
    child = memory.fork("a", "b")
    assert child.blocks == parent.blocks == [0, 1]
    assert (child.planned, child.computed, child.committed, child.node) == (6, 6, 1, parent.node)
    assert list(memory.pool.references)[:2] == [2, 2]
    grow(memory, child, 7)
    assert child.blocks == [0, 2]
    grow(memory, parent, 7)
    assert parent.blocks == [0, 1], "the last holder writes in place"
    assert memory.end_step().copies == ((1, 2),)
    assert (memory.counters.copied_blocks, memory.counters.forks) == (1, 1)
    memory.check_invariants()
    assert list(memory.pool.references)[:3] == [2, 1, 1]


def test_of_three_holders_two_clone() -> None:
    memory = make(8, 4)
    fill(memory, "a", 1, 2)
    tables = [memory.tables["a"], memory.fork("a", "b"), memory.fork("a", "c")]
    for table in tables:
        grow(memory, table, 3)
    assert sorted(table.blocks[0] for table in tables) == [0, 1, 2]
    assert memory.end_step().copies == ((0, 1), (0, 2))
    assert memory.pool.shared == 0


def test_a_fork_in_the_middle_of_a_step_is_refused() -> None:
    """The child's clone would be copied before the parent's token is written, and lack it."""
    memory = make(8, 4)
    table = fill(memory, "a", 1, 2)
    grow(memory, table, 3)
    with pytest.raises(AssertionError, match="middle of a step"):
        memory.fork("a", "b")
    memory.end_step()
    assert memory.fork("a", "b").planned == 3


def test_at_the_end_of_a_block_nothing_is_cloned() -> None:
    memory = make(8, 2)
    fill(memory, "a", 1, 2)
    child = memory.fork("a", "b")
    grow(memory, child, 3)
    assert child.blocks == [0, 1]
    assert memory.end_step().copies == ()
    assert memory.pool.references[0] == 2


def test_a_fork_finds_the_names_of_its_blocks() -> None:
    memory = make(8, 2)
    parent = fill(memory, "a", 1, 2, 3)
    child = memory.fork("a", "b")
    assert child.lineage is not parent.lineage
    for key, token in ("a", 7), ("b", 8):
        grow(memory, memory.tables[key], 5)
        memory.end_step()
        memory.acknowledge(memory.tables[key], 5, array("I", [1, 2, 3, token, 9]))
    assert admit(memory, "c", 1, 2, 3, 7, 9).blocks == [0, parent.blocks[1]]
    assert admit(memory, "d", 1, 2, 3, 8, 9).blocks == [0, child.blocks[1]]


def test_a_source_stays_until_its_step_has_left_even_where_its_sequence_is_gone() -> None:
    memory = make(3, 4, prefix_cache=False)
    fill(memory, "a", 1, 2)
    child = memory.fork("a", "b")
    grow(memory, child, 3)
    release(memory, "a", 1, 2)
    assert memory.pool.live == 2
    step = memory.end_step()
    assert (step.copies, step.freed) == (((0, 1),), ())
    assert memory.pool.live == 1
    assert memory.end_step().freed == (0,)


def test_a_copy_for_a_sequence_that_is_gone_is_not_made() -> None:
    memory = make(4, 4)
    fill(memory, "a", 1, 2, 3, 4)
    admit(memory, "b", 1, 2, 3, 9, 9)
    release(memory, "b", 1, 2, 3, 9, 9)
    step = memory.end_step()
    assert (step.copies, step.freed) == ((), (1,))
    assert memory.pool.references[0] == 1


# -------------------------------------------------------------------------------------------------------- eviction


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    memory = make(3, 2)
    fill(memory, "a", 1, 2, 3, 4)
    release(memory, "a", 1, 2, 3, 4)
    assert list(memory.pool.eviction_order()) == [1, 0]
    table = admit(memory, "b", 9, 9, 9)
    grow(memory, table, 3)
    assert table.blocks == [2, 1]
    assert memory.counters.evicted_blocks == 1
    assert memory.end_step().freed == (1,), "an evicted block is poisoned before its new owner writes"
    assert memory.index.match(Lineage(ROOT, ""), array("I", [1, 2, 3, 4, 5]), 4).blocks == (0,)


def test_the_least_recently_used_goes_first() -> None:
    memory = make(4, 2)
    for key, token in ("a", 1), ("b", 2), ("c", 3):
        fill(memory, key, token, token)
        release(memory, key, token, token)
    admit(memory, "again", 1, 1, 9)
    release(memory, "again", 1, 1, 9)
    assert list(memory.pool.eviction_order()) == [1, 2, 0]
    memory.now = 5.0
    fill(memory, "d", 4, 4, 4)
    assert memory.index.hash_of(1) is None
    release(memory, "d", 4, 4, 4)
    assert memory.pool.stamp(1) == 5.0


def test_what_stands_on_an_evicted_block_goes_with_it() -> None:
    memory = make(5, 2)
    duplicate = admit(memory, "first", 1, 2, 3), admit(memory, "second", 1, 2, 3)
    for table in duplicate:
        grow(memory, table, 3)
    memory.end_step()
    memory.acknowledge(duplicate[0], 3, array("I", [1, 2, 3]))
    memory.acknowledge(duplicate[1], 3, array("I", [1, 2, 3]))
    grow(memory, duplicate[1], 4)
    memory.end_step()
    memory.acknowledge(duplicate[1], 4, array("I", [1, 2, 3, 4]))  # its second block hangs on first's first one
    release(memory, "first", 1, 2, 3)
    assert list(memory.pool.eviction_order()) == [1, 0]
    table = admit(memory, "big", 9, 9, 9, 9)
    grow(memory, table, 4)  # one was free; the tail [3] goes for the second
    assert memory.index.hash_of(0) is not None
    grow(memory, table, 5)
    assert memory.counters.evicted_blocks == 2
    assert len(memory.index) == 0, "second's block [3, 4] can't be found without [1, 2]; it lives on"
    assert [memory.pool.references[block] for block in duplicate[1].blocks] == [1, 1]
    release(memory, "second", 1, 2, 3, 4)
    assert memory.pool.cached == 0


def test_generations_count_how_often_a_block_was_given_out() -> None:
    memory = make(1, 2, prefix_cache=False)
    for expected in (1, 2, 3):
        fill(memory, "a", 1)
        assert memory.pool.generations[0] == expected
        release(memory, "a", 1)


# ------------------------------------------------------------------------------------------------------- the step


def test_a_block_freed_twice_in_one_step_is_named_once() -> None:
    memory = make(1, 4, prefix_cache=False)
    for key in "ab":
        grow(memory, admit(memory, key, 1), 1)
        release(memory, key, 1)
    step = memory.end_step()
    assert step.freed == (0,)
    assert (memory.counters.allocated_blocks, memory.counters.freed_blocks) == (2, 2)


def test_a_step_begins_empty() -> None:
    memory = make(4, 2)
    fill(memory, "a", 1, 2)
    step = memory.end_step()
    assert (step.copies, step.freed) == ((), ())


@pytest.mark.parametrize("damage", ["references", "planned", "twice", "counter"])
def test_invariants_see_damage(damage: str) -> None:
    memory = make(8, 2)
    table = fill(memory, "a", 1, 2, 3)
    if damage == "references":
        memory.pool.share(table.blocks[0])
    elif damage == "planned":
        table.planned = 5
    elif damage == "twice":
        table.blocks[1] = table.blocks[0]
    else:
        memory.counters.allocated_blocks += 1
    with pytest.raises(AssertionError):
        memory.check_invariants()


def one_after_the_other(memory: Memory, *prompts: range) -> None:
    """Let prompts through, each alone."""
    for number, prompt in enumerate(prompts):
        tokens = array("I", prompt)
        lineage = Lineage(root_hash("m", "t", ""), "t")
        admission = memory.plan_admission(lineage, tokens, 0)
        assert admission is not None
        table = memory.admit(number, lineage, admission)
        growth = memory.plan_growth(table, len(tokens) - table.planned)
        assert growth is not None
        memory.grow(growth)
        memory.end_step()
        memory.acknowledge(table, len(tokens), tokens)
        memory.release(number, tokens)
        memory.end_step()
        memory.check_invariants()


def cached_blocks(memory: Memory, prompt: range) -> int:
    return len(memory.plan_match(Lineage(root_hash("m", "t", ""), "t"), array("I", [*prompt, 0])).blocks)


def test_a_prefix_that_was_used_twice_outlives_prompts_that_come_once() -> None:
    memory = Memory(10, 4, prefix_cache=True, counters=MemoryCounters())
    twice = range(100, 109)
    one_after_the_other(memory, twice, twice, *(range(first, first + 9) for first in range(200, 400, 10)))
    assert cached_blocks(memory, twice) == 2
    assert cached_blocks(memory, range(200, 209)) == 0


def test_what_comes_back_after_it_was_evicted_has_proven_its_use() -> None:
    memory = Memory(10, 4, prefix_cache=True, counters=MemoryCounters())
    back = range(100, 109)
    once = [range(first, first + 9) for first in range(200, 600, 10)]
    one_after_the_other(memory, back, *once[:5])
    assert cached_blocks(memory, back) == 0
    one_after_the_other(memory, back, *once[5:15])
    assert cached_blocks(memory, back) == 2
    # What was evicted too long ago is forgotten: forty names are remembered.
    memory = Memory(10, 4, prefix_cache=True, counters=MemoryCounters())
    one_after_the_other(memory, back, *once[:35], back, *once[35:])
    assert cached_blocks(memory, back) == 0


def test_a_long_check_lets_others_breathe() -> None:
    memory = Memory(40_000, 1, prefix_cache=True, counters=MemoryCounters())
    one_after_the_other(memory, range(100, 35_100))
    breaths: list[None] = []
    memory.breathe = lambda: breaths.append(None)
    assert memory.check_invariants() > 0
    assert len(breaths) >= 3 * 3  # pool, index and what holds between them, each in parts


def test_what_a_growth_would_evict_is_looked_up_once_for_each_block() -> None:
    """Of a chain, its end goes first: what stands on a block has been counted, and is not walked through again."""
    memory = Memory(600, 1, prefix_cache=True, counters=MemoryCounters())
    one_after_the_other(memory, range(100, 690))
    order = list(memory.pool.eviction_order())
    gone: dict[int, None] = {}
    for block in order:
        assert memory.index.standing_on(block, gone) == [block]
        gone[block] = None
    assert memory.index.standing_on(order[-1]) == order
    assert memory.plan_evictions(Admission(Match(), 0), 600) == order
