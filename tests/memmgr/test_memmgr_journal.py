"""The journal: what is recorded comes to the same again, at every operation; what a file may be, and what goes wrong with it."""

from __future__ import annotations

import os
import random
import tempfile
from array import array
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import run_state_machine_as_test

from kilburn.v1.journal_pb2 import JournalEntry
from memmgr.core.blocks import BlockPool
from memmgr.core.lineage import Lineage, root_hash
from memmgr.core.memory import Memory
from memmgr.core.pins import Pins
from memmgr.core.prefix import PrefixIndex
from memmgr.core.quotas import Quotas
from memmgr.core.swap import HostBlocks, SwappingMemory
from memmgr.core.table import MemoryCounters
from memmgr.journal import recording
from memmgr.journal.journaled import JournaledMemory, JournaledPins, memory_of
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.plans import EndCode, Limits
from memmgr.session import Session, StepTotals, Totals
from tests.memmgr.memmgr_journal import grow, open_journal, replayed, state_of, write_small
from tests.memmgr.memmgr_messages import hello
from tests.memmgr.memmgr_world import World
from tests.memmgr.test_memmgr_memory_machine import MemoryMachine

EXAMPLES = int(os.environ.get("KILBURN_EXAMPLES", "300"))

#: What a request asks for beside one answer.
KINDS: list[dict[str, Any]] = [{}, {}, {"samples": 2}, {"beam_width": 2}]

