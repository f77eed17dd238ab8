"""Two contents under one hash: it may cost a miss, never a wrong token."""

from array import array

import pytest

from memmgr.core import lineage as lineage_module
from memmgr.core import memory as memory_module
from memmgr.core import prefix as prefix_module
from memmgr.core.lineage import HASH_BYTES, Lineage, root_hash
from memmgr.core.memory import Memory
from memmgr.core.table import MemoryCounters, Table

ROOT = root_hash("model", "tenant", "")


@pytest.fixture(autouse=True)
def _one_hash_for_each_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    def weak_hash(parent: bytes, _: bytes) -> bytes:
        return bytes([(parent[0] + 1) % 256]) * HASH_BYTES

    for module in lineage_module, prefix_module, memory_module:
        monkeypatch.setattr(module, "block_hash", weak_hash)


def admit(memory: Memory, key: str, *tokens: int, root: bytes = ROOT) -> Table:
    """Admit a sequence and plan all of its tokens."""
    lineage = Lineage(root, "tenant")
    admission = memory.plan_admission(lineage, array("I", tokens), 0)
    assert admission is not None
    table = memory.admit(key, lineage, admission)
    grow(memory, table, len(tokens))
    return table


def grow(memory: Memory, table: Table, length: int) -> None:
    growth = memory.plan_growth(table, length - table.planned)
    assert growth is not None
    memory.grow(growth)


def compute(memory: Memory, table: Table, *tokens: int) -> None:
    memory.end_step()
    memory.acknowledge(table, len(tokens), array("I", tokens))
    memory.check_invariants()


def run(memory: Memory, *tokens: int, root: bytes = ROOT) -> int:
    """Compute a sequence and release it; return how many tokens were found in the cache."""
    table = admit(memory, "run", *tokens, root=root)
    found = table.computed
    compute(memory, table, *tokens)
    memory.release("run", array("I", tokens))
    memory.check_invariants()
    return found


def test_the_second_content_of_a_hash_stays_out() -> None:
    memory = Memory(16, 2, prefix_cache=True, counters=MemoryCounters())
    assert run(memory, 1, 1, 2, 2, 9) == 0
    assert run(memory, 5, 5, 6, 6, 9) == 0
    assert run(memory, 5, 5, 6, 6, 9) == 0  # a miss, for as long as the other is there
    assert run(memory, 1, 1, 2, 2, 9) == 4


def test_the_same_tokens_in_another_domain_are_no_hit() -> None:
    roots = (root_hash("model", "tenant", str(salt)) for salt in range(10_000))
    other = next(root for root in roots if root[0] == ROOT[0])  # its blocks get the names of the first domain's
    memory = Memory(16, 2, prefix_cache=True, counters=MemoryCounters())
    assert run(memory, 1, 1, 2, 2, 9) == 0
    assert run(memory, 1, 1, 2, 2, 9, root=other) == 0
    assert run(memory, 1, 1, 2, 2, 9) == 4


def test_what_follows_a_collision_is_not_hung_on_the_other_content() -> None:
    memory = Memory(16, 2, prefix_cache=True, counters=MemoryCounters())
    assert run(memory, 1, 1) == 0
    assert run(memory, 5, 5, 2, 2, 9) == 0  # (2, 2) after (5, 5), whose name is that of (1, 1)
    assert run(memory, 1, 1, 2, 2, 9) == 2  # not 4: that (2, 2) was computed after other tokens


def test_a_tail_is_not_hung_on_the_other_content() -> None:
    memory = Memory(16, 4, prefix_cache=True, counters=MemoryCounters())
    assert run(memory, 1, 1, 1, 1) == 0
    assert run(memory, 5, 5, 5, 5, 2, 2) == 0
    assert run(memory, 1, 1, 1, 1, 2, 2, 9) == 4


def test_a_node_that_was_evicted_is_not_mistaken_for_its_successor() -> None:
    memory = Memory(7, 2, prefix_cache=True, counters=MemoryCounters())
    first, second = admit(memory, "first", 5, 5, 6), admit(memory, "second", 5, 5, 6)
    compute(memory, first, 5, 5, 6)
    compute(memory, second, 5, 5, 6)  # a duplicate: its first block goes on from the other's node
    assert second.node is not None
    assert second.node.block == first.blocks[0]
    memory.release("first", array("I", [5, 5, 6]))
    assert run(memory, 1, 1, 2, 2, 3, 3, 4, 4, 4) == 0  # evicts all that "first" left, and takes the name of (5, 5)
    assert memory.counters.evicted_blocks == 2
    grow(memory, second, 5)
    compute(memory, second, 5, 5, 6, 6, 9)
    memory.release("second", array("I", [5, 5, 6, 6, 9]))
    memory.check_invariants()
    assert run(memory, 1, 1, 6, 6, 9) == 2  # (6, 6) was computed after (5, 5)


def test_the_same_content_twice_is_no_collision() -> None:
    memory = Memory(16, 2, prefix_cache=True, counters=MemoryCounters())
    first, second = admit(memory, "first", 5, 5, 6), admit(memory, "second", 5, 5, 6)
    compute(memory, first, 5, 5, 6)
    compute(memory, second, 5, 5, 6)
    grow(memory, second, 5)
    compute(memory, second, 5, 5, 6, 6, 9)
    assert run(memory, 5, 5, 6, 6, 9, 9) == 4  # the duplicate's second block was hung on the first one's
