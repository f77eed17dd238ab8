"""What happened to blocks, as compact records: enough to rebuild state, references, holders, hash and pins of every block.

A record is a plain tuple (kind, block, owner, detail), because one is made for each block that changes hands. `owner` is what the
table was admitted with; `detail` depends on the kind:

    kind         block's                    owner       detail
    ALLOCATED    first reference            who         -
    SHARED       further reference          who         -
    COPIED       content, from another      who         the source block, which stays referenced to the end of the step
    RELEASED     reference that went        who         -
    INDEXED      entry in the index         who         Indexed
    EVICTED      end, to be used again      -           Unindexed; it is free now
    FLUSHED      end in the index           -           Unindexed; FREED follows where it has no reference, else it stays live
    FREED        end                        -           -
    PINNED       first pin                  -           Unindexed
    UNPINNED     last pin that went         -           Unindexed
    PREEMPTED    - (-1)                     who         -
    SWAPPED_OUT  content, to the host       who         -; RELEASED follows
    SWAPPED_IN   content, from the host     who         -; ALLOCATED came before
    STARTED      - (-1)                     -           -; a new pool, all blocks free

A block whose last reference goes is cached where it is in the index; else FREED follows.
"""

from __future__ import annotations

from typing import Final

#: The numbers of admin.proto's EventKind.
ALLOCATED: Final = 1
SHARED: Final = 2
COPIED: Final = 3
RELEASED: Final = 4
INDEXED: Final = 5
EVICTED: Final = 6
FREED: Final = 7
PREEMPTED: Final = 8
SWAPPED_OUT: Final = 9
SWAPPED_IN: Final = 10
FLUSHED: Final = 12
PINNED: Final = 13
UNPINNED: Final = 14
STARTED: Final = 15

#: The block of a record that is about none.
NO_BLOCK: Final = -1

Record = tuple[int, int, object, object]

#: What a block entered the index with: name, parent, tokens (little-endian 32-bit ids), tenant. A plain tuple, as is Unindexed:
#: hundreds of thousands of records are held, and Python's collector of cycles lets go of plain tuples of bytes and strings, and
#: of those alone. With named ones each full collection held up a step for 200 ms.
Indexed = tuple[bytes, bytes, bytes, str]

#: What a block was known by: name, tenant.
Unindexed = tuple[bytes, str]
