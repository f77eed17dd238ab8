"""Physical blocks: what state each is in, who counts on it, which one is given out next.

Knows block numbers only: not what a block holds, nor for whom.

    state    references   in the eviction order   leaves by
    FREE     0            no                      take          -> LIVE, with one reference and a new generation
    LIVE     1 or more    no                      share, drop   -> LIVE
                                                  drop          -> unsettled, then at once keep -> CACHED or free -> FREE
    CACHED   0            yes, unless pinned      share         -> LIVE (its content is used again)
                                                  free          -> FREE (evicted or flushed); never while pinned

free + live + cached = total, always. A pin is no reference: it keeps a block out of the eviction order, no more.

The eviction order has two segments. What has proven its use (`favour`) lies in the second, whose blocks go only when the first
has none; within a segment the one that was used least recently goes first. The second takes up a part of the pool: what is beyond
that, its least recently used, goes to the end of the first. So a prefix that was used twice outlives any number of prompts that
come once.

State lies in flat lists: ten million blocks cost tens of bytes each and no object, and a list is read and written in a third of
an array's time. A segment is made of runs: what becomes cached at once lies in one run, in order. A block that is used again
leaves its run by forgetting which it was in; its entry stays behind, and a run that is more than half such entries is written
anew. So a whole table enters or leaves the order at the cost of one write for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from itertools import chain
from typing import Final

from memmgr.core.runs import Run, Segment

#: Entries that a check looks at between two breaths.
BREATH: Final = 1 << 14


def no_breath() -> None:
    """Do nothing, where nobody waits for a check to end."""


class BlockState(IntEnum):
    """As in admin.proto."""

    FREE = 1
    LIVE = 2
    CACHED = 3


class BlockPool:
    """The blocks of one physical pool, numbered 0 .. total - 1; cached ones that are favoured take up `proven` of them at most.

    Free blocks are given out last freed first, then those never used, lowest first.
    """

    __slots__ = (
        "_favoured",
        "_free",
        "_fresh",
        "_most_proven",
        "_proven",
        "_run_of",
        "_stamps",
        "_unused",
        "cached",
        "generations",
        "live",
        "pinned",
        "pinned_cached",
        "pins",
        "references",
        "shared",
        "total",
    )

    def __init__(self, total: int, proven: int = 0) -> None:
        assert total >= 1
        self.total: Final = total
        self.live = 0
        self.cached = 0
        self.shared = 0  # live with two references or more
        self.pinned = 0  # with one pin or more, live or cached
        self.pinned_cached = 0
        self.pins: Final = [0] * total
        self.references: Final = [0] * total
        self.generations: Final = [0] * total
        self._stamps: Final = [0.0] * total  # see `stamps`; of a block in a run it's the run's
        self._free: list[int] = []
        self._unused = 0  # blocks from here on were never given out
        self._run_of: Final[list[Run | None]] = [None] * total
        self._fresh = Segment()
        self._proven = Segment()
        self._most_proven: Final = proven
        self._favoured: Final = [False] * total

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
        return self._run_of[block] is not None

    def evictable_among(self, blocks: Iterable[int]) -> int:
        """Return how many of some blocks are cached and not pinned."""
        run_of = self._run_of
        runs = [run_of[block] for block in blocks]
        return len(runs) - runs.count(None)

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

    def take_some(self, count: int) -> list[int]:
        """Give out free blocks, each with one reference. There must be so many."""
        free = self._free
        blocks = free[: -count - 1 : -1]
        del free[len(free) - len(blocks) :]
        if missing := count - len(blocks):
            first = self._unused
            assert first + missing <= self.total, "no free block: the caller has to evict first"
            self._unused = first + missing
            blocks += range(first, self._unused)
        references, generations = self.references, self.generations
        for block in blocks:
            references[block] = 1
            generations[block] += 1
        self.live += count
        return blocks

    def share(self, block: int) -> bool:
        """Add a reference to a live or cached block. True: it was a cached one."""
        count = self.references[block]
        self.references[block] = count + 1
        if count:
            self.shared += count == 1
            return False
        run = self._run_of[block]
        if run is None:
            assert self.pins[block], f"block {block} is not cached"
            self.pinned_cached -= 1
        else:
            self._run_of[block] = None
            self._let_go(run, 1)
        self.cached -= 1
        self.live += 1
        return True

    def share_all(self, blocks: list[int], *, favour: bool = False) -> int:
        """Add a reference to each of some blocks, live or cached, and favour them; return how many were cached."""
        references, run_of = self.references, self._run_of
        runs = [run_of[block] for block in blocks]
        run = runs[0] if runs else None
        if run is not None and runs.count(run) == len(runs):  # as of most tables: all became cached at one time
            for block in blocks:
                references[block] = 1
                run_of[block] = None
            if favour and run.segment is not self._proven:  # where they are favoured
                self.favour(blocks)
            self._let_go(run, len(runs))
            self.cached -= len(runs)
            self.live += len(runs)
            return len(runs)
        if favour:
            self.favour(blocks)
        revived = 0
        left, gone = self._fresh.last, 0  # the others lie in a few runs
        for block, run in zip(blocks, runs, strict=True):
            count = references[block]
            references[block] = count + 1
            if count:
                self.shared += count == 1
                continue
            revived += 1
            if run is None:
                assert self.pins[block], f"block {block} is not cached"
                self.pinned_cached -= 1
                continue
            if run is not left:
                self._let_go(left, gone)
                left, gone = run, 0
            run_of[block] = None
            gone += 1
        self._let_go(left, gone)
        self.cached -= revived
        self.live += revived
        return revived

    def drop(self, block: int) -> bool:
        """Take a reference away. True: it was the last one, and the caller must `keep` or `release` the block at once."""
        references = self.references[block]
        assert references > 0, f"block {block} has no reference to drop"
        self.references[block] = references - 1
        if references == 2:
            self.shared -= 1
        if references > 1:
            return False
        self.live -= 1
        return True

    def drop_all(self, blocks: list[int], of_use: list[bytes | None], now: float) -> list[int]:
        """Take a reference from each of some blocks, in their order; what is `of_use` becomes cached with the last one.

        Returns those whose last reference went and which are of no use: the caller must `release` them at once.
        """
        if not blocks:
            return []
        references, run_of, favoured = self.references, self._run_of, self._favoured
        useless: list[int] = []
        others = blocks  # whose case is less simple
        if not self.pinned:
            others = []
            run = fresh = self._fresh.run_at(now)
            first: list[int] = []  # of them, where others go into the second segment
            if favoured[blocks[-1]]:  # the head of a chain, with at least its tail's use
                run = self._proven.run_at(now)
                for block in blocks:
                    if references[block] != 1:
                        others.append(block)
                        continue
                    references[block] = 0
                    if of_use[block] is None:
                        useless.append(block)
                    elif favoured[block]:
                        run_of[block] = run
                    else:
                        run_of[block] = fresh
                        first.append(block)
            else:
                for block in blocks:
                    if references[block] != 1:
                        others.append(block)
                        continue
                    references[block] = 0
                    if of_use[block] is None:
                        useless.append(block)
                    else:
                        run_of[block] = run
            last = blocks
            if useless or others or first:  # most often the first one alone: a table's last block
                left = not others and not first and useless == blocks[: len(useless)]
                last = blocks[len(useless) :] if left else [block for block in blocks if run_of[block] is run]
            self.live -= len(useless) + len(first) + len(last)
            self.cached += len(first) + len(last)
            run.segment.append(run, last)
            if run is not fresh:
                self._fresh.append(fresh, first)  # before what is moved behind it from the second segment
                self._demote()
        for block in others:
            if self.drop(block):
                if of_use[block] is None:
                    useless.append(block)
                else:
                    self.keep(block, now)
        return useless

    def favour(self, blocks: list[int]) -> None:
        """Take note that live blocks have proven their use: once they are cached they go after those that have not."""
        if not self._most_proven:
            return
        favoured = self._favoured
        for block in blocks:
            favoured[block] = True

    def _demote(self) -> None:
        """Move what the second segment has too much of to the end of the first."""
        proven, run_of = self._proven, self._run_of
        while (excess := proven.held - self._most_proven) > 0:
            run = next(iter(proven.runs))
            moved: list[int] = []
            while run.first < len(run.blocks) and len(moved) < excess:
                block = run.blocks[run.first]
                run.first += 1
                if run_of[block] is run:
                    moved.append(block)
            later = self._fresh.last = Run(run.at, self._fresh, [])
            for block in moved:
                run_of[block] = later
                self._favoured[block] = False
            self._let_go(run, len(moved))
            self._fresh.append(later, moved)

    def keep(self, block: int, now: float) -> None:
        """Make a block whose last reference was dropped a cached one, the last in the order of eviction."""
        assert self.references[block] == 0
        if self.pins[block]:
            self.pinned_cached += 1
            self._stamps[block] = now
        else:
            self._enter(block, now)
        self.cached += 1

    def pin(self, block: int) -> bool:
        """Keep a live or cached block from eviction, once more. True: it was not pinned before."""
        self.pins[block] += 1
        if self.pins[block] > 1:
            return False
        self.pinned += 1
        if self.references[block] == 0:
            self._stamps[block] = self.stamp(block)
            self._leave(block)
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
            self._enter(block, self._stamps[block])
        return True

    def release(self, block: int, now: float) -> None:
        """Make a cached block, or one whose last reference was dropped, a free one."""
        assert self.references[block] == 0
        assert self.pins[block] == 0, f"block {block} is pinned"
        if self._run_of[block] is not None:
            self._leave(block)
            self.cached -= 1
        self._favoured[block] = False
        self._stamps[block] = now
        self._free.append(block)

    def release_dropped(self, blocks: list[int], now: float) -> None:
        """Make blocks whose last reference was dropped just now, and which are not pinned, free ones."""
        favoured, stamps = self._favoured, self._stamps
        for block in blocks:
            favoured[block] = False
            stamps[block] = now
        self._free += blocks

    def release_all(self, now: float) -> list[int]:
        """Make all cached blocks free ones, none of which may be pinned; return them in the order of eviction."""
        assert not self.pinned_cached
        blocks = list(self.eviction_order())
        for block in blocks:
            self._run_of[block] = None
            self._favoured[block] = False
            self._stamps[block] = now
        self._fresh, self._proven = Segment(), Segment()
        self._free += blocks
        self.cached = 0
        return blocks

    def oldest(self) -> int:
        """Return the cached block that is evicted next. There must be one."""
        return self.oldest_some(1)[0]

    def oldest_some(self, count: int) -> list[int]:
        """Return the cached blocks that are evicted next: of one run, one at least and `count` at most."""
        runs = self._fresh.runs or self._proven.runs
        assert runs, "no cached block"
        run, run_of = next(iter(runs)), self._run_of
        while run_of[run.blocks[run.first]] is not run:
            run.first += 1
        blocks = run.blocks[run.first : run.first + count]
        return blocks if run.whole else [block for block in blocks if run_of[block] is run]

    def reuse(self, blocks: list[int]) -> None:
        """Give out cached blocks of one run: from cached to free to live at once, each with one reference."""
        references, generations, run_of = self.references, self.generations, self._run_of
        run = run_of[blocks[0]]
        assert run is not None
        for block in blocks:
            run_of[block] = None
            self._favoured[block] = False
            references[block] = 1
            generations[block] += 1
        if run.whole and run.blocks[run.first] == blocks[0]:
            run.first += len(blocks)
        self._let_go(run, len(blocks))
        self.cached -= len(blocks)
        self.live += len(blocks)

    def eviction_order(self) -> Iterator[int]:
        """Yield the cached blocks that are not pinned, the next to be evicted first."""
        run_of = self._run_of
        for run in chain(self._fresh.runs, self._proven.runs):
            for block in run.blocks[run.first :]:
                if run_of[block] is run:
                    yield block

    def stamp(self, block: int) -> float:
        """Return when a block that is not live was last in use, by the owner's clock."""
        run = self._run_of[block]
        return self._stamps[block] if run is None else run.at

    def stamps(self, part: slice) -> list[float]:
        """Return each block's stamp, of a part."""
        pairs = zip(self._run_of[part], self._stamps[part], strict=True)
        return [stamp if run is None else run.at for run, stamp in pairs]

    def evictable_in(self, part: slice) -> list[bool]:
        """Return for each block of a part whether it is cached and not pinned."""
        return [run is not None for run in self._run_of[part]]

    def _enter(self, block: int, now: float) -> None:
        assert self._run_of[block] is None
        if not self._favoured[block]:
            run = self._run_of[block] = self._fresh.run_at(now)
            self._fresh.append(run, [block])
            return
        run = self._run_of[block] = self._proven.run_at(now)
        self._proven.append(run, [block])
        self._demote()

    def _leave(self, block: int) -> None:
        run = self._run_of[block]
        assert run is not None, f"block {block} is not cached"
        self._run_of[block] = None
        self._let_go(run, 1)

    def _let_go(self, run: Run, count: int) -> None:
        """Take note that blocks have left a run. An empty one is forgotten, one that is mostly their entries is written anew."""
        if not count:
            return
        run.held -= count
        run.segment.held -= count
        if not run.held:
            del run.segment.runs[run]
            run.blocks, run.first = [], 0
        elif 2 * run.held < len(run.blocks):
            run.blocks = [block for block in run.blocks[run.first :] if self._run_of[block] is run]
            run.first = 0

    def check_invariants(self, breathe: Callable[[], None] = no_breath) -> int:
        """Check every block's state against the counts. Returns how many checks were made. `breathe`: see Memory.

        Raises:
            AssertionError: one does not hold.
        """
        breathe()
        live = sum(1 for references in self.references if references)
        assert live == self.live, f"{live} blocks have references, {self.live} count as live"
        shared = sum(1 for references in self.references if references > 1)
        assert shared == self.shared, f"{shared} blocks are shared, {self.shared} count as shared"
        cached = 0
        for segment in self._fresh, self._proven:
            assert segment.held == sum(run.held for run in segment.runs), "a segment of the order does not add up"
            assert all(run.segment is segment for run in segment.runs)
        assert self._proven.held <= self._most_proven, "too much is favoured"
        for number, run in enumerate(chain(self._fresh.runs, self._proven.runs)):
            if not number % BREATH:
                breathe()
            blocks = [block for block in run.blocks[run.first :] if self._run_of[block] is run]
            assert len(blocks) == len(set(blocks)) == run.held > 0, "a run of cached blocks does not add up"
            assert len(run.blocks) <= 2 * run.held, "a run holds more that has left than what is there"
            for block in blocks:
                assert self.references[block] == 0, f"cached block {block} has references"
                assert self.pins[block] == 0, f"pinned block {block} could be evicted"
            cached += len(blocks)
        assert cached == self.total - self._run_of.count(None), "a block is in a run that is not in the order"
        breathe()
        pinned = [block for block, pins in enumerate(self.pins) if pins]
        assert len(pinned) == self.pinned, f"{len(pinned)} blocks are pinned, {self.pinned} count as pinned"
        pinned_cached = sum(1 for block in pinned if self.references[block] == 0)
        assert pinned_cached == self.pinned_cached, f"{pinned_cached} blocks without references are pinned, not as counted"
        assert cached + pinned_cached == self.cached, f"{cached} blocks can be evicted, {self.cached} count as cached"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + self.total - self._unused == self.free, "free blocks do not add up"
        for number, block in enumerate(free):
            if not number % BREATH:
                breathe()
            assert self.state(block) is BlockState.FREE, f"block {block} is in the free list and not free"
            assert block < self._unused
        return 3 * self.total + 2 * cached + len(free) + 7
