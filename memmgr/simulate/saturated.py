"""A trace as a queue that never runs dry, through the scheduler, with an executor that answers at once.

Everything is the memory manager's own: the scheduler plans a step, and its result is there before the next plan. What the pool's
slots are good for is looked at in each step that a request has to wait for, between its plan and its result; at the end of
the trace, when nobody waits any more, nothing is. In Kwon et al.'s terms (2023, section 3.1), a slot is

    utilization               a token's, of a live sequence; of several that share a block, once
    reserved                  held by a sequence that will write to it before it ends
    internal_fragmentation    held by a sequence that will never write to it, which only its end shows
    external_fragmentation    lost to contiguity: what a run was rounded up by, known before its request began; and free slots
                              that would be enough for the request that waits, but lie in pieces
    free                      nobody's, or cached; too few, if a request waits

Blocks need no contiguity: paged memory has no external fragmentation.

Where a request has several samples or beams, they share blocks, and copy what they write to. What that saves is measured as Kwon
et al. do (section 6.3): blocks that are not there because of it, of those that there would be if no table shared any, over all
steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from memmgr.core.lineage import root_hash
from memmgr.core.table import MemoryCounters, Table
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.plans import EndCode, Limits, Plan, RequestEnd, Sampled, Submission
from memmgr.schedule.requests import Sequence
from memmgr.schedule.scheduler import Scheduler
from memmgr.simulate.beams import Parents, answers
from memmgr.simulate.buddy import rounded
from memmgr.simulate.policies import CountingMemory, Policy, ReservingMemory, reservation
from memmgr.simulate.traces import MOONCAKE_BLOCK, TraceRequest

#: Requests of the trace in the queue before a step is planned: more than one step can admit.
_MARGIN: Final = 16

#: Tokens of our own, that no trace's id has.
_OUTPUT: Final = 0xFFFF_FFFF
_FIRST_UNNAMED: Final = 1 << 31

_ANSWER: Final = Sampled(_OUTPUT)


class NeverFitsError(Exception):
    """No request of a trace can ever run in this pool. The text is one line."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated. `context_length` bounds prompt and output together, in tokens; see Limits for the rest."""

    policy: Policy
    num_blocks: int
    block_size: int
    context_length: int
    max_running: int
    max_step_tokens: int
    prefix_cache: bool = False
    samples: int = 1  # of each request, all as long as the trace says
    searches: tuple[Parents, ...] = ()  # requests search with beams, as recorded here, in turn, instead of sampling

    def __post_init__(self) -> None:
        assert self.samples == 1 or not self.searches
        shares = self.prefix_cache or self.samples > 1 or self.searches
        assert not (shares and self.policy is not Policy.PAGED), "a contiguous run is nobody else's"

    @property
    def beams(self) -> int:
        """Beams of each request's search; 0: there is none."""
        return len(self.searches[0][0]) if self.searches else 0

    @property
    def slots(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class Report:
    """How a run went. The five shares and `mean_running` are means over the steps in which a request waited."""

    policy: str
    requests: int  # that ran to their end
    refused: int  # that could never run: longer than the context, or than the pool
    steps: int
    utilization: float
    reserved: float
    internal_fragmentation: float
    external_fragmentation: float
    free: float
    mean_running: float  # requests
    block_hit_rate: float  # whole blocks found, of those that prompts take up
    evictions: int
    preemptions: int
    max_waste_tokens: int  # the most that one sequence ever held unused
    shared_saving: float = 0.0  # blocks saved by sharing, of those that there would be without it, over all steps


@dataclass(slots=True)
class Slots:
    """What the pool's slots were good for, summed over steps."""

    steps: int = 0
    running: int = 0
    used: int = 0
    reserved: int = 0
    internal: int = 0
    external: int = 0
    free: int = 0

    def shares(self) -> tuple[float, float, float, float, float]:
        """Return the five as shares of all; of a run in which nothing ever waited all is free."""
        total = self.used + self.reserved + self.internal + self.external + self.free
        if not total:
            return 0.0, 0.0, 0.0, 0.0, 1.0
        return self.used / total, self.reserved / total, self.internal / total, self.external / total, self.free / total


class _World(Protocol):
    """A memory under one policy, and how it is looked at."""

    scheduler: Scheduler

    def takes(self, number: int, request: TraceRequest) -> bool:
        """Take note of a request before it is submitted. False: it could never run."""

    def look(self, slots: Slots) -> None:
        """Add the state of one step to the sums."""

    def look_at_waste(self) -> int:
        """Return the most slots that one sequence holds unused now."""

    def look_at_sharing(self) -> tuple[int, int]:
        """Return how many blocks live now, and how many there would be if no two tables shared one."""

    def hit_rate(self) -> float:
        """Return the share of whole blocks found."""

    def room(self) -> str:
        """Say how much one request can have."""


class _Paged:
    """The memory core as it is."""

    def __init__(self, setup: Setup, limits: Limits, counters: ScheduleCounters) -> None:
        self._setup = setup
        self._memory = CountingMemory(
            setup.num_blocks, setup.block_size, prefix_cache=setup.prefix_cache, counters=MemoryCounters()
        )
        self.scheduler = Scheduler(self._memory, limits, lambda tenant, salt: root_hash("simulated", tenant, salt), counters)

    def takes(self, number: int, request: TraceRequest) -> bool:
        return request.prompt_tokens < self._setup.slots  # and one of output

    def look(self, slots: Slots) -> None:
        """Only a last block has slots without a token. Who share one hold as many tokens in it: who grows has cloned it."""
        size = self._setup.block_size
        unused: dict[int, int] = {}  # last block -> its slots without a token
        reserved: dict[int, int] = {}  # last block -> those of them that will be written to; the last holder writes in place
        for sequence, table in self._tables():
            request, block = sequence.request, table.blocks[-1]
            unused[block] = len(table.blocks) * size - table.planned
            to_come = request.prompt_length + request.max_outputs - 1 - table.planned  # the last is never stored
            reserved[block] = max(reserved.get(block, 0), min(unused[block], to_come))
        pool = self._memory.pool
        wasted, kept = sum(unused.values()), sum(reserved.values())
        slots.used += pool.live * size - wasted
        slots.reserved += kept
        slots.internal += wasted - kept
        slots.free += pool.available * size

    def look_at_waste(self) -> int:
        size = self._setup.block_size
        return max((len(table.blocks) * size - table.planned for _, table in self._tables()), default=0)

    def look_at_sharing(self) -> tuple[int, int]:
        return self._memory.pool.live, sum(len(table.blocks) for _, table in self._tables())

    def _tables(self) -> Iterator[tuple[Sequence, Table]]:
        """Yield the living sequences that have a table: before the fork the trunk alone."""
        for request in self.scheduler.running:
            for sequence in request.sequences:
                if sequence.table is not None:
                    yield sequence, sequence.table

    def hit_rate(self) -> float:
        return self._memory.found_blocks / max(1, self._memory.asked_blocks)

    def room(self) -> str:
        return f"the pool holds {self._setup.slots:,}"


class _Contiguous:
    """One run of slots for each request, from its admission to its end."""

    def __init__(self, setup: Setup, limits: Limits, counters: ScheduleCounters) -> None:
        self._setup = setup
        self._reservations: dict[bytes, int] = {}  # of the live requests
        self._memory = ReservingMemory(setup.slots, setup.context_length, setup.max_running, self._reservations.__getitem__)
        self.scheduler = Scheduler(self._memory, limits, lambda tenant, salt: salt.encode(), counters)
        self._largest = self._memory.buddy.largest

    def takes(self, number: int, request: TraceRequest) -> bool:
        setup = self._setup
        outputs = min(max(1, request.output_tokens), setup.context_length - request.prompt_tokens)
        if outputs < 1:
            return True  # it is the scheduler that refuses it
        slots = reservation(setup.policy, request.prompt_tokens, outputs, setup.context_length)
        self._reservations[str(number).encode()] = slots
        return slots <= self._largest

    def look(self, slots: Slots) -> None:
        used = reserved = held = runs = 0
        for request in self.scheduler.running:
            assert request.trunk.table is not None
            wanted = self._reservations[request.trunk.lineage.root]
            used += request.trunk.table.planned
            reserved += request.prompt_length + request.max_outputs - 1 - request.trunk.table.planned
            held += wanted
            runs += rounded(wanted)
        free = self._memory.buddy.free
        assert free + runs == self._setup.slots
        slots.used += used
        slots.reserved += reserved
        slots.internal += held - used - reserved
        slots.external += runs - held
        if free >= rounded(self._reservations[self.scheduler.waiting[0].trunk.lineage.root]):
            slots.external += free
        else:
            slots.free += free

    def look_at_waste(self) -> int:
        return max(
            (
                rounded(self._reservations[request.trunk.lineage.root]) - request.trunk.table.planned
                for request in self.scheduler.running
                if request.trunk.table is not None
            ),
            default=0,
        )

    def look_at_sharing(self) -> tuple[int, int]:
        return 0, 0  # nothing is shared

    def hit_rate(self) -> float:
        return 0.0

    def room(self) -> str:
        return f"the longest run of slots is {self._largest:,} of the pool's {self._setup.slots:,}"


def simulate(setup: Setup, trace: Iterable[TraceRequest], on_progress: Callable[[int], None] = lambda done: None) -> Report:
    """Run a trace to its end. `on_progress` hears how many of its requests are done with.

    Raises:
        NeverFitsError: none of them could ever run.
    """
    return _Run(setup, trace, on_progress).run()


class _Run:
    """One simulation."""

    def __init__(self, setup: Setup, trace: Iterable[TraceRequest], on_progress: Callable[[int], None]) -> None:
        in_queue = setup.max_running + _MARGIN
        limits = Limits(setup.max_running, in_queue + setup.max_running, setup.max_step_tokens, setup.context_length)
        self._setup = setup
        self._counters = ScheduleCounters()
        self._world: _World = (_Paged if setup.policy is Policy.PAGED else _Contiguous)(setup, limits, self._counters)
        self._in_queue = in_queue
        self._trace: Iterator[tuple[int, TraceRequest]] = enumerate(trace)
        self._on_progress = on_progress
        self._finished = self._refused = 0
        self._slots = Slots()

    def run(self) -> Report:
        """See `simulate`."""
        scheduler, slots = self._world.scheduler, self._slots
        steps = max_waste = physical = logical = 0
        self._feed()
        while (plan := scheduler.plan(float(steps))) is not None:
            steps += bool(plan.chunks)  # the last plan only closes
            if scheduler.waiting:
                slots.steps += 1
                slots.running += len(scheduler.running)
                self._world.look(slots)
            max_waste = max(max_waste, self._world.look_at_waste())
            held, unshared = self._world.look_at_sharing()
            physical, logical = physical + held, logical + unshared
            scheduler.complete(plan.step, self._answers(plan), float(steps))
            self._hear()
            self._feed()
        assert not scheduler.waiting, "a request waits that could never run"
        if self._refused and not self._finished:
            raise NeverFitsError(
                f"{self._setup.policy}: none of {self._refused:,} requests fits; the context is {self._setup.context_length:,} "
                f"tokens, {self._world.room()}"
            )
        used, reserved, internal, external, free = slots.shares()
        return Report(
            policy=self._setup.policy.value,
            requests=self._finished,
            refused=self._refused,
            steps=steps,
            utilization=used,
            reserved=reserved,
            internal_fragmentation=internal,
            external_fragmentation=external,
            free=free,
            mean_running=slots.running / max(1, slots.steps),
            block_hit_rate=self._world.hit_rate(),
            evictions=scheduler.memory.counters.evicted_blocks,
            preemptions=self._counters.preemptions,
            max_waste_tokens=max_waste,
            shared_saving=1 - physical / logical if logical else 0.0,
        )

    def _answers(self, plan: Plan) -> list[Sampled]:
        if self._setup.searches:
            return answers(plan, self._world.scheduler.running, self._setup.searches)
        return [_ANSWER] * len(plan.samples)

    def _feed(self) -> None:
        """Fill the queue again."""
        scheduler = self._world.scheduler
        while len(scheduler.waiting) < self._in_queue and (following := next(self._trace, None)) is not None:
            number, request = following
            if not self._world.takes(number, request):
                self._refused += 1
                continue
            name = str(number)
            prompt = prompt_of(number, request)
            outputs = max(1, request.output_tokens)  # who runs a prompt samples once
            scheduler.submit(
                Submission(
                    (0, number),
                    "",
                    name,
                    prompt,
                    None,
                    outputs,
                    frozenset(),
                    samples=self._setup.samples,
                    beam_width=self._setup.beams,
                    salt=self._salt(name),
                ),
                0.0,
            )
            self._hear()

    def _salt(self, name: str) -> str:
        return "" if self._setup.policy is Policy.PAGED else name

    def _hear(self) -> None:
        """Count the requests that have ended."""
        ended = [event for event in self._world.scheduler.take_events() if isinstance(event, RequestEnd)]
        if not ended:
            return
        for event in ended:
            if event.code is EndCode.OK:
                self._finished += 1
            else:
                self._refused += 1
        self._on_progress(self._finished + self._refused)


def prompt_of(number: int, request: TraceRequest) -> array[int]:
    """Return a prompt's tokens, made up: equal ids give equal tokens; where a trace has none no two prompts share a token."""
    if not request.prefix:
        return array("I", [_FIRST_UNNAMED + number % (_FIRST_UNNAMED - 1)]) * request.prompt_tokens
    tokens = array("I")
    for one in request.prefix:
        tokens.extend(array("I", [one]) * MOONCAKE_BLOCK)
    del tokens[request.prompt_tokens :]
    return tokens
