"""The scheduler as the rest of the memory manager sees it: requests come, steps are planned, results come back.

Joins the parts, each of which owns its state and knows those above it in this list:

    registry     who lives, by key and by name; deadlines
    queues       where each of them is: waiting, or running with slots and tables
    outputs      tokens, ends, and what clients are to hear
    lanes        the searches that have news
    results      plans in flight
    planning     the next plan: a draft (drafts), and who begins in it (admitting)

Itself it knows what a submission has to keep, what clients may ask for, and what a quota that changes does to live requests.

Pure: no I/O, no clock, no randomness. What clients are to hear gathers in order until `take_events`.
"""

from collections.abc import Callable, Iterable
from typing import Final

from memmgr.core.lineage import Lineage
from memmgr.core.memory import Memory
from memmgr.core.quotas import Quota
from memmgr.core.swap import SwappingMemory
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.lanes import Searches
from memmgr.schedule.outputs import Outputs
from memmgr.schedule.planning import Planner
from memmgr.schedule.plans import EndCode, Event, FinishReason, Limits, Plan, RequestKey, Sampled, Submission
from memmgr.schedule.queues import Queues
from memmgr.schedule.registry import Registry
from memmgr.schedule.requests import Request
from memmgr.schedule.results import Results
from memmgr.schedule.sizes import most_blocks, most_outputs
from memmgr.schedule.tenants import beyond_limit


