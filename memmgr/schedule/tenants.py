"""What quotas mean to the scheduler: who waits behind its own tenant's limit, and who makes room for whom.

Where a tenant's own limit is what keeps a request from being admitted, the request goes into a queue of its tenant, and so does
each of the same tenant that would pass it; the common queue goes on without them. Only the first of such a queue is ever looked
at again, and only once its tenant has less than when it was last looked at: so a step looks at one request for each quota at
most, however many wait. All that a tenant has, falls, at last to nothing, and then any request that was accepted fits.

Knows requests and quotas; not tables or plans.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from memmgr.core.quotas import Quotas
from memmgr.schedule.plans import Submission
from memmgr.schedule.requests import Request, State
from memmgr.schedule.requests import Sequence as SequenceOfRequest

#: What a tenant has: live blocks, and sequences that run.
Use = tuple[int, int]


class Tenants:
    """The sequences that run, counted by tenant, and the requests that wait behind their tenant's limit."""

    __slots__ = ("_queues", "_quotas", "_refused_at", "_running")

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._running: dict[str, int] = {}  # tenant -> sequences, where there are any
        self._queues: dict[str, list[Request]] = {}  # by rank, none empty
        self._refused_at: dict[str, Use] = {}  # what a tenant had when the first of its queue did not fit

    def __len__(self) -> int:
        """Return how many requests wait here."""
        return sum(map(len, self._queues.values()))

    @property
    def waiting(self) -> list[Request]:
        """Those who wait, in no order."""
        return [request for queue in self._queues.values() for request in queue]

    # -------------------------------------------------------------------------------------------------- counting

    def running(self, tenant: str) -> int:
        """Return how many sequences of a tenant run."""
        return self._running.get(tenant, 0)

    def began(self, tenant: str, sequences: int) -> None:
        """Take note that sequences of a tenant run."""
        self._running[tenant] = self._running.get(tenant, 0) + sequences

    def stopped(self, tenant: str) -> None:
        """Take note that one sequence of a tenant does not run any more."""
        left = self._running[tenant] - 1
        if left:
            self._running[tenant] = left
        else:
            del self._running[tenant]

    def full(self, tenant: str, more: int) -> bool:
        """Whether a tenant's `max_running` has no room for so many sequences more. One request may always run alone."""
        most, now = self._quotas.max_running(tenant), self.running(tenant)
        return bool(most and now and now + more > most)

    # --------------------------------------------------------------------------------------------------- waiting

    def hold(self, request: Request, *, refused: bool) -> None:
        """Let a request wait behind its tenant's limit; where it is `refused`, with what its tenant has now it does not fit."""
        tenant = request.submission.tenant
        queue = self._queues.setdefault(tenant, [])
        insort(queue, request, key=_rank)
        if queue[0] is request:
            self._refused_at.pop(tenant, None)
            if refused:
                self._refused_at[tenant] = self._use(tenant)

    def would_pass(self, request: Request) -> bool:
        """Whether one of the same tenant and of better rank waits here."""
        queue = self._queues.get(request.submission.tenant)
        return queue is not None and queue[0].rank < request.rank

    def is_waiting(self, request: Request) -> bool:
        """Whether a request waits here."""
        queue = self._queues.get(request.submission.tenant, ())
        place = bisect_left(queue, request.rank, key=_rank)
        return place < len(queue) and queue[place] is request

    def forget(self, request: Request) -> None:
        """Take out a request that waits here."""
        tenant = request.submission.tenant
        queue = self._queues[tenant]
        place = bisect_left(queue, request.rank, key=_rank)
        assert queue[place] is request
        del queue[place]
        if place == 0:
            self._refused_at.pop(tenant, None)  # another is the first now
        if not queue:
            del self._queues[tenant]

    def wake(self, tenant: str) -> None:
        """Let the first of a tenant's queue be looked at again: its quota is another."""
        self._refused_at.pop(tenant, None)

    def take_woken(self) -> list[Request]:
        """Take out the first of each queue whose tenant has not what it had when that one did not fit."""
        return [request for tenant in list(self._queues) for request in self.take_first(tenant)]

    def take_first(self, tenant: str) -> list[Request]:
        """Take out the first of one tenant's queue, if it may fit by now: none or one."""
        queue = self._queues.get(tenant)
        if queue is None or queue[0].in_flight or self._refused_at.get(tenant) == self._use(tenant):
            return []
        first = queue[0]
        self.forget(first)
        return [first]

    def next_place(self, waiting: Sequence[Request], place: int, *, short: bool) -> int:
        """Return the place in the common queue to look at next, from `place` on; its end: there is none.

        Where blocks are `short`, only who can take what is kept back for its tenant is looked at.
        """
        if not short:
            return place
        quotas, end = self._quotas, len(waiting)
        if not quotas.owed:
            return end
        while place < end and not quotas.unused_floor(waiting[place].submission.tenant):
            place += 1
        return place

    def _use(self, tenant: str) -> Use:
        return self._quotas.used(tenant), self.running(tenant)

    def check_invariants(self, running: Iterable[SequenceOfRequest]) -> int:
        """Check the counts against the sequences that run, and that queues are in order. Returns how many checks were made.

        Raises:
            AssertionError: one is not.
        """
        for tenant, queue in self._queues.items():
            assert queue, f"an empty queue of tenant {tenant!r} is kept"
            assert all(a.rank < b.rank for a, b in pairwise(queue)), f"the queue of tenant {tenant!r} is out of order"
            assert all(request.submission.tenant == tenant and request.state is State.WAITING for request in queue)
        assert self._refused_at.keys() <= self._queues.keys()
        counted = Counter(sequence.request.submission.tenant for sequence in running)
        assert counted == self._running, f"{counted} sequences run, {self._running} are counted"
        return 3 * len(self._queues) + 2


def choose_victim(running: Sequence[Request], quotas: Quotas, tenant: str, needed: int) -> Request:
    """Return which running request makes room where one of `tenant` needs so many blocks and there is no room for them.

    `running` is by rank, one of the tenant's among them. Where its own limit is what is in the way, it is one of its own;
    else the last of those who have more than is guaranteed to them, or its own; who takes what is guaranteed to it, is
    first made room by those who have more than that.
    """
    if not quotas:
        return running[-1]
    allowance = quotas.allowance(tenant)
    own = next(request for request in reversed(running) if request.submission.tenant == tenant)
    if allowance is not None and needed > allowance:
        return own
    beyond = next((request for request in reversed(running) if quotas.beyond_floor(request.submission.tenant)), own)
    within_floor = needed <= quotas.unused_floor(tenant)
    return beyond if within_floor else max(own, beyond, key=_rank)


def choose_victim_for_floors(running: Sequence[Request], quotas: Quotas) -> Request:
    """Return which running request gives up its blocks for what is guaranteed to others; there is one, or nothing would lack.

    As long as floors and pins together fit the pool, what lacks is in the hands of those who have more than their floor.
    """
    return next(request for request in reversed(running) if quotas.beyond_floor(request.submission.tenant))


def beyond_limit(submission: Submission, limit: int | None) -> str:
    """Return what a request is told that can never fit its tenant's limit."""
    tokens = len(submission.prompt)
    return f"the prompt has {tokens} tokens; with one of output they do not fit the {limit} blocks that its tenant may have"


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
