"""A memory whose operations are recorded before it does them, and what came of them after.

`JournaledMemory` is a memory that tells a `Journal` of each operation; where no journal is wanted, a plain one is used and
nothing is paid. Every method of the core that changes something is here; a test sees to that.

Knows the memory's operations; not who calls for them, nor when an entry is written.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final
from zlib import crc32

from memmgr.core.blocks import BlockPool
from memmgr.core.events import Record
from memmgr.core.lineage import Lineage
from memmgr.core.pins import Pin, Pins
from memmgr.core.prefix import PrefixIndex
from memmgr.core.swap import SwapIn, SwapOut, SwappingMemory
from memmgr.core.table import Admission, Growth, MemoryCounters, StepMemory, Table
from memmgr.journal.recording import Journal


def blocks_check(tables: Iterable[Sequence[int]]) -> int:
    """Return a checksum of the blocks of some tables, in their order."""
    return crc32(array("q", (block for table in tables for block in (*table, -1))).tobytes())


def step_check(memory: SwappingMemory, step: StepMemory) -> int:
    """Return a checksum of what a step does to blocks and of how many are in which state after it."""
    pool, counters = memory.pool, memory.counters
    numbers = array("q", (block for copies in (step.outs, step.ins, step.copies) for copy in (*copies, (-1,)) for block in copy))
    numbers.extend((*step.freed, -1, pool.live, pool.cached, pool.shared, pool.pinned, pool.pinned_cached))
    numbers.extend((len(memory.index), len(memory.tables), counters.allocated_blocks, counters.evicted_blocks))
    numbers.extend((len(memory.swapped), memory.host.used))
    return crc32(numbers.tobytes())


def memory_of(
    journal: Journal,
    total_blocks: int,
    block_size: int,
    *,
    prefix_cache: bool,
    counters: MemoryCounters,
    records: list[Record] | None = None,
    host_blocks: int = 0,
) -> SwappingMemory:
    """Return the memory of a new pool: a plain one where the journal can't be written any more."""
    make: Callable[..., SwappingMemory] = SwappingMemory
    if journal.begin_pool(total_blocks, block_size, prefix_cache=prefix_cache, host_blocks=host_blocks):
        make = partial(JournaledMemory, journal)
    return make(total_blocks, block_size, prefix_cache=prefix_cache, counters=counters, records=records, host_blocks=host_blocks)


