"""What a reader who has a snapshot and all later events knows of every block, by the words of admin.proto alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kilburn.v1 import admin_pb2 as admin


@dataclass
class BlockAsTold:
    """One block. `holders` may have one of them twice for a moment: within a step that copies."""

    holders: Counter[str] = field(default_factory=Counter)
    prefix_hash: bytes = b""
    pinned: bool = False
    tokens: tuple[int, ...] | None = None  # where an event has told them

    @property
    def references(self) -> int:
        return self.holders.total()

    @property
    def state(self) -> int:
        if self.references:
            return admin.BLOCK_STATE_LIVE
        return admin.BLOCK_STATE_CACHED if self.prefix_hash else admin.BLOCK_STATE_FREE


class Rebuilt:
    """A pool as told."""

    def __init__(self, snapshot: Iterable[admin.BlockPage]) -> None:
        pages = list(snapshot)
        (self.cursor,) = {page.cursor for page in pages}
        self.blocks = {
            block.block: BlockAsTold(Counter(block.holders), block.prefix_hash, block.pinned)
            for page in pages
            for block in page.blocks
        }

    def follow(self, events: Iterable[admin.Event]) -> None:
        for event in events:
            assert event.lost == 0
            assert event.cursor == self.cursor + 1
            self.cursor = event.cursor
            self.take(event)

    def take(self, event: admin.Event) -> None:
        if event.kind == admin.EVENT_KIND_PREEMPTED:
            assert event.request_id
            return
        if event.kind == admin.EVENT_KIND_STARTED:
            self.blocks = {number: BlockAsTold() for number in self.blocks}
            return
        block, who = self.blocks[event.block], f"{event.tenant}/{event.request_id}/{event.index}"
        if event.kind == admin.EVENT_KIND_ALLOCATED:
            assert block == BlockAsTold(), "what is given out was free"
            block.holders[who] += 1
        elif event.kind == admin.EVENT_KIND_SHARED:
            assert block.state != admin.BLOCK_STATE_FREE
            block.holders[who] += 1
        elif event.kind in {admin.EVENT_KIND_SWAPPED_OUT, admin.EVENT_KIND_SWAPPED_IN}:
            assert block.holders[who]
        elif event.kind == admin.EVENT_KIND_COPIED:
            assert block.state == self.blocks[event.source].state == admin.BLOCK_STATE_LIVE
        elif event.kind == admin.EVENT_KIND_RELEASED:
            assert block.holders[who]
            block.holders[who] -= 1
            block.holders += Counter()
        elif event.kind == admin.EVENT_KIND_INDEXED:
            assert not block.prefix_hash
            assert event.token_ids
            block.prefix_hash, block.tokens = event.prefix_hash, tuple(event.token_ids)
        elif event.kind in {admin.EVENT_KIND_EVICTED, admin.EVENT_KIND_FLUSHED}:
            assert block.prefix_hash == event.prefix_hash
            assert not block.pinned, "a pinned block has left the index"
            block.prefix_hash, block.tokens = b"", None
            assert event.kind == admin.EVENT_KIND_FLUSHED or not block.references, "EVICTED implies freed"
        elif event.kind == admin.EVENT_KIND_FREED:
            assert block == BlockAsTold(), "what is freed holds nothing"
        elif event.kind in {admin.EVENT_KIND_PINNED, admin.EVENT_KIND_UNPINNED}:
            assert block.prefix_hash == event.prefix_hash
            assert block.pinned == (event.kind == admin.EVENT_KIND_UNPINNED)
            block.pinned = not block.pinned
        else:
            raise AssertionError(f"nobody knows what to make of {event}")

    def check(self, snapshot: Iterable[admin.BlockPage]) -> None:
        """Compare with a later snapshot."""
        for page in snapshot:
            assert page.cursor == self.cursor
            for block in page.blocks:
                told = self.blocks[block.block]
                assert told.state == block.state
                assert told.references == block.references
                assert told.holders == Counter(block.holders)
                assert told.prefix_hash == block.prefix_hash
                assert told.pinned == block.pinned
                if told.tokens is not None and not told.references:
                    assert len(told.tokens) == block.filled
