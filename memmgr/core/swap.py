"""Swapping: tables whose content waits in blocks on the host instead of being computed again.

    plan_swap_out -> SwapOut -> swap_out     a group's tables leave the pool; what they held goes to the host
    plan_swap_in  -> SwapIn  -> swap_in      they come back: what is still cached is shared, the rest is brought in
    drop_swapped                             one that is not wanted any more

A block that several tables of a group share takes one block on the host and comes back as one. The blocks in the pool are
released as ever: what the index knows of them stays cached, and need not be brought in where it is still there.

In a step, what goes out is read before anything is written; what comes in is there before copies are made. So a block that goes
out may be given away in the same step, and one that comes in may be cloned in it. A block on the host that is read in a step is
given out again in the next one.

Knows host blocks by number; not where they lie.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mypy_extensions import mypyc_attr

from memmgr.core import events
from memmgr.core.events import Record
from memmgr.core.lineage import Lineage
from memmgr.core.memory import Memory
from memmgr.core.table import DEFAULT_ORDER, EvictionOrder, MemoryCounters, StepMemory, Table


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Tables can leave, each with its first so many tokens."""

    lengths: Mapping[Hashable, int]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Tables can come back; each finds so many blocks of its own, from the start, in the cache."""

    cached: Mapping[Hashable, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class SwappedTable:
    """One sequence's content on the host: host block i holds its tokens i * size .. (i + 1) * size - 1, `planned` in all."""

    owner: Hashable
    lineage: Lineage
    blocks: tuple[int, ...]
    planned: int