class Scheduler:
    """See the module. One scheduler serves one pool; `root_of` gives the prefix root of a tenant and a salt."""

    def __init__(self, memory: Memory, limits: Limits, root_of: Callable[[str, str], bytes], counters: ScheduleCounters) -> None:
        self.memory: Final = memory
        self.limits: Final = limits
        self.counters: Final = counters
        self._root_of = root_of
        swap = memory if isinstance(memory, SwappingMemory) and memory.host.total else None
        self._registry: Final = Registry(limits.max_waiting)
        self._queues: Final = Queues(memory, swap, limits.max_running)
        self._outputs: Final = Outputs(self._registry, self._queues, counters)
        self._searches: Final = Searches()
        self._results: Final = Results(memory, self._queues, self._outputs, self._searches, counters)
        self._planner: Final = Planner(limits, memory, swap, self._queues, self._searches, self._results, counters)
        self._arrivals = 0

    # -------------------------------------------------------------------------------------------------- reading

    @property
    def step(self) -> int:
        """The number of the last plan."""
        return self._planner.step

    @property
    def plans_in_flight(self) -> int:
        """Plans whose results are not back."""
        return len(self._results)

    @property
    def running(self) -> list[Request]:
        """Admitted requests, by rank."""
        return self._queues.running

    @property
    def running_sequences(self) -> int:
        """Sequences of admitted requests."""
        return self._queues.running_sequences

    @property
    def waiting(self) -> list[Request]:
        """Requests in the queue, by rank, with those who wait for another's prefix or behind their tenant's limit."""
        return self._queues.all_waiting

    @property
    def closing_slots(self) -> frozenset[int]:
        """Slots given up since the last plan: the executor does not know of it yet."""
        return self._queues.slots.closing

    @property
    def most_pinned(self) -> int:
        """Blocks that may be pinned or guaranteed at once: so that one as long as the context can run, and each that is here."""
        most = max((request.most_blocks for request in self._registry), default=0)
        return max(0, self.memory.pool.total - max(most, self.memory.blocks_for(self.limits.context_length)))

    def batch_has_room(self, tenant: str, sequences: int) -> bool:
        """Whether so many more sequences of a tenant may run now."""
        return self._queues.have_room(tenant, sequences)

    def lineage(self, tenant: str, salt: str) -> Lineage:
        """Return the names, none yet, of a prefix in one domain."""
        return Lineage(self._root_of(tenant, salt), tenant)

    def find(self, tenant: str, request_id: str) -> Request | None:
        """Return a live request by the name that its client knows it by."""
        return self._registry.find(tenant, request_id)

    # ------------------------------------------------------------------------------------------------- requests

    def submit(self, submission: Submission, now: float) -> bool:
        """Take a request into the queue, or refuse it by an event. False: its key is a live request's, and nothing happened."""
        if submission.key in self._registry:
            return False
        room = most_outputs(submission.tenant, len(submission.prompt), submission.width, self.memory, self.limits)
        refusal = self._refusal(submission, room)
        if refusal is not None:
            self._outputs.refuse(submission.key, *refusal)
            return True
        max_outputs = min(room, submission.max_tokens or room)
        self._arrivals += 1
        lineage = self.lineage(submission.tenant, submission.salt)
        most = most_blocks(submission, max_outputs, self.memory)
        request = Request(submission, lineage, max_outputs, most, self._arrivals, now)
        self._registry.add(request)
        self._queues.join([request])
        return True

    def _refusal(self, submission: Submission, room: int) -> tuple[EndCode, str] | None:
        """Return why a submission can't be taken, each of its sequences having `room` for so many outputs; None: it can."""
        prompt_length, width, quotas = len(submission.prompt), submission.width, self.memory.quotas
        limit, running_limit = quotas.limit(submission.tenant), quotas.max_running(submission.tenant)
        if self._registry.find(submission.tenant, submission.request_id) is not None:
            return EndCode.DUPLICATE, f"request {submission.request_id!r} is already running"
        if prompt_length >= self.limits.context_length:
            return EndCode.NEVER_FITS, (
                f"the prompt has {prompt_length} tokens; with one of output it must fit "
                f"the context of {self.limits.context_length}"
            )
        if width > self.limits.max_running:
            return EndCode.NEVER_FITS, f"{width} sequences; at most {self.limits.max_running} run at once"
        if running_limit and width > running_limit:
            return EndCode.NEVER_FITS, f"{width} sequences; at most {running_limit} of this tenant run at once"
        if limit is not None and self.memory.blocks_for(prompt_length + 1) > limit:
            return EndCode.NEVER_FITS, beyond_limit(submission, limit)
        if room < 1:
            where = "the pool" if limit is None else f"the {limit} blocks that their tenant may have"
            return EndCode.NEVER_FITS, f"{width} sequences of this prompt do not fit {where} together"
        if (waiting := self._queues.waiting_requests) >= self.limits.max_waiting:
            return EndCode.QUEUE_FULL, f"{waiting} requests are waiting already; try again later"
        return None

    def cancel(self, key: RequestKey, code: EndCode, message: str, now: float) -> bool:
        """End a request whose output is not wanted any more; everything that it holds is free at once. False: it is not live."""
        request = self._registry.get(key)
        if request is None:
            return False
        self.counters.cancelled_requests += 1
        self._outputs.end(request, code, message, now)
        return True

    def finish(self, key: RequestKey, index: int, output_tokens: int, now: float) -> None:
        """End a sequence whose text reached a stop string at its output token number `output_tokens` (from 1).

        Nothing happens where it has ended by itself meanwhile.
        """
        request = self._registry.get(key)
        if request is None or request.search is not None or index >= len(request.sequences):
            return
        sequence = request.sequences[index]
        if sequence.ended or not 0 <= output_tokens <= sequence.outputs:
            return
        self.counters.discarded_tokens += sequence.outputs - output_tokens
        self._outputs.complete(sequence, output_tokens, FinishReason.STOP, now)

    def abandon(self, code: EndCode, message: str, now: float) -> None:
        """End every request: the executor is gone, and with it what was in flight and what the pool held."""
        self._results.clear()
        self._searches.clear()
        for request in list(self._registry):
            self._outputs.end(request, code, message, now)
        self.memory.pins.clear()
        self.memory.flush()

    def take_events(self) -> list[Event]:
        """Return what clients are to hear, in order, and forget it."""
        return self._outputs.take_events()

    # ---------------------------------------------------------------------------------------------------- steps

    def plan(self, now: float) -> Plan | None:
        """Plan the next step; None where there is nothing to do until a result or a request comes."""
        self.memory.now = now
        for key in self._registry.take_expired(now):
            self.cancel(key, EndCode.DEADLINE, "the deadline has passed", now)
        for request in self._searches.move(self.memory):
            self._outputs.conclude(request, now)
        return self._planner.plan()

    def complete(self, step: int, sampled: Iterable[Sampled], now: float, told: Iterable[tuple[object, ...]] = ()) -> None:
        """Take in the result of the oldest plan in flight: one Sampled for each of its samples, in their order.

        `told`: what became of each of its tellings, of which most plans have none.
        """
        self._results.complete(step, sampled, now, told)

    # ------------------------------------------------------------------------------------------ tenants' quotas

    def set_quota(self, quota: Quota, now: float) -> None:
        """Put a tenant's quota in force. What has outgrown a limit that was lowered ends: with CONTEXT, or as what never fits."""
        self.memory.quotas.set(quota)
        self._queues.tenants.wake(quota.tenant)
        if quota.max_blocks:
            for request in [one for one in self._registry if one.submission.tenant == quota.tenant]:
                self._fit(request, now)

    def _fit(self, request: Request, now: float) -> None:
        """Cut a live request down to its tenant's limit."""
        submission, search, outputs = request.submission, request.search, self._outputs
        room = most_outputs(submission.tenant, request.prompt_length, len(request.live), self.memory, self.limits)
        unheard = search is not None or not any(sequence.outputs for sequence in request.sequences)
        if search is not None and 0 < search.length >= room:
            search.stop()  # its best so far, as samples keep what they have
            outputs.conclude(request, now)
            return
        if room <= 0 and unheard:
            self.counters.rejected_requests += 1
            message = beyond_limit(submission, self.memory.quotas.limit(submission.tenant))
            outputs.end(request, EndCode.NEVER_FITS, message, now)
            return
        request.cut(room)
        if search is None:
            for sequence in request.live:
                if sequence.outputs >= room or sequence.outputs_promised > room:
                    outputs.complete(sequence, sequence.outputs, FinishReason.CONTEXT, now)

    # ----------------------------------------------------------------------------------------------- invariants

    def check_invariants(self) -> int:
        """Check queues, slots, lengths and the memory below. Returns how many checks were made.

        Raises:
            AssertionError: one does not hold.
        """
        checks = self.memory.check_invariants() + self._queues.check_invariants() + self._registry.check_invariants()
        live = {request.submission.key for request in (*self._queues.all_waiting, *self._queues.running)}
        everyone = {request.submission.key for request in self._registry}
        assert live == everyone, "a live request is in no queue, or a queue holds a dead one"
        in_flight = self._results.in_flight()
        return checks + sum(request.check_invariants(in_flight) for request in self._registry) + 1
