"""What the journal's tests share: all that a memory consists of, as plain values, and journals made on the way."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

import structlog
from google.protobuf.proto import serialize_length_prefixed

from kilburn.v1.journal_pb2 import JournalEntry
from memmgr.core.blocks import BlockPool
from memmgr.core.lineage import Lineage, root_hash
from memmgr.core.memory import Memory
from memmgr.core.prefix import PrefixIndex
from memmgr.core.swap import SwappingMemory
from memmgr.core.table import MemoryCounters, Table
from memmgr.journal.files import Frames, JournalFile
from memmgr.journal.journaled import JournaledMemory, memory_of
from memmgr.journal.reading import entries
from memmgr.journal.recording import Journal
from memmgr.journal.replaying import Replay, replay
from memmgr.journal.summary import Summary


def open_journal(path: Path) -> Journal:
    return Journal(JournalFile(path), structlog.get_logger(), 1.7e9)


def replayed(path: Path, check_every: int = 1) -> tuple[Replay, Summary]:
    """Replay a journal that must be in order."""
    replaying = Replay(check_every)
    return replaying, replay(path, replaying)


def slots_of(value: object) -> dict[str, Any]:
    return {name: getattr(value, name) for name in type(value).__slots__}  # type: ignore[attr-defined]


def pool_state(pool: BlockPool) -> dict[str, Any]:
    """Return all of a pool's state; of the order of eviction what it is, not how it is kept, which may change by a look."""
    state = slots_of(pool)
    for kept in ("_fresh", "_proven", "_run_of"):
        del state[kept]
    every = slice(None)
    state["proven"] = pool._proven.held
    return state | {"order": list(pool.eviction_order()), "evictable": pool.evictable_in(every), "stamps": pool.stamps(every)}


def state_of(memory: SwappingMemory) -> dict[str, Any]:
    """Return every part of a memory's state; sequences by the numbers that its journal gives them."""
    assert BlockPool.__slots__, "all of its state is in its slots"
    assert PrefixIndex.__slots__
    number: Callable[[Any], int] = memory._numbers.__getitem__ if isinstance(memory, JournaledMemory) else int
    known = {"block_size", "prefix_cache", "counters", "pool", "index", "pins", "now", "_records", "_tables", "_copies", "_held"}
    known |= {"quotas", "host", "_swapped", "_outs", "_ins", "_evicted"}
    rest = set(vars(memory)) - known - {"_freed", "_planning", "_journal", "_numbers", "_unused_numbers", "_swapping", "breathe"}
    assert not rest, f"state that is not compared: {rest}"
    pins = {name: value for name, value in vars(memory.pins).items() if name in {"_pins", "_made", "_next_expiry"}}
    return {
        "pool": pool_state(memory.pool),
        "index": slots_of(memory.index),
        "pins": pins,
        "used": {tenant: memory.quotas.used(tenant) for tenant in memory.quotas._used},
        "tables": [(number(key), _table(table)) for key, table in memory.tables.items()],
        "copies": list(memory._copies.items()),
        "held": [(block, len(owners)) for block, owners in memory._held.items()],
        "freed": memory._freed,
        "host": vars(memory.host),
        "swapped": [(number(key), swapped.blocks, swapped.planned) for key, swapped in memory.swapped.items()],
        "outs": list(memory._outs.items()),
        "ins": list(memory._ins.items()),
        "planning": memory._planning,
        "evicted": slots_of(memory._evicted),
        "counters": asdict(memory.counters),
        "kind": (memory.block_size, memory.prefix_cache),
    }


def _table(table: Table) -> tuple[object, ...]:
    lineage = table.lineage
    numbers = table.blocks, table.planned, table.computed, table.committed, table.node
    return (*numbers, lineage.root, lineage.tenant, lineage.names[: table.committed])


def grow(memory: Memory, key: str, count: int) -> None:
    growth = memory.plan_growth(memory.tables[key], count)
    assert growth is not None
    memory.grow(growth)


def write_small(path: Path) -> bytes:
    """Write a journal with one of everything, in several frames; return its bytes."""
    journal = open_journal(path)
    memory = memory_of(journal, 8, 2, prefix_cache=True, counters=MemoryCounters(), host_blocks=8)
    lineage, prompt = Lineage(root_hash("model", "tenant", ""), "tenant"), array("I", [1, 2, 3, 4, 5])
    admission = memory.plan_admission(lineage, prompt, 0)
    assert admission is not None
    table = memory.admit("a", lineage, admission)
    grow(memory, "a", 5)
    journal.flush()
    memory.now = 1.5
    memory.end_step()
    memory.fork("a", "b")
    memory.acknowledge(table, 5, prompt)
    grow(memory, "b", 1)
    memory.end_step()
    out = memory.plan_swap_out({"a": 5, "b": 6})
    assert out is not None
    memory.swap_out(out, {"a": prompt, "b": array("I", [*prompt, 6])})
    memory.end_step()
    back = memory.plan_swap_in(["a"], {"a": prompt}, 3)
    assert back is not None
    assert back.cached["a"], "some of it is still there"
    memory.swap_in(back)
    memory.drop_swapped("b")
    memory.end_step()
    memory.acknowledge(memory.tables["a"], 5, prompt)
    memory.fork("a", "b")
    journal.flush()
    pin = memory.pins.pin(memory.pins.pinnable(lineage, prompt), "tenant", 2.0)
    memory.pins.pin(memory.pins.pinnable(lineage, prompt), "tenant", 3.0)
    memory.release("a", prompt)
    again = memory.plan_admission(lineage, array("I", [1, 2, 3, 4, 5, 6]), 0)
    assert again is not None
    assert again.match.tail_tokens == 1
    memory.admit("c", lineage, again)
    memory.end_step()
    journal.flush()
    memory.note_preemption("a")
    memory.pins.unpin(pin.number)
    memory.pins.expire(3.0)
    memory.pins.clear()
    memory.distrust(memory.tables["c"])
    memory.release("c", prompt)
    memory.distrust_cached(lineage, prompt)
    memory.flush_part(range(4), "tenant")
    memory.flush()
    memory.release("b", prompt)
    memory.discard()
    journal.close(ended=True)
    return path.read_bytes()


def framed(entries: list[JournalEntry], path: Path) -> None:
    """Write entries as a journal whose checksums are right."""
    path.unlink(missing_ok=True)
    file = JournalFile(path)
    payload = BytesIO()
    for entry in entries:
        serialize_length_prefixed(entry, payload)
    if payload.tell():
        file.append(payload.getvalue())
    file.close()


def parsed(path: Path) -> list[JournalEntry]:
    """Return a journal's entries."""
    with path.open("rb") as file:
        return [entry for frame in Frames(file).read() for entry in entries(frame.payload)]
