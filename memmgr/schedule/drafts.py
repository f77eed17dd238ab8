"""A step being planned: who computes how many tokens in it, and whose memory goes where there is not enough.

A draft has a budget of tokens. A running sequence takes its part, and the blocks that it grows by; where those are short, the
running request of the last rank is preempted, and gets its part of the budget back: its blocks go, what the prefix index knows of
them stays cached, and it waits, with its old rank, to be computed again, or on the host, to be brought in again.

Knows budget, growth and preemption; not who is admitted (admitting.py), nor what a plan looks like (planning.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from memmgr.core.memory import Memory
from memmgr.core.swap import SwappingMemory
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.queues import Queues
from memmgr.schedule.requests import Request, Sequence
from memmgr.schedule.tenants import choose_victim, choose_victim_for_floors


class Draft:
    """See the module. `counts`: tokens of each sequence, in the order of the plan's chunks; `opened`: who begins in this step."""

    __slots__ = ("_counters", "_memory", "_queues", "_swap", "_tellable", "budget", "counts", "opened")

    def __init__(
        self,
        budget: int,
        memory: Memory,
        swap: SwappingMemory | None,
        queues: Queues,
        counters: ScheduleCounters,
        tellable: int = 0,
    ) -> None:
        self.budget = budget  # tokens that are left
        self._tellable = tellable  # prompt tokens that the step may still tell of
        self.counts: Final[dict[Sequence, int]] = {}
        self.opened: Final[list[Request]] = []
        self._memory: Final = memory
        self._swap: Final = swap
        self._queues: Final = queues
        self._counters: Final = counters

    def settle(self) -> None:
        """Make available what is guaranteed and not used, at the cost of those who have more than is guaranteed to them."""
        quotas = self._memory.quotas
        while quotas.deficit(self._memory.pool.available) > 0:
            self._preempt(choose_victim_for_floors(self._queues.running, quotas))

    def schedule(self, sequence: Sequence) -> None:
        """Give a running sequence its part of the budget, at the cost of those behind it where blocks are short."""
        count = min(sequence.uncomputed, self.budget)
        if count and sequence.request.tells:
            count = self._bound_telling(sequence, count)
        if count == 0:
            return
        assert sequence.table is not None
        while (growth := self._memory.plan_growth(sequence.table, count)) is None:
            victim = self._make_room(sequence, count)
            if victim is sequence.request:
                return
        self._memory.grow(growth)
        self.counts[sequence] = count
        self.budget -= count

    def _bound_telling(self, sequence: Sequence, count: int) -> int:
        """Return how many of `count` tokens a sequence of whose prompt the client is told may compute, and take them off.

        What was told before a preemption and is computed again costs nothing.
        """
        assert sequence.table is not None
        repeated = min(count, max(0, sequence.request.told - 1 - sequence.table.planned))
        new = min(count - repeated, self._tellable)
        self._tellable -= new
        return repeated + new

    def _make_room(self, sequence: Sequence, count: int) -> Request:
        """Preempt a running request for the growth of a sequence, perhaps its own; return it."""
        memory, tenant = self._memory, sequence.request.submission.tenant
        assert sequence.table is not None
        needed = memory.blocks_to_grow(sequence.table, count)
        allowance = memory.quotas.allowance(tenant)
        victim = choose_victim(self._queues.running, memory.quotas, tenant, needed)
        self._preempt(victim)
        if allowance is not None and needed > allowance:  # its own limit's fault: no other tenant waits behind it
            self._queues.hold_back(victim)
        return victim

    def _preempt(self, request: Request) -> None:
        """Take a running request's memory back; it waits with the rank that it had."""
        assert request not in self.opened, "a request was admitted without the blocks for its prompt"
        lengths: dict[Hashable, int] = {}
        for sequence in request.sequences:
            count = self.counts.pop(sequence, 0)
            self.budget += count
            if sequence.table is not None:
                lengths[sequence.key] = sequence.table.planned - count
        self._memory.note_preemption(request.trunk.owner)
        self._swap_out(request, lengths)
        self._queues.set_aside(request)
        request.preemptions += 1
        self._counters.preemptions += 1

    def _swap_out(self, request: Request, lengths: dict[Hashable, int]) -> None:
        """Let what a request has wait on the host, where that is wanted and has room; else it will be computed again."""
        if self._swap is None:
            return
        swap = self._swap.plan_swap_out(lengths)
        if swap is None:
            return
        self._swap.swap_out(swap, {sequence.key: sequence.tokens for sequence in request.live})
        for sequence in request.live:
            sequence.table = None
        request.swapped = True
