"""An hour of simulated load, watched: what a reader makes of the events is compared with the truth, to the last block.

    python -m tests.memmgr.watched_hour [--seconds 3600] [--seed 1]

The scheduler and the memory are the real ones; the executor answers at once, with tokens drawn at random. Requests come at
random: prompts that begin with one of a few system prompts or with none, samples, beams, tenants, salts, priorities, deadlines;
clients leave, an administrator pins, unpins and flushes, and the pool is small enough that requests are preempted, swapped and
computed again. A reader has a snapshot of the start and WatchEvents from its cursor on. Every few seconds of that time it is
compared with a fresh snapshot: state, references, holders, hash, pins and tokens of every block. The identities that admin.proto
states between the counters are checked at each step.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from types import SimpleNamespace
from typing import Final, cast

import click
from rich.console import Console
from rich.progress import Progress

from benchmarks.options import Seconds
from kilburn.v1 import admin_pb2 as admin
from memmgr.core.events import Record
from memmgr.core.lineage import root_hash
from memmgr.core.swap import SwappingMemory
from memmgr.core.table import MemoryCounters
from memmgr.dumps import Dump
from memmgr.engine import Engine
from memmgr.events import EventLog, read_page
from memmgr.schedule.beams import Choice
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.plans import EndCode, Limits, Plan, RequestEnd, RequestKey, Sampled, Submission
from memmgr.schedule.scheduler import Scheduler
from memmgr.views import PAGE_BYTES, block_pages, snapshot_blocks
from tests.memmgr.memmgr_rebuild import Rebuilt

BLOCKS: Final = 512
BLOCK_SIZE: Final = 16
HOST_BLOCKS: Final = 200
STEP_SECONDS: Final = 0.04
REQUESTS_PER_SECOND: Final = 4.0
COMPARED_EVERY_SECONDS: Final = 20.0
MOST_IN_FLIGHT: Final = 2
VOCABULARY: Final = 5000
TENANTS: Final = ("red", "blue", "green")


class Hour:
    """The load and its reader."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.records: list[Record] = []
        self.memory = SwappingMemory(
            BLOCKS,
            BLOCK_SIZE,
            prefix_cache=True,
            counters=MemoryCounters(),
            records=self.records,
            host_blocks=HOST_BLOCKS,
        )
        limits = Limits(max_running=64, max_waiting=128, max_step_tokens=512, context_length=2048)
        self.scheduler = Scheduler(self.memory, limits, lambda tenant, salt: root_hash("model", tenant, salt), ScheduleCounters())
        self.log = EventLog()
        self.now = 0.0
        self.requests = 0
        self.live: list[RequestKey] = []
        self.in_flight: deque[Plan] = deque()
        self.pins: list[int] = []
        self.systems = [[self.chance.randrange(VOCABULARY) for _ in range(size)] for size in (40, 96, 300, 333)]
        self.rebuilt = Rebuilt(self.snapshot())

    def take_events(self) -> int:
        """As the engine does."""
        self.log.take(self.records, self.now, self.scheduler.step, BLOCK_SIZE)
        return self.log.cursor

    def snapshot(self) -> list[admin.BlockPage]:
        """Return every block, as ListBlocks does."""
        session = SimpleNamespace(scheduler=self.scheduler, memory=self.memory)
        engine = cast(Engine, SimpleNamespace(session=session, take_events=self.take_events))
        blocks = snapshot_blocks(engine, Dump(0, 0), self.now)
        assert blocks is not None
        return list(block_pages(blocks, 0, 0))

    def step(self) -> None:
        """Let a step's time pass."""
        self.now += STEP_SECONDS
        if self.chance.random() < REQUESTS_PER_SECOND * STEP_SECONDS:
            self._submit()
        self._interfere()
        while len(self.in_flight) < MOST_IN_FLIGHT and (plan := self.scheduler.plan(self.now)) is not None:
            self.in_flight.append(plan)
            self.take_events()
        if self.in_flight:
            plan = self.in_flight.popleft()
            self.scheduler.complete(plan.step, [self._answer(sample.choices) for sample in plan.samples], self.now)
        for event in self.scheduler.take_events():
            if isinstance(event, RequestEnd):
                self.live.remove(event.key)
        self._check_identities()
        self.take_events()
        self._read()

    def compare(self) -> None:
        """Compare what the reader knows with the truth, and check every invariant."""
        snapshot = self.snapshot()
        self._read()
        self.rebuilt.check(snapshot)
        self.scheduler.check_invariants()

    def _read(self) -> None:
        while self.rebuilt.cursor < self.log.cursor:
            page, _, _ = read_page(self.log, self.rebuilt.cursor, 0, (), "incarnation", PAGE_BYTES)
            self.rebuilt.follow(page.events)

    def _submit(self) -> None:
        chance = self.chance
        self.requests += 1
        base = chance.choice([[], *self.systems])
        prompt = [*base, *(chance.randrange(VOCABULARY) for _ in range(1 + int(chance.expovariate(1 / 80))))][:1500]
        beams = chance.choice([0] * 12 + [2, 4])
        self.live.append((1, self.requests))
        self.scheduler.submit(
            Submission(
                key=(1, self.requests),
                tenant=chance.choice(TENANTS),
                request_id=f"request-{self.requests}",
                prompt=array("I", prompt),
                sampling=None,
                max_tokens=1 + int(chance.expovariate(1 / 200)),
                stop_token_ids=frozenset({0, 1, 2}),
                samples=1 if beams else chance.choice([1, 1, 1, 1, 2, 4]),
                beam_width=beams,
                priority=chance.choice([0, 0, 0, -1, 1]),
                salt=chance.choice(["", "", "", "salt"]),
                deadline=self.now + chance.choice([float("inf")] * 9 + [5.0]),
            ),
            self.now,
        )

    def _interfere(self) -> None:
        chance, pins = self.chance, self.memory.pins
        if chance.random() < 0.01 and self.live:
            self.scheduler.cancel(chance.choice(self.live), EndCode.CANCELLED, "gone", self.now)
        if chance.random() < 0.01:
            lineage = self.scheduler.lineage(chance.choice(TENANTS), "")
            blocks = pins.pinnable(lineage, array("I", chance.choice(self.systems)))
            if blocks and self.memory.pool.pinned + pins.new_blocks(blocks) <= self.scheduler.most_pinned:
                self.pins.append(pins.pin(blocks, lineage.tenant, self.now + chance.choice([3.0, 60.0, float("inf")])).number)
        if chance.random() < 0.005 and self.pins:
            pins.unpin(self.pins.pop(chance.randrange(len(self.pins))))
        pins.expire(self.now)
        if chance.random() < 0.0005:
            self.memory.flush()
        if chance.random() < 0.0005:
            first = chance.randrange(BLOCKS)
            self.memory.flush_part(range(first, min(BLOCKS, first + 100)), chance.choice(["", *TENANTS]))

    def _answer(self, choices: int) -> Sampled:
        if self.chance.random() < 0.0005:
            return Sampled(0, failed=True)
        if not choices:
            return Sampled(self.chance.randrange(VOCABULARY))
        logprobs = sorted((-self.chance.expovariate(1.0) for _ in range(choices)), reverse=True)
        tokens = self.chance.sample(range(VOCABULARY), choices)
        return Sampled(0, choices=tuple(Choice(*one) for one in zip(tokens, logprobs, strict=True)))

    def _check_identities(self) -> None:
        pool, counted, schedule = self.memory.pool, self.memory.counters, self.scheduler.counters
        assert pool.free + pool.live + pool.cached == pool.total
        assert counted.allocated_blocks - counted.freed_blocks == pool.live + pool.cached
        assert pool.shared <= pool.live
        if not self.live:  # nothing runs
            assert schedule.prefill_tokens == schedule.prefix_query_tokens - schedule.prefix_hit_tokens
            assert pool.live == self.memory.host.used == 0


