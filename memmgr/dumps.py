"""A copy of a pool of any size, of one instant, without holding up a step for longer than a piece of it takes to copy.

The pieces are copied between steps, one at a time; steps go on in between. With each piece, every block of those
before it that an event has told of since is read again: so all that is copied is of the instant of the last piece. Events tell of
everything that changes: whatever happens to a block is in its records (see core/events.py).

Knows the core's lists and the event log; not messages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from memmgr.core.events import NO_BLOCK
from memmgr.core.swap import SwappingMemory
from memmgr.engine import Engine
from memmgr.session import Session

#: Blocks that are copied between two steps: a millisecond, and some for the collector of cycles to see that they are no cycle.
PIECE_BLOCKS: Final = 1 << 12

#: How often a copy is begun anew, because another pool came or more happened than events are held, before it is made at once.
_MOST_BEGINNINGS: Final = 3


#: What is known of one block.
Row = tuple[Any, ...]


class Part(NamedTuple):
    """What is known of blocks first, first + 1, ...: each column has an entry for every one.

    Arrays and tuples: Python's collector of cycles does not look into arrays, and lets go of tuples that hold strings and bytes
    alone when it has looked once. It would look through lists of millions of entries again and again, in the middle of a step.
    """

    first: int
    references: array[int]
    evictable: bytearray  # cached and not pinned
    pins: array[int]
    generations: array[int]
    stamps: array[float]
    depths: array[int]
    hits: array[int]
    serials: array[int]
    names: tuple[bytes | None, ...]
    parents: tuple[bytes | None, ...]
    tokens: tuple[bytes | None, ...]
    tenants: tuple[str, ...]

    @property
    def stop(self) -> int:
        """The number of the first block behind it."""
        return self.first + len(self.references)

    def changed(self, rows: dict[int, Row]) -> Part:
        """Return the part with what is known of some blocks later."""
        later = [(block - self.first, row) for block, row in rows.items() if self.first <= block < self.stop]
        if not later:
            return self
        columns: list[Any] = list(self[1:])
        for number, column in enumerate(columns):
            entries = list(column) if isinstance(column, tuple) else column[:]
            for at, row in later:
                entries[at] = row[number]
            columns[number] = tuple(entries) if isinstance(column, tuple) else entries
        return Part(self.first, *columns)


def copy_part(memory: SwappingMemory, part: slice) -> Part:
    """Return what is known of a part of the pool."""
    pool, nodes = memory.pool, memory.index.nodes(part)
    return Part(
        part.start,
        array("Q", pool.references[part]),
        bytearray(pool.evictable_in(part)),
        array("Q", pool.pins[part]),
        array("Q", pool.generations[part]),
        array("d", pool.stamps(part)),
        array("Q", nodes.depths),
        array("Q", nodes.hits),
        array("Q", nodes.serials),
        tuple(nodes.names),
        tuple(nodes.parents),
        tuple(nodes.tokens),
        tuple(nodes.tenants),
    )


def row_of(memory: SwappingMemory, block: int) -> Row:
    """Return what is known of one block, in the order of a part's tuples."""
    pool, index = memory.pool, memory.index
    return (
        pool.references[block],
        pool.evictable(block),
        pool.pins[block],
        pool.generations[block],
        pool.stamp(block),
        index.depths[block],
        index.hits[block],
        *index.node_at(block),
    )


class Dump:
    """A copy in the making, of blocks first .. first + limit - 1 (0: to the end).

    `take` runs between two steps, until it says that all is there; then `read` gives the parts, in any thread.
    """

    def __init__(self, first: int, limit: int) -> None:
        self._parts: list[Part] = []
        self._changes: dict[int, Row] = {}  # what is another by now
        self.cursor = 0  # of the last event before the last piece: before the copy's instant, in the end
        self._first, self._limit = first, limit
        self._session: Session | None = None
        self._beginnings = 0

    def take(self, engine: Engine) -> bool:
        """Copy the next piece. False: there is more to come. Where there is no pool there are no parts."""
        session = engine.session
        if session is None:
            self._parts, self.cursor = [], engine.take_events()
            return True
        if session is not self._session or not self._catch_up(engine, session.memory):
            self._begin(engine, session)
        memory = session.memory
        first = self._parts[-1].stop if self._parts else self._first
        stop = min(memory.pool.total, self._first + self._limit) if self._limit else memory.pool.total
        most = PIECE_BLOCKS if self._beginnings <= _MOST_BEGINNINGS else memory.pool.total
        if first < stop:
            self._parts.append(copy_part(memory, slice(first, min(stop, first + most))))
        return first + most >= stop

    def _begin(self, engine: Engine, session: Session) -> None:
        self._session = session
        self._beginnings += 1
        self.cursor = engine.take_events()
        self._parts, self._changes = [], {}

    def _catch_up(self, engine: Engine, memory: SwappingMemory) -> bool:
        """Read again what has changed in the pieces since the last one. False: it is not known any more what has."""
        before, self.cursor = self.cursor, engine.take_events()
        if engine.events.oldest > before + 1:
            return False
        changed = {
            block
            for batch in engine.events.after(before)
            for _, block, _, _ in batch.records
            if block != NO_BLOCK and self._first <= block < self._parts[-1].stop
        }
        self._changes.update((block, row_of(memory, block)) for block in changed)
        return True

    def read(self) -> Iterator[Part]:
        """Yield the parts, once: each is free when it was read, for to free a large pool's at once would take long."""
        while self._parts:
            yield self._parts.pop(0).changed(self._changes)
