"""What a policy takes from the pool for one request.

    paged               a block whenever the last one is full: the memory core as it is
    contiguous-max      one run of slots as long as the context
    contiguous-pow2     one run for the prompt and the next power of two of the true output, at most twice as much
    contiguous-oracle   one run for the prompt and the true output, as if it were known

The contiguous ones are Orca's as Kwon et al. (2023, section 6.1) compare with, each from a buddy allocator; a request keeps its
run from its admission to its end.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from enum import StrEnum
from typing import Final

from memmgr.core.lineage import Lineage
from memmgr.core.memory import Memory
from memmgr.core.prefix import Match
from memmgr.core.table import Admission, MemoryCounters, Table
from memmgr.simulate.buddy import BuddyAllocator, rounded


class Policy(StrEnum):
    """See the module."""

    PAGED = "paged"
    CONTIGUOUS_MAX = "contiguous-max"
    CONTIGUOUS_POW2 = "contiguous-pow2"
    CONTIGUOUS_ORACLE = "contiguous-oracle"


def reservation(policy: Policy, prompt_tokens: int, output_tokens: int, context_length: int) -> int:
    """Return how many slots a contiguous policy reserves for a request; never more than the context."""
    assert policy is not Policy.PAGED
    if policy is Policy.CONTIGUOUS_MAX:
        return context_length
    outputs = rounded(output_tokens) if policy is Policy.CONTIGUOUS_POW2 else output_tokens
    return min(context_length, prompt_tokens + outputs)


class CountingMemory(Memory):
    """The memory, counting the whole blocks that prompts found at their first admission, of those that they take up."""

    def __init__(self, total_blocks: int, block_size: int, *, prefix_cache: bool, counters: MemoryCounters) -> None:
        super().__init__(total_blocks, block_size, prefix_cache=prefix_cache, counters=counters)
        self.asked_blocks = 0
        self.found_blocks = 0
        self._admitting = 0  # tokens of the sequence that was planned last
        self._admitted: set[Hashable] = set()

    def plan_admission(
        self, lineage: Lineage, tokens: array[int], reserve: int, allowance: int | None = None
    ) -> Admission | None:
        """See Memory."""
        self._admitting = len(tokens)
        return super().plan_admission(lineage, tokens, reserve, allowance)

    def admit(self, key: Hashable, lineage: Lineage, admission: Admission, owner: object = None) -> Table:
        """See Memory."""
        if key not in self._admitted:  # else it was preempted, and finds itself
            self._admitted.add(key)
            self.asked_blocks += self.blocks_for(self._admitting)
            self.found_blocks += len(admission.match.blocks)
        return super().admit(key, lineage, admission, owner)


class ReservingMemory(Memory):
    """A memory in which a sequence needs a run of slots to be admitted, and has it until it is released.

    The run is the buddy allocator's business. Below it each sequence has a table of one block as long as the context, of which
    there are as many as sequences may run: so nothing else is ever short, and the scheduler is the same.

    `reserve_for` gives the slots for the request whose prefix root is this: every request has its own root, nothing is shared.
    """

    def __init__(self, slots: int, context_length: int, max_running: int, reserve_for: Callable[[bytes], int]) -> None:
        super().__init__(max_running, context_length, prefix_cache=False, counters=MemoryCounters())
        self.buddy: Final = BuddyAllocator(slots)
        self._reserve_for: Final = reserve_for
        self._starts: dict[Hashable, int] = {}

    def plan_admission(
        self, lineage: Lineage, tokens: array[int], reserve: int, allowance: int | None = None
    ) -> Admission | None:
        """Decide whether there is a run for a sequence; what others have still to take is reserved already."""
        return Admission(Match(), 0) if self.buddy.fits(self._reserve_for(lineage.root)) else None

    def admit(self, key: Hashable, lineage: Lineage, admission: Admission, owner: object = None) -> Table:
        """Give a sequence its run and its table."""
        start = self.buddy.allocate(self._reserve_for(lineage.root))
        assert start is not None, "admitted without a plan"
        self._starts[key] = start
        return super().admit(key, lineage, admission, owner)

    def release(self, key: Hashable, tokens: array[int], *, keep_tail: bool = True) -> None:
        """Take a sequence's run and table back."""
        self.buddy.release(self._starts.pop(key))
        super().release(key, tokens, keep_tail=keep_tail)

    def check_invariants(self) -> int:
        """See Memory; and the runs."""
        assert set(self._starts) == set(self.tables)
        return super().check_invariants() + self.buddy.check_invariants()
