"""Continuous batching: which tokens of which sequences the next step computes, and whose memory goes when there is not enough.

Each step has a budget of tokens. Running sequences that decode come first, one token each, so that a long prompt never stalls a
stream; the rest of the budget goes to prompts, in chunks, running ones before waiting ones, in order of rank (priority, then
arrival). Where a sequence can't grow, the running sequence of the last rank is preempted: its blocks go, what the prefix index
knows of them stays cached, and it waits, with its old rank, to be computed again.

Plans leave before the results of earlier ones are back: a sequence's next token may be "the one sampled last". A result applies
to its request wherever that is by now; for one that has ended it is discarded and counted.

Pure: no I/O, no clock, no randomness. What clients are to hear gathers in order until `take_events`.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Final

from memmgr.core.memory import Memory
from memmgr.core.prefix import Lineage
from memmgr.schedule.plans import (
    EndCode,
    Event,
    FinishReason,
    Limits,
    NewToken,
    Plan,
    PlannedChunk,
    PlannedSample,
    RequestEnd,
    RequestKey,
    Sampled,
    SequenceEnd,
    Submission,
)
from memmgr.schedule.requests import Request, State


@dataclass(slots=True)
class ScheduleCounters:
    """Never fall. prefill_tokens = prefix_query_tokens - prefix_hit_tokens where nothing was preempted."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    finished_requests: int = 0
    cancelled_requests: int = 0
    rejected_requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    discarded_tokens: int = 0
    planned_steps: int = 0
    acknowledged_steps: int = 0


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence's part in a plan that has left: positions start .. end - 1, then perhaps a sample."""

    request: Request
    residence: int
    start: int
    end: int
    samples: bool


@dataclass(slots=True)
class _Draft:
    """A step being planned."""

    budget: int
    counts: dict[Request, int] = field(default_factory=dict)  # in the order of the plan's chunks
    opened: list[Request] = field(default_factory=list)


