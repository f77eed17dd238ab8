"""A scheduler with the other two processes around it, simulated: an executor that obeys plans to the letter, clients that listen.

The executor's pool holds one (token, digest) for each slot. The digest of a position is a hash of the digest before it, *as read
through the table*, and of its token: like K and V it depends on everything before it. What is sampled is a hash of the last
digest. So a request gets the tokens of the pure function `answer`, which knows no pages, exactly if every block that was shared,
copied, evicted, given away and computed again held at each moment what it had to.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from memmgr.core.events import Record
from memmgr.core.lineage import root_hash
from memmgr.core.swap import SwappingMemory
from memmgr.core.table import MemoryCounters
from memmgr.schedule.beams import Choice
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.plans import (
    EndCode,
    FinishReason,
    Limits,
    NewToken,
    Plan,
    PlannedChunk,
    PromptTold,
    RequestEnd,
    RequestKey,
    Sampled,
    SequenceEnd,
    Submission,
)
from memmgr.schedule.scheduler import Scheduler

#: As in memmgr/session.py.
MOST_IN_FLIGHT: Final = 2

_MASK: Final = 2**61 - 1
START: Final = 7

Slot = tuple[int, int]
POISON: Final[Slot] = (-1, -1)


# -------------------------------------------------------------------------------------------- the pure function


def mix(digest: int, token: int) -> int:
    """Return the digest of a position after one with `digest`."""
    return (digest * 1_000_003 + token * 40_503 + 12_345) * 2_654_435_761 % _MASK


def sample(digest: int, position: int, vocabulary: int, index: int = 0) -> Sampled:
    """Return output number `position` of a request's sequence after a context: now and then none: no numbers."""
    drawn = mix(digest, position + 1000 * index) >> 7
    return Sampled(0, failed=True) if drawn % 97 == 0 else Sampled(drawn % vocabulary)


def choose(digest: int, vocabulary: int, count: int) -> Sampled:
    """Return the `count` most likely tokens after a context; now and then none: no numbers."""
    if mix(digest, 4711) % 97 == 0:
        return Sampled(0, failed=True)
    likely = sorted((-1 - (mix(digest, 100_000 + token) >> 9) % 100_003 / 20_000, -token) for token in range(vocabulary))
    return Sampled(0, choices=tuple(Choice(-token, logprob, "detail") for logprob, token in reversed(likely[-count:])))


def search(
    prompt: Iterable[int], vocabulary: int, width: int, penalty: float, most_outputs: int, stop: frozenset[int]
) -> list[tuple[float, list[int]]]:
    """Return the `width` best hypotheses, with their scores: beam search as it is defined, over whole texts."""
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, most_outputs + 1):
        nexts: list[tuple[float, list[int]]] = []
        for total, outputs in running:
            digest = START
            for token in (*prompt, *outputs):
                digest = mix(digest, token)
            nexts += [(total + one.logprob, [*outputs, one.token]) for one in choose(digest, vocabulary, vocabulary).choices]
        nexts.sort(key=lambda one: -one[0])
        ending = [one for one in nexts[:width] if length == most_outputs or one[1][-1] in stop]
        done = sorted([*done, *((total / length**penalty, outputs) for total, outputs in ending)], key=lambda one: -one[0])[
            :width
        ]
        running = [one for one in nexts if one[1][-1] not in stop][:width]
        if not running or (len(done) == width and running[0][0] / length**penalty <= done[-1][0]):
            break
    return done


def answer(
    prompt: Iterable[int], vocabulary: int, max_tokens: int, context_length: int, stop: frozenset[int], index: int = 0
) -> tuple[list[int], FinishReason]:
    """Return what a request must get: no pages, no batch, no cache."""
    prompt = list(prompt)
    digest = START
    for token in prompt:
        digest = mix(digest, token)
    outputs: list[int] = []
    while True:
        drawn = sample(digest, len(outputs), vocabulary, index)
        if drawn.failed:
            return outputs, FinishReason.ERROR
        outputs.append(drawn.token)
        digest = mix(digest, drawn.token)
        if drawn.token in stop:
            return outputs, FinishReason.EOS
        if len(outputs) == max_tokens:
            return outputs, FinishReason.LENGTH
        if len(prompt) + len(outputs) == context_length:
            return outputs, FinishReason.CONTEXT


