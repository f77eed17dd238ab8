"""Physical blocks: what state each is in, who counts on it, which one is given out next.

Knows block numbers only: not what a block holds, nor for whom.

    state    references   in the eviction order   leaves by
    FREE     0            no                      take          -> LIVE, with one reference and a new generation
    LIVE     1 or more    no                      share, drop   -> LIVE
                                                  drop          -> unsettled, then at once keep -> CACHED or free -> FREE
    CACHED   0            yes, unless pinned      share         -> LIVE (its content is used again)
                                                  free          -> FREE (evicted or flushed); never while pinned

free + live + cached = total, always. A pin is no reference: it keeps a block out of the eviction order, no more. State lies in
flat arrays, so that ten million blocks cost tens of bytes each and no object.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

_OUTSIDE: Final = -1


class BlockState(IntEnum):
    """As in admin.proto."""

    FREE = 1
    LIVE = 2
    CACHED = 3


class BlockPool:
    """The blocks of one physical pool, numbered 0 .. total - 1.

    Free blocks are given out last freed first, then those never used, lowest first. `recency` is the eviction order: a doubly
    linked list threaded through two arrays, its sentinel at index `total`.
    """

    __slots__ = (
        "_free",
        "_next",
        "_previous",
        "_unused",
        "cached",
        "generations",
        "live",
        "pinned",
        "pinned_cached",
        "pins",
        "references",
        "shared",
        "stamps",
        "total",
    )

    def __init__(self, total: int) -> None:
        assert total >= 1
        self.total: Final = total
        self.live = 0
        self.cached = 0
        self.shared = 0  # live with two references or more
        self.pinned = 0  # with one pin or more, live or cached
        self.pinned_cached = 0
        self.pins: Final = array("H", bytes(2 * total))
        self.references: Final = array("I", bytes(4 * total))
        self.generations: Final = array("I", bytes(4 * total))
        self.stamps: Final = array("d", bytes(8 * total))  # when a block was last in use; the owner's clock
        self._free: list[int] = []
        self._unused = 0  # blocks from here on were never given out
        self._next = array("i", [_OUTSIDE]) * (total + 1)
        self._previous = array("i", [_OUTSIDE]) * (total + 1)
        self._next[total] = self._previous[total] = total

    @property
    def free(self) -> int:
        """How many blocks hold nothing of use."""
        return self.total - self.live - self.cached

    @property
    def available(self) -> int:
        """How many blocks could be given out now, cached ones evicted but for those that are pinned."""
        return self.total - self.live - self.pinned_cached

    def state(self, block: int) -> BlockState:
        """Return the state of a block."""
        if self.references[block]:
            return BlockState.LIVE
        return BlockState.CACHED if self.evictable(block) or self.pins[block] else BlockState.FREE

    def evictable(self, block: int) -> bool:
        """Whether a block is cached and not pinned."""
        return self._next[block] != _OUTSIDE

    def take(self) -> int:
        """Give out a free block, with one reference. There must be one."""
        if self._free:
            block = self._free.pop()
        else:
            block = self._unused
            assert block < self.total, "no free block: the caller has to evict first"
            self._unused += 1
        self.references[block] = 1
        self.generations[block] += 1
        self.live += 1
        return block

    def share(self, block: int) -> bool:
        """Add a reference to a live or cached block. True: it was a cached one."""
        references = self.references[block]
        if references == 0:
            if self.pins[block]:
                self.pinned_cached -= 1
            else:
                self._unlink(block)
            self.cached -= 1
            self.live += 1
        elif references == 1:
            self.shared += 1
        self.references[block] = references + 1
        return references == 0

    def drop(self, block: int) -> bool:
        """Take a reference away. True: it was the last one, and the caller must `keep` or `free` the block at once."""
        references = self.references[block]
        assert references > 0, f"block {block} has no reference to drop"
        self.references[block] = references - 1
        if references == 2:
            self.shared -= 1
        if references > 1:
            return False
        self.live -= 1
        return True

    def keep(self, block: int, now: float) -> None:
        """Make a block whose last reference was dropped a cached one, the last in the order of eviction."""
        assert self.references[block] == 0
        if self.pins[block]:
            self.pinned_cached += 1
        else:
            self._link(block)
        self.stamps[block] = now
        self.cached += 1

    def pin(self, block: int) -> bool:
        """Keep a live or cached block from eviction, once more. True: it was not pinned before."""
        self.pins[block] += 1
        if self.pins[block] > 1:
            return False
        self.pinned += 1
        if self.references[block] == 0:
            self._unlink(block)
            self.pinned_cached += 1
        return True

    def unpin(self, block: int) -> bool:
        """Take a pin away. True: it was the last one; a cached block is now the last in the order of eviction."""
        assert self.pins[block] > 0, f"block {block} has no pin to take away"
        self.pins[block] -= 1
        if self.pins[block]:
            return False
        self.pinned -= 1
        if self.references[block] == 0:
            self.pinned_cached -= 1
            self._link(block)
        return True

    def release(self, block: int, now: float) -> None:
        """Make a cached block, or one whose last reference was dropped, a free one."""
        assert self.references[block] == 0
        assert self.pins[block] == 0, f"block {block} is pinned"
        if self._next[block] != _OUTSIDE:
            self._unlink(block)
            self.cached -= 1
        self.stamps[block] = now
        self._free.append(block)

    def oldest(self) -> int:
        """Return the cached block that is evicted next. There must be one."""
        block = self._next[self.total]
        assert block != self.total, "no cached block"
        return block

    def eviction_order(self) -> Iterator[int]:
        """Yield the cached blocks that are not pinned, the next to be evicted first."""
        block = self._next[self.total]
        while block != self.total:
            yield block
            block = self._next[block]

    def links(self, part: slice) -> array[int]:
        """Return for each block of a part the next one in the order of eviction; negative where it is not in that order."""
        return self._next[part]

    def _link(self, block: int) -> None:
        assert self._next[block] == _OUTSIDE
        last = self._previous[self.total]
        self._next[last] = self._previous[self.total] = block
        self._previous[block] = last
        self._next[block] = self.total

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        assert after != _OUTSIDE, f"block {block} is not cached"
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = self._previous[block] = _OUTSIDE

    def check_invariants(self) -> int:
        """Check every block's state against the counts. Returns how many checks were made.

        Raises:
            AssertionError: one does not hold.
        """
        live = sum(1 for references in self.references if references)
        assert live == self.live, f"{live} blocks have references, {self.live} count as live"
        shared = sum(1 for references in self.references if references > 1)
        assert shared == self.shared, f"{shared} blocks are shared, {self.shared} count as shared"
        cached = 0
        before = self.total
        for block in self.eviction_order():
            assert self.references[block] == 0, f"cached block {block} has references"
            assert self.pins[block] == 0, f"pinned block {block} could be evicted"
            assert self._previous[block] == before, f"the eviction order is torn at block {block}"
            before = block
            cached += 1
            assert cached <= self.total, "the eviction order runs in a circle"
        pinned = [block for block, pins in enumerate(self.pins) if pins]
        assert len(pinned) == self.pinned, f"{len(pinned)} blocks are pinned, {self.pinned} count as pinned"
        pinned_cached = sum(1 for block in pinned if self.references[block] == 0)
        assert pinned_cached == self.pinned_cached, f"{pinned_cached} blocks without references are pinned, not as counted"
        assert cached + pinned_cached == self.cached, f"{cached} blocks can be evicted, {self.cached} count as cached"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + self.total - self._unused == self.free, "free blocks do not add up"
        for block in free:
            assert self.state(block) is BlockState.FREE, f"block {block} is in the free list and not free"
            assert block < self._unused
        return 3 * self.total + 2 * cached + len(free) + 7