class JournaledMemory(SwappingMemory):
    """A memory that tells its journal. `memory_of` makes them."""

    def __init__(
        self,
        journal: Journal,
        total_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool,
        counters: MemoryCounters,
        records: list[Record] | None,
        host_blocks: int,
    ) -> None:
        self._journal: Final = journal
        self._numbers: Final[dict[Hashable, int]] = {}  # of the sequences that have a table, in the pool or on the host
        self._unused_numbers: Final[list[int]] = []
        self._swapping = False  # what is released within a swap is not recorded
        super().__init__(
            total_blocks, block_size, prefix_cache=prefix_cache, counters=counters, records=records, host_blocks=host_blocks
        )

    def _new_pins(self, records: list[Record] | None) -> Pins:
        return JournaledPins(self._journal, self.pool, self.index, records)

    def _number(self, key: Hashable) -> int:
        """Give a new sequence its number."""
        number = self._unused_numbers.pop() if self._unused_numbers else len(self._numbers)
        self._numbers[key] = number
        return number

    def admit(self, key: Hashable, lineage: Lineage, admission: Admission, owner: object = None) -> Table:
        """See Memory."""
        match = admission.match
        entry = self._journal.begin(self.now)
        admit = entry.admit
        admit.sequence = self._number(key)
        admit.root, admit.tenant = lineage.root, lineage.tenant
        admit.blocks.extend(match.blocks)
        if match.tail_tokens:
            admit.tail, admit.tail_tokens = match.tail, match.tail_tokens
        table = super().admit(key, lineage, admission, owner)
        entry.outcome = table.blocks[-1] if match.tail_tokens else 0
        return table

    def fork(self, parent: Hashable, key: Hashable, owner: object = None) -> Table:
        """See Memory."""
        entry = self._journal.begin(self.now)
        entry.fork.parent = self._numbers[parent]
        entry.fork.sequence = self._number(key)
        table = super().fork(parent, key, owner)
        entry.outcome = 0
        return table

    def grow(self, growth: Growth) -> None:
        """See Memory."""
        table = growth.table
        self._journal.grow(self.now, self._numbers[table.key], growth.length - table.planned)
        super().grow(growth)
        changed = growth.new_blocks + growth.clone
        if changed:
            self._journal.came(table.blocks[-changed:])

    def acknowledge(self, table: Table, computed: int, tokens: array[int]) -> None:
        """See Memory."""
        size = self.block_size
        first, full = table.committed, computed // size
        number, count = self._numbers[table.key], (computed - table.computed) % 2**32  # if negative, it is refused again
        if not self.prefix_cache or full <= first:
            self._journal.acknowledge(self.now, number, count, None)
            super().acknowledge(table, computed, tokens)
            return
        self._journal.acknowledge(self.now, number, count, tokens[first * size : full * size])
        super().acknowledge(table, computed, tokens)
        self._journal.came((0 if table.node is None else table.node.block + 1,))

    def release(self, key: Hashable, tokens: array[int], *, keep_tail: bool = True) -> None:
        """See Memory."""
        if self._swapping:
            super().release(key, tokens, keep_tail=keep_tail)
            return
        entry = self._journal.begin(self.now)
        entry.release.sequence = self._numbers[key]
        entry.release.drop_tail = not keep_tail
        if keep_tail:
            entry.release.tokens.extend(self._tail(self.tables[key], tokens))
        super().release(key, tokens, keep_tail=keep_tail)
        entry.outcome = 0
        self._unused_numbers.append(self._numbers.pop(key))

    def _tail(self, table: Table, tokens: array[int]) -> array[int]:
        """Return the tokens by which the last block of a table that is released may be known."""
        full = table.computed // self.block_size * self.block_size
        return tokens[full : table.computed] if self.prefix_cache else array("I")

    def swap_out(self, swap: SwapOut, tokens: Mapping[Hashable, array[int]]) -> None:
        """See SwappingMemory."""
        entry = self._journal.begin(self.now)
        for key, length in swap.lengths.items():
            entry.swap_out.sequences.append(self._numbers[key])
            entry.swap_out.lengths.append(length)
            entry.swap_out.tokens.extend(self._tail(self.tables[key], tokens[key]))
        self._swapping = True
        super().swap_out(swap, tokens)
        self._swapping = False
        entry.outcome = blocks_check(self.swapped[key].blocks for key in swap.lengths)

    def swap_in(self, swap: SwapIn) -> dict[Hashable, Table]:
        """See SwappingMemory."""
        entry = self._journal.begin(self.now)
        for key, cached in swap.cached.items():
            entry.swap_in.sequences.append(self._numbers[key])
            entry.swap_in.counts.append(len(cached))
            entry.swap_in.blocks.extend(cached)
        tables = super().swap_in(swap)
        entry.outcome = blocks_check(table.blocks for table in tables.values())
        return tables

    def drop_swapped(self, key: Hashable) -> None:
        """See SwappingMemory."""
        entry = self._journal.begin(self.now)
        entry.drop_swapped.sequence = self._numbers[key]
        super().drop_swapped(key)
        entry.outcome = 0
        self._unused_numbers.append(self._numbers.pop(key))

    def distrust(self, table: Table) -> None:
        """See Memory."""
        entry = self._journal.begin(self.now)
        entry.distrust.sequence = self._numbers[table.key]
        super().distrust(table)
        entry.outcome = 0

    def distrust_cached(self, lineage: Lineage, tokens: array[int]) -> None:
        """See Memory."""
        entry = self._journal.begin(self.now)
        entry.distrust_cached.root, entry.distrust_cached.tenant = lineage.root, lineage.tenant
        entry.distrust_cached.tokens.extend(tokens)
        super().distrust_cached(lineage, tokens)
        entry.outcome = 0

    def flush(self) -> int:
        """See Memory."""
        entry = self._journal.begin(self.now)
        entry.flush.SetInParent()
        entry.outcome = super().flush()
        return entry.outcome

    def flush_part(self, part: range, tenant: str) -> int:
        """See Memory. A part is a run of blocks."""
        assert part.step == 1
        entry = self._journal.begin(self.now)
        entry.flush_part.start, entry.flush_part.stop, entry.flush_part.tenant = part.start, part.stop, tenant
        entry.outcome = super().flush_part(part, tenant)
        return entry.outcome

    def end_step(self) -> StepMemory:
        """See Memory."""
        entry = self._journal.begin(self.now)
        entry.end_step.SetInParent()
        step = super().end_step()
        entry.outcome = step_check(self, step)
        return step

    def note_preemption(self, owner: object) -> None:
        """See Memory."""
        entry = self._journal.begin(self.now)
        entry.note_preemption.SetInParent()
        super().note_preemption(owner)
        entry.outcome = 0

    def discard(self) -> None:
        """See Memory."""
        entry = self._journal.begin(self.now)
        entry.discard.SetInParent()
        super().discard()
        entry.outcome = 0


class JournaledPins(Pins):
    """Pins that tell their journal. `cut` is no operation: the memory calls it within its own."""

    def __init__(self, journal: Journal, pool: BlockPool, index: PrefixIndex, records: list[Record] | None) -> None:
        super().__init__(pool, index, records)
        self._journal = journal
        self._in_operation = False  # ending a pin within another operation is not recorded

    def pin(self, blocks: Sequence[int], tenant: str, expires_at: float) -> Pin:
        """See Pins."""
        entry = self._journal.begin()
        entry.pin.blocks.extend(blocks)
        entry.pin.tenant, entry.pin.expires_at = tenant, expires_at
        pin = super().pin(blocks, tenant, expires_at)
        entry.outcome = pin.number % 2**32
        return pin

    def unpin(self, number: int) -> bool:
        """See Pins."""
        if self._in_operation or number not in self._pins:
            return super().unpin(number)
        entry = self._journal.begin()
        entry.unpin.number = number
        super().unpin(number)
        entry.outcome = 1
        return True

    def expire(self, now: float) -> None:
        """See Pins. Where no pin's time is over nothing is recorded: this is asked once a round."""
        if now < self._next_expiry:
            return
        entry = self._journal.begin()
        entry.expire.now = now
        self._in_operation = True
        super().expire(now)
        self._in_operation = False
        entry.outcome = len(self)

    def clear(self) -> None:
        """See Pins."""
        entry = self._journal.begin()
        entry.clear_pins.SetInParent()
        self._in_operation = True
        super().clear()
        self._in_operation = False
        entry.outcome = 0
