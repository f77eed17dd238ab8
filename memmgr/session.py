"""All that memmgr keeps for one executor: its pool's memory and scheduler, its plans in flight, and whether it is alive.

A session begins with an executor's hello and ends with its loss; nothing of it is carried over. Time is an argument; it sends
nothing itself.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kilburn.errors import KilburnError
from kilburn.limits import EXECUTOR_STALL_SECONDS, MAX_PINS, PEER_TIMEOUT_SECONDS
from kilburn.v1 import engine_pb2 as engine
from memmgr.core.events import Record
from memmgr.core.lineage import root_hash
from memmgr.core.pins import Pin
from memmgr.core.quotas import Quota
from memmgr.core.swap import SwappingMemory
from memmgr.core.table import MemoryCounters
from memmgr.journal.journaled import memory_of
from memmgr.journal.recording import Journal
from memmgr.messages import MessageError, read_result, read_told, step_plan
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.plans import Limits, PlannedSample, PlannedTelling
from memmgr.schedule.scheduler import Scheduler

#: Plans out at once: the executor has the next one when it ends a step, and a token's fate is known one step later at the most.
MAX_PLANS_IN_FLIGHT: Final = 2

#: Questions about the executor's view waiting for its answer.
MAX_INSPECTIONS: Final = 16


class NotCachedError(KilburnError):
    """There is nothing to pin."""


class PinRefusedError(KilburnError):
    """Nothing more may be pinned."""


class QuotaRefusedError(KilburnError):
    """So much can't be guaranteed."""


@dataclass(slots=True)
class StepTotals:
    """Nanoseconds, as in admin.proto; never fall."""

    planning: int = 0
    applying: int = 0
    transport: int = 0
    prepare: int = 0
    forward: int = 0
    sample: int = 0
    idle: int = 0


@dataclass(slots=True)
class Totals:
    """What is counted over all sessions of one memmgr."""

    memory: MemoryCounters
    schedule: ScheduleCounters
    steps: StepTotals


@dataclass(frozen=True, slots=True)
class _Expected:
    """The executor's slots as they must be once it has read an Inspect: slot -> (tokens, table)."""

    slots: dict[int, tuple[int, tuple[int, ...]]]
    unknown: frozenset[int]
    answer: Future[tuple[int, list[str]]]


