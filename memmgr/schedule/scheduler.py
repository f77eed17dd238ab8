"""Continuous batching: which tokens of which sequences the next step computes, and whose memory goes when there is not enough.

Each step has a budget of tokens. Running sequences that decode come first, one token each, so that a long prompt never stalls a
stream; the rest of the budget goes to prompts, in chunks, running ones before waiting ones, in order of rank (priority, then
arrival). Where a sequence can't grow, the running request of the last rank is preempted: its blocks go, what the prefix index
knows of them stays cached, and it waits, with its old rank, to be computed again. A prefix that a running sequence is computing
is not computed twice: who needs it waits for it (schedule/forming.py).

Plans leave before the results of earlier ones are back: a sequence's next token may be "the one sampled last". A result applies
to its request wherever that is by now; for one that has ended it is discarded and counted.

Pure: no I/O, no clock, no randomness. What clients are to hear gathers in order until `take_events`.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Final

from memmgr.core.lineage import Lineage
from memmgr.core.memory import Memory
from memmgr.core.quotas import Quota
from memmgr.core.swap import SwappingMemory
from memmgr.schedule.admission import blocks_beside, is_over_limit, is_small, margin, plan_admission, plan_swap_in
from memmgr.schedule.forming import FormingPrefixes
from memmgr.schedule.lanes import can_move, move, outcome
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
from memmgr.schedule.requests import Request, Sequence, State
from memmgr.schedule.sizes import most_blocks, most_outputs
from memmgr.schedule.slots import Slots
from memmgr.schedule.tenants import Tenants, beyond_limit, choose_victim, choose_victim_for_floors

#: How often others may pass the first of the queue while there is no room for it, and how many of them are looked at in a step.
MAX_PASSES: Final = 16
MAX_LOOKED_BEHIND: Final = 16


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


@dataclass(slots=True)
class _Row:
    """One sequence's part in a plan that has left: positions start .. end - 1.

    `samples`: the sequences that its last logits are sampled for. `forks`: those that share its tokens from then on.
    """

    sequence: Sequence
    residence: int
    start: int
    end: int
    samples: tuple[Sequence, ...]
    forks: tuple[Sequence, ...]


@dataclass(slots=True)
class _Draft:
    """A step being planned."""

    budget: int
    counts: dict[Sequence, int] = field(default_factory=dict)  # in the order of the plan's chunks
    opened: list[Request] = field(default_factory=list)


class Scheduler:
    """See the module. One scheduler serves one pool; `root_of` gives the prefix root of a tenant and a salt."""

    def __init__(self, memory: Memory, limits: Limits, root_of: Callable[[str, str], bytes], counters: ScheduleCounters) -> None:
        self.memory: Final = memory
        self._swap: Final = memory if isinstance(memory, SwappingMemory) and memory.host.total else None
        self.limits: Final = limits
        self.counters: Final = counters
        self._root_of = root_of
        self._requests: dict[RequestKey, Request] = {}
        self._names: dict[tuple[str, str], Request] = {}  # (tenant, request id)
        self._waiting: list[Request] = []  # by rank
        self._running: list[Request] = []  # by rank
        self._forming = FormingPrefixes(memory.block_size)  # and those who wait for it, who are in no other queue
        self._tenants = Tenants(memory.quotas)  # and those who wait behind their tenant's limit, who are in no other queue
        self._deadlines: list[tuple[float, RequestKey]] = []  # a heap; entries of ended requests are skipped
        self._slots = Slots(limits.max_running)
        self._searching: dict[Request, None] = {}  # of those whose beams have news since the last plan, in order
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
    def running(self) -> list[Request]:
        """Admitted requests, by rank."""
        return self._running

    @property
    def running_sequences(self) -> int:
        """Sequences of admitted requests."""
        return self._slots.total - self._slots.free

    @property
    def waiting(self) -> list[Request]:
        """Requests in the queue, by rank, with those who wait for another's prefix or behind their tenant's limit."""
        others = (*self._forming.waiting, *self._tenants.waiting)
        return sorted((*self._waiting, *others), key=_rank) if others else list(self._waiting)

    @property
    def closing_slots(self) -> frozenset[int]:
        """Slots given up since the last plan: the executor does not know of it yet."""
        return self._slots.closing

    @property
    def most_pinned(self) -> int:
        """Blocks that may be pinned or guaranteed at once: so that one as long as the context can run, and each that is here."""
        most = max((request.most_blocks for request in self._requests.values()), default=0)
        return max(0, self.memory.pool.total - max(most, self.memory.blocks_for(self.limits.context_length)))

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
        room = most_outputs(submission.tenant, len(submission.prompt), submission.width, self.memory, self.limits)
        limit = self.memory.quotas.limit(submission.tenant)
        running_limit = self.memory.quotas.max_running(submission.tenant)
        refusal: tuple[EndCode, str] | None = None
        if name in self._names:
            refusal = EndCode.DUPLICATE, f"request {submission.request_id!r} is already running"
        elif len(submission.prompt) >= self.limits.context_length:
            refusal = (
                EndCode.NEVER_FITS,
                f"the prompt has {len(submission.prompt)} tokens; with one of output it must fit "
                f"the context of {self.limits.context_length}",
            )
        elif submission.width > self.limits.max_running:
            refusal = EndCode.NEVER_FITS, f"{submission.width} sequences; at most {self.limits.max_running} run at once"
        elif running_limit and submission.width > running_limit:
            refusal = EndCode.NEVER_FITS, f"{submission.width} sequences; at most {running_limit} of this tenant run at once"
        elif limit is not None and self.memory.blocks_for(len(submission.prompt) + 1) > limit:
            refusal = EndCode.NEVER_FITS, beyond_limit(submission, limit)
        elif room < 1:
            where = "the pool" if limit is None else f"the {limit} blocks that their tenant may have"
            refusal = EndCode.NEVER_FITS, f"{submission.width} sequences of this prompt do not fit {where} together"
        elif (waiting := len(self._waiting) + len(self._forming.waiting) + len(self._tenants)) >= self.limits.max_waiting:
            refusal = EndCode.QUEUE_FULL, f"{waiting} requests are waiting already; try again later"
        if refusal is not None:
            self.counters.rejected_requests += 1
            self._events.append(RequestEnd(submission.key, *refusal))
            return True
        max_outputs = min(room, submission.max_tokens or room)
        self._arrivals += 1
        lineage = self.lineage(submission.tenant, submission.salt)
        most = most_blocks(submission, max_outputs, self.memory)
        request = Request(submission, lineage, max_outputs, most, self._arrivals, now)
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

    def finish(self, key: RequestKey, index: int, output_tokens: int, now: float) -> None:
        """End a sequence whose text reached a stop string at its output token number `output_tokens` (from 1).

        Nothing happens where it has ended by itself meanwhile.
        """
        request = self._requests.get(key)
        if request is None or request.search is not None or index >= len(request.sequences):
            return
        sequence = request.sequences[index]
        if sequence.ended or not 0 <= output_tokens <= sequence.outputs:
            return
        self.counters.discarded_tokens += sequence.outputs - output_tokens
        self._complete(sequence, output_tokens, FinishReason.STOP, now)

    def abandon(self, code: EndCode, message: str, now: float) -> None:
        """End every request: the executor is gone, and with it what was in flight and what the pool held."""
        self._in_flight.clear()
        self._searching.clear()
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
        self._search(now)
        draft = _Draft(self.limits.max_step_tokens)
        self._settle(draft)
        decoding: list[Sequence] = []
        others: list[Sequence] = []
        for request in self._running:
            for sequence in request.sequences:
                if not sequence.ended:
                    (decoding if sequence.decoding else others).append(sequence)
        for sequence in decoding + others:
            if sequence.request.state is State.RUNNING:  # not preempted a moment ago
                self._schedule(draft, sequence)
        self._admit(draft)
        self._let_pass(draft)
        if not draft.counts and not draft.opened and not self._slots.any_closing:
            return None
        return self._seal(draft)

    def _schedule(self, draft: _Draft, sequence: Sequence) -> None:
        """Give a running sequence its part of the budget, at the cost of those behind it where blocks are short."""
        count = min(sequence.uncomputed, draft.budget)
        if count == 0:
            return
        assert sequence.table is not None
        while (growth := self.memory.plan_growth(sequence.table, count)) is None:
            victim = self._make_room(sequence, count, draft)
            if victim is sequence.request:
                return
        self.memory.grow(growth)
        draft.counts[sequence] = count
        draft.budget -= count

    def _admit(self, draft: _Draft) -> None:
        """Admit waiting requests, in order of rank, until budget, slots or blocks run out.

        Where blocks have run out, those who take what is guaranteed to their tenant are still admitted: `short`.
        """
        self._rejoin(self._tenants.take_woken())
        place, short = 0, False
        while (place := self._tenants.next_place(self._waiting, place, short=short)) < len(self._waiting):
            request = self._waiting[place]
            if request.in_flight:  # preempted a moment ago: its last token is not back yet
                place, short = place + 1, True
                continue
            # Where there is no room for it as well: its leader may have to be raised.
            if not request.swapped and self._follows(request, place):
                continue
            live = request.live
            if not draft.budget or self._slots.free < len(live):
                return
            if self._is_held(request, live, place):
                continue
            admitted = self._swap_in if request.swapped else self._start
            if not admitted(draft, request, place, short=short):
                place, short = place + 1, True
            elif not short:
                self._rejoin(self._tenants.take_first(request.submission.tenant))

    def _let_pass(self, draft: _Draft) -> None:
        """Let small requests pass the first of the queue, for which there is no room, a bounded number of times.

        Not one that was preempted: it would lose what it has waited for. And only into room that those who run do not need in the
        next steps: who fills a full pool is preempted from it at once.
        """
        place, looked = 1, 0
        while place < len(self._waiting) and draft.budget and looked < MAX_LOOKED_BEHIND:
            head, request = self._waiting[0], self._waiting[place]
            if head.in_flight or head.preemptions or head.passed == MAX_PASSES:
                return
            looked += 1
            live = request.live
            if request.in_flight or request.preemptions or self._slots.free < len(live) or not is_small(request, head):
                place += 1
            elif not self._follows(request, place) and not self._is_held(request, live, place):
                if self._start(draft, request, place, short=False, left=self.running_sequences):
                    head.passed += 1
                else:
                    place += 1

    def _start(self, draft: _Draft, request: Request, place: int, *, short: bool, left: int = 0) -> bool:
        """Admit the request at a place in the queue that has to compute all that the cache has not. False: it has to wait.

        So many blocks have to be `left` for the others.
        """
        live = request.live
        trunk, rest = live[0], blocks_beside(request, live, self.memory)
        admission = plan_admission(
            trunk.lineage,
            request.trunk_tokens,
            rest,
            self._running,
            self.memory,
            short=short,
            margin=max(left, margin(request, self.running_sequences)),
        )
        if admission is None:
            return False
        self._begin(draft, request, place)
        request.forked = len(live) == 1
        trunk.table = self.memory.admit(trunk.key, trunk.lineage, admission, trunk.owner)
        if self.memory.prefix_cache:
            self._forming.lead(trunk, request.trunk_tokens, len(admission.match.blocks))
        self._count_hits(trunk, admission.cached_tokens)
        if request.first_admitted_at is None:
            request.first_admitted_at = self.memory.now
            request.cached_tokens = admission.cached_tokens
        self._schedule(draft, trunk)
        return True

    def _begin(self, draft: _Draft, request: Request, place: int) -> None:
        """Make the request at a place in the queue a running one, with slots."""
        del self._waiting[place]
        insort(self._running, request, key=_rank)
        request.state = State.RUNNING
        request.residence += 1
        for sequence in request.live:
            sequence.slot = self._slots.take()
        self._tenants.began(request.submission.tenant, len(request.live))
        draft.opened.append(request)

    def _swap_in(self, draft: _Draft, request: Request, place: int, *, short: bool) -> bool:
        """Bring the request at a place in the queue back from the host. False: it has to wait."""
        assert self._swap is not None
        live = request.live
        left = margin(request, self.running_sequences)
        swap = plan_swap_in(request, live, self._running, self._swap, short=short, margin=left)
        if swap is None:
            return False
        self._begin(draft, request, place)
        request.swapped = False
        back = self._swap.swap_in(swap)
        for sequence in live:
            sequence.table = back.get(sequence.key)
            self._schedule(draft, sequence)
        if request.search is not None:
            self._searching[request] = None
        return True

    def batch_has_room(self, tenant: str, sequences: int) -> bool:
        """Whether so many more sequences of a tenant may run now."""
        return sequences <= self._slots.free and not self._tenants.full(tenant, sequences)

    # ------------------------------------------------------------------------------------------ tenants' quotas

    def set_quota(self, quota: Quota, now: float) -> None:
        """Put a tenant's quota in force. What has outgrown a limit that was lowered ends: with CONTEXT, or as what never fits."""
        self.memory.quotas.set(quota)
        self._tenants.wake(quota.tenant)
        if quota.max_blocks:
            for request in [one for one in self._requests.values() if one.submission.tenant == quota.tenant]:
                self._fit(request, now)

    def _fit(self, request: Request, now: float) -> None:
        """Cut a live request down to its tenant's limit."""
        submission, search = request.submission, request.search
        room = most_outputs(submission.tenant, request.prompt_length, len(request.live), self.memory, self.limits)
        unheard = search is not None or not any(sequence.outputs for sequence in request.sequences)
        if search is not None and 0 < search.length >= room:
            search.stop()  # its best so far, as samples keep what they have
            self._conclude(request, now)
            return
        if room <= 0 and unheard:
            self.counters.rejected_requests += 1
            message = beyond_limit(submission, self.memory.quotas.limit(submission.tenant))
            self._end(request, EndCode.NEVER_FITS, message, now)
            return
        request.cut(room)
        if search is None:
            for sequence in request.live:
                if sequence.outputs >= room or sequence.outputs_promised > room:
                    self._complete(sequence, sequence.outputs, FinishReason.CONTEXT, now)

    def _settle(self, draft: _Draft) -> None:
        """Make available what is guaranteed and not used, at the cost of those who have more than is guaranteed to them."""
        while self.memory.quotas.deficit(self.memory.pool.available) > 0:
            self._preempt(choose_victim_for_floors(self._running, self.memory.quotas), draft)

    def _make_room(self, sequence: Sequence, count: int, draft: _Draft) -> Request:
        """Preempt a running request for the growth of a sequence, perhaps its own; return it."""
        memory, tenant = self.memory, sequence.request.submission.tenant
        assert sequence.table is not None
        needed = memory.blocks_to_grow(sequence.table, count)
        allowance = memory.quotas.allowance(tenant)
        victim = choose_victim(self._running, memory.quotas, tenant, needed)
        self._preempt(victim, draft)
        if allowance is not None and needed > allowance:  # its own limit's fault: no other tenant waits behind it
            del self._waiting[bisect_left(self._waiting, victim.rank, key=_rank)]
            self._tenants.hold(victim, refused=False)
        return victim

    def _is_held(self, request: Request, live: list[Sequence], place: int) -> bool:
        """Let a waiting request wait behind its tenant's limit where that is in its way, or another of the tenant before it."""
        passes = self._tenants.would_pass(request)
        refused = not passes and (
            self._tenants.full(request.submission.tenant, len(live)) or is_over_limit(request, live, self._running, self.memory)
        )
        if passes or refused:
            del self._waiting[place]
            self._tenants.hold(request, refused=refused)
        return passes or refused

    # ------------------------------------------------------------------------------------- waiting for a prefix

    def _follows(self, request: Request, place: int) -> bool:
        """Let one of the queue wait for a prefix that is being computed, if there is one, and be as urgent as it is."""
        if not self._forming:
            return False
        lineage, tokens = request.trunk.lineage, request.trunk_tokens
        leader = self._forming.follow(request, lineage, tokens, len(self.memory.plan_match(lineage, tokens).blocks))
        if leader is None:
            return False
        del self._waiting[place]
        if request.priority < leader.request.priority:
            self._set_priority(leader.request, request.priority)
        return True

    def _set_priority(self, request: Request, priority: int) -> None:
        """Give a running request the place that goes with another priority."""
        del self._running[bisect_left(self._running, request.rank, key=_rank)]
        request.priority = priority
        insort(self._running, request, key=_rank)

    def _rejoin(self, requests: Iterable[Request]) -> None:
        """Put those who waited for a prefix back into the queue."""
        for request in requests:
            insort(self._waiting, request, key=_rank)

    def _seal(self, draft: _Draft) -> Plan:
        """Turn a draft into a plan that leaves."""
        self._step += 1
        chunks: list[PlannedChunk] = []
        samples: list[PlannedSample] = []
        rows: list[_Row] = []
        forking: list[Request] = []
        for sequence, count in draft.counts.items():
            table, request = sequence.table, sequence.request
            assert table is not None
            start = table.planned - count
            known = start < len(sequence.tokens)
            tokens = sequence.tokens[start : start + count] if known else None
            assert len(tokens) == count if tokens is not None else count == 1
            forks: list[Sequence] = []
            if not request.forked and table.planned == request.prompt_length:
                forking.append(request)
                forks = request.live[1:]
            sampled = [one for one in (sequence, *forks) if one.is_sampled_at(table.planned)]
            for one in sampled:
                samples.append(_planned_sample(len(chunks), one))
                one.outputs_promised += request.search is None
            new_blocks, edits = sequence.tell()
            chunks.append(PlannedChunk(sequence.slot, start, count, tokens, new_blocks, edits))
            rows.append(_Row(sequence, request.residence, start, table.planned, tuple(sampled), tuple(forks)))
            sequence.in_flight += 1
            for one in sampled:
                one.in_flight += one is not sequence
        opens = tuple(
            (sequence.slot, request.submission.sampling, sequence.index)
            for request in draft.opened
            for sequence in request.sequences
            if not sequence.ended
        )
        self._in_flight.append((self._step, rows))
        self.counters.planned_steps += 1
        plan = Plan(self._step, self.memory.end_step(), self._slots.closes(), opens, tuple(chunks), tuple(samples))
        for request in forking:
            self._fork(request)
        return plan

    def _fork(self, request: Request) -> None:
        """Give a request's other sequences the trunk's content: the prompt, which plans that left compute."""
        request.forked = True
        trunk, *others = request.live
        for sequence in others:
            sequence.table = self.memory.fork(trunk.key, sequence.key, sequence.owner)
            sequence.lineage = sequence.table.lineage
            sequence.high_water = max(sequence.high_water, request.prompt_length)

    def _preempt(self, request: Request, draft: _Draft) -> None:
        """Take a running request's memory back; it waits with the rank that it had."""
        assert request not in draft.opened, "a request was admitted without the blocks for its prompt"
        lengths: dict[Hashable, int] = {}
        for sequence in request.sequences:
            count = draft.counts.pop(sequence, 0)
            draft.budget += count
            if sequence.table is not None:
                lengths[sequence.key] = sequence.table.planned - count
        self.memory.note_preemption(request.trunk.owner)
        self._swap_out(request, lengths)
        self._set_aside(request)
        request.preemptions += 1
        self.counters.preemptions += 1

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

    def _set_aside(self, request: Request) -> None:
        """Send a running request back to the queue; it has the rank that it had."""
        self._leave(request)
        request.state = State.WAITING
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
            row.sequence.in_flight -= 1
            for sequence in row.samples:
                sequence.in_flight -= sequence is not row.sequence
            outcomes = [(sequence, next(results)) for sequence in row.samples]
            self._acknowledge(row)
            for sequence, result in outcomes:
                self._append(sequence, result, now)
            if row.sequence.request.search is not None:
                self._searching[row.sequence.request] = None

    def _acknowledge(self, row: _Row) -> None:
        """Take note of what a row computed, where its sequence still is what it was when the row left."""
        sequence, request = row.sequence, row.sequence.request
        if sequence.ended:
            self.counters.discarded_tokens += row.end - row.start
        else:
            self._count(sequence, row)
        if request.state is not State.RUNNING or row.residence != request.residence:
            return
        for one in (sequence, *row.forks):
            if one.table is not None:
                self.memory.acknowledge(one.table, row.end, one.tokens)
        if sequence.table is not None and self._forming.leads(sequence):
            self._rejoin(self._forming.arrived(sequence, sequence.table.committed))
            if not self._forming.leads(sequence) and request.priority != request.submission.priority:
                self._set_priority(request, request.submission.priority)

    def _count_hits(self, trunk: Sequence, cached_tokens: int) -> None:
        """Count what an admission found of the prompt and no earlier one had found or computed: each token counts once."""
        of_prompt = max(0, min(cached_tokens, trunk.request.prompt_length) - trunk.high_water)
        self.counters.prefix_query_tokens += of_prompt
        self.counters.prefix_hit_tokens += of_prompt
        trunk.high_water = max(trunk.high_water, cached_tokens)

    def _count(self, sequence: Sequence, row: _Row) -> None:
        if row.start >= sequence.high_water and row.start >= sequence.request.prompt_length:
            sequence.high_water = row.end
            return
        first_time = max(0, row.end - max(row.start, sequence.high_water))
        self.counters.recomputed_tokens += row.end - row.start - first_time
        of_prompt = max(0, min(row.end, sequence.request.prompt_length) - max(row.start, sequence.high_water))
        self.counters.prefill_tokens += of_prompt
        self.counters.prefix_query_tokens += of_prompt
        sequence.high_water = max(sequence.high_water, row.end)

    def _append(self, sequence: Sequence, result: Sampled, now: float) -> None:
        """Add a sampled token to its sequence, which may end with it."""
        if result.failed:
            # Or whoever begins with the same tokens fails as well.
            if sequence.table is not None:
                self.memory.distrust(sequence.table)
            else:
                self.memory.distrust_cached(sequence.lineage, sequence.tokens)  # it was released meanwhile
        if sequence.ended:
            return
        request = sequence.request
        submission = request.submission
        if request.search is not None:
            sequence.choices = result.choices
            return
        if result.failed:
            self._complete(sequence, sequence.outputs, FinishReason.ERROR, now)
            return
        self._events.append(NewToken(submission.key, sequence.index, sequence.outputs, result.token, result.logprob))
        sequence.tokens.append(result.token)
        if result.token in submission.stop_token_ids:
            self._complete(sequence, sequence.outputs, FinishReason.EOS, now)
        elif sequence.outputs == request.max_outputs:
            reason = FinishReason.LENGTH if sequence.outputs == submission.max_tokens else FinishReason.CONTEXT
            self._complete(sequence, sequence.outputs, reason, now)

    def _search(self, now: float) -> None:
        """Move the beams of every search that has all that it needs."""
        due, self._searching = list(self._searching), {}
        for request in due:
            if can_move(request) and not move(request, self.memory):
                self._conclude(request, now)

    # ---------------------------------------------------------------------------------------------------- ends

    def _conclude(self, request: Request, now: float) -> None:
        """End a request whose search is over."""
        for event in outcome(request):
            self._events.append(event)
            if isinstance(event, SequenceEnd):
                self.counters.decode_tokens += max(0, event.output_tokens - 1)
        self.counters.finished_requests += 1
        self._end(request, EndCode.OK, "", now)

    def _complete(self, sequence: Sequence, output_tokens: int, reason: FinishReason, now: float) -> None:
        """End one sequence, and with the last one its request."""
        request = sequence.request
        self.counters.decode_tokens += max(0, output_tokens - 1)
        self._events.append(SequenceEnd(request.submission.key, sequence.index, output_tokens, reason))
        if len(request.live) == 1:
            self.counters.finished_requests += 1
            self._end(request, EndCode.OK, "", now)
            return
        if request.state is State.RUNNING:
            if not request.forked and sequence is request.trunk:
                self._set_aside(request)  # the others have nothing yet: another one has to compute the prompt
            else:
                self._release(sequence)
        else:
            self._drop_swapped(sequence)
            # Where it was the trunk, and nothing had forked, there is nothing to bring back.
            request.swapped = request.swapped and request.forked
        sequence.ended = True

    def _end(self, request: Request, code: EndCode, message: str, now: float) -> None:
        submission = request.submission
        if request.state is State.RUNNING:
            self._leave(request)
        elif self._forming.is_waiting(request):
            self._forming.forget(request)
        elif self._tenants.is_waiting(request):
            self._tenants.forget(request)
        else:
            del self._waiting[bisect_left(self._waiting, request.rank, key=_rank)]
        request.state = State.ENDED
        for sequence in request.live:
            self._drop_swapped(sequence)
            sequence.ended = True
        del self._requests[submission.key]
        del self._names[submission.tenant, submission.request_id]
        admitted_at = now if request.first_admitted_at is None else request.first_admitted_at
        queue_seconds = admitted_at - request.arrived_at
        self._events.append(RequestEnd(submission.key, code, message, request.cached_tokens, request.preemptions, queue_seconds))

    def _leave(self, request: Request) -> None:
        """Take slots and memory from a running request."""
        del self._running[bisect_left(self._running, request.rank, key=_rank)]
        request.priority = request.submission.priority
        for sequence in request.live:
            self._release(sequence)

    def _drop_swapped(self, sequence: Sequence) -> None:
        if self._swap is not None and sequence.key in self._swap.swapped:
            self._swap.drop_swapped(sequence.key)

    def _release(self, sequence: Sequence) -> None:
        """Take slot and memory from one sequence of a running request."""
        if self._forming.leads(sequence):
            self._rejoin(self._forming.leave(sequence))
        if sequence.table is not None:
            self.memory.release(sequence.key, sequence.tokens)
            sequence.table = None
        self._slots.give_up(sequence.slot)
        self._tenants.stopped(sequence.request.submission.tenant)
        sequence.slot = -1
        sequence.told = []
        sequence.moved = False

    # ------------------------------------------------------------------------------------------------ invariants

    def check_invariants(self) -> int:
        """Check queues, slots, lengths and the memory below. Returns how many checks were made.

        Raises:
            AssertionError: one does not hold.
        """
        checks = self.memory.check_invariants() + self._forming.check_invariants()
        checks += self._tenants.check_invariants(sequence for request in self._running for sequence in request.live)
        for queue, state in (self._waiting, State.WAITING), (self._running, State.RUNNING):
            assert all(a.rank < b.rank for a, b in pairwise(queue)), f"{state.name} is out of order"
            assert all(request.state is state for request in queue)
        followers = (*self._forming.waiting, *self._tenants.waiting)
        assert all(request.state is State.WAITING for request in followers)
        for request in self._running:
            raised = request.priority != request.submission.priority
            assert not raised or any(self._forming.leads(one) for one in request.live), "raised for nobody"
        live = {request.submission.key for request in (*self._waiting, *followers, *self._running)}
        assert live == set(self._requests), "a live request is in no queue, or a queue holds a dead one"
        assert {(r.submission.tenant, r.submission.request_id) for r in self._requests.values()} == set(self._names)
        running = [sequence for request in self._running for sequence in request.live]
        assert set(self.memory.tables) == {sequence.key for sequence in running if sequence.table is not None}
        if self._swap is not None:
            waiting = (*self._waiting, *self._tenants.waiting)
            swapped = [sequence for request in waiting if request.swapped for sequence in request.live]
            assert set(self._swap.swapped) <= {sequence.key for sequence in swapped}, "a table on the host is nobody's"
        checks += self._slots.check_invariants([sequence.slot for sequence in running])
        in_flight: dict[Sequence, int] = {}
        for _, rows in self._in_flight:
            for row in rows:
                for sequence in {row.sequence, *row.samples}:
                    in_flight[sequence] = in_flight.get(sequence, 0) + 1
        for request in self._requests.values():
            assert request.live, "a request without a sequence"
            if request.search is not None:
                checks += request.search.check_invariants()
                for lane in request.search.running:
                    sequence = request.sequences[lane]
                    assert sequence.tokens[request.prompt_length :] == request.search.tokens(lane), "a beam is in another lane"
            for sequence in request.live:
                assert sequence.in_flight == in_flight.get(sequence, 0)
                assert sequence.outputs <= sequence.outputs_promised <= request.max_outputs
                assert sequence.outputs_promised - sequence.outputs <= sequence.in_flight
                if request.state is State.RUNNING:
                    assert (sequence.table is not None) == (request.forked or sequence is request.trunk)
                if sequence.table is not None:
                    assert sequence.table.planned <= sequence.promised
                    assert len(sequence.told) <= len(sequence.table.blocks)
        return checks + 6 * len(self._requests) + 4


def _planned_sample(chunk: int, sequence: Sequence) -> PlannedSample:
    search = sequence.request.search
    if search is None:
        return PlannedSample(chunk, sequence.slot, sequence.outputs_promised)
    alternatives = sequence.request.submission.alternatives
    return PlannedSample(chunk, sequence.slot, sequence.outputs, max(search.choices, alternatives or 0), alternatives)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
