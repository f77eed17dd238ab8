"""The operations of a journal, done again by a memory: one function for each kind of entry.

What an operation returns is for the caller to compare; of rows, the blocks that were taken and the nodes of the index are
compared here. What the end of a step returns is a checksum of its copies, of what fell free and of the counts.

Believes nothing: what an entry names has to be there, and the entries of all tables and the pins are limited, so that no file
makes this process larger than its limits say. Knows entries and memory; not files, numbers of operations or when to check.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from kilburn.limits import MAX_PINS
from kilburn.v1.journal_pb2 import JournalEntry
from memmgr.core.prefix import Match
from memmgr.core.swap import SwapIn, SwappedTable, SwappingMemory
from memmgr.core.table import Admission, Table
from memmgr.journal.journaled import blocks_check, step_check
from memmgr.journal.reading import Outcomes, Part, RefusedError, lineage_of, tokens_from
from memmgr.journal.summary import Summary

#: Entries of all tables together, 16 bytes each with their names: a thousand sequences of half a million tokens.
MAX_TABLE_ENTRIES: Final = 2**25

#: Tables at once: more than any batch.
MAX_TABLES: Final = 2**17


class Operations:
    """See the module. By the entry's kind: `single` has one operation in an entry and returns what it came to, `rows` many.

    `begin` is called before each operation of a row, `done` after it; around a `single` one the caller does so. The memory is
    an argument and never kept: one that is given up is to be gone before the next is made.
    """

    def __init__(self, summary: Summary, begin: Callable[[str], None], done: Callable[[SwappingMemory], None]) -> None:
        self._summary: Final = summary
        self._begin: Final = begin
        self._done: Final = done
        self._entries = 0  # of all tables
        self.single: Final[dict[str, Callable[[SwappingMemory, JournalEntry], int | None]]] = {
            "admit": self._admit,
            "fork": self._fork,
            "release": self._release,
            "end_step": self._end_step,
            "distrust": self._distrust,
            "distrust_cached": self._distrust_cached,
            "flush": lambda memory, _: memory.flush(),
            "flush_part": self._flush_part,
            "note_preemption": self._note_preemption,
            "discard": lambda memory, _: memory.discard(),
            "pin": self._pin,
            "unpin": lambda memory, entry: memory.pins.unpin(entry.unpin.number),
            "expire": self._expire,
            "clear_pins": lambda memory, _: memory.pins.clear(),
            "swap_out": self._swap_out,
            "swap_in": self._swap_in,
            "drop_swapped": self._drop_swapped,
        }
        self.rows: Final[dict[str, Callable[[SwappingMemory, JournalEntry], None]]] = {
            "grow": self._grow,
            "acknowledge": self._acknowledge,
        }

    def begin_pool(self) -> None:
        """Take note that the next operation is a new pool's."""
        self._entries = 0

    def _table(self, memory: SwappingMemory, number: Hashable) -> Table:
        table = memory.tables.get(number)
        if table is None:
            raise RefusedError(f"sequence {number} has no table")
        return table

    def _new_table(self, memory: SwappingMemory, number: int, entries: int) -> None:
        self._summary.sequences += 1
        if number in memory.tables or number in memory.swapped:
            raise RefusedError(f"sequence {number} has a table already")
        if len(memory.tables) + len(memory.swapped) >= MAX_TABLES:
            raise RefusedError(f"{MAX_TABLES} sequences have tables already; no more are replayed")
        self._more_entries(entries)

    def _more_entries(self, entries: int) -> None:
        self._entries += entries
        if self._entries > MAX_TABLE_ENTRIES:
            raise RefusedError(f"all tables together have more than {MAX_TABLE_ENTRIES} entries; no more are replayed")

    def _admit(self, memory: SwappingMemory, entry: JournalEntry) -> int:
        admit = entry.admit
        self._new_table(memory, admit.sequence, len(admit.blocks) + bool(admit.tail_tokens))
        lineage = lineage_of(admit.root, admit.tenant)
        above = -1
        for block in admit.blocks:
            lineage.names.append(self._known(memory, block, above, lineage.root, memory.block_size))
            above = block
        match = Match(tuple(admit.blocks))
        if admit.tail_tokens:
            if admit.tail_tokens > memory.block_size:
                raise RefusedError(f"{admit.tail_tokens} tokens of a block of {memory.block_size}")
            self._known(memory, admit.tail, above, lineage.root, admit.tail_tokens)
            match = Match(match.blocks, admit.tail, admit.tail_tokens)
        cached_tokens = len(match.blocks) * memory.block_size + match.tail_tokens
        table = memory.admit(admit.sequence, lineage, Admission(match, cached_tokens))
        return table.blocks[-1] if match.tail_tokens else 0

    def _known(self, memory: SwappingMemory, block: int, above: int, root: bytes, tokens: int) -> bytes:
        """Return the name of a block that must be in the index, after `above` or else the root, with so many tokens."""
        index = memory.index
        name = index.hash_of(block) if block < memory.pool.total else None
        if name is None or index.above(block) != above or (above < 0 and index.parent_of(block) != root):
            raise RefusedError(f"block {block} was found in the cache, and is not there")
        if index.filled(block) < tokens:
            raise RefusedError(f"block {block} was found with {tokens} tokens, and {index.filled(block)} are known")
        return name

    def _fork(self, memory: SwappingMemory, entry: JournalEntry) -> None:
        parent = self._table(memory, entry.fork.parent)
        self._new_table(memory, entry.fork.sequence, len(parent.blocks))
        memory.fork(parent.key, entry.fork.sequence)

    def _grow(self, memory: SwappingMemory, entry: JournalEntry) -> None:
        row = entry.grow
        if len(row.sequences) != len(row.counts):
            raise RefusedError("a row of growths that does not add up")
        outcomes = Outcomes(row.blocks)
        for number, count in zip(row.sequences, row.counts, strict=True):
            self._begin("grow")
            table = self._table(memory, number)
            growth = memory.plan_growth(table, count)
            if growth is None:
                raise RefusedError(
                    f"sequence {number} can't grow by {count} tokens: {memory.pool.available} blocks are available"
                )
            self._more_entries(growth.new_blocks)
            memory.grow(growth)
            changed = growth.new_blocks + growth.clone
            if changed:
                outcomes.compare("blocks", table.blocks[-changed:])
            self._done(memory)
        outcomes.finish("blocks")

    def _acknowledge(self, memory: SwappingMemory, entry: JournalEntry) -> None:
        row, size = entry.acknowledge, memory.block_size
        if len(row.sequences) != len(row.counts):
            raise RefusedError("a row of acknowledgements that does not add up")
        outcomes, tokens, used = Outcomes(row.nodes), row.tokens, 0
        for number, count in zip(row.sequences, row.counts, strict=True):
            self._begin("acknowledge")
            table = self._table(memory, number)
            computed = table.computed + count
            if computed > table.planned:
                raise RefusedError(f"sequence {number} computed {computed} tokens, {table.planned} were planned")
            full = computed // size - table.committed if memory.prefix_cache else 0
            new = tokens[used : used + full * size] if full > 0 else []
            if len(new) < full * size:
                raise RefusedError("tokens of full blocks are missing")
            used += len(new)
            memory.acknowledge(table, computed, tokens_from(table.committed * size, new))
            if full > 0:
                outcomes.compare("nodes", (0 if table.node is None else table.node.block + 1,))
            self._done(memory)
        outcomes.finish("nodes")
        if used < len(tokens):
            raise RefusedError(f"{len(tokens) - used} tokens too many were recorded")

    def _release(self, memory: SwappingMemory, entry: JournalEntry) -> None:
        message = entry.release
        table = self._table(memory, message.sequence)
        tokens, rest = self._tail(memory, table, () if message.drop_tail else message.tokens)
        if rest or (message.drop_tail and message.tokens):
            raise RefusedError("more tokens than a last block has")
        self._entries -= len(table.blocks)
        memory.release(table.key, tokens, keep_tail=not message.drop_tail)

    def _tail(self, memory: SwappingMemory, table: Table, tokens: Sequence[int]) -> tuple[Part, Sequence[int]]:
        """Return the tokens of a table's last block, if it is partly filled, and those behind them."""
        full, rest = divmod(table.computed, memory.block_size)
        if not memory.prefix_cache:
            rest = 0
        return tokens_from(full * memory.block_size, tokens[:rest]), tokens[rest:]

    def _swap_out(self, memory: SwappingMemory, entry: JournalEntry) -> int:
        message = entry.swap_out
        rest: Sequence[int] = message.tokens
        lengths: dict[Hashable, int] = dict(zip(message.sequences, message.lengths, strict=True))
        if len(lengths) < len(message.sequences):
            raise RefusedError("a sequence leaves twice")
        tokens: dict[Hashable, array[int]] = {}
        more = 0
        for number, length in lengths.items():
            table = self._table(memory, number)
            if not 1 <= length <= table.planned:
                raise RefusedError(f"sequence {number} leaves with {length} tokens of {table.planned}")
            tokens[number], rest = self._tail(memory, table, rest)
            more += memory.blocks_for(length) - len(table.blocks)
        swap = memory.plan_swap_out(lengths)
        if swap is None:
            raise RefusedError(f"what leaves does not fit the host: {memory.host.free} blocks are free there")
        self._more_entries(more)
        memory.swap_out(swap, tokens)
        return blocks_check(memory.swapped[number].blocks for number in lengths)

    def _swap_in(self, memory: SwappingMemory, entry: JournalEntry) -> int:
        message, rest = entry.swap_in, tuple(entry.swap_in.blocks)
        cached: dict[Hashable, tuple[int, ...]] = {}
        for number, count in zip(message.sequences, message.counts, strict=True):
            swapped = self._swapped(memory, number)
            if number in cached or count > swapped.planned // memory.block_size or count > len(rest):
                raise RefusedError(f"sequence {number} comes back with {count} cached blocks, or twice")
            cached[number], rest = rest[:count], rest[count:]
            names, above = swapped.lineage.names, -1
            for logical, block in enumerate(cached[number]):
                name = self._known(memory, block, above, swapped.lineage.root, memory.block_size)
                if logical == len(names):
                    names.append(name)  # another sequence computed it since
                above = block
        return blocks_check(table.blocks for table in memory.swap_in(SwapIn(cached)).values())

    def _drop_swapped(self, memory: SwappingMemory, entry: JournalEntry) -> None:
        self._entries -= len(self._swapped(memory, entry.drop_swapped.sequence).blocks)
        memory.drop_swapped(entry.drop_swapped.sequence)

    def _swapped(self, memory: SwappingMemory, number: int) -> SwappedTable:
        swapped = memory.swapped.get(number)
        if swapped is None:
            raise RefusedError(f"sequence {number} is not on the host")
        return swapped

    def _end_step(self, memory: SwappingMemory, _: JournalEntry) -> int:
        check = step_check(memory, memory.end_step())
        self._summary.steps += 1
        return check

    def _distrust(self, memory: SwappingMemory, entry: JournalEntry) -> None:
        memory.distrust(self._table(memory, entry.distrust.sequence))

    def _distrust_cached(self, memory: SwappingMemory, entry: JournalEntry) -> None:
        message = entry.distrust_cached
        memory.distrust_cached(lineage_of(message.root, message.tenant), array("I", message.tokens))

    def _flush_part(self, memory: SwappingMemory, entry: JournalEntry) -> int:
        part = entry.flush_part
        if not part.start <= part.stop <= memory.pool.total:
            raise RefusedError(f"blocks {part.start} to {part.stop} of {memory.pool.total}")
        return memory.flush_part(range(part.start, part.stop), part.tenant)

    def _note_preemption(self, memory: SwappingMemory, _: JournalEntry) -> None:
        self._summary.preemptions += 1
        memory.note_preemption(None)

    def _pin(self, memory: SwappingMemory, entry: JournalEntry) -> int:
        blocks = entry.pin.blocks
        if len(memory.pins) >= MAX_PINS or math.isnan(entry.pin.expires_at):
            raise RefusedError(f"there are {MAX_PINS} pins already, or its end is no time")
        if sum(len(pin.blocks) for pin in memory.pins) + len(blocks) > MAX_TABLE_ENTRIES:
            raise RefusedError(f"all pins together hold more than {MAX_TABLE_ENTRIES} blocks; no more are replayed")
        above = -1
        for block in blocks:
            if block >= memory.pool.total or memory.index.hash_of(block) is None or memory.index.above(block) != above:
                raise RefusedError(f"block {block} was pinned, and is not in the cache")
            above = block
        return memory.pins.pin(list(blocks), entry.pin.tenant, entry.pin.expires_at).number % 2**32

    def _expire(self, memory: SwappingMemory, entry: JournalEntry) -> int:
        memory.pins.expire(entry.expire.now)
        return len(memory.pins)
