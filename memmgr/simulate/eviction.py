"""Other orders of eviction than the core's, to compare with; what no order can beat; and what no size can.

The core evicts what was used least recently, the tail of a chain before its head. Here a use also counts by how often its prefix
was used before: whenever that number doubles, a block is kept for as much longer as it takes, on average, until a block is used
again. A number outlives its block for some time (a "ghost", as in 2Q and ARC): what came back after a while is likely to come
again, and a small cache would never see its second use otherwise.

Every use of a block is one of the block before it in its chain, a moment later. So a head has at least its tail's number and
time, and the order is again tail before head.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf, log2
from typing import ClassVar, Final

from memmgr.core.blocks import BlockState
from memmgr.core.memory import Memory
from memmgr.core.table import RECENCY, EvictionOrder, MemoryCounters
from memmgr.simulate.prefixes import Hits, Prompt

#: The mean time until a block is used again is over about so many uses: longer than bursts, shorter than a day.
_MEMORY_USES: Final = 1 << 14

#: Entries of the heap that are out of date are dropped when there are more of them than of others, and more than so many.
_MIN_STALE: Final = 64


class RecencyMemory(Memory):
    """A memory that evicts by recency alone."""

    def __init__(self, total_blocks: int, block_size: int, *, prefix_cache: bool, counters: MemoryCounters) -> None:
        super().__init__(total_blocks, block_size, prefix_cache=prefix_cache, counters=counters, order=RECENCY)


def segmented(share: float, names: int) -> type[Memory]:
    """Return the core's memory with another share of the pool for what has proven its use, and other names for each block."""

    class SegmentedMemory(Memory):
        def __init__(self, total_blocks: int, block_size: int, *, prefix_cache: bool, counters: MemoryCounters) -> None:
            order = EvictionOrder(share, names)
            super().__init__(total_blocks, block_size, prefix_cache=prefix_cache, counters=counters, order=order)

    return SegmentedMemory


class FrequencyMemory(RecencyMemory):
    """A memory that evicts by recency and count. `seen` names are remembered for each block of the pool."""

    seen: ClassVar[int] = 16

    def __init__(self, total_blocks: int, block_size: int, *, prefix_cache: bool, counters: MemoryCounters) -> None:
        super().__init__(total_blocks, block_size, prefix_cache=prefix_cache, counters=counters)
        self._uses = 0  # the clock
        self._gap = float(total_blocks)  # mean uses of others until a block is used again
        self._names_seen: OrderedDict[bytes, tuple[int, int]] = (
            OrderedDict()
        )  # name -> how often, when last; in the order of that
        self._values: dict[int, float] = {}  # cached block -> its value
        self._heap: list[tuple[float, int]] = []

    def release(self, key: Hashable, tokens: array[int], *, keep_tail: bool = True) -> None:
        """See Memory; and count the use of each block."""
        blocks = self.tables[key].blocks
        super().release(key, tokens, keep_tail=keep_tail)
        for block in reversed(blocks):
            name = self.index.hash_of(block)
            if name is None:
                continue
            value = self._use(name)
            if self.pool.state(block) is BlockState.CACHED:
                self._values[block] = value
                heappush(self._heap, (value, block))
        if len(self._heap) > 2 * self.pool.cached + _MIN_STALE:
            self._heap = [(self._values[block], block) for block in self.pool.eviction_order()]
            heapify(self._heap)

    def _use(self, name: bytes) -> float:
        """Count a use and return what a block is worth after it."""
        self._uses += 1
        count, last = self._names_seen.pop(name, (0, self._uses))
        if count:
            self._gap += (self._uses - last - self._gap) / _MEMORY_USES
        self._names_seen[name] = (count + 1, self._uses)
        if len(self._names_seen) > self.seen * self.pool.total:
            self._names_seen.popitem(last=False)
        return self._uses + self._gap * log2(count + 1)

    def _victims(self, count: int) -> list[int]:
        while self._heap:
            value, block = heappop(self._heap)
            if self._values.get(block) == value and self.pool.state(block) is BlockState.CACHED:
                return [block]
        return super()._victims(1)  # the source of a copy, cached again without a use


class BriefFrequencyMemory(FrequencyMemory):
    """The same, remembering no more names than there are blocks."""

    seen = 1


# ---------------------------------------------------------------------------------------------------- bounds


def unbounded(prompts: Iterable[Prompt], size: int) -> Hits:
    """Return the hits of a cache that never forgets; `size` is a block's, in the prompts' tokens."""
    known: dict[tuple[int, bytes], int] = {}
    hits = Hits()
    for prompt in prompts:
        hits.prompts += 1
        hits.asked += prompt.asked
        hits.found += sum(not new for _, new in _nodes(prompt, size, known))  # what is known hangs on what is known
    return hits


def bound(prompts: Iterable[Prompt], size: int, num_blocks: int) -> Hits:
    """Return more hits than any order of eviction can have with so many blocks, or as many.

    Belady's: what is used again last goes first, what is never used again is not kept at all. For single blocks no policy has
    more hits; that a block counts as found only behind all blocks before it, and that a prompt's blocks have to be in the pool
    together, can only cost a real cache more. (Where two are used again at the same time, the deeper one goes first.)
    """
    known: dict[tuple[int, bytes], int] = {}
    asked: list[int] = []
    chains: list[list[int]] = []
    for prompt in prompts:
        asked.append(prompt.asked)
        chains.append([node for node, _ in _nodes(prompt, size, known)])
    following = _next_uses(chains, len(known))
    hits = Hits(prompts=len(chains), asked=sum(asked))
    kept: dict[int, float] = {}  # node -> its next use
    heap: list[tuple[float, int, int]] = []
    for chain, nexts in zip(chains, following, strict=True):
        for depth, (node, use) in enumerate(zip(chain, nexts, strict=True)):
            hits.found += node in kept
            if use == inf:
                kept.pop(node, None)
                continue
            kept[node] = use
            heappush(heap, (-use, -depth, node))
            while len(kept) > num_blocks:
                negative, _, last = heappop(heap)
                if kept.get(last) == -negative:
                    del kept[last]
    return hits


def _next_uses(chains: list[list[int]], nodes: int) -> list[list[float]]:
    """Return for each node of each chain the number of the next chain that has it."""
    following: list[list[float]] = []
    last = [inf] * nodes
    for number in reversed(range(len(chains))):
        following.append([last[node] for node in chains[number]])
        for node in chains[number]:
            last[node] = number
    following.reverse()
    return following


def _nodes(prompt: Prompt, size: int, known: dict[tuple[int, bytes], int]) -> Iterator[tuple[int, bool]]:
    """Yield the number of each whole block's prefix in a tree that grows in `known`, and whether it is new."""
    above = -1
    for start in range(0, len(prompt.tokens), size):
        name = (above, prompt.tokens[start : start + size].tobytes())
        new = name not in known
        above = known.setdefault(name, len(known))
        yield above, new