class Scheduler:
    """See the module. One scheduler serves one pool; `root_of` gives the prefix root of a tenant and a salt."""

    def __init__(self, memory: Memory, limits: Limits, root_of: Callable[[str, str], bytes], counters: ScheduleCounters) -> None:
        self.memory: Final = memory
        self.limits: Final = limits
        self.counters: Final = counters
        self._root_of = root_of
        self._requests: dict[RequestKey, Request] = {}
        self._names: dict[tuple[str, str], Request] = {}  # (tenant, request id)
        self._waiting: list[Request] = []  # by rank
        self._running: list[Request] = []  # by rank
        self._deadlines: list[tuple[float, RequestKey]] = []  # a heap; entries of ended requests are skipped
        self._free_slots: list[int] = list(range(limits.max_running))  # a heap
        self._closed_slots: list[int] = []  # since the last plan
        self._in_flight: deque[tuple[int, list[_Row]]] = deque()
        self._events: list[Event] = []
        self._arrivals = 0
        self._step = 0

    # -------------------------------------------------------------------------------------------------- reading

    @property
    def step(self) -> int:
        """The number of the last plan."""
        return self._step

    @property
    def plans_in_flight(self) -> int:
        """Plans whose results are not back."""
        return len(self._in_flight)

    @property
    def running(self) -> Sequence[Request]:
        """Admitted requests, by rank."""
        return self._running

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests in the queue, by rank."""
        return self._waiting

    @property
    def closing_slots(self) -> frozenset[int]:
        """Slots given up since the last plan: the executor does not know of it yet."""
        return frozenset(self._closed_slots)

    @property
    def reserve(self) -> int:
        """Blocks that whoever is admitted next has to leave."""
        return self._prompt_blocks_owed()

    @property
    def most_pinned(self) -> int:
        """Blocks that may be pinned at once: one request as long as the context can run whatever is pinned."""
        return max(0, self.memory.pool.total - self.memory.blocks_for(self.limits.context_length))

    def lineage(self, tenant: str, salt: str) -> Lineage:
        """Return the names, none yet, of a prefix in one domain."""
        return Lineage(self._root_of(tenant, salt), tenant)

    def find(self, tenant: str, request_id: str) -> Request | None:
        """Return a live request by the name that its client knows it by."""
        return self._names.get((tenant, request_id))

    # ------------------------------------------------------------------------------------------------- requests

    def submit(self, submission: Submission, now: float) -> bool:
        """Take a request into the queue, or refuse it by an event. False: its key is a live request's, and nothing happened."""
        if submission.key in self._requests:
            return False
        name = (submission.tenant, submission.request_id)
        room = self.limits.context_length - len(submission.prompt)
        refusal: tuple[EndCode, str] | None = None
        if name in self._names:
            refusal = EndCode.DUPLICATE, f"request {submission.request_id!r} is already running"
        elif room < 1:
            refusal = (
                EndCode.NEVER_FITS,
                f"the prompt has {len(submission.prompt)} tokens; with one of output it must fit "
                f"the context of {self.limits.context_length}",
            )
        elif len(self._waiting) >= self.limits.max_waiting:
            refusal = EndCode.QUEUE_FULL, f"{len(self._waiting)} requests are waiting already; try again later"
        if refusal is not None:
            self.counters.rejected_requests += 1
            self._events.append(RequestEnd(submission.key, *refusal))
            return True
        max_outputs = min(room, submission.max_tokens or room)
        self._arrivals += 1
        lineage = self.lineage(submission.tenant, submission.salt)
        request = Request(submission, lineage, max_outputs, self._arrivals, now)
        self._requests[submission.key] = request
        self._names[name] = request
        insort(self._waiting, request, key=_rank)
        if submission.deadline != float("inf"):
            heappush(self._deadlines, (submission.deadline, submission.key))
        return True

    def cancel(self, key: RequestKey, code: EndCode, message: str, now: float) -> bool:
        """End a request whose output is not wanted any more; everything that it holds is free at once. False: it is not live."""
        request = self._requests.get(key)
        if request is None:
            return False
        self.counters.cancelled_requests += 1
        self._end(request, code, message, now)
        return True

    def finish(self, key: RequestKey, output_tokens: int, now: float) -> None:
        """End a request whose text reached a stop string at its output token number `output_tokens` (from 1).

        Nothing happens where it has ended by itself meanwhile.
        """
        request = self._requests.get(key)
        if request is None or not 0 <= output_tokens <= request.outputs:
            return
        self.counters.discarded_tokens += request.outputs - output_tokens
        self._complete(request, output_tokens, FinishReason.STOP, now)

    def abandon(self, code: EndCode, message: str, now: float) -> None:
        """End every request: the executor is gone, and with it what was in flight and what the pool held."""
        self._in_flight.clear()
        for request in list(self._requests.values()):
            self._end(request, code, message, now)
        self.memory.pins.clear()
        self.memory.flush()

    def take_events(self) -> list[Event]:
        """Return what clients are to hear, in order, and forget it."""
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------------------------------------------- planning

    def plan(self, now: float) -> Plan | None:
        """Plan the next step; None where there is nothing to do until a result or a request comes."""
        self.memory.now = now
        self._expire(now)
        draft = _Draft(self.limits.max_step_tokens)
        for request in sorted(self._running, key=lambda request: not request.decoding):  # those that decode first, each by rank
            if request.state is State.RUNNING:  # not preempted a moment ago
                self._schedule(draft, request)
        self._admit(draft, now)
        if not draft.counts and not self._closed_slots:
            return None
        return self._seal(draft)

    def _schedule(self, draft: _Draft, request: Request) -> None:
        """Give a running sequence its part of the budget, at the cost of those behind it where blocks are short."""
        assert request.table is not None
        count = min(request.uncomputed, draft.budget)
        if count == 0:
            return
        while (growth := self.memory.plan_growth(request.table, count)) is None:
            victim = self._running[-1]
            self._preempt(victim, draft)
            if victim is request:
                return
        self.memory.grow(growth)
        draft.counts[request] = count
        draft.budget -= count

    def _admit(self, draft: _Draft, now: float) -> None:
        """Admit waiting requests, in order of rank, until budget, slots or blocks run out."""
        while self._waiting and draft.budget and len(self._running) < self.limits.max_running:
            request = self._waiting[0]
            if request.in_flight:
                return  # preempted a moment ago: its last token is not back yet
            admission = self.memory.plan_admission(request.lineage, request.tokens, self._prompt_blocks_owed())
            if admission is None:
                return
            del self._waiting[0]
            insort(self._running, request, key=_rank)
            request.state = State.RUNNING
            request.table = self.memory.admit(request.submission.key, request.lineage, admission, request.owner)
            request.slot = heappop(self._free_slots)
            request.residence += 1
            self._count_hits(request, admission.cached_tokens)
            if request.first_admitted_at is None:
                request.first_admitted_at = now
                request.cached_tokens = admission.cached_tokens
            draft.opened.append(request)
            self._schedule(draft, request)

    def _prompt_blocks_owed(self) -> int:
        """Return how many blocks the prompts that were admitted still have to take: they are not another's."""
        owed = 0
        for request in self._running:
            assert request.table is not None
            if not request.decoding:
                owed += self.memory.blocks_for(request.promised + 1) - len(request.table.blocks)
        return owed

    def _seal(self, draft: _Draft) -> Plan:
        """Turn a draft into a plan that leaves."""
        self._step += 1
        chunks: list[PlannedChunk] = []
        samples: list[PlannedSample] = []
        rows: list[_Row] = []
        for request, count in draft.counts.items():
            table = request.table
            assert table is not None
            start = table.planned - count
            known = start < len(request.tokens)
            tokens = request.tokens[start : start + count] if known else None
            assert len(tokens) == count if tokens is not None else count == 1
            samples_now = table.planned == request.promised
            if samples_now:
                samples.append(PlannedSample(len(chunks), request.slot, request.outputs_promised))
                request.outputs_promised += 1
            new_blocks, edits = request.tell()
            chunks.append(PlannedChunk(request.slot, start, count, tokens, new_blocks, edits))
            rows.append(_Row(request, request.residence, start, table.planned, samples_now))
            request.in_flight += 1
        closes, self._closed_slots = tuple(self._closed_slots), []
        opens = tuple((request.slot, request.submission.sampling) for request in draft.opened)
        self._in_flight.append((self._step, rows))
        self.counters.planned_steps += 1
        return Plan(self._step, self.memory.end_step(), closes, opens, tuple(chunks), tuple(samples))

    def _preempt(self, request: Request, draft: _Draft) -> None:
        """Take a running request's memory back; it waits with the rank that it had."""
        assert request not in draft.opened, "a request was admitted without the blocks for its prompt"
        draft.budget += draft.counts.pop(request, 0)
        self.memory.note_preemption(request.owner)
        self._leave(request)
        request.state = State.WAITING
        request.preemptions += 1
        self.counters.preemptions += 1
        insort(self._waiting, request, key=_rank)

    def _expire(self, now: float) -> None:
        """End the requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heappop(self._deadlines)
            self.cancel(key, EndCode.DEADLINE, "the deadline has passed", now)
        if len(self._deadlines) > 2 * (len(self._requests) + self.limits.max_waiting):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._requests]
            heapify(self._deadlines)

    # -------------------------------------------------------------------------------------------------- results

    def complete(self, step: int, sampled: Iterable[Sampled], now: float) -> None:
        """Take in the result of the oldest plan in flight: one Sampled for each of its samples, in their order."""
        expected, rows = self._in_flight.popleft()
        assert step == expected, f"the result of step {step} came, {expected} was due"
        self.memory.now = now
        self.counters.acknowledged_steps += 1
        results = iter(sampled)
        for row in rows:
            request = row.request
            request.in_flight -= 1
            result = next(results) if row.samples else None
            if result is not None and result.failed and request.table is None:
                self.memory.distrust_cached(request.lineage, request.tokens)  # it was released meanwhile
            if request.state is State.ENDED:
                self.counters.discarded_tokens += row.end - row.start
                continue
            self._count(request, row)
            if request.state is State.RUNNING and row.residence == request.residence:
                assert request.table is not None
                self.memory.acknowledge(request.table, row.end, request.tokens)
            if result is not None:
                self._append(request, result, now)

    def _count_hits(self, request: Request, cached_tokens: int) -> None:
        """Count what an admission found of the prompt and no earlier one had found or computed: each token counts once."""
        of_prompt = max(0, min(cached_tokens, request.prompt_length) - request.high_water)
        self.counters.prefix_query_tokens += of_prompt
        self.counters.prefix_hit_tokens += of_prompt
        request.high_water = max(request.high_water, cached_tokens)

    def _count(self, request: Request, row: _Row) -> None:
        first_time = max(0, row.end - max(row.start, request.high_water))
        self.counters.recomputed_tokens += row.end - row.start - first_time
        of_prompt = max(0, min(row.end, request.prompt_length) - max(row.start, request.high_water))
        self.counters.prefill_tokens += of_prompt
        self.counters.prefix_query_tokens += of_prompt
        request.high_water = max(request.high_water, row.end)

    def _append(self, request: Request, result: Sampled, now: float) -> None:
        """Add a sampled token to its request, which may end with it."""
        if result.failed:
            if request.table is not None:
                self.memory.distrust(request.table)  # or whoever begins with the same tokens fails as well
            self._complete(request, request.outputs, FinishReason.ERROR, now)
            return
        submission = request.submission
        self._events.append(NewToken(submission.key, 0, request.outputs, result.token, result.logprob))
        request.tokens.append(result.token)
        if result.token in submission.stop_token_ids:
            self._complete(request, request.outputs, FinishReason.EOS, now)
        elif request.outputs == request.max_outputs:
            reason = FinishReason.LENGTH if request.outputs == submission.max_tokens else FinishReason.CONTEXT
            self._complete(request, request.outputs, reason, now)

    # ---------------------------------------------------------------------------------------------------- ends

    def _complete(self, request: Request, output_tokens: int, reason: FinishReason, now: float) -> None:
        self.counters.finished_requests += 1
        self.counters.decode_tokens += max(0, output_tokens - 1)
        self._events.append(SequenceEnd(request.submission.key, 0, output_tokens, reason))
        self._end(request, EndCode.OK, "", now)

    def _end(self, request: Request, code: EndCode, message: str, now: float) -> None:
        submission = request.submission
        if request.state is State.RUNNING:
            self._leave(request)
        else:
            del self._waiting[bisect_left(self._waiting, request.rank, key=_rank)]
        request.state = State.ENDED
        del self._requests[submission.key]
        del self._names[submission.tenant, submission.request_id]
        admitted_at = now if request.first_admitted_at is None else request.first_admitted_at
        queue_seconds = admitted_at - request.arrived_at
        self._events.append(RequestEnd(submission.key, code, message, request.cached_tokens, request.preemptions, queue_seconds))

    def _leave(self, request: Request) -> None:
        """Take slot and memory from a running request."""
        del self._running[bisect_left(self._running, request.rank, key=_rank)]
        self.memory.release(request.submission.key, request.tokens)
        heappush(self._free_slots, request.slot)
        self._closed_slots.append(request.slot)
        request.slot = -1
        request.table = None
        request.told = []

    # ------------------------------------------------------------------------------------------------ invariants

    def check_invariants(self) -> int:
        """Check queues, slots, lengths and the memory below. Returns how many checks were made.

        Raises:
            AssertionError: one does not hold.
        """
        checks = self.memory.check_invariants()
        for queue, state in (self._waiting, State.WAITING), (self._running, State.RUNNING):
            assert all(a.rank < b.rank for a, b in pairwise(queue)), f"{state.name} is out of order"
            assert all(request.state is state for request in queue)
        live = {request.submission.key for request in (*self._waiting, *self._running)}
        assert live == set(self._requests), "a live request is in no queue, or a queue holds a dead one"
        assert {(r.submission.tenant, r.submission.request_id) for r in self._requests.values()} == set(self._names)
        assert set(self.memory.tables) == {request.submission.key for request in self._running}
        slots = [request.slot for request in self._running]
        assert sorted(slots + self._free_slots) == list(range(self.limits.max_running)), "slots do not add up"
        in_flight: dict[Request, int] = {}
        for _, rows in self._in_flight:
            for row in rows:
                in_flight[row.request] = in_flight.get(row.request, 0) + 1
        for request in self._requests.values():
            assert request.in_flight == in_flight.get(request, 0)
            assert request.outputs <= request.outputs_promised <= request.max_outputs
            assert request.outputs_promised - request.outputs <= request.in_flight
            if request.table is not None:
                assert request.table.planned <= request.promised
                assert len(request.told) <= len(request.table.blocks)
        return checks + 6 * len(self._requests) + len(self._free_slots) + 4


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
