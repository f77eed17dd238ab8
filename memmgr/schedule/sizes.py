"""How many blocks requests need, before they have them: what admission reckons with.

Knows requests and the memory's block size; not queues. All of one request's sequences share its prompt's whole blocks; nothing
more is reckoned with, whatever they share at the moment.
"""

from __future__ import annotations

from collections.abc import Iterable

from memmgr.core.memory import Memory
from memmgr.schedule.plans import Limits, Submission
from memmgr.schedule.requests import Request, Sequence


def most_outputs(submission: Submission, memory: Memory, limits: Limits) -> int:
    """Return how many outputs each of a request's sequences can have: the context's rest, or what they can hold together."""
    prompt = len(submission.prompt)
    room = limits.context_length - prompt
    if submission.width == 1:
        return room
    shared = prompt // memory.block_size
    each = (memory.pool.total - memory.pool.pinned - shared) // submission.width
    return min(room, (shared + each) * memory.block_size - prompt)


def most_blocks(submission: Submission, max_outputs: int, memory: Memory) -> int:
    """Return how many blocks a request can come to hold."""
    shared = len(submission.prompt) // memory.block_size
    each = memory.blocks_for(len(submission.prompt) + max_outputs) - shared
    return shared + each * submission.width


def blocks_owed(running: Iterable[Request], memory: Memory) -> int:
    """Return how many blocks admitted requests still have to take for what they know: they are not another's."""
    owed = 0
    for request in running:
        if not request.forked:
            live = request.live
            assert live[0].table is not None
            owed += memory.blocks_for(live[0].promised + 1) - len(live[0].table.blocks) + branch_blocks(live, memory)
            continue
        for sequence in request.sequences:
            if not sequence.ended and not sequence.decoding:
                assert sequence.table is not None
                owed += memory.blocks_for(sequence.promised + 1) - len(sequence.table.blocks)
    return owed


def branch_blocks(live: list[Sequence], memory: Memory) -> int:
    """Return how many blocks a request's others need beside those of its trunk, for what they know and one token more."""
    shared = live[0].request.prompt_length // memory.block_size
    return sum(memory.blocks_for(sequence.promised + 1) - shared for sequence in live[1:])


def blocks_after(trunk: Sequence, length: int, memory: Memory) -> int:
    """Return how many blocks a trunk needs for what it knows behind its first `length` tokens."""
    return memory.blocks_for(trunk.promised + 1) - memory.blocks_for(length + 1)
