"""From the prefix index, its pins and a dry run to the messages of admin.proto; see `views` for which part runs where."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from kilburn.v1 import admin_pb2 as admin
from memmgr.core.pins import Pin
from memmgr.core.prefix import Forest
from memmgr.engine import Engine
from memmgr.schedule.probe import Probe
from memmgr.views import FRAMING_BYTES, PAGE_BYTES

#: So many nodes are looked up at once; for more the whole index is copied, and they are looked up in the copy.
_NODES_AT_ONCE: Final = 2048


class _Node(NamedTuple):
    block: int
    name: bytes
    parent: bytes
    depth: int
    references: int
    hits: int
    pinned: bool
    tokens: bytes


def snapshot_tree(engine: Engine, tenant: str, max_depth: int, max_nodes: int) -> tuple[int, Iterator[_Node]]:
    """Return the cursor, and a tenant's nodes or all, depth first, down to `max_depth` blocks, at most `max_nodes` (0: all)."""
    cursor = engine.take_events()
    if engine.session is None:
        return cursor, iter(())
    memory = engine.session.scheduler.memory
    copied = not 0 < max_nodes <= _NODES_AT_ONCE
    references, pins = memory.pool.references, memory.pool.pins
    forest = memory.index.forest(copied=copied)
    if copied:
        return cursor, islice(_nodes(forest, references[:], pins[:], tenant, max_depth), max_nodes or None)
    return cursor, iter(list(islice(_nodes(forest, references, pins, tenant, max_depth), max_nodes)))


def _nodes(forest: Forest, references: Sequence[int], pins: Sequence[int], tenant: str, max_depth: int) -> Iterator[_Node]:
    for block in forest.walk(tenant, max_depth):
        name, parent, tokens = forest.hashes[block], forest.parents[block], forest.tokens[block]
        assert name is not None
        assert parent is not None
        assert tokens is not None
        depth, hits = forest.depths[block], forest.hits[block]
        yield _Node(block, name, parent, depth, references[block], hits, pins[block] > 0, tokens)


# --------------------------------------------------------------------------------------------- in the admin's thread


def prefix_pages(nodes: Iterator[_Node], cursor: int, *, with_tokens: bool) -> Iterator[admin.PrefixPage]:
    """Yield the nodes in pages under 1 MiB; one empty page where there are none."""
    page, size, full = admin.PrefixPage(cursor=cursor), 0, False
    for node in nodes:
        message = page.nodes.add(
            prefix_hash=node.name,
            parent_hash=node.parent,
            block=node.block,
            depth=node.depth,
            references=node.references,
            hits=node.hits,
            pinned=node.pinned,
            token_ids=array("I", node.tokens) if with_tokens else (),
        )
        size += message.ByteSize() + FRAMING_BYTES
        if size > PAGE_BYTES:
            yield page
            page, size, full = admin.PrefixPage(cursor=cursor), 0, True
    if page.nodes or not full:
        yield page


def pin_message(pin: Pin, pin_id: str, block_size: int, now: float) -> admin.Pin:
    """Return a pin as it is; one that lasts until it is unpinned expires in 0 seconds."""
    expires_in = 0.0 if math.isinf(pin.expires_at) else max(0.0, pin.expires_at - now)
    return admin.Pin(
        pin_id=pin_id,
        tokens=len(pin.blocks) * block_size,
        blocks=len(pin.blocks),
        expires_in_seconds=expires_in,
        tenant=pin.tenant,
    )


def probe_message(probe: Probe) -> admin.ProbeResponse:
    """Return a dry run's result."""
    return admin.ProbeResponse(
        fits_now=probe.fits_now,
        fits_ever=probe.fits_ever,
        cached_tokens=probe.cached_tokens,
        new_blocks=probe.new_blocks,
        worst_case_blocks=probe.worst_case_blocks,
        evicted_blocks=probe.evicted_blocks,
        waiting_ahead=probe.waiting_ahead,
    )
