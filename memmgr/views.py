"""From one instant of the engine's state to the messages of admin.proto.

The functions named `snapshot_…` run between two steps and only copy; the ones that build messages run in the admin API's thread,
so that a long answer does not hold up a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kilburn.v1 import admin_pb2 as admin
from memmgr.core.blocks import BlockState
from memmgr.core.swap import SwappingMemory
from memmgr.dumps import Dump
from memmgr.engine import Engine
from memmgr.schedule.requests import Sequence, State

#: Bytes at which a page is full. A block with the most and longest holders has as many again, so that no page of blocks reaches
#: the 1 MiB of the contract.
PAGE_BYTES: Final = 256 * 1024

#: Blocks at which one is full: what is made of it in one call of C, and freed in one, takes half a millisecond.
PAGE_BLOCKS: Final = 1024

#: Bytes that a message in a repeated field takes beside its own: tag and length.
FRAMING_BYTES: Final = 5


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """One sequence, without its table's references. `blocks` are the host's where it is `on_host`."""

    message: admin.Sequence
    blocks: tuple[int, ...]
    planned: int
    block_size: int
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class BlocksSnapshot:
    """Blocks at one instant, and every running sequence's table. The dump can be read once."""

    dump: Dump
    block_size: int
    sequences: list[SequenceSnapshot]
    now: float
    cursor: int


# ------------------------------------------------------------------------------------------------- between steps


def pool(engine: Engine, now: float) -> admin.Pool:
    """Return the pool's figures; all zero but the counters where no executor is connected."""
    totals = engine.totals
    message = admin.Pool(
        counters=_counters(engine),
        memmgr_incarnation=f"{engine.incarnation:016x}",
        gateways_connected=engine.gateways,
        step=totals.schedule.planned_steps,
        cursor=engine.take_events(),
        step_totals=admin.StepTotals(
            planning_ns=totals.steps.planning,
            applying_ns=totals.steps.applying,
            transport_ns=totals.steps.transport,
            prepare_ns=totals.steps.prepare,
            forward_ns=totals.steps.forward,
            sample_ns=totals.steps.sample,
            idle_ns=totals.steps.idle,
        ),
        utilization=1.0,
        contiguous_utilization=1.0,
    )
    session = engine.session
    if session is None:
        return message
    scheduler = session.scheduler
    memory = scheduler.memory
    blocks = memory.pool
    message.executor_connected = True
    message.executor_incarnation = f"{session.incarnation:016x}"
    message.block_size = memory.block_size
    message.bytes_per_block = session.model.bytes_per_block
    message.total_blocks = blocks.total
    message.free_blocks = blocks.free
    message.live_blocks = blocks.live
    message.cached_blocks = blocks.cached
    message.shared_blocks = blocks.shared
    message.pinned_blocks = blocks.pinned
    message.running = scheduler.running_sequences
    message.waiting = len(scheduler.waiting)
    message.swapped = len(session.memory.swapped)
    message.host_total_blocks = session.memory.host.total
    message.host_free_blocks = session.memory.host.total - session.memory.host.used
    message.logical_tokens, message.live_tokens = _tokens(engine)
    if blocks.live:
        message.utilization = message.live_tokens / (blocks.live * memory.block_size)
    reserved = sum((request.prompt_length + request.max_outputs) * len(request.live) for request in scheduler.running)
    if reserved:
        message.contiguous_utilization = message.logical_tokens / reserved
    return message


def _tokens(engine: Engine) -> tuple[int, int]:
    """Return the token slots planned or filled: each sequence's own, and shared ones counted once.

    Every live block is full but for the last of a table, and who shares that has the same tokens planned in it: else the writer
    would have cloned it.
    """
    assert engine.session is not None
    memory = engine.session.scheduler.memory
    size = memory.block_size
    tables = memory.tables.values()
    unused = {table.blocks[-1]: -table.planned % size for table in tables if table.blocks}
    return sum(table.planned for table in tables), memory.pool.live * size - sum(unused.values())


def _counters(engine: Engine) -> admin.Counters:
    memory, schedule = engine.totals.memory, engine.totals.schedule
    return admin.Counters(
        allocated_blocks=memory.allocated_blocks,
        freed_blocks=memory.freed_blocks,
        evicted_blocks=memory.evicted_blocks,
        copied_blocks=memory.copied_blocks,
        partial_copies=memory.partial_copies,
        swapped_out_blocks=memory.swapped_out_blocks,
        swapped_in_blocks=memory.swapped_in_blocks,
        forks=memory.forks,
        prefix_query_tokens=schedule.prefix_query_tokens,
        prefix_hit_tokens=schedule.prefix_hit_tokens,
        preemptions=schedule.preemptions,
        recomputed_tokens=schedule.recomputed_tokens,
        finished_requests=schedule.finished_requests,
        cancelled_requests=schedule.cancelled_requests,
        rejected_requests=schedule.rejected_requests,
        prefill_tokens=schedule.prefill_tokens,
        decode_tokens=schedule.decode_tokens,
        discarded_tokens=schedule.discarded_tokens,
        steps=schedule.acknowledged_steps,
        fenced_messages=engine.fenced,
    )


def snapshot_sequences(engine: Engine, now: float) -> list[SequenceSnapshot]:
    """Return all live sequences: the running ones, then the waiting ones, each by rank."""
    if engine.session is None:
        return []
    scheduler, memory = engine.session.scheduler, engine.session.memory
    requests = (*scheduler.running, *scheduler.waiting)
    return [snapshot_sequence(sequence, memory, now) for request in requests for sequence in request.live]


