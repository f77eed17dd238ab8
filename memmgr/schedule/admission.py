"""Whether a waiting request can begin: what the pool has, less what others were promised or are guaranteed, and its quota.

Knows requests, memory and quotas; not queues, slots or the budget of a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from typing import Final

from memmgr.core.lineage import Lineage
from memmgr.core.memory import Memory
from memmgr.core.swap import SwapIn, SwappingMemory
from memmgr.core.table import Admission
from memmgr.schedule.requests import Request, Sequence
from memmgr.schedule.sizes import blocks_after, blocks_owed, branch_blocks

#: A margin is doubled so often at most; it is bounded by the sequences that run anyway.
_MOST_DOUBLINGS: Final = 16


def plan_admission(
    lineage: Lineage,
    tokens: array[int],
    rest: int,
    running: Iterable[Request],
    memory: Memory,
    *,
    short: bool = False,
    margin: int = 0,
    whole: bool = False,
) -> Admission | None:
    """Decide whether a request can begin with these known tokens, `rest` being the blocks that it needs beside theirs.

    Where blocks are `short`, it may only take what is guaranteed to its tenant. `margin` blocks more have to be left.
    Where it is to be computed `whole`, nothing cached is used.
    """
    reserve, allowance = _terms(lineage.tenant, running, memory, short=short)
    allowed = None if allowance is None else allowance - rest
    if whole:
        return memory.plan_whole_admission(tokens, reserve + rest + margin, allowed)
    return memory.plan_admission(lineage, tokens, reserve + rest + margin, allowed)


def plan_swap_in(
    request: Request,
    live: list[Sequence],
    running: Iterable[Request],
    memory: SwappingMemory,
    *,
    short: bool = False,
    margin: int = 0,
) -> SwapIn | None:
    """Decide whether a request can come back from the host. `short` and `margin`: as for an admission."""
    tables = _swapped_tables(live, memory)
    reserve, allowance = _terms(request.submission.tenant, running, memory, short=short)
    return memory.plan_swap_in(list(tables), tables, _blocks_back(live, memory), reserve + margin, allowance)


def _terms(tenant: str, running: Iterable[Request], memory: Memory, *, short: bool) -> tuple[int, int | None]:
    """Return how many blocks are not a tenant's to begin with, and how many it may make live; None: no matter how many."""
    quotas, owed = memory.quotas, blocks_owed(running, memory)
    if not quotas:
        return sum(owed.values()), None
    allowance = quotas.unused_floor(tenant) if short else quotas.allowance(tenant)  # a floor is within its limit
    return quotas.kept_back(tenant, owed), None if allowance is None else allowance - owed.get(tenant, 0)


def _swapped_tables(live: list[Sequence], memory: SwappingMemory) -> dict[Hashable, array[int]]:
    return {sequence.key: sequence.tokens for sequence in live if sequence.key in memory.swapped}


def _blocks_back(live: list[Sequence], memory: Memory) -> int:
    return memory.blocks_for(live[0].promised + 1) + branch_blocks(live, memory)


def blocks_beside(request: Request, live: list[Sequence], memory: Memory) -> int:
    """Return how many blocks a request needs beside those for what its trunk computes first."""
    return branch_blocks(live, memory) + blocks_after(live[0], len(request.trunk_tokens), memory)


def margin(request: Request, running_sequences: int) -> int:
    """Return how many blocks have to be left where a request begins again that was preempted: more each time.

    Who is preempted was the last in rank, and will be so again: where it comes back to a pool that is full at once, it has been
    computed, or brought in, for nothing. One block for each sequence that runs is as much as all of them can take in a step.
    """
    return min((1 << min(request.preemptions, _MOST_DOUBLINGS)) - 1, running_sequences)


def is_small(request: Request, other: Request) -> bool:
    """Whether a request may pass another one for which there is no room: it needs half as much at most."""
    return 2 * _known_tokens(request) <= _known_tokens(other)


def _known_tokens(request: Request) -> int:
    return sum(len(sequence.tokens) for sequence in request.live)


def is_over_limit(request: Request, live: list[Sequence], running: Iterable[Request], memory: Memory) -> bool:
    """Whether its tenant's own limit keeps a request from beginning, however much is free."""
    tenant = request.submission.tenant
    allowance = memory.quotas.allowance(tenant)
    if allowance is None:
        return False
    if request.swapped:
        assert isinstance(memory, SwappingMemory)
        tables = _swapped_tables(live, memory)
        needed = memory.blocks_charged_back(list(tables), tables, _blocks_back(live, memory))
    else:
        tokens = request.trunk_tokens
        charged = memory.blocks_for(len(tokens) + 1) if request.tells else memory.blocks_charged(live[0].lineage, tokens)
        needed = charged + blocks_beside(request, live, memory)
    return needed + blocks_owed(running, memory).get(tenant, 0) > allowance
