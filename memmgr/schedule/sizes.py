"""How many blocks requests need, before they have them: what admission reckons with.

Knows requests and the memory's block size; not queues. All of one request's sequences share its prompt's whole blocks; nothing
more is reckoned with, whatever they share at the moment.
"""

from __future__ import annotations

from collections.abc import Iterable

from memmgr.core.memory import Memory
from memmgr.schedule.plans import Limits, Submission
from memmgr.schedule.requests import Request, Sequence


def most_outputs(tenant: str, prompt: int, width: int, memory: Memory, limits: Limits) -> int:
    """Return how many outputs each of a request's sequences can have: the context's rest, or what they can hold together.

    `prompt` in tokens. Below 1 where they do not fit the pool, or their tenant's limit, however long they wait.
    """
    quotas, room = memory.quotas, limits.context_length - prompt
    limit = quotas.limit(tenant)
    if width == 1 and limit is None:
        return room
    together = memory.pool.total  # one is no longer than the context, whatever is pinned or guaranteed to others
    if width > 1:
        together -= memory.pool.pinned + quotas.guaranteed - quotas.floor(tenant)
    if limit is not None:
        together = min(together, limit)
    shared = prompt // memory.block_size
    each = (together - shared) // width
    return min(room, (shared + each) * memory.block_size - prompt)


def most_blocks(submission: Submission, max_outputs: int, memory: Memory) -> int:
    """Return how many blocks a request can come to hold."""
    shared = len(submission.prompt) // memory.block_size
    each = memory.blocks_for(len(submission.prompt) + max_outputs) - shared
    return shared + each * submission.width


def blocks_owed(running: Iterable[Request], memory: Memory) -> dict[str, int]:
    """Return how many blocks admitted requests still have to take for what they know, by tenant: they are not another's."""
    owed: dict[str, int] = {}
    for request in running:
        blocks = 0
        if not request.forked:
            live = request.live
            assert live[0].table is not None
            blocks = memory.blocks_for(live[0].promised + 1) - len(live[0].table.blocks) + branch_blocks(live, memory)
        else:
            for sequence in request.sequences:
                if not sequence.ended and not sequence.decoding:
                    assert sequence.table is not None
                    blocks += memory.blocks_for(sequence.promised + 1) - len(sequence.table.blocks)
        if blocks:
            tenant = request.submission.tenant
            owed[tenant] = owed.get(tenant, 0) + blocks
    return owed


def branch_blocks(live: list[Sequence], memory: Memory) -> int:
    """Return how many blocks a request's others need beside those of its trunk, for what they know and one token more."""
    shared = live[0].request.prompt_length // memory.block_size
    return sum(memory.blocks_for(sequence.promised + 1) - shared for sequence in live[1:])


def blocks_after(trunk: Sequence, length: int, memory: Memory) -> int:
    """Return how many blocks a trunk needs for what it knows behind its first `length` tokens."""
    return memory.blocks_for(trunk.promised + 1) - memory.blocks_for(length + 1)
