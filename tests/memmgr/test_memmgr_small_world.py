"""Every string of operations on a memory of four blocks of two tokens and three sequences; see memmgr_small_world.

Here as deep as some seconds allow; `make prove` goes to eight operations from each beginning.
"""

from __future__ import annotations

import pytest

from memmgr.core.blocks import BlockPool
from memmgr.core.memory import Memory
from tests.memmgr.memmgr_search import BrokenError, search
from tests.memmgr.memmgr_small_world import BEGINNINGS, again, begin, kept

OPERATIONS = {"admit", "grow", "acknowledge", "fork", "release", "distrust", "end_step", "pin", "unpin", "flush"}
OPERATIONS |= {"swap_out", "swap_in", "drop_swapped"}


@pytest.mark.parametrize(("beginning", "depth"), [("empty", 6), ("cached", 4), ("forked", 4)])
def test_nothing_goes_wrong_in_any_order(beginning: str, depth: int) -> None:
    found = search(depth, BEGINNINGS[beginning])
    reached = OPERATIONS if beginning != "forked" else OPERATIONS - {"pin", "unpin", "flush"}  # which need more steps
    assert set(found.reached) >= reached | {"copied_blocks"}
    assert found.reached["evicted_blocks"] or beginning != "cached"
    assert sum(found.strings) > 3 * sum(found.states) > 6_000


@pytest.mark.parametrize(("beginning", "depth"), [("empty", 4), ("cached", 3), ("forked", 3)])
def test_to_follow_one_string_to_each_state_is_enough(beginning: str, depth: int) -> None:
    """The same states are found, and as many strings counted, where every string is followed to its end."""
    pruned, every = search(depth, BEGINNINGS[beginning]), search(depth, BEGINNINGS[beginning], prune=False)
    assert pruned.signatures == every.signatures
    assert pruned.strings == every.strings == every.states
    assert sum(pruned.states) == len(pruned.signatures) < sum(every.states)


def test_a_copy_is_the_same_and_goes_its_own_way() -> None:
    world = begin(BEGINNINGS["cached"])
    before = world.signature()
    copy = again(kept(world))
    assert copy.signature() == before
    copy.check()
    for operation in list(copy.operations()):
        if copy.apply(operation):
            break
    assert copy.signature() != before
    copy.check_leaks()
    assert world.signature() == before
    world.check()


def test_a_fault_is_told_with_the_operations_that_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_clone(memory: Memory, source: int, owner: object) -> int:
        return source

    monkeypatch.setattr(Memory, "_clone", no_clone)
    with pytest.raises(BrokenError, match=r"a shared block is written: .*'fork'.*'grow'.*'end_step'"):
        search(4, BEGINNINGS["forked"])


def test_a_lost_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    share_all = BlockPool.share_all

    def share_one_twice(pool: BlockPool, blocks: list[int], *, favour: bool = False) -> int:
        for block in blocks[-1:]:
            pool.references[block] += 1
        return share_all(pool, blocks, favour=favour)

    monkeypatch.setattr(BlockPool, "share_all", share_one_twice)
    with pytest.raises(BrokenError):
        search(2, BEGINNINGS["forked"])
