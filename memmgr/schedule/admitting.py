"""Which of the requests that wait begin in a step: in order of rank, into what the running ones have left of it.

A request begins as a whole, when slots are free for all of its sequences and blocks for all that it knows: computed from what the
cache has not, or brought in from the host. Where that is not so it waits, and who is behind it waits too, but for three kinds:
those who take what is guaranteed to their tenant, small ones, a bounded number of times, and any where the one before is kept
back by nothing but a prefix that is being computed (queues.py, forming.py) or its own tenant's limit (tenants.py).

Knows the order in which requests are asked; not whether the blocks are enough (admission.py), nor what running ones need.
"""

from __future__ import annotations

from typing import Final

from memmgr.core.memory import Memory
from memmgr.core.swap import SwappingMemory
from memmgr.schedule.admission import blocks_beside, is_over_limit, is_small, margin, plan_admission, plan_swap_in
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.drafts import Draft
from memmgr.schedule.lanes import Searches
from memmgr.schedule.queues import Queues
from memmgr.schedule.requests import Request, Sequence

#: How often others may pass the first of the queue while there is no room for it, and how many of them are looked at in a step.
MAX_PASSES: Final = 16
MAX_LOOKED_BEHIND: Final = 16


class Admitting:
    """See the module."""

    __slots__ = ("_counters", "_history_tokens", "_memory", "_queues", "_searches", "_swap")

    def __init__(
        self,
        memory: Memory,
        swap: SwappingMemory | None,
        queues: Queues,
        searches: Searches,
        counters: ScheduleCounters,
        history_tokens: int,
    ) -> None:
        self._memory: Final = memory
        self._swap: Final = swap
        self._queues: Final = queues
        self._searches: Final = searches
        self._counters: Final = counters
        self._history_tokens: Final = history_tokens  # that a plan has room for

    def admit(self, draft: Draft) -> None:
        """Admit waiting requests, in order of rank, until budget, slots or blocks run out.

        Where blocks have run out, those who take what is guaranteed to their tenant are still admitted: `short`.
        """
        queues = self._queues
        waiting, tenants = queues.waiting, queues.tenants
        queues.join(tenants.take_woken())
        place, short = 0, False
        while (place := tenants.next_place(waiting, place, short=short)) < len(waiting):
            request = waiting[place]
            if request.in_flight:  # preempted a moment ago: its last token is not back yet
                place, short = place + 1, True
                continue
            # Where there is no room for it as well: its leader may have to be raised.
            if not request.swapped and queues.follow(request, place):
                continue
            live = request.live
            if not draft.budget or queues.slots.free < len(live) or self._carries_enough(draft, request):
                return
            if self._is_held(request, live, place):
                continue
            admitted = self._swap_in if request.swapped else self._start
            if not admitted(draft, request, place, short=short):
                place, short = place + 1, True
            elif not short:
                queues.join(tenants.take_first(request.submission.tenant))

    def let_pass(self, draft: Draft) -> None:
        """Let small requests pass the first of the queue, for which there is no room, a bounded number of times.

        Not one that was preempted: it would lose what it has waited for. And only into room that those who run do not need in the
        next steps: who fills a full pool is preempted from it at once.
        """
        queues = self._queues
        waiting = queues.waiting
        place, looked = 1, 0
        while place < len(waiting) and draft.budget and looked < MAX_LOOKED_BEHIND:
            head, request = waiting[0], waiting[place]
            if head.in_flight or head.preemptions or head.passed == MAX_PASSES:
                return
            looked += 1
            live = request.live
            if request.in_flight or request.preemptions or queues.slots.free < len(live) or not is_small(request, head):
                place += 1
            elif self._carries_enough(draft, request):
                return
            elif not queues.follow(request, place) and not self._is_held(request, live, place):
                if self._start(draft, request, place, short=False, left=queues.running_sequences):
                    head.passed += 1
                else:
                    place += 1

    def _carries_enough(self, draft: Draft, request: Request) -> bool:
        """Whether the plan has no room for the histories of one more request."""
        size = request.history_size
        carried = sum(one.history_size for one in draft.opened) if size else 0
        return carried > 0 and carried + size > self._history_tokens

    def _is_held(self, request: Request, live: list[Sequence], place: int) -> bool:
        """Let a waiting request wait behind its tenant's limit where that is in its way, or another of the tenant before it."""
        queues, memory = self._queues, self._memory
        passes = queues.tenants.would_pass(request)
        refused = not passes and (
            queues.tenants.full(request.submission.tenant, len(live)) or is_over_limit(request, live, queues.running, memory)
        )
        if passes or refused:
            queues.hold(request, place, refused=refused)
        return passes or refused

    def _start(self, draft: Draft, request: Request, place: int, *, short: bool, left: int = 0) -> bool:
        """Admit the request at a place in the queue that has to compute all that the cache has not. False: it has to wait.

        So many blocks have to be `left` for the others.
        """
        queues, memory, live = self._queues, self._memory, request.live
        trunk, rest = live[0], blocks_beside(request, live, memory)
        admission = plan_admission(
            trunk.lineage,
            request.trunk_tokens,
            rest,
            queues.running,
            memory,
            short=short,
            margin=max(left, margin(request, queues.running_sequences)),
            whole=request.tells,
        )
        if admission is None:
            return False
        queues.begin(request, place)
        draft.opened.append(request)
        request.forked = len(live) == 1
        trunk.table = memory.admit(trunk.key, trunk.lineage, admission, trunk.owner)
        if memory.prefix_cache:
            queues.forming.lead(trunk, request.trunk_tokens, len(admission.match.blocks))
        self._counters.count_hits(trunk, admission.cached_tokens)
        if request.first_admitted_at is None:
            request.first_admitted_at = memory.now
            request.cached_tokens = admission.cached_tokens
        draft.schedule(trunk)
        return True

    def _swap_in(self, draft: Draft, request: Request, place: int, *, short: bool) -> bool:
        """Bring the request at a place in the queue back from the host. False: it has to wait."""
        assert self._swap is not None
        queues, live = self._queues, request.live
        left = margin(request, queues.running_sequences)
        swap = plan_swap_in(request, live, queues.running, self._swap, short=short, margin=left)
        if swap is None:
            return False
        queues.begin(request, place)
        draft.opened.append(request)
        request.swapped = False
        back = self._swap.swap_in(swap)
        for sequence in live:
            sequence.table = back.get(sequence.key)
            draft.schedule(sequence)
        if request.search is not None:
            self._searches.note(request)
        return True
