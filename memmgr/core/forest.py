"""The prefix index to look at: its nodes as a forest, and what it knows of a part of the blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

#: No node; a negative number is no block.
NONE: Final = -1


@dataclass(frozen=True, slots=True)
class Forest:
    """The nodes of an index and how they hang together: its own lists, to be read at once."""

    hashes: Sequence[bytes | None]
    parents: Sequence[bytes | None]
    tokens: Sequence[bytes | None]
    tenants: Sequence[str]
    depths: Sequence[int]
    hits: Sequence[int]
    first_child: Sequence[int]
    next_sibling: Sequence[int]
    roots: Sequence[int]  # the most recent child of each

    def walk(self, tenant: str, max_depth: int) -> Iterator[int]:
        """Yield the blocks depth first, a tenant's or (empty) all, down to `max_depth` blocks from the root or (0) to the leaves.

        The domains come in no order that means anything; the children of a node the most recent first.
        """
        for root in self.roots:
            if tenant and self.tenants[root] != tenant:
                continue
            ahead = [root]
            while ahead:
                block = ahead.pop()
                if (after := self.next_sibling[block]) != NONE:
                    ahead.append(after)
                yield block
                if (child := self.first_child[block]) != NONE and not 0 < max_depth <= self.depths[block] + 1:
                    ahead.append(child)


@dataclass(frozen=True, slots=True)
class Nodes:
    """What the index knows of a part of the blocks, copied; None, "" or 0 where one is not in it, but for depths and hits."""

    names: list[bytes | None]
    parents: list[bytes | None]
    tokens: list[bytes | None]  # 4 bytes each
    tenants: list[str]
    depths: list[int]
    hits: list[int]
    serials: list[int]