@click.command(help=__doc__)
@click.option("--seconds", type=Seconds(1), default=3600.0, show_default=True, help="Of simulated time.")
@click.option("--seed", type=int, default=1, show_default=True)
def main(seconds: float, seed: int) -> None:
    """Run it and say what happened."""
    hour = run(seconds, seed, Progress(console=Console(stderr=True), transient=True))
    counted, schedule = hour.memory.counters, hour.scheduler.counters
    Console(width=130).print(
        f"{hour.now:,.0f} seconds, {schedule.acknowledged_steps:,} steps, {hour.requests:,} requests, "
        f"{hour.log.cursor:,} events: every block as told\n"
        f"{counted.allocated_blocks:,} blocks given out, {counted.evicted_blocks:,} evicted, "
        f"{counted.copied_blocks:,} copied, {counted.forks:,} forks, {schedule.preemptions:,} preemptions, "
        f"{counted.swapped_out_blocks:,} out and {counted.swapped_in_blocks:,} in, {schedule.recomputed_tokens:,} tokens again"
    )


def run(seconds: float, seed: int, progress: Progress) -> Hour:
    """Let so much time pass, and the load end; compare on the way and at the end."""
    hour, compared = Hour(seed), 0.0
    with progress:
        task = progress.add_task("watching", total=seconds)
        while hour.now < seconds:
            hour.step()
            if hour.now - compared >= COMPARED_EVERY_SECONDS:
                hour.compare()
                progress.update(task, completed=hour.now)
                compared = hour.now
    for key in list(hour.live):
        hour.scheduler.cancel(key, EndCode.CANCELLED, "the end", hour.now)
    while hour.live or hour.in_flight:
        hour.step()
    hour.compare()
    return hour


if __name__ == "__main__":
    main()