# ------------------------------------------------------------------------------------------------- the executor


@dataclass
class _Open:
    index: int
    table: list[int] = field(default_factory=list)
    length: int = 0
    last: int | None = None  # sampled last
    history: list[int] | None = None  # its outputs, where they are counted


class Executor:
    """Does plans in order. Whatever a plan may not ask of it is an assertion here."""

    def __init__(
        self, total: int, size: int, max_slots: int, max_step_tokens: int, vocabulary: int, host_blocks: int = 0
    ) -> None:
        self.size, self.total = size, total
        self.max_slots, self.max_step_tokens, self.vocabulary = max_slots, max_step_tokens, vocabulary
        self.pool: list[list[Slot]] = [[POISON] * size for _ in range(total)]
        self.host: list[list[Slot]] = [[POISON] * size for _ in range(host_blocks)]
        self.slots: dict[int, _Open] = {}
        self.step = 0
        self.computed = 0
        self.histories: list[tuple[int, ...]] = []  # all outputs of a sequence, each time that one is counted

    def do(self, plan: Plan) -> list[Sampled]:
        """Do one plan; return its samples."""
        self.step += 1
        assert plan.step == self.step
        self._blocks(plan)
        for slot in plan.closes:
            del self.slots[slot]
        for slot, sampling, index in plan.opens:
            assert slot not in self.slots
            assert sampling is not None
            assert slot < self.max_slots
            self.slots[slot] = _Open(index)
        opened_now = {slot for slot, _, _ in plan.opens}
        for slot, _, outputs in plan.histories:
            assert slot in opened_now
            assert self.slots[slot].history is None
            self.slots[slot].history = list(outputs)
        assert len({chunk.slot for chunk in plan.chunks}) == len(plan.chunks)
        assert sum(chunk.count for chunk in plan.chunks) <= self.max_step_tokens
        for chunk in plan.chunks:
            self._table(chunk)
        for chunk in plan.chunks:
            self._write(chunk)
        drawn: list[Sampled] = []
        for row in plan.samples:
            chunk, opened = plan.chunks[row.chunk], self.slots[row.slot]
            assert chunk.slot == row.slot or opened.length == 0, "a sequence that goes its own way is sampled from another's"
            digest = self._read(self.slots[chunk.slot])
            if row.choices:
                drawn.append(choose(digest, self.vocabulary, row.choices))
                opened.last = None
                continue
            drawn.append(sample(digest, row.position, self.vocabulary, opened.index))
            opened.last = drawn[-1].token
            if opened.history is not None:
                assert len(opened.history) == row.position, "the executor has counted other tokens than there are"
                opened.history.append(opened.last)
                self.histories.append(tuple(opened.history))
        return drawn

    def _blocks(self, plan: Plan) -> None:
        places = [place for _, place in plan.memory.outs]
        read = {place for place, _ in plan.memory.ins}
        assert len(set(places)) == len(places)
        for block, place in plan.memory.outs:
            self.host[place] = list(self.pool[block])
        for block in plan.memory.freed:
            self.pool[block] = [POISON] * self.size
        assert len({block for _, block in plan.memory.ins}) == len(plan.memory.ins) == len(read)
        for place, block in plan.memory.ins:
            assert self.host[place] != [POISON] * self.size, "a block comes in that never went out"
            self.pool[block] = list(self.host[place])
            self.host[place] = [POISON] * self.size
        sources = {source for source, _ in plan.memory.copies}
        destinations = [destination for _, destination in plan.memory.copies]
        assert len(set(destinations)) == len(destinations)
        assert not sources & set(destinations)
        for source, destination in plan.memory.copies:
            self.pool[destination] = list(self.pool[source])

    def _table(self, chunk: PlannedChunk) -> None:
        slot = self.slots[chunk.slot]
        for logical, block in chunk.edits:
            assert 0 <= block < self.total
            slot.table[logical] = block
        slot.table.extend(chunk.new_blocks)
        assert all(0 <= block < self.total for block in chunk.new_blocks)
        assert len(slot.table) == -(-(chunk.start + chunk.count) // self.size)
        if slot.length == 0:
            slot.length = chunk.start  # what was found in the cache
        assert slot.length == chunk.start, "a chunk does not go on where the last one ended"

    def _write(self, chunk: PlannedChunk) -> None:
        slot = self.slots[chunk.slot]
        tokens = chunk.tokens
        if tokens is None:
            assert slot.last is not None
            assert chunk.count == 1
            tokens = array("I", [slot.last])
        assert len(tokens) == chunk.count > 0
        digest = self._read(slot)
        for token in tokens:
            block, offset = slot.table[slot.length // self.size], slot.length % self.size
            seen_by = [number for number, other in self.slots.items() if block in other.table]
            assert seen_by == [chunk.slot], f"block {block} is written by slot {chunk.slot} and seen by {seen_by}"
            digest = mix(digest, token)
            self.pool[block][offset] = (token, digest)
            slot.length += 1
            self.computed += 1

    def _read(self, slot: _Open) -> int:
        """Read the whole context through the table; return its digest."""
        digest = START
        for position in range(slot.length):
            token, written = self.pool[slot.table[position // self.size]][position % self.size]
            assert (token, written) != POISON, f"position {position} was never written, or is another's by now"
            digest = mix(digest, token)
            assert written == digest, f"position {position} was computed in another context"
        return digest


# --------------------------------------------------------------------------------------------------- the clients


@dataclass
class Client:
    """What one request has heard."""

    submission: Submission
    kept: int  # blocks that were pinned or guaranteed to other tenants when it came
    outputs: dict[int, list[int]] = field(default_factory=dict)  # by index
    sequence_ends: dict[int, SequenceEnd] = field(default_factory=dict)
    end: RequestEnd | None = None
    told: list[object] = field(default_factory=list)  # of its prompt

    @property
    def tokens(self) -> list[int]:
        """Those of the first sequence."""
        return self.outputs.get(0, [])

    @property
    def sequence_end(self) -> SequenceEnd | None:
        """That of the first sequence."""
        return self.sequence_ends.get(0)


class World:
    """Scheduler, executor and clients. A plan is done by the executor when its result is asked for, in order."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        max_running: int = 8,
        max_waiting: int = 64,
        max_step_tokens: int = 16,
        context_length: int | None = None,
        vocabulary: int = 50,
        prefix_cache: bool = True,
        records: list[Record] | None = None,
        host_blocks: int = 0,
        max_prompt_rows: int = 128,
        max_history_tokens: int = 1024 * 1024,
        new_memory: Callable[..., SwappingMemory] = SwappingMemory,
    ) -> None:
        self.vocabulary = vocabulary
        self.records = records
        self.limits = Limits(
            max_running, max_waiting, max_step_tokens, context_length or blocks * block_size, max_prompt_rows, max_history_tokens
        )
        self.memory = new_memory(
            blocks,
            block_size,
            prefix_cache=prefix_cache,
            counters=MemoryCounters(),
            records=records,
            host_blocks=host_blocks,
        )
        self.scheduler = Scheduler(
            self.memory, self.limits, lambda tenant, salt: root_hash("model", tenant, salt), ScheduleCounters()
        )
        self.executor = Executor(blocks, block_size, max_running, max_step_tokens, vocabulary, host_blocks)
        self.in_flight: deque[Plan] = deque()
        self.clients: dict[RequestKey, Client] = {}
        self.now = 0.0
        self.steps = 0

    def submit(
        self,
        prompt: Iterable[int],
        max_tokens: int = 0,
        *,
        stop: Iterable[int] = (),
        priority: int = 0,
        salt: str = "",
        name: str = "",
        tenant: str = "tenant",
        deadline: float = float("inf"),
        samples: int = 1,
        beam_width: int = 0,
        length_penalty: float = 1.0,
        prompt_alternatives: int | None = None,
        counts_tokens: bool = False,
    ) -> RequestKey:
        """Submit a request; its key."""
        key = (1, len(self.clients) + 1)
        submission = Submission(
            key=key,
            tenant=tenant,
            request_id=name or f"request-{key[1]}",
            prompt=array("I", prompt),
            sampling=f"sampling of {key}",
            max_tokens=max_tokens,
            stop_token_ids=frozenset(stop),
            priority=priority,
            salt=salt,
            deadline=deadline,
            samples=samples,
            beam_width=beam_width,
            length_penalty=length_penalty,
            prompt_alternatives=prompt_alternatives,
            counts_tokens=counts_tokens,
            prompt_seen=b"seen" if counts_tokens else b"",
        )
        quotas = self.memory.quotas
        kept = self.memory.pool.pinned + quotas.guaranteed - quotas.floor(tenant)
        self.clients[key] = Client(submission, kept)
        assert self.scheduler.submit(submission, self.now)
        self.listen()
        return key

    def plan(self) -> Plan | None:
        """Plan one step, if another may be in flight."""
        if len(self.in_flight) == MOST_IN_FLIGHT:
            return None
        plan = self.scheduler.plan(self.now)
        self.listen()
        if plan is not None:
            self.in_flight.append(plan)
            self.steps += 1
        assert self.scheduler.plans_in_flight == len(self.in_flight)
        return plan

    def complete(self) -> bool:
        """Have the oldest plan done and take in its result; False where there is none."""
        if not self.in_flight:
            return False
        plan = self.in_flight.popleft()
        told = [tuple(telling.targets) for telling in plan.tellings]
        self.scheduler.complete(plan.step, self.executor.do(plan), self.now, told)
        self.listen()
        return True

    def step(self) -> Plan | None:
        """Plan one step and have it done, none else being in flight."""
        assert not self.in_flight
        plan = self.plan()
        self.complete()
        return plan

    def run(self, most_steps: int = 1000) -> None:
        """Go on, two plans in flight, until there is nothing to do."""
        for _ in range(most_steps):
            while self.plan() is not None:
                pass
            if not self.complete():
                return
        raise AssertionError(f"still busy after {most_steps} steps")

    def listen(self) -> None:
        """Let the clients hear what there is, and check that it is in order."""
        for event in self.scheduler.take_events():
            client = self.clients[event.key]
            assert client.end is None, "a request was spoken of after its end"
            if isinstance(event, NewToken):
                assert event.index not in client.sequence_ends
                outputs = client.outputs.setdefault(event.index, [])
                assert event.offset == len(outputs)
                outputs.append(event.token)
            elif isinstance(event, PromptTold):
                assert not client.outputs
                client.told += event.logprobs
            elif isinstance(event, SequenceEnd):
                assert event.index not in client.sequence_ends
                client.sequence_ends[event.index] = event
            else:
                assert (event.code is EndCode.OK) == (len(client.sequence_ends) == client.submission.samples)
                client.end = event

    def expected(self, key: RequestKey, index: int = 0) -> tuple[list[int], FinishReason]:
        """Return what a request's sequence must get if nobody disturbs it."""
        asked = self.clients[key].submission
        return answer(asked.prompt, self.vocabulary, asked.max_tokens, self.context(key), asked.stop_token_ids, index)

    def context(self, key: RequestKey) -> int:
        """Return how long a request's sequences may get: several of them have to fit together beside what is kept."""
        asked, size = self.clients[key].submission, self.memory.block_size
        if asked.width == 1:
            return self.limits.context_length
        shared = len(asked.prompt) // size
        each = (self.memory.pool.total - self.clients[key].kept - shared) // asked.width
        return min(self.limits.context_length, (shared + each) * size)

    def check_answer(self, key: RequestKey) -> None:
        """Check that a request that was left alone got its answer."""
        client = self.clients[key]
        assert client.end is not None
        if client.submission.beam_width > 1:
            self._check_beams(key, client)
            return
        for index in range(client.submission.samples):
            tokens, reason = self.expected(key, index)
            assert client.outputs.get(index, []) == tokens
            assert client.sequence_ends[index] == SequenceEnd(key, index, len(tokens), reason)
        assert client.end is not None
        assert client.end.code is EndCode.OK

    def _check_beams(self, key: RequestKey, client: Client) -> None:
        asked = client.submission
        room = self.context(key) - len(asked.prompt)
        most = min(room, asked.max_tokens or room)
        found = search(asked.prompt, self.vocabulary, asked.beam_width, asked.length_penalty, most, asked.stop_token_ids)
        for index in range(asked.samples):
            end = client.sequence_ends[index]
            outputs = client.outputs.get(index, [])
            if index >= len(found):
                assert (end.reason, outputs) == (FinishReason.ERROR, [])
                continue
            score, tokens = found[index]
            unended = FinishReason.LENGTH if len(tokens) == asked.max_tokens else FinishReason.CONTEXT
            reason = FinishReason.EOS if tokens[-1] in asked.stop_token_ids else unended
            assert (outputs, end.output_tokens, end.reason) == (tokens, len(tokens), reason)
            assert abs(end.score - score) < 1e-9

    def check_view(self) -> None:
        """Check that the executor, all plans done, holds what was planned."""
        assert not self.in_flight
        sequences = [sequence for request in self.scheduler.running for sequence in request.live]
        planned = {s.slot: (s.table.planned, s.table.blocks) if s.table is not None and s.told else (0, []) for s in sequences}
        held = {slot: (state.length, state.table) for slot, state in self.executor.slots.items()}
        for slot in self.scheduler.closing_slots - planned.keys():
            held.pop(slot)
        assert held == planned

    def check_idle(self, *, cut_short: bool = False) -> None:
        """Check that nothing is left, and that the counters add up, unless some request was `cut_short`."""
        memory, counted, blocks = self.memory, self.scheduler.counters, self.memory.counters
        assert not self.in_flight
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.executor.slots
        assert memory.pool.live == 0
        assert not memory.swapped
        assert memory.host.used == 0
        assert blocks.swapped_in_blocks <= blocks.swapped_out_blocks
        assert memory.pool.free + memory.pool.cached == memory.pool.total
        assert blocks.allocated_blocks - blocks.freed_blocks == memory.pool.cached
        assert counted.prefill_tokens == counted.prefix_query_tokens - counted.prefix_hit_tokens
        ends = [client.end for client in self.clients.values()]
        assert all(end is not None for end in ends), "a request has no end"
        codes = [end.code for end in ends if end is not None]
        if not cut_short and EndCode.CANCELLED not in codes and EndCode.DEADLINE not in codes:
            served = [c.submission for c in self.clients.values() if c.end is not None and c.end.code is EndCode.OK]
            assert counted.prefix_query_tokens == sum(len(submission.prompt) for submission in served)
        assert counted.finished_requests == codes.count(EndCode.OK)
        assert counted.cancelled_requests == codes.count(EndCode.CANCELLED) + codes.count(EndCode.DEADLINE)
        assert counted.finished_requests + counted.cancelled_requests + counted.rejected_requests == len(codes)
        assert counted.planned_steps == counted.acknowledged_steps == self.steps
        kept = [end.output_tokens for client in self.clients.values() for end in client.sequence_ends.values()]
        assert counted.decode_tokens == sum(max(0, outputs - 1) for outputs in kept)
        assert counted.preemptions >= sum(end.preemptions for end in ends if end is not None)