class Session:
    """See the module. `limits` are memmgr's own; the executor's are respected."""

    def __init__(
        self,
        incarnation: int,
        hello: engine.ExecutorHello,
        limits: Limits,
        totals: Totals,
        now: float,
        *,
        prefix_cache: bool,
        swap: bool = False,
        records: list[Record] | None = None,
        journal: Journal | None = None,
        quotas: Iterable[Quota] = (),
    ) -> None:
        self.incarnation: Final = incarnation
        self.attempt: Final = hello.attempt
        self.model: Final = hello.model
        self.totals: Final = totals
        new_memory = SwappingMemory if journal is None else partial(memory_of, journal)
        memory = new_memory(
            hello.model.total_blocks,
            hello.model.block_size,
            prefix_cache=prefix_cache,
            counters=totals.memory,
            records=records,
            host_blocks=hello.host_blocks if swap else 0,
        )
        fingerprint = hello.model.fingerprint
        self.memory: Final = memory
        self.scheduler: Final = Scheduler(
            memory, limits, lambda tenant, salt: root_hash(fingerprint, tenant, salt), totals.schedule
        )
        self.cut_floors: Final = self._adopt(quotas)
        self._samples: dict[int, tuple[PlannedSample, ...]] = {}  # step -> samples of its plan
        self._tellings: dict[int, tuple[PlannedTelling, ...]] = {}  # likewise, where it has any
        self._inspections: dict[int, _Expected] = {}
        self._inspected = 0
        self._heard = now
        self._progress = (0, 0)
        self._progressed = now

    # --------------------------------------------------------------------------------------------------- liveness

    def hear(self, now: float) -> None:
        """Something came from the executor."""
        self._heard = now

    def hear_heartbeat(self, heartbeat: engine.ExecutorHeartbeat, now: float) -> None:
        """A heartbeat came: it tells whether the step in progress moves."""
        progress = (heartbeat.step, heartbeat.layer)
        compiling = heartbeat.phase != engine.ExecutorHeartbeat.PHASE_RUNNING
        if progress != self._progress or compiling:
            self._progress, self._progressed = progress, now

    def death(self, now: float) -> str:
        """Return why the executor counts as dead; empty where it is alive."""
        if now - self._heard > PEER_TIMEOUT_SECONDS:
            return f"the executor was silent for {PEER_TIMEOUT_SECONDS} seconds"
        if self.scheduler.plans_in_flight and now - self._progressed > EXECUTOR_STALL_SECONDS:
            return f"the executor stood still in step {self._progress[0]} for {EXECUTOR_STALL_SECONDS} seconds"
        return ""

    # ------------------------------------------------------------------------------------------------------ steps

    def next_plan(self, now: float) -> engine.StepPlan | None:
        """Return the next plan to send; None where enough are out or there is nothing to do."""
        if self.scheduler.plans_in_flight >= MAX_PLANS_IN_FLIGHT:
            return None
        began = time.perf_counter_ns()
        plan = self.scheduler.plan(now)
        if plan is None:
            return None
        planned = time.perf_counter_ns()
        self.totals.steps.planning += planned - began
        if self.scheduler.plans_in_flight == 1:
            self._progressed = now  # nothing was out: the executor's standing still was no fault
        self._samples[plan.step] = plan.samples
        if plan.tellings:
            self._tellings[plan.step] = plan.tellings
        message = step_plan(plan)
        self.totals.steps.transport += time.perf_counter_ns() - planned
        return message

    def take_result(self, result: engine.StepResult, now: float) -> None:
        """Apply a step's result.

        Raises:
            MessageError: it is not the one that is due, or says that the step failed: this executor can't go on.
        """
        if result.error:
            raise MessageError(f"the executor could not do step {result.step}: {result.error}")
        if not self._samples or result.step != next(iter(self._samples)):
            raise MessageError(f"the result of step {result.step} came out of turn")
        sampled = read_result(result, self._samples.pop(result.step), self.model.vocab_size)
        told = read_told(result, self._tellings.pop(result.step, ()), self.model.vocab_size)
        began = time.perf_counter_ns()
        self.scheduler.complete(result.step, sampled, now, told)
        steps, times = self.totals.steps, result.times
        steps.applying += time.perf_counter_ns() - began
        steps.transport += times.receive
        steps.prepare += times.prepare
        steps.forward += times.forward
        steps.sample += times.sample
        steps.idle += times.wait

    # ------------------------------------------------------------------------------------------------------- pins

    def pin(self, tenant: str, salt: str, tokens: array[int], ttl_seconds: float, now: float) -> Pin:
        """Pin what is cached of a prefix, in whole blocks; a `ttl_seconds` of 0 is for ever.

        Raises:
            NotCachedError: no whole block of it is.
            PinRefusedError: too much is pinned already.
        """
        memory = self.scheduler.memory
        memory.pins.expire(now)
        blocks = memory.pins.pinnable(self.scheduler.lineage(tenant, salt), tokens)
        if not blocks:
            raise NotCachedError(f"no whole block of {memory.block_size} tokens of this prefix is in the cache")
        most, new, guaranteed = self.scheduler.most_pinned, memory.pins.new_blocks(blocks), memory.quotas.guaranteed
        if memory.pool.pinned + guaranteed + new > most:
            also = f", {guaranteed} guaranteed to tenants" if guaranteed else ""
            raise PinRefusedError(
                f"{memory.pool.pinned} blocks are pinned{also} and this pin needs {new} more; at most {most} of "
                f"{memory.pool.total} may be, so that one request of {self.scheduler.limits.context_length} tokens can run"
            )
        if len(memory.pins) >= MAX_PINS:
            raise PinRefusedError(f"there are {MAX_PINS} pins already; no more are taken")
        return memory.pins.pin(blocks, tenant, now + ttl_seconds if ttl_seconds else math.inf)

    def expire(self, now: float) -> None:
        """End the pins whose time is over."""
        self.scheduler.memory.pins.expire(now)

    # ----------------------------------------------------------------------------------------------------- quotas

    def set_quota(self, quota: Quota, now: float) -> None:
        """Put a tenant's quota in force.

        Raises:
            QuotaRefusedError: it raises what is guaranteed beyond what keeps one longest request runnable.
        """
        memory, most = self.scheduler.memory, self.scheduler.most_pinned
        memory.pins.expire(now)
        floor, pinned = memory.quotas.floor(quota.tenant), memory.pool.pinned
        others = memory.quotas.guaranteed - floor
        if quota.guaranteed_blocks > floor and others + pinned + quota.guaranteed_blocks > most:
            raise QuotaRefusedError(
                f"{others} blocks are guaranteed to other tenants and {pinned} are pinned; with {quota.guaranteed_blocks} more "
                f"they are too many: at most {most} of {memory.pool.total} may be, so that one request of "
                f"{self.scheduler.limits.context_length} tokens can run"
            )
        self.scheduler.set_quota(quota, now)

    def _adopt(self, quotas: Iterable[Quota]) -> list[str]:
        """Put in force what was set before this executor came; return the tenants whose floor had to be cut to fit its pool."""
        memory, most = self.scheduler.memory, self.scheduler.most_pinned
        cut: list[str] = []
        for quota in quotas:
            floor = min(quota.guaranteed_blocks, most - memory.quotas.guaranteed)
            memory.quotas.set(replace(quota, guaranteed_blocks=floor))
            if floor < quota.guaranteed_blocks:
                cut.append(quota.tenant)
        return cut

    # ------------------------------------------------------------------------------------------------ inspections

    def inspect(self, answer: Future[tuple[int, list[str]]]) -> engine.Inspect | None:
        """Return the question to send; `answer` gets (checks, faults) once the executor's view has come. None: too many wait."""
        if len(self._inspections) >= MAX_INSPECTIONS:
            return None
        slots: dict[int, tuple[int, tuple[int, ...]]] = {}
        for request in self.scheduler.running:
            for sequence in request.live:
                told = tuple(sequence.told)
                # A sequence that has forked and computed nothing since has an empty slot there.
                slots[sequence.slot] = (sequence.table.planned if sequence.table is not None and told else 0, told)
        unknown = self.scheduler.closing_slots - slots.keys()
        self._inspected += 1
        self._inspections[self._inspected] = _Expected(slots, unknown, answer)
        return engine.Inspect(id=self._inspected)

    def take_inspection(self, inspection: engine.Inspection) -> None:
        """Compare the executor's view with what was planned when it was asked."""
        expected = self._inspections.pop(inspection.id, None)
        if expected is None:
            return
        faults = list(inspection.faults)
        seen = {slot.slot: (slot.length, tuple(slot.table)) for slot in inspection.slots}
        for slot, (length, table) in expected.slots.items():
            if slot not in seen:
                faults.append(f"slot {slot} is not open in the executor")
            elif seen[slot] != (length, table):
                faults.append(f"slot {slot} has {seen[slot]} in the executor and {(length, table)} as planned")
        faults += [
            f"slot {slot} is open in the executor and not planned"
            for slot in seen.keys() - expected.slots.keys() - expected.unknown
        ]
        expected.answer.set_result((inspection.checks + len(seen) + len(expected.slots), faults))

    def close(self, reason: str) -> None:
        """End what waits for this executor's answers, and give its pool up. Its requests have been ended."""
        self.scheduler.memory.discard()
        for expected in self._inspections.values():
            expected.answer.set_result((0, [reason]))
        self._inspections.clear()
