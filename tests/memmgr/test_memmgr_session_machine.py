"""A session against a naive model, under messages that are lost, late, repeated, wrong, and with an executor that dies.

Gateways submit, submit again, cancel and finish, also what has long ended; plans and results travel in frames, and any frame that
an executor ever sent may come once more; a result may come before its turn; the executor may be lost with two plans out, and
another begins with an empty pool. The model is made of dicts (memmgr_naive): what each slot of each block holds, and what each
client has heard. After each rule all invariants hold, each table reads as its sequence's tokens, and each client has heard a part
of its one answer, and its end at most once.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from kilburn.v1 import engine_pb2 as engine
from kilburn.wire.envelope import Conversation, Verdict, body_of, parse
from memmgr.core.blocks import BlockState
from memmgr.core.lineage import root_hash
from memmgr.core.swap import SwappingMemory
from memmgr.messages import MessageError, read_submit
from memmgr.schedule.plans import EndCode, FinishReason, Limits, NewToken, PromptTold, RequestEnd, SequenceEnd, Submission
from memmgr.session import NotCachedError, PinRefusedError, Session, Totals
from tests.memmgr.memmgr_messages import hello, submit, totals
from tests.memmgr.memmgr_naive import VOCABULARY, NaiveExecutor, answer

EXAMPLES = int(os.environ.get("KILBURN_EXAMPLES", "500"))
MEMMGR = 77
MOST_LIVE = 5
MOST_SAID = 12
WHICH = st.integers(0, 9)
UNLIKELY = st.sampled_from([False] * 5 + [True])


#: Prompts begin with a part of this.
BEGINNING = (0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1)

#: Tokens from the beginning, the bits that follow, max_tokens, stop tokens, samples, priority, salt, seconds to the deadline.
Wish = tuple[int, int, int, int, int, int, str, float]
WISHES = st.tuples(
    st.integers(0, 12),
    st.integers(0, 9),
    st.sampled_from([0, 0, 0, 1, 3, 8]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([1, 1, 1, 1, 2, 3]),
    st.sampled_from([0, 0, 0, -1, 1]),
    st.sampled_from(["", "", "", "other"]),
    st.sampled_from([inf, inf, inf, inf, 4.0]),
)


@dataclass
class Client:
    """What is known of one request. `most` outputs are made of each sequence."""

    message: engine.Submit
    deadline: float
    most: int
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, SequenceEnd] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)  # sequences that a Finish ended
    end: RequestEnd | None = None


class SessionMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(4, 14),
        size=st.integers(1, 4),
        running=st.sampled_from([1, 2, 3, 6]),
        budget=st.sampled_from([0, 2, 9]),
        prefix_cache=st.sampled_from([True, True, True, False]),
        host_blocks=st.sampled_from([0, 4, 20]),
    )
    def begin(self, blocks: int, size: int, running: int, budget: int, prefix_cache: bool, host_blocks: int) -> None:
        self.total, self.size, self.prefix_cache, self.host_blocks = blocks, size, prefix_cache, host_blocks
        self.limits = Limits(running, 6, running + budget, min(blocks * size, 24))
        self.totals: Totals = totals()
        self.clients: dict[int, Client] = {}
        self.domains: dict[int, str] = {}
        self.incarnation = 0
        self.now = 0.0
        self.wire = Conversation(MEMMGR)
        self.said: deque[bytes] = deque(maxlen=MOST_SAID)  # frames of all executors that were
        self.arrive()

    def arrive(self) -> None:
        """An executor says hello, its pool empty."""
        self.incarnation += 1
        greeting = hello(block_size=self.size, total_blocks=self.total, vocab_size=VOCABULARY)
        greeting.host_blocks = self.host_blocks
        self.session = Session(
            self.incarnation, greeting, self.limits, self.totals, self.now, prefix_cache=self.prefix_cache, swap=True
        )
        self.scheduler = self.session.scheduler
        self.executor = NaiveExecutor(self.size, self.domains)
        self.wire.meet(self.incarnation)
        self.executor_wire = Conversation(self.incarnation, MEMMGR)
        self.results: deque[engine.StepResult] = deque()  # done and not sent
        self.pins: dict[int, list[int]] = {}

    # -------------------------------------------------------------------------------------------------- gateways

    @precondition(lambda self: len(self.live) < MOST_LIVE)
    @rule(wishes=st.lists(WISHES, min_size=1, max_size=3))
    def submit(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            self.submit_one(*wish)

    def submit_one(
        self, length: int, more: int, most: int, stops: int, samples: int, priority: int, salt: str, patience: float
    ) -> None:
        handle = len(self.clients) + 1
        prompt = [*BEGINNING[:length], *map(int, f"{more:b}")]
        if more:  # else it may be too much: few are
            prompt = prompt[: self.limits.context_length - 1]
            samples = min(samples, self.limits.max_running)
        message = submit(
            handle,
            prompt_ids=prompt,
            max_tokens=most,
            stop_token_ids=list(range(stops)),
            samples=samples,
            priority=priority,
            cache_salt=salt,
        )
        message.sampling.seed = handle
        room = self.limits.context_length - len(prompt)
        if samples > 1:  # they have to fit together beside what is pinned now
            shared = len(prompt) // self.size
            each = (self.total - len(self.pinned) - shared) // samples
            room = min(room, (shared + each) * self.size - len(prompt))
        self.clients[handle] = Client(message, self.now + patience, min(room, most or room))
        self.domains[handle] = salt
        waiting = len(self.scheduler.waiting)
        assert self.scheduler.submit(self.read(message, self.now + patience), self.now)
        self.listen()
        end = self.clients[handle].end
        if room < 1 or samples > self.limits.max_running:
            assert end is not None
            assert end.code is EndCode.NEVER_FITS
        elif waiting >= self.limits.max_waiting:
            assert end is not None
            assert end.code is EndCode.QUEUE_FULL
        else:
            assert end is None

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def submit_again(self, which: int) -> None:
        """The same message comes twice, and then another that calls its request the same."""
        handle = self.pick(which)
        message = self.clients[handle].message
        self.changes_nothing(lambda: not self.scheduler.submit(self.read(message, inf), self.now))
        other = engine.Submit()
        other.CopyFrom(message)
        other.handle = len(self.clients) + 1
        self.clients[other.handle] = Client(other, inf, 0)
        assert self.scheduler.submit(self.read(other, inf), self.now)
        self.listen()
        end = self.clients[other.handle].end
        assert end is not None
        assert end.code is EndCode.DUPLICATE

    @precondition(lambda self: self.clients)
    @rule(which=WHICH, ended=st.booleans())
    def cancel(self, which: int, ended: bool) -> None:
        """One that lives, or one that has ended: its Cancel is late."""
        handles = [handle for handle, client in self.clients.items() if (client.end is not None) == ended]
        if not handles:
            return
        handle = handles[which % len(handles)]
        if ended:
            self.changes_nothing(lambda: not self.scheduler.cancel((1, handle), EndCode.CANCELLED, "late", self.now))
            return
        assert self.scheduler.cancel((1, handle), EndCode.CANCELLED, "enough", self.now)
        self.listen()
        end = self.clients[handle].end
        assert end is not None
        assert end.code is EndCode.CANCELLED

    @precondition(lambda self: self.clients)
    @rule(which=WHICH, index=st.integers(0, 3), back=st.integers(-1, 3))
    def finish(self, which: int, index: int, back: int) -> None:
        """A stop string ended a sequence `back` tokens ago: one that lives, or has ended, or never was; or it is yet to come."""
        handle = sorted(self.clients)[which % len(self.clients)]
        client = self.clients[handle]
        count = max(0, len(client.outputs.get(index, [])) - back)
        lives = client.end is None and index < client.message.samples and index not in client.ends
        if not lives or back < 0:
            before = self.fingerprint()
            self.scheduler.finish((1, handle), index, count, self.now)
            self.unchanged(before)
            return
        client.finished.add(index)
        self.scheduler.finish((1, handle), index, count, self.now)
        self.listen()
        assert client.ends[index] == SequenceEnd((1, handle), index, count, FinishReason.STOP)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # ------------------------------------------------------------------------------------------------ the executor

    @rule(plans=st.integers(1, 8))
    def run(self, plans: int) -> None:
        """Plans leave, two at a time, are done, and their results come back; the last one's perhaps later."""
        for _ in range(plans):
            self.plan()
            self.plan()
            if self.executor.ahead:
                self.execute()
            if self.results:
                self.deliver()
            self.scheduler.check_invariants()

    @rule()
    def plan(self) -> None:
        plan = self.session.next_plan(self.now)
        self.listen()
        for client in self.clients.values():
            assert client.end is not None or plan is None or client.deadline > self.now
        if plan is not None:
            self.executor.ahead.append(plan)
        assert self.scheduler.plans_in_flight == len(self.executor.ahead) + len(self.results) <= 2

    @precondition(lambda self: self.executor.ahead)
    @rule()
    def execute(self) -> None:
        self.results.append(self.executor.do())

    @precondition(lambda self: self.results)
    @rule()
    def deliver(self) -> None:
        frame = self.executor_wire.seal(self.results.popleft())
        self.said.append(frame)
        assert self.hear(frame) is Verdict.ACCEPTED
        self.listen()

    @precondition(lambda self: self.said)
    @rule(which=WHICH)
    def say_again(self, which: int) -> None:
        """A frame comes once more: of this executor, or of one that is dead."""
        frame = self.said[which % len(self.said)]
        own = parse(frame).sender == self.incarnation
        self.changes_nothing(lambda: self.hear(frame) is (Verdict.DUPLICATE if own else Verdict.FENCED))

    @rule(kind=st.sampled_from(["again", "ahead", "none"]))
    def out_of_turn(self, kind: str) -> None:
        """A result that is not due, in a new frame: it changes nothing, not even what is due."""
        due = self.executor.step + 1 - len(self.results)
        step = {"again": due - 1, "ahead": due + 1, "none": 0}[kind]
        frame = self.executor_wire.seal(engine.StepResult(step=step, token_ids=[0]))
        self.changes_nothing(lambda: self.refuses(frame))

    @precondition(lambda self: self.scheduler.plans_in_flight)
    @rule(kind=st.sampled_from(["error", "more", "beyond"]), which=WHICH, unlikely=UNLIKELY)
    def wrong_result(self, kind: str, which: int, unlikely: bool) -> None:
        """The result that is due is none. Nothing of it is applied, and the executor is lost."""
        if not unlikely:
            return
        result = self.results[0] if self.results else self.executor.do()
        if kind == "error":
            result.error = "out of memory"
        elif kind == "more" or not result.token_ids:
            result.token_ids.append(0)
        else:
            sample = which % len(result.token_ids)
            result.token_ids[sample] = VOCABULARY
            result.ClearField("failed")
        frame = self.executor_wire.seal(result)
        self.changes_nothing(lambda: self.refuses(frame))
        self.lose()

    @precondition(lambda self: self.scheduler.plans_in_flight or self.live)
    @rule(unlikely=UNLIKELY)
    def crash(self, unlikely: bool) -> None:
        if unlikely:
            self.lose()

    def lose(self) -> None:
        """The executor is gone: with its plans, its results, its pool. All requests end, and nothing counts as held."""
        live = self.live
        self.scheduler.abandon(EndCode.UNAVAILABLE, "the executor has gone", self.now)
        self.scheduler.check_invariants()
        self.session.close("the executor has gone")
        self.listen()
        for handle in live:
            end = self.clients[handle].end
            assert end is not None
            assert end.code is EndCode.UNAVAILABLE
        assert not self.live
        assert not self.scheduler.memory.tables
        counters = self.totals.memory
        assert counters.allocated_blocks == counters.freed_blocks
        self.arrive()

    @rule()
    def inspect(self) -> None:
        """Both sides tell what they hold, after all plans that left."""
        while self.executor.ahead:
            self.execute()
        told: Future[tuple[int, list[str]]] = Future()
        question = self.session.inspect(told)
        assert question is not None
        self.session.take_inspection(self.executor.inspection(question.id))
        assert told.result(0)[1] == []

    # ------------------------------------------------------------------------------------------------------ pins

    @precondition(lambda self: self.clients)
    @rule(which=WHICH, lasts=st.sampled_from([0.0, 1.0]))
    def pin(self, which: int, lasts: float) -> None:
        """Pin what is cached of some request's prompt."""
        message = self.clients[sorted(self.clients)[which % len(self.clients)]].message
        tokens = array("I", message.prompt_ids)
        try:
            pin = self.session.pin("default", message.cache_salt, tokens, lasts, self.now)
        except (NotCachedError, PinRefusedError):
            return
        assert list(self.contents(pin.blocks)) == [
            (message.cache_salt, tuple(tokens[: end + 1])) for end in range(len(pin.blocks) * self.size)
        ]

    @rule()
    def expire_pins(self) -> None:
        self.session.expire(self.now)

    @rule()
    def flush(self) -> None:
        memory = self.scheduler.memory
        cached = [block for block in range(self.total) if memory.pool.state(block) is BlockState.CACHED]
        assert memory.flush() == len(set(cached) - self.pinned)
        assert memory.pool.cached == len(set(cached) & self.pinned)

    # ------------------------------------------------------------------------------------------------- the model

    @property
    def live(self) -> list[int]:
        return [handle for handle, client in self.clients.items() if client.end is None]

    @property
    def pinned(self) -> set[int]:
        return {block for pin in self.scheduler.memory.pins for block in pin.blocks}

    def pick(self, which: int) -> int:
        return self.live[which % len(self.live)]

    def read(self, message: engine.Submit, deadline: float) -> Submission:
        return read_submit(message, 1, VOCABULARY, deadline)

    def hear(self, frame: bytes) -> Verdict:
        """Take in a frame as the service does."""
        envelope = parse(frame)
        verdict = self.wire.judge(envelope)
        if verdict is Verdict.ACCEPTED:
            result = body_of(envelope)
            assert isinstance(result, engine.StepResult)
            self.session.take_result(result, self.now)
        return verdict

    def refuses(self, frame: bytes) -> bool:
        with pytest.raises(MessageError):
            self.hear(frame)
        return True

    def changes_nothing(self, what: Callable[[], bool]) -> None:
        before = self.fingerprint()
        assert what()
        self.unchanged(before)

    def unchanged(self, before: object) -> None:
        assert self.fingerprint() == before
        assert not self.scheduler.take_events()

    def fingerprint(self) -> object:
        """Return what decides how the scheduler goes on, as far as it is told to anybody."""
        scheduler, memory = self.scheduler, self.scheduler.memory
        requests = [
            (
                request.submission.key,
                request.rank,
                [(list(one.tokens), one.slot, one.told[:], one.in_flight) for one in request.live],
            )
            for request in (*scheduler.running, *scheduler.waiting)
        ]
        tables = {key: (table.blocks[:], table.planned, table.computed, table.committed) for key, table in memory.tables.items()}
        pool = memory.pool
        return (
            requests,
            tables,
            (pool.references[:], pool.generations[:], list(pool.eviction_order()), pool.free, pool.pins[:]),
            [memory.index.hash_of(block) for block in range(self.total)],
            (scheduler.step, scheduler.plans_in_flight, str(scheduler.counters), str(self.totals.memory)),
        )

    def contents(self, blocks: list[int]) -> list[object]:
        """Return what some whole blocks hold, slot by slot."""
        return [self.executor.blocks[block][offset] for block in blocks for offset in range(self.size)]

    def listen(self) -> None:
        """Let the clients hear what there is; each hears a part of its answer, in order, and its end once."""
        for event in self.scheduler.take_events():
            gateway, handle = event.key
            client = self.clients[handle]
            assert gateway == 1
            assert client.end is None, "a request is spoken of after its end"
            if isinstance(event, RequestEnd):
                client.end = event
                assert (event.code is EndCode.OK) == (len(client.ends) == client.message.samples)
                continue
            assert not isinstance(event, PromptTold), "nobody asked to be told of a prompt"
            assert event.index not in client.ends
            outputs = client.outputs.setdefault(event.index, [])
            if isinstance(event, NewToken):
                assert event.offset == len(outputs)
                outputs.append(event.token)
                continue
            client.ends[event.index] = event
            if event.index not in client.finished:
                self.check_end(client, event)
        for client in self.clients.values():
            for index, outputs in client.outputs.items():
                assert outputs == answer(client.message.prompt_ids, index, len(outputs), ())[0]

    def check_end(self, client: Client, end: SequenceEnd) -> None:
        message = client.message
        expected, failed = answer(message.prompt_ids, end.index, client.most, message.stop_token_ids)
        assert client.outputs[end.index] == expected
        assert end.output_tokens == len(expected)
        if failed:
            assert end.reason is FinishReason.ERROR
        elif expected[-1] in message.stop_token_ids:
            assert end.reason is FinishReason.EOS
        else:
            assert end.reason is (FinishReason.LENGTH if len(expected) == message.max_tokens else FinishReason.CONTEXT)

    # -------------------------------------------------------------------------------------------- after each rule

    @invariant()
    def holds(self) -> None:
        self.scheduler.check_invariants()
        self.check_states()
        if not self.executor.ahead:  # else what is known may be a copy that is made first
            for slot in self.executor.slots.values():
                self.executor.read(slot)
            self.check_tables()
            self.check_host()
            self.check_index()

    def check_states(self) -> None:
        """Live is what some table names: nothing leaks, and nothing in use is free."""
        memory = self.scheduler.memory
        held = {block for table in memory.tables.values() for block in table.blocks}
        live = {block for block in range(self.total) if memory.pool.state(block) is BlockState.LIVE}
        assert live == held

    def check_tables(self) -> None:
        """What is acknowledged is there."""
        for request in self.scheduler.running:
            domain = self.domains[request.submission.key[1]]
            for sequence in request.live:
                if (table := sequence.table) is None:
                    continue
                for position in range(table.computed):
                    value = self.executor.blocks[table.blocks[position // self.size]][position % self.size]
                    assert value == (domain, tuple(sequence.tokens[: position + 1])), "a table reads as another's"

    def check_host(self) -> None:
        """What was swapped out waits there."""
        memory = self.scheduler.memory
        assert isinstance(memory, SwappingMemory)
        waiting: dict[Hashable, array[int]] = {one.key: one.tokens for request in self.scheduler.waiting for one in request.live}
        assert memory.swapped.keys() <= waiting.keys()
        for key, swapped in memory.swapped.items():
            tokens = waiting[key]
            for position in range(0 if memory._outs else min(swapped.planned, len(tokens))):
                value = self.executor.host[swapped.blocks[position // self.size]][position % self.size]
                assert value == (self.domains[swapped_handle(key)], tuple(tokens[: position + 1]))

    def check_index(self) -> None:
        """What can be found is what it is found as."""
        index = self.scheduler.memory.index
        roots = {root_hash("f" * 64, "default", salt): salt for salt in ("", "other")}
        for block in range(self.total):
            if index.hash_of(block) is None:
                continue
            chain = [block]
            while index.above(chain[0]) >= 0:
                chain.insert(0, index.above(chain[0]))
            known = [token for one in chain for token in array("I", index.nodes(slice(one, one + 1)).tokens[0] or b"")]
            domain = roots[index.parent_of(chain[0])]
            written = self.executor.blocks[block][(len(known) - 1) % self.size]
            assert written == (domain, tuple(known)), "a block is known for another's content"

    def teardown(self) -> None:
        """Whatever is under way comes to its end, and nothing is left."""
        if not hasattr(self, "session"):
            return
        for _ in range(4000):
            self.plan()
            self.plan()
            if not self.executor.ahead and not self.results:
                break
            while self.executor.ahead:
                self.execute()
            self.deliver()
            self.holds()
        assert not self.live
        self.scheduler.memory.pins.clear()
        self.scheduler.memory.flush()
        assert self.scheduler.memory.pool.free == self.total
        assert len(self.scheduler.memory.index) == 0
        ends = [client.end for client in self.clients.values()]
        counted = self.totals.schedule
        assert counted.finished_requests == sum(1 for end in ends if end is not None and end.code is EndCode.OK)


def swapped_handle(key: Any) -> int:
    """Return the handle in a sequence's key."""
    handle: int = key[0][1]
    return handle


def test_a_session_agrees_with_a_naive_model() -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