def snapshot_sequence(sequence: Sequence, memory: SwappingMemory, now: float) -> SequenceSnapshot:
    """Return one sequence as it is."""
    request, table = sequence.request, sequence.table
    submission = request.submission
    state = admin.SEQUENCE_STATE_WAITING
    if request.state is State.RUNNING:
        state = admin.SEQUENCE_STATE_DECODE if sequence.decoding else admin.SEQUENCE_STATE_PREFILL
    swapped = memory.swapped.get(sequence.key)
    if swapped is not None:
        state = admin.SEQUENCE_STATE_SWAPPED
    message = admin.Sequence(
        request_id=submission.request_id,
        index=sequence.index,
        tenant=submission.tenant,
        state=state,
        prompt_tokens=request.prompt_length,
        output_tokens=sequence.outputs,
        computed_tokens=0 if table is None else table.computed,
        cached_tokens=request.cached_tokens,
        priority=submission.priority,
        age_seconds=now - request.arrived_at,
        block_count=0 if table is None else len(table.blocks),
    )
    if swapped is not None:
        message.block_count = len(swapped.blocks)
        return SequenceSnapshot(message, swapped.blocks, swapped.planned, memory.block_size, on_host=True)
    if table is None:
        return SequenceSnapshot(message, (), 0, memory.block_size)
    return SequenceSnapshot(message, tuple(table.blocks), table.planned, memory.block_size)


def snapshot_references(engine: Engine, sequence: SequenceSnapshot) -> list[int]:
    """Return the references of each block of a sequence's table."""
    if engine.session is None:
        return []
    memory = engine.session.memory
    references = memory.host.references if sequence.on_host else memory.pool.references
    return [references[block] for block in sequence.blocks]


def snapshot_blocks(engine: Engine, dump: Dump, now: float) -> BlocksSnapshot | None:
    """Go on with a dump between two steps; return the blocks once it is complete. Where there is no pool there are none."""
    if not dump.take(engine):
        return None
    block_size = engine.session.memory.block_size if engine.session is not None else 1
    return BlocksSnapshot(dump, block_size, snapshot_sequences(engine, now), now, dump.cursor)


# --------------------------------------------------------------------------------------------- in the admin's thread


def with_table(sequence: SequenceSnapshot, references: list[int]) -> admin.Sequence:
    """Return a sequence's message with its whole block table."""
    message = admin.Sequence()
    message.CopyFrom(sequence.message)
    for logical, (block, counted) in enumerate(zip(sequence.blocks, references, strict=True)):
        filled = min(sequence.block_size, sequence.planned - logical * sequence.block_size)
        message.table.add(logical=logical, block=block, filled=filled, references=counted, on_host=sequence.on_host)
    return message


def sequence_pages(sequences: Iterator[admin.Sequence], cursor: int) -> Iterator[admin.SequencePage]:
    """Yield the sequences in pages under 1 MiB; one empty page where there are none."""
    page, size = admin.SequencePage(cursor=cursor), 0
    for sequence in sequences:
        cost = sequence.ByteSize() + FRAMING_BYTES
        if page.sequences and size + cost > PAGE_BYTES:
            yield page
            page, size = admin.SequencePage(cursor=cursor), 0
        page.sequences.append(sequence)
        size += cost
    yield page


def block_pages(snapshot: BlocksSnapshot, state: int, min_references: int) -> Iterator[admin.BlockPage]:
    """Yield the blocks of a snapshot that are asked for, in pages under 1 MiB; one empty page where there are none."""
    holders, fills = _holders(snapshot)
    page, size, full = admin.BlockPage(cursor=snapshot.cursor), 0, False
    for part in snapshot.dump.read():
        for offset, references in enumerate(part.references):
            block, pinned = part.first + offset, part.pins[offset] > 0
            now_in = _state(references, bool(part.evictable[offset]), pinned)
            if (state and now_in != state) or references < min_references:
                continue
            held_by = holders.get(block, [])
            name = part.names[offset]
            message = page.blocks.add(
                block=block,
                state=admin.BlockState.ValueType(now_in),
                references=references,
                filled=fills.get(block, len(part.tokens[offset] or b"") // 4),
                prefix_hash=name or b"",
                depth=part.depths[offset] if name else 0,
                pinned=pinned,
                tenant=held_by[0].tenant if held_by else part.tenants[offset] if name else "",
                idle_seconds=0.0 if references or not part.generations[offset] else snapshot.now - part.stamps[offset],
                holders=[f"{holder.tenant}/{holder.request_id}/{holder.index}" for holder in held_by],
                generation=part.generations[offset],
            )
            size += message.ByteSize() + FRAMING_BYTES
            if size > PAGE_BYTES or len(page.blocks) == PAGE_BLOCKS:
                yield page
                page, size = admin.BlockPage(cursor=snapshot.cursor), 0
                full = True
    if page.blocks or not full:
        yield page


def _state(references: int, evictable: bool, pinned: bool) -> BlockState:
    if references:
        return BlockState.LIVE
    return BlockState.CACHED if evictable or pinned else BlockState.FREE


def _holders(snapshot: BlocksSnapshot) -> tuple[dict[int, list[admin.Sequence]], dict[int, int]]:
    """Return which sequences hold each live block, and how many of its slots are planned or in use."""
    holders: dict[int, list[admin.Sequence]] = {}
    fills: dict[int, int] = {}
    size = snapshot.block_size
    for sequence in snapshot.sequences:
        if sequence.on_host:
            continue
        for logical, block in enumerate(sequence.blocks):
            holders.setdefault(block, []).append(sequence.message)
            fills[block] = max(fills.get(block, 0), min(size, sequence.planned - logical * size))
    return holders, fills
