"""From the prefix index, its pins and a dry run to the messages of admin.proto; see `views` for which part runs where."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from kilburn.v1 import admin_pb2 as admin
from memmgr.core.pins import Pin
from memmgr.dumps import Part
from memmgr.engine import Engine
from memmgr.schedule.probe import Probe
from memmgr.views import FRAMING_BYTES, PAGE_BYTES

#: So many nodes are looked up between two steps; for more the pool is dumped, and they are looked up in the dump.
NODES_AT_ONCE: Final = 2048


class Node(NamedTuple):
    """One node of the prefix index; `tokens` are little-endian 32-bit ids."""

    block: int
    name: bytes
    parent: bytes
    depth: int
    references: int
    hits: int
    pinned: bool
    tokens: bytes


def snapshot_tree(engine: Engine, tenant: str, max_depth: int, max_nodes: int) -> tuple[int, Iterator[Node]]:
    """Return the cursor, and the first `max_nodes` of a tenant's nodes or all, depth first, down to `max_depth` blocks."""
    assert 0 < max_nodes <= NODES_AT_ONCE
    cursor = engine.take_events()
    if engine.session is None:
        return cursor, iter(())
    memory = engine.session.memory
    references, pins, forest = memory.pool.references, memory.pool.pins, memory.index.forest()
    found: list[Node] = []
    for block in islice(forest.walk(tenant, max_depth), max_nodes):
        name, parent, tokens = forest.hashes[block], forest.parents[block], forest.tokens[block]
        assert name is not None
        assert parent is not None
        assert tokens is not None
        depth, hits = forest.depths[block], forest.hits[block]
        found.append(Node(block, name, parent, depth, references[block], hits, pins[block] > 0, tokens))
    return cursor, iter(found)


# --------------------------------------------------------------------------------------------- in the admin's thread


def tree_of(parts: list[Part], tenant: str, max_depth: int) -> Iterator[Node]:
    """Yield the nodes in a dump of the pool, as `snapshot_tree` has them: the children of a node the most recent first."""
    size = len(parts[0].references) if parts else 1  # of all but the last
    children: dict[bytes, int | list[int]] = {}  # a list where there are several: most have one, and a million lists are many
    ahead: list[int] = []
    for part in parts:
        for offset, parent in enumerate(part.parents):
            if parent is None:
                continue
            block = part.first + offset
            if part.depths[offset] == 0:
                if not tenant or part.tenants[offset] == tenant:
                    ahead.append(block)
            elif parent not in children:
                children[parent] = block
            else:
                others = children[parent]
                if isinstance(others, int):
                    children[parent] = [others, block]
                else:
                    others.append(block)
    first = parts[0].first if parts else 0

    def serial(block: int) -> int:
        return parts[(block - first) // size].serials[(block - first) % size]

    ahead.sort(key=lambda block: (parts[(block - first) // size].parents[(block - first) % size] or b"", serial(block)))
    while ahead:
        block = ahead.pop()
        part, offset = parts[(block - first) // size], (block - first) % size
        name, parent, tokens, depth = part.names[offset], part.parents[offset], part.tokens[offset], part.depths[offset]
        assert name is not None
        assert parent is not None
        assert tokens is not None
        yield Node(block, name, parent, depth, part.references[offset], part.hits[offset], part.pins[offset] > 0, tokens)
        if name in children and not 0 < max_depth <= depth + 1:
            below = children[name]
            ahead += [below] if isinstance(below, int) else sorted(below, key=serial)


def prefix_pages(nodes: Iterator[Node], cursor: int, *, with_tokens: bool) -> Iterator[admin.PrefixPage]:
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