class HostBlocks:
    """The blocks on the host, 0 .. total - 1, and how many swapped tables hold each."""

    def __init__(self, total: int) -> None:
        self.total: Final = total
        self.references: Final = array("I", bytes(4 * total))
        self._free: list[int] = []
        self._unused = 0  # blocks from here on were never given out
        self._leaving: list[int] = []  # nobody's, but read in this step

    @property
    def free(self) -> int:
        """How many can be given out in this step."""
        return len(self._free) + self.total - self._unused

    @property
    def used(self) -> int:
        """How many hold something."""
        return self.total - self.free - len(self._leaving)

    def take(self) -> int:
        """Give out a block, with one reference. There must be one."""
        if self._free:
            block = self._free.pop()
        else:
            block = self._unused
            assert block < self.total, "no free block on the host"
            self._unused += 1
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference."""
        assert self.references[block] > 0
        self.references[block] += 1

    def drop(self, block: int) -> None:
        """Take a reference away; with the last one the block is free from the next step on."""
        assert self.references[block] > 0, f"host block {block} has no reference to drop"
        self.references[block] -= 1
        if not self.references[block]:
            self._leaving.append(block)

    def end_step(self) -> None:
        """What was read in this step can be written in the next."""
        self._free += self._leaving
        self._leaving.clear()

    def check_invariants(self, expected: Mapping[int, int]) -> int:
        """Check the references against those that `expected` counts. Returns how many checks were made.

        Raises:
            AssertionError: one does not hold.
        """
        for block in range(self.total):
            assert self.references[block] == expected.get(block, 0), f"host block {block} counts {self.references[block]}"
        idle = self._free + self._leaving
        assert len(set(idle)) == len(idle), "a host block is free twice"
        assert not any(self.references[block] for block in idle), "a free host block is held"
        assert self.used == len(expected), "host blocks do not add up"
        return self.total + 3


@mypyc_attr(allow_interpreted_subclasses=True)
class SwappingMemory(Memory):
    """See the module: a Memory with `host_blocks` blocks on the host."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool,
        counters: MemoryCounters,
        records: list[Record] | None = None,
        host_blocks: int = 0,
        order: EvictionOrder = DEFAULT_ORDER,
    ) -> None:
        super().__init__(total_blocks, block_size, prefix_cache=prefix_cache, counters=counters, records=records, order=order)
        self.host: Final = HostBlocks(host_blocks)
        self._swapped: dict[Hashable, SwappedTable] = {}
        self._outs: dict[int, int] = {}  # host block -> the block that it is filled from
        self._ins: dict[int, int] = {}  # block -> the host block that it is filled from

    @property
    def swapped(self) -> Mapping[Hashable, SwappedTable]:
        """The swapped tables by key, to read."""
        return self._swapped

    def plan_swap_out(self, lengths: Mapping[Hashable, int]) -> SwapOut | None:
        """Decide whether tables can go to the host, each with its first so many tokens: those of plans that have left.

        Not in the step in which they come: what goes out is read before anything is brought in, and before copies of that.
        """
        blocks = {block for key, length in lengths.items() for block in self._tables[key].blocks[: self.blocks_for(length)]}
        if not blocks or len(blocks) > self.host.free:
            return None
        if self._ins and any(self._copies.get(block, block) in self._ins for block in blocks):
            return None
        return SwapOut(lengths)

    def swap_out(self, swap: SwapOut, tokens: Mapping[Hashable, array[int]]) -> None:
        """Take tables out of the pool. `tokens` are those that each was made of."""
        places: dict[int, int] = {}
        for key, length in swap.lengths.items():
            table = self._tables[key]
            blocks = table.blocks[: self.blocks_for(length)]
            for block in blocks:
                if block in places:
                    self.host.share(places[block])
                else:
                    places[block] = self._send_out(block, table.owner)
            self._swapped[key] = SwappedTable(table.owner, table.lineage, tuple(places[block] for block in blocks), length)
        for key in swap.lengths:
            self.release(key, tokens[key])

    def _send_out(self, block: int, owner: object) -> int:
        """Return the host block that this step fills from a block."""
        place = self.host.take()
        # What this step's copies were to fill is read where they would have read it: they are made later.
        self._outs[place] = self._copies.get(block, block)
        self.counters.swapped_out_blocks += 1
        if self._records is not None:
            self._records.append((events.SWAPPED_OUT, block, owner, None))
        return place

    def plan_swap_in(
        self,
        keys: Sequence[Hashable],
        tokens: Mapping[Hashable, array[int]],
        needed: int,
        reserve: int = 0,
        allowance: int | None = None,
    ) -> SwapIn | None:
        """Decide whether a group's swapped tables can come back; they need `needed` blocks, what is cached among them.

        `reserve` blocks are left, and no more than `allowance` become live. Not in the step in which they leave: no block on the
        host is written and read in one step.
        """
        if any(place in self._outs for key in keys for place in self._swapped[key].blocks):
            return None
        cached = self._cached(keys, tokens)
        found = {block for blocks in cached.values() for block in blocks}
        revived = self.pool.evictable_among(found)
        if needed - len(found) > self.pool.available - revived - reserve:
            return None
        if allowance is not None and needed - len(found) + self._dead(found) > allowance:
            return None
        return SwapIn(cached)

    def blocks_charged_back(self, keys: Sequence[Hashable], tokens: Mapping[Hashable, array[int]], needed: int) -> int:
        """Return how many blocks become live where swapped tables that need `needed` come back."""
        found = {block for blocks in self._cached(keys, tokens).values() for block in blocks}
        return needed - len(found) + self._dead(found)

    def _cached(self, keys: Sequence[Hashable], tokens: Mapping[Hashable, array[int]]) -> dict[Hashable, tuple[int, ...]]:
        """Return the blocks of its own, from the start, that each swapped table finds in the cache."""
        cached: dict[Hashable, tuple[int, ...]] = {}
        for key in keys:
            swapped = self._swapped[key]
            whole = swapped.planned // self.block_size
            cached[key] = self.plan_match(swapped.lineage, tokens[key]).blocks[:whole] if whole else ()
        return cached

    def swap_in(self, swap: SwapIn) -> dict[Hashable, Table]:
        """Give swapped tables their place in the pool again, and return them by key. This step brings in what they lack."""
        tables: dict[Hashable, Table] = {}
        for key, cached in swap.cached.items():
            swapped = self._swapped[key]
            self._share_all(list(cached), swapped.owner)  # all of them, before anything is given out and evicts one
            node = self.index.node(cached[-1]) if cached else None
            tables[key] = Table(
                key,
                swapped.owner,
                swapped.lineage,
                list(cached),
                planned=swapped.planned,
                computed=len(cached) * self.block_size,
                committed=len(cached),
                node=node,
            )
        places: dict[int, int] = {}
        for key, table in tables.items():
            swapped = self._swapped.pop(key)
            for place in swapped.blocks[len(table.blocks) :]:
                if place in places:
                    self._share(places[place], table.owner)
                else:
                    places[place] = self._bring_in(place, table)
                table.blocks.append(places[place])
            for place in swapped.blocks:
                self.host.drop(place)
            self._tables[key] = table
        self._planning = True
        return tables

    def _bring_in(self, place: int, table: Table) -> int:
        """Return a block for a table that this step fills from a host block."""
        [block] = self._allocate(1, table.owner)
        self.quotas.charge(block, table.lineage.tenant)
        self._ins[block] = place
        self.counters.swapped_in_blocks += 1
        if self._records is not None:
            self._records.append((events.SWAPPED_IN, block, table.owner, None))
        return block

    def drop_swapped(self, key: Hashable) -> None:
        """Forget a swapped table."""
        for place in self._swapped.pop(key).blocks:
            self.host.drop(place)

    def end_step(self) -> StepMemory:
        """See Memory."""
        step = super().end_step()
        if self._outs or self._ins:
            step = step._replace(
                outs=tuple((block, place) for place, block in self._outs.items()),
                ins=tuple((place, block) for block, place in self._ins.items()),
            )
        self._outs.clear()
        self._ins.clear()
        self.host.end_step()
        return step

    def check_invariants(self) -> int:
        """See Memory."""
        checks = super().check_invariants()
        held: dict[int, int] = {}
        for key, swapped in self._swapped.items():
            assert key not in self._tables, f"sequence {key} is in the pool and on the host"
            assert len(swapped.blocks) == self.blocks_for(swapped.planned), f"sequence {key} has the wrong number of host blocks"
            assert len(set(swapped.blocks)) == len(swapped.blocks), f"sequence {key} has a host block twice"
            for place in swapped.blocks:
                held[place] = held.get(place, 0) + 1
            checks += 3
        assert all(self.pool.references[block] for block in self._ins), "a block that is brought in is nobody's"
        assert not self._ins.keys() & self._copies.keys(), "a block is brought in and copied to in one step"
        return checks + 2 + self.host.check_invariants(held)
