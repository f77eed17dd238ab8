"""What the memory keeps of one sequence, and what it decides: plain values. See `memory`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from memmgr.core.lineage import Lineage
from memmgr.core.prefix import Match, Node


class EvictionOrder(NamedTuple):
    """How much a proven use counts: see Memory. `RECENCY`: nothing."""

    proven_share: float  # of the pool
    names: int  # of evicted blocks, for each block of the pool


#: What a memory evicts by where nothing else is said.
DEFAULT_ORDER: Final = EvictionOrder(0.3, 4)
RECENCY: Final = EvictionOrder(0.0, 0)


@dataclass(slots=True)
class MemoryCounters:
    """Never fall. allocated - freed = live + cached blocks."""

    allocated_blocks: int = 0
    freed_blocks: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0
    partial_copies: int = 0
    forks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0


@dataclass(slots=True, eq=False)
class Table:
    """One sequence's memory. `blocks[i]` holds its tokens i * size .. (i + 1) * size - 1.

    len(blocks) = ceil(planned / size); computed <= planned; blocks 0 .. committed - 1 are full, acknowledged and were offered to
    the index. `node` stands there for the last of them, in its own block or in another's with the same content; None: they can't
    be found, so nothing that stands on them could be.
    """

    key: Hashable
    owner: Hashable
    lineage: Lineage
    blocks: list[int] = field(default_factory=list)
    planned: int = 0
    computed: int = 0
    committed: int = 0
    node: Node | None = None


class Admission(NamedTuple):
    """A sequence can begin: with `cached_tokens` of its prompt from `match`."""

    match: Match
    cached_tokens: int


class Growth(NamedTuple):
    """A table can grow to `length` tokens, by `new_blocks` at its end, after cloning its last block where `clone`."""

    table: Table
    length: int
    new_blocks: int
    clone: bool


class StepMemory(NamedTuple):
    """What a step does to blocks before it computes, in this order.

    `outs` as (block, host block): what is swapped out is read. `freed`: these hold nothing of use. `ins` as (host block, block):
    what is swapped in is there. `copies` as (source, destination).
    """

    copies: tuple[tuple[int, int], ...]
    freed: tuple[int, ...]
    outs: tuple[tuple[int, int], ...] = ()
    ins: tuple[tuple[int, int], ...] = ()
