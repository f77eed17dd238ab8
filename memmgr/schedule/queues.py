"""Where each live request is: in the common queue, behind another's prefix, behind its tenant's limit, or running.

    waiting    the common queue, by rank
    forming    who waits for a prefix that a running sequence is computing, and for nothing else (forming.py)
    tenants    who waits behind its tenant's limit, and for nothing else (tenants.py)
    running    who was admitted, by rank: each of its living sequences has a slot, and a table once it has forked

Each live request is in exactly one of them. Whoever leaves a place gives up what belongs to it: a running one its slots, its
tables and what it was to compute for others, a waiting one what it has on the host.

Knows places, slots and tables; not whose turn it is (admitting.py), what a step computes (drafts.py) or what clients hear.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from memmgr.core.memory import Memory
from memmgr.core.swap import SwappingMemory
from memmgr.schedule.forming import FormingPrefixes
from memmgr.schedule.requests import Request, Sequence, State
from memmgr.schedule.slots import Slots
from memmgr.schedule.tenants import Tenants


class Queues:
    """See the module. `swap` is the memory where it can swap, else None. What is read of the lists is only changed here."""

    __slots__ = ("_memory", "_swap", "forming", "running", "slots", "tenants", "waiting")

    def __init__(self, memory: Memory, swap: SwappingMemory | None, max_running: int) -> None:
        self._memory: Final = memory
        self._swap: Final = swap
        self.waiting: Final[list[Request]] = []
        self.running: Final[list[Request]] = []
        self.forming: Final = FormingPrefixes(memory.block_size)
        self.tenants: Final = Tenants(memory.quotas)
        self.slots: Final = Slots(max_running)

    # -------------------------------------------------------------------------------------------------- reading

    @property
    def running_sequences(self) -> int:
        """Sequences of running requests."""
        return self.slots.total - self.slots.free

    @property
    def waiting_requests(self) -> int:
        """How many requests wait, wherever."""
        return len(self.waiting) + len(self.forming.waiting) + len(self.tenants)

    @property
    def all_waiting(self) -> list[Request]:
        """Those who wait, wherever, by rank."""
        others = (*self.forming.waiting, *self.tenants.waiting)
        return sorted((*self.waiting, *others), key=_rank) if others else list(self.waiting)

    def have_room(self, tenant: str, sequences: int) -> bool:
        """Whether so many more sequences of a tenant may run now."""
        return sequences <= self.slots.free and not self.tenants.full(tenant, sequences)

    # -------------------------------------------------------------------------------------------------- waiting

    def join(self, requests: Iterable[Request]) -> None:
        """Put requests that are nowhere into the common queue."""
        for request in requests:
            insort(self.waiting, request, key=_rank)

    def hold(self, request: Request, place: int, *, refused: bool) -> None:
        """Move the request at a place in the common queue behind its tenant's limit; `refused`: it does not fit in now."""
        del self.waiting[place]
        self.tenants.hold(request, refused=refused)

    def hold_back(self, request: Request) -> None:
        """Move a request from the common queue behind its tenant's limit: it was preempted for that."""
        self.hold(request, bisect_left(self.waiting, request.rank, key=_rank), refused=False)

    def follow(self, request: Request, place: int) -> bool:
        """Let one of the queue wait for a prefix that is being computed, if there is one, and be as urgent as it is."""
        if not self.forming or request.tells:
            return False
        lineage, tokens = request.trunk.lineage, request.trunk_tokens
        leader = self.forming.follow(request, lineage, tokens, len(self._memory.plan_match(lineage, tokens).blocks))
        if leader is None:
            return False
        del self.waiting[place]
        if request.priority < leader.request.priority:
            self._set_priority(leader.request, request.priority)
        return True

    def arrived(self, leader: Sequence, blocks: int) -> None:
        """Put those back who waited for a leader's first `blocks` blocks, which are in the pool."""
        self.join(self.forming.arrived(leader, blocks))
        self._lower(leader.request)

    def _lower(self, request: Request) -> None:
        """Take back the priority to which a running request was raised, once it leads nobody."""
        if request.priority != request.submission.priority and not any(self.forming.leads(one) for one in request.live):
            self._set_priority(request, request.submission.priority)

    def _set_priority(self, request: Request, priority: int) -> None:
        """Give a running request the place that goes with another priority."""
        del self.running[bisect_left(self.running, request.rank, key=_rank)]
        request.priority = priority
        insort(self.running, request, key=_rank)

    # -------------------------------------------------------------------------------------------------- running

    def begin(self, request: Request, place: int) -> None:
        """Make the request at a place in the common queue a running one, with slots."""
        del self.waiting[place]
        insort(self.running, request, key=_rank)
        request.state = State.RUNNING
        request.residence += 1
        for sequence in request.live:
            sequence.slot = self.slots.take()
        self.tenants.began(request.submission.tenant, len(request.live))

    def set_aside(self, request: Request) -> None:
        """Send a running request back to the common queue; it has the rank that it had."""
        self._leave(request)
        request.state = State.WAITING
        insort(self.waiting, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Take a request that ends from where it is, and all that it holds from it."""
        if request.state is State.RUNNING:
            self._leave(request)
        elif self.forming.is_waiting(request):
            self.forming.forget(request)
        elif self.tenants.is_waiting(request):
            self.tenants.forget(request)
        else:
            del self.waiting[bisect_left(self.waiting, request.rank, key=_rank)]
        for sequence in request.live:
            self.drop_swapped(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take slot and memory from one sequence of a running request."""
        if self.forming.leads(sequence):
            self.join(self.forming.leave(sequence))
            self._lower(sequence.request)
        if sequence.table is not None:
            self._memory.release(sequence.key, sequence.tokens)
            sequence.table = None
        self.slots.give_up(sequence.slot)
        self.tenants.stopped(sequence.request.submission.tenant)
        sequence.slot = -1
        sequence.told = []
        sequence.moved = False

    def drop_swapped(self, sequence: Sequence) -> None:
        """Give up what a sequence has on the host, if it has something there."""
        if self._swap is not None and sequence.key in self._swap.swapped:
            self._swap.drop_swapped(sequence.key)

    def _leave(self, request: Request) -> None:
        """Take slots and memory from a running request."""
        del self.running[bisect_left(self.running, request.rank, key=_rank)]
        request.priority = request.submission.priority
        for sequence in request.live:
            self.release(sequence)

    # ----------------------------------------------------------------------------------------------- invariants

    def check_invariants(self) -> int:
        """Check order, states, slots and who has memory. Returns how many checks were made.

        Raises:
            AssertionError: one does not hold.
        """
        running = [sequence for request in self.running for sequence in request.live]
        checks = self.forming.check_invariants() + self.tenants.check_invariants(running)
        for queue, state in (self.waiting, State.WAITING), (self.running, State.RUNNING):
            assert all(a.rank < b.rank for a, b in pairwise(queue)), f"{state.name} is out of order"
            assert all(request.state is state for request in queue)
        assert all(request.state is State.WAITING for request in (*self.forming.waiting, *self.tenants.waiting))
        for request in self.running:
            raised = request.priority != request.submission.priority
            assert not raised or any(self.forming.leads(one) for one in request.live), "raised for nobody"
        assert set(self._memory.tables) == {sequence.key for sequence in running if sequence.table is not None}
        if self._swap is not None:
            waiting = (*self.waiting, *self.tenants.waiting)
            swapped = {sequence.key for request in waiting if request.swapped for sequence in request.live}
            assert set(self._swap.swapped) <= swapped, "a table on the host is nobody's"
        return checks + self.slots.check_invariants([sequence.slot for sequence in running]) + 2


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