#: Methods that change nothing, and so are not in a journal.
READING: dict[type, set[str]] = {
    Memory: {"tables", "blocks_for", "plan_match", "plan_admission", "plan_evictions", "plan_growth", "check_invariants"}
    | {"blocks_charged", "blocks_to_grow", "plan_whole_admission"},
    SwappingMemory: {"swapped", "plan_swap_out", "plan_swap_in", "blocks_charged_back"},
    Pins: {"pinnable", "new_blocks", "check_invariants"},
}
#: What the memory calls within its own operations, and nobody else.
INNER: dict[type, set[str]] = {Pins: {"cut"}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def small(path: Path) -> bytes:
    return write_small(path)


# --------------------------------------------------------------------------------------------- the same state again


class JournaledMachine(MemoryMachine):
    """The memory's own machine, with a journal that is replayed at the end."""

    def new_memory(self, total: int, size: int, *, prefix_cache: bool) -> SwappingMemory:
        if not hasattr(self, "path"):  # else the executor was lost and there is another pool
            # A replay takes the default order of eviction, the machine's model is one of recency.
            self.by_recency = pytest.MonkeyPatch()
            self.by_recency.setattr(BlockPool, "favour", lambda pool, blocks: None)
            self.folder = tempfile.TemporaryDirectory()
            self.path = Path(self.folder.name) / "journal"
            self.journal = open_journal(self.path)
        return memory_of(self.journal, total, size, prefix_cache=prefix_cache, counters=self.counters, host_blocks=self.places)

    def teardown(self) -> None:
        try:
            self.replay()
        finally:
            if hasattr(self, "by_recency"):
                self.by_recency.undo()
            super().teardown()

    def replay(self) -> None:
        if not hasattr(self, "path"):
            return
        with self.folder:
            self.journal.close(ended=True)
            replaying, summary = replayed(self.path)
            assert replaying.memory is not None
            assert isinstance(self.memory, JournaledMemory)
            assert state_of(replaying.memory) == state_of(self.memory)
            assert summary.ended


def test_a_replay_comes_to_the_same_state_in_every_part() -> None:
    run_state_machine_as_test(
        JournaledMachine,
        settings=settings(
            max_examples=max(1, EXAMPLES // 10), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_a_pool_that_is_given_up_in_the_middle_of_a_step_is_replayed() -> None:
    """The source of a copy is still held for it."""
    machine = JournaledMachine()
    machine.begin(total=3, size=2, prefix_cache=True, places=0)
    machine.admit(chunk=14, prompt=[0], reserve=0, root=0)
    machine.fork(more=[0], which=0)
    machine.crash(unlikely=True)
    machine.teardown()


@given(seed=st.integers(0, 2**32), prefix_cache=st.sampled_from([True, True, False]))
@settings(max_examples=max(1, EXAMPLES // 12), deadline=None, suppress_health_check=list(HealthCheck))
def test_a_scheduler_under_pressure_is_replayed(seed: int, prefix_cache: bool) -> None:
    """Preempted, forked, cancelled, failed, pinned and flushed: through the scheduler that the service has."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        journal = open_journal(path)
        world = World(
            blocks=14,
            block_size=3,
            max_running=5,
            prefix_cache=prefix_cache,
            host_blocks=chance.choice([0, 6, 20]),
            new_memory=partial(memory_of, journal),
        )
        keys = []
        for turn in range(60):
            world.now = turn / 7
            if turn < 40 and chance.random() < 0.5:
                prompt = [1, 2, 3, 4, 5, 6, 7, 8][: chance.randint(1, 8)] + [
                    chance.randrange(4) for _ in range(chance.randrange(5))
                ]
                keys.append(world.submit(prompt, chance.randint(1, 9), **chance.choice(KINDS), priority=turn % 3))
            if keys and chance.random() < 0.1:
                world.scheduler.cancel(chance.choice(keys), EndCode.CANCELLED, "gone", world.now)
                world.listen()
            if chance.random() < 0.1:
                lineage = world.scheduler.lineage("tenant", "")
                if blocks := world.memory.pins.pinnable(lineage, array("I", [1, 2, 3, 4])):
                    world.memory.pins.pin(blocks, "tenant", world.now + 1)
            world.memory.pins.expire(world.now)
            if chance.random() < 0.05:
                world.memory.flush_part(range(chance.randrange(14)), chance.choice(["", "tenant"]))
            world.plan()
            if chance.random() < 0.8:
                world.complete()
            journal.flush()
        world.memory.pins.clear()
        world.run()
        journal.close(ended=True)
        replaying, summary = replayed(path)
        assert replaying.memory is not None
        assert state_of(replaying.memory) == state_of(world.memory)
        assert summary.steps == world.scheduler.counters.planned_steps
        assert summary.preemptions == world.scheduler.counters.preemptions
        assert summary.evicted_blocks == world.memory.counters.evicted_blocks
        assert summary.copied_blocks == world.memory.counters.copied_blocks


def test_one_of_everything_is_replayed(path: Path, small: bytes) -> None:
    _, summary = replayed(path)
    every = {field.name for field in JournalEntry.DESCRIPTOR.oneofs_by_name["kind"].fields} - {"run", "pool", "clock", "end"}
    assert set(summary.kinds) == every
    assert summary.operations == sum(summary.kinds.values())
    assert (summary.bytes, summary.torn_bytes, summary.ended, summary.killed) == (len(small), 0, True, 0)


def test_what_was_copied_and_evicted_is_counted_over_all_runs(path: Path) -> None:
    """A fork that goes on in a shared block is given a copy; then both blocks are evicted for another."""
    for run in range(1, 4):
        journal = open_journal(path)
        memory = memory_of(journal, 2, 2, prefix_cache=True, counters=MemoryCounters(), host_blocks=0)
        lineage, prompt = Lineage(root_hash("model", "tenant", ""), "tenant"), array("I", [1])
        admission = memory.plan_admission(lineage, prompt, 0)
        assert admission is not None
        memory.admit("a", lineage, admission)
        grow(memory, "a", 1)
        memory.end_step()
        memory.acknowledge(memory.tables["a"], 1, prompt)
        memory.fork("a", "b")
        grow(memory, "b", 1)
        memory.end_step()
        memory.acknowledge(memory.tables["b"], 2, array("I", [1, 2]))
        memory.release("a", prompt)
        memory.release("b", array("I", [1, 2]))
        memory.end_step()
        admission = memory.plan_admission(lineage, array("I", [7, 7, 7]), 0)
        assert admission is not None
        memory.admit("c", lineage, admission)
        grow(memory, "c", 3)  # no step ends after it
        journal.close(ended=True)
        assert memory.counters.copied_blocks == 1
        assert memory.counters.evicted_blocks > 0
        _, summary = replayed(path)
        assert (summary.copied_blocks, summary.evicted_blocks) == (run, run * memory.counters.evicted_blocks)


def test_checking_now_and_then_checks_less_and_still_the_end(path: Path, small: bytes) -> None:
    _, often = replayed(path)
    _, seldom = replayed(path, check_every=10**9)
    assert 0 < seldom.checks < often.checks / 5


def test_rows_that_are_long_are_cut(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MAX_OPERATIONS", 3)
    monkeypatch.setattr(recording, "_MAX_TOKENS", 8)
    monkeypatch.setattr(recording, "_MAX_BUFFERED_BYTES", 64)
    journal = open_journal(path)
    memory = memory_of(journal, 32, 2, prefix_cache=True, counters=MemoryCounters())
    lineage, tokens = Lineage(root_hash("model", "tenant", ""), "tenant"), array("I", range(64))
    admission = memory.plan_admission(lineage, tokens[:1], 0)
    assert admission is not None
    memory.admit("a", lineage, admission)
    for _ in range(64):
        grow(memory, "a", 1)
    memory.end_step()
    for computed in range(1, 65):
        memory.acknowledge(memory.tables["a"], computed, tokens)
    written = journal.written_bytes
    assert path.stat().st_size == written > 64, "much was written before anybody asked for it"
    journal.close(ended=True)
    replaying, summary = replayed(path)
    assert replaying.memory is not None
    assert state_of(replaying.memory) == state_of(memory)
    assert summary.kinds["grow"] == summary.kinds["acknowledge"] == 64


def test_no_part_of_a_memory_is_forgotten(path: Path) -> None:
    """A new part, whose own methods can be called from outside, has to be recorded as the pins are."""
    journal = open_journal(path)
    memory = memory_of(journal, 4, 2, prefix_cache=True, counters=MemoryCounters())
    parts = {name: type(value) for name, value in vars(memory).items() if not name.startswith("_")}
    values = {"block_size": int, "prefix_cache": bool, "counters": MemoryCounters, "now": float, "breathe": FunctionType}
    changed_by_the_memory_alone = {"pool": BlockPool, "index": PrefixIndex, "host": HostBlocks}
    decide_and_change_nothing = {"quotas": Quotas}  # what planners were allowed; the journal has what was done
    assert parts == {**values, **changed_by_the_memory_alone, **decide_and_change_nothing, "pins": JournaledPins}
    journal.close(ended=True)


@pytest.mark.parametrize("journaled", [JournaledMemory, JournaledPins])
def test_no_method_that_changes_something_is_forgotten(journaled: type) -> None:
    """A new public method of the core has to be recorded, or to be named here as one that changes nothing."""
    core = [of for of in journaled.__mro__[1:] if of is not object]
    assert all(of.__module__.startswith("memmgr.core.") for of in core)
    public = {name for of in core for name, value in vars(of).items() if callable(value) or isinstance(value, property)}
    quiet = {name for of in core for name in READING.get(of, set()) | INNER.get(of, set())}
    recorded = {name for name in vars(journaled) if not name.startswith("_")}
    assert {name for name in public if not name.startswith("_")} - quiet == recorded
    kinds = {field.name for field in JournalEntry.DESCRIPTOR.oneofs_by_name["kind"].fields}
    names = {"clear": "clear_pins"} if journaled is not JournaledMemory else {}
    assert {names.get(name, name) for name in recorded} <= kinds


@pytest.mark.parametrize("on", [True, False])
def test_the_service_has_the_same_memory_with_a_journal_and_without(path: Path, on: bool) -> None:
    """Or the journal would record another core than the one that serves."""
    journal = open_journal(path)
    totals = Totals(MemoryCounters(), ScheduleCounters(), StepTotals())
    limits = Limits(4, 4, 8, 16)
    session = Session(1, hello(), limits, totals, 0.0, prefix_cache=True, journal=journal if on else None)
    served = type(session.scheduler.memory)
    assert served is JournaledMemory if on else issubclass(JournaledMemory, served)
    journal.close(ended=True)
