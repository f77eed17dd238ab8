"""Pins: prefixes that stay cached until they are unpinned or their time is over.

A pin holds a chain of whole blocks from the root of its domain on: what a pinned block stands on is pinned as well. No eviction
and no flush takes one. Only distrust cuts a pin short: a block that may hold no numbers leaves the index, pinned or not.

Knows blocks and the index; not how many blocks may be pinned, nor who asks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from mypy_extensions import mypyc_attr

from memmgr.core import events
from memmgr.core.blocks import BlockPool
from memmgr.core.events import Record, Unindexed
from memmgr.core.lineage import Lineage
from memmgr.core.prefix import PrefixIndex


@dataclass(slots=True)
class Pin:
    """One pin. `blocks[i]` is block i of the prefix; `expires_at` is on the owner's clock, infinite: until unpinned."""

    number: int
    tenant: str
    blocks: list[int]
    expires_at: float


@mypyc_attr(allow_interpreted_subclasses=True)
class Pins:
    """See the module."""

    def __init__(self, pool: BlockPool, index: PrefixIndex, records: list[Record] | None) -> None:
        self._pool = pool
        self._index = index
        self._records = records
        self._pins: dict[int, Pin] = {}
        self._made = 0
        self._next_expiry = inf  # no pin's time is over before

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def pinnable(self, lineage: Lineage, tokens: array[int]) -> tuple[int, ...]:
        """Return the blocks that a pin of these tokens would hold: the whole ones that are in the cache, from the start."""
        return self._index.match(lineage, tokens, len(tokens)).blocks

    def new_blocks(self, blocks: Sequence[int]) -> int:
        """Return how many of some blocks no pin holds yet."""
        return sum(1 for block in blocks if not self._pool.pins[block])

    def pin(self, blocks: Sequence[int], tenant: str, expires_at: float) -> Pin:
        """Pin blocks that are `pinnable`."""
        assert blocks
        self._made += 1
        pin = self._pins[self._made] = Pin(self._made, tenant, list(blocks), expires_at)
        self._next_expiry = min(self._next_expiry, expires_at)
        for block in blocks:
            if self._pool.pin(block):
                self._note(events.PINNED, block)
        return pin

    def unpin(self, number: int) -> bool:
        """End a pin. Its blocks enter the order of eviction as if they had been used now. False: there is none of that number."""
        pin = self._pins.pop(number, None)
        if pin is None:
            return False
        self._let_go(pin.blocks)
        return True

    def expire(self, now: float) -> None:
        """End the pins whose time is over."""
        if now < self._next_expiry:
            return
        for number in [pin.number for pin in self if pin.expires_at <= now]:
            self.unpin(number)
        self._next_expiry = min((pin.expires_at for pin in self), default=inf)

    def clear(self) -> None:
        """End all pins."""
        for number in list(self._pins):
            self.unpin(number)

    def cut(self, block: int) -> None:
        """Cut short what holds a block that leaves the index; a pin that holds nothing any more ends."""
        for pin in list(self):
            if block in pin.blocks:
                kept = pin.blocks.index(block)
                self._let_go(pin.blocks[kept:])
                del pin.blocks[kept:]
                if not kept:
                    del self._pins[pin.number]

    def _let_go(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # the tail of a chain is evicted before its head
            if self._pool.unpin(block):
                self._note(events.UNPINNED, block)

    def _note(self, kind: int, block: int) -> None:
        if self._records is not None:
            entry: Unindexed = (self._index.hash_of(block) or b"", self._index.tenants[block])
            self._records.append((kind, block, None, entry))

    def check_invariants(self, block_size: int) -> int:
        """Check each pin's chain, and the blocks' counts against the pins. Returns how many checks were made.

        Raises:
            AssertionError: one does not hold.
        """
        counted: dict[int, int] = {}
        for number, pin in self._pins.items():
            assert pin.number == number
            assert pin.blocks, f"pin {number} holds nothing"
            assert pin.expires_at >= self._next_expiry, f"pin {number} would be kept too long"
            for depth, block in enumerate(pin.blocks):
                counted[block] = counted.get(block, 0) + 1
                assert self._index.hash_of(block) is not None, f"pinned block {block} can't be found"
                assert self._index.filled(block) == block_size, f"pinned block {block} is not full"
                above = pin.blocks[depth - 1] if depth else -1
                assert self._index.above(block) == above, f"pinned block {block} hangs on another than its pin has before it"
        for block, pins in enumerate(self._pool.pins):
            assert pins == counted.get(block, 0), f"block {block} counts {pins} pins, {counted.get(block, 0)} hold it"
        return 3 * len(self) + 3 * sum(counted.values()) + self._pool.total
