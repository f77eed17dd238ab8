"""Slots, and how a step plan becomes arrays: rows, tables, the slots that they write, the rows to sample.

Knows the protocol's plans and the limits of this executor; not tensors, models or frames. Everything in a plan is checked here
before it is used: a plan that breaks a rule raises PlanError, and what the slots hold after that is of no meaning.

The rules:

    blocks       0 .. num_blocks - 1; the scratch block behind them is never named
    slots        0 .. max_slots - 1; opened before use, closed before they are opened again
    a chunk      starts where its slot's last one ended; the first one after the opening starts anywhere (a cached prefix, a fork)
    positions    within the context length, and within the slot's table
    rows         at most max_step_tokens in a plan; no two write the same token slot of a block
    copies       no block is source and destination, none is a destination twice
    swaps        host blocks 0 .. host_blocks - 1; none is named twice; no block is swapped in twice
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from executor.errors import PlanError
from executor.sampler import Draw, Sampling
from kilburn.limits import MAX_CHOICES, MAX_TOP_LOGPROBS
from kilburn.v1.engine_pb2 import Chunk, SampleRow, SamplingParams, SlotOpen, SlotState, StepPlan

#: Table entries that one Inspection may list; at most 5 bytes each on the wire, so that it stays under a frame's limit.
MAX_INSPECTED_ENTRIES: Final = 2 * 1024 * 1024

_FIRST_WIDTH: Final = 16

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What this executor can hold and do; told in its hello."""

    num_blocks: int
    block_size: int
    context_length: int
    vocab_size: int
    max_slots: int
    max_step_tokens: int
    host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step, sequence by sequence, decodes (one row) first; see kernels/interface.py for the words."""

    token_ids: Ints  # [rows]
    positions: Ints  # [rows]
    decodes: int
    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    tables: npt.NDArray[np.int32]  # [sequences, width], padded with the scratch block
    write_slots: Ints  # [rows]
    logit_rows: Ints  # [distinct rows to sample from]
    sample_logits: Ints  # [samples]: which of logit_rows
    sample_slots: tuple[int, ...]  # [samples]: takes the token
    draws: tuple[Draw, ...]  # [samples]


@dataclass(frozen=True, slots=True)
class _Advance:
    """A plan's chunks in the batch's order: decodes first."""

    order: Ints  # [chunks]: where each is in the plan
    slots: Ints  # [chunks]
    query_lengths: Ints  # [chunks]
    token_ids: Ints  # [rows]


class Slots:
    """The sequences that are open: table, length, last token and sampling of each, as arrays over all slots."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._scratch = limits.num_blocks
        self._open: dict[int, tuple[Sampling, int]] = {}  # slot -> its sampling, and its index among its request's sequences
        self._is_open = np.zeros(limits.max_slots, dtype=bool)  # the same once more
        self._started = np.zeros(limits.max_slots, dtype=bool)
        self._lengths = np.zeros(limits.max_slots, dtype=np.int64)
        self._last_tokens = np.full(limits.max_slots, -1, dtype=np.int64)
        self._entries = np.zeros(limits.max_slots, dtype=np.int64)
        self._tables = np.full((limits.max_slots, _FIRST_WIDTH), self._scratch, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._open)

    def clear(self) -> None:
        """Close all slots."""
        for slot in list(self._open):
            self._close(slot)

    def check_blocks(self, plan: StepPlan) -> None:
        """Check the blocks that a plan frees, copies and swaps.

        Raises:
            PlanError: see the module.
        """
        self._check_range(plan.freed_blocks)
        sources = [copy.source for copy in plan.copies]
        destinations = [copy.destination for copy in plan.copies]
        self._check_range(sources)
        self._check_range(destinations)
        if len(set(destinations)) != len(destinations) or set(sources) & set(destinations):
            raise PlanError("a block is copied to twice, or is both source and destination")
        self._check_swaps(plan)

    def _check_swaps(self, plan: StepPlan) -> None:
        brought = [swap.destination for swap in plan.swap_ins]
        self._check_range([swap.source for swap in plan.swap_outs])
        self._check_range(brought)
        places = [swap.destination for swap in plan.swap_outs] + [swap.source for swap in plan.swap_ins]
        if places and max(places) >= self._limits.host_blocks:
            raise PlanError(f"host block {max(places)}; there are {self._limits.host_blocks}")
        if len(set(places)) != len(places) or len(set(brought)) != len(brought):
            raise PlanError("a host block is named twice, or a block is swapped in twice")

    def apply(self, plan: StepPlan) -> Batch | None:
        """Close, open and advance slots, and return the rows to compute; None where there are none.

        Raises:
            PlanError: see the module.
        """
        for slot in plan.closes:
            self._close(slot)
        for opening in plan.opens:
            self._open_slot(opening)
        samples = _sample_slots(plan)
        if not plan.chunks:
            return None
        return self._batch(plan, samples, self._advance(plan.chunks))

    def sampled(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Remember what was sampled for each slot, for the chunk that names no ids; -1 where nothing was drawn."""
        self._last_tokens[list(slots)] = token_ids

    def state(self) -> list[SlotState]:
        """Return the open slots, for an Inspection."""
        return [
            SlotState(slot=slot, length=int(self._lengths[slot]), table=self._tables[slot, : self._entries[slot]].tolist())
            for slot in sorted(self._open)
        ]

    def faults(self) -> tuple[list[str], int]:
        """Return what contradicts itself, and how many things were checked."""
        faults = []
        for slot in self._open:
            table = self._tables[slot, : self._entries[slot]]
            if self._lengths[slot] > len(table) * self._limits.block_size:
                faults.append(f"slot {slot}: {self._lengths[slot]} tokens in {len(table)} blocks")
            if len(table) and not 0 <= table.min() <= table.max() < self._limits.num_blocks:
                faults.append(f"slot {slot}: its table names a block outside of the pool")
        return faults, 2 * len(self._open)

    def entries(self) -> int:
        """Return the table entries of all open slots."""
        return int(self._entries[list(self._open)].sum())

    # ------------------------------------------------------------------------------------------------------- changes

    def _close(self, slot: int) -> None:
        if self._open.pop(slot, None) is None:
            raise PlanError(f"slot {slot} is closed, but it is not open")
        self._tables[slot, : self._entries[slot]] = self._scratch
        self._entries[slot] = self._lengths[slot] = 0
        self._started[slot] = self._is_open[slot] = False
        self._last_tokens[slot] = -1

    def _open_slot(self, opening: SlotOpen) -> None:
        if opening.slot >= self._limits.max_slots:
            raise PlanError(f"slot {opening.slot} is opened; there are {self._limits.max_slots}")
        if opening.slot in self._open:
            raise PlanError(f"slot {opening.slot} is opened, but it is open")
        self._is_open[opening.slot] = True
        self._open[opening.slot] = (read_sampling(opening.sampling), opening.index)

    def _advance(self, chunks: Sequence[Chunk]) -> "_Advance":
        """Take the chunks' blocks and tokens into their slots.

        A step of decodes has many chunks, and each has next to nothing: all that can be is done for all of them at once.
        """
        slots = np.array([chunk.slot for chunk in chunks], dtype=np.int64)
        named = set(slots.tolist())
        if len(named) != len(slots):
            raise PlanError("a slot has two chunks in one plan")
        if not named <= self._open.keys():
            raise PlanError(f"a chunk names slot {min(named - self._open.keys())}, which is not open")
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        for number in _where(self._started[slots] & (starts != self._lengths[slots])):
            slot = slots[number]
            raise PlanError(f"slot {slot} holds {self._lengths[slot]} tokens, and its chunk starts at {starts[number]}")
        for chunk in chunks:
            if chunk.new_blocks or chunk.edits:
                self._extend_table(chunk.slot, chunk)
        counts = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
        going_on = counts == 0
        for number in _where(going_on & (self._last_tokens[slots] < 0)):
            raise PlanError(f"slot {slots[number]} has sampled nothing that it could go on with")
        counts[going_on] = 1
        ends = starts + counts
        for number in _where(ends > self._limits.context_length):
            raise PlanError(
                f"slot {slots[number]} would reach {ends[number]} tokens; the context has {self._limits.context_length}"
            )
        for number in _where(ends > self._entries[slots] * self._limits.block_size):
            slot = slots[number]
            raise PlanError(f"slot {slot} would reach {ends[number]} tokens in {self._entries[slot]} blocks")
        rows = int(counts.sum())
        if rows > self._limits.max_step_tokens:
            raise PlanError(f"a plan of {rows} rows; at most {self._limits.max_step_tokens} were agreed on")
        self._lengths[slots] = ends
        self._started[slots] = True
        # The order in the batch; stable, so that it is the plan's where it can be.
        order = np.argsort(counts > 1, kind="stable")
        slots, counts = slots[order], counts[order]
        firsts = counts.cumsum() - counts
        tokens = np.empty(rows, dtype=np.int64)
        tokens[firsts] = self._last_tokens[slots]
        for first, count, number in zip(firsts.tolist(), counts.tolist(), order.tolist(), strict=True):
            if not going_on[number]:
                tokens[first : first + count] = chunks[number].token_ids
        if tokens.max() >= self._limits.vocab_size:
            raise PlanError(f"token {tokens.max()}; the vocabulary has {self._limits.vocab_size}")
        return _Advance(order, slots, counts, tokens)

    def _extend_table(self, slot: int, chunk: Chunk) -> None:
        first = int(self._entries[slot])
        last = first + len(chunk.new_blocks)
        if last > self._limits.num_blocks:
            raise PlanError(f"slot {slot} would have {last} blocks; there are {self._limits.num_blocks}")
        if chunk.new_blocks:
            self._check_range(chunk.new_blocks)
            if last > self._tables.shape[1]:
                self._widen(last)
            self._tables[slot, first:last] = chunk.new_blocks
            self._entries[slot] = last
        self._check_range([edit.block for edit in chunk.edits])
        for edit in chunk.edits:
            if edit.logical >= last:
                raise PlanError(f"entry {edit.logical} of slot {slot} is replaced; its table has {last}")
            self._tables[slot, edit.logical] = edit.block

    def _widen(self, width: int) -> None:
        """Make the tables at least `width` wide; at least twice as wide as now, so that this is rare."""
        wider = np.full((self._tables.shape[0], max(width, 2 * self._tables.shape[1])), self._scratch, dtype=np.int32)
        wider[:, : self._tables.shape[1]] = self._tables
        self._tables = wider

    # ---------------------------------------------------------------------------------------------------------- rows

    def _batch(self, plan: StepPlan, samples: tuple[int, ...], advance: "_Advance") -> Batch:
        block_size = self._limits.block_size
        slots, query_lengths, token_ids = advance.slots, advance.query_lengths, advance.token_ids
        rows = len(token_ids)
        ends = query_lengths.cumsum()
        contexts = self._lengths[slots]
        # Row r of a sequence whose rows end at `end`, and whose context then has `context` tokens, is token context - end + r.
        positions = np.repeat(contexts - ends, query_lengths) + np.arange(rows)
        width = int(-(-contexts.max() // block_size))
        blocks = self._tables[np.repeat(slots, query_lengths), positions // block_size].astype(np.int64)
        write_slots = blocks * block_size + positions % block_size
        if len(set(write_slots.tolist())) != rows:
            raise PlanError("two rows write the same slot of a block")
        last_rows = np.empty(len(slots), dtype=np.int64)
        last_rows[advance.order] = ends - 1
        sampled = last_rows[np.array([sample.chunk for sample in plan.samples], dtype=np.int64)]
        if bool((sampled[1:] > sampled[:-1]).all()):
            logit_rows, sample_logits = sampled, np.arange(len(sampled))
        else:
            logit_rows, sample_logits = np.unique(sampled, return_inverse=True)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            decodes=int(np.count_nonzero(query_lengths == 1)),
            query_lengths=tuple(query_lengths.tolist()),
            context_lengths=tuple(contexts.tolist()),
            tables=self._tables[slots, :width],
            write_slots=write_slots,
            logit_rows=logit_rows,
            sample_logits=sample_logits,
            sample_slots=samples,
            draws=tuple(self._draw(sample) for sample in plan.samples),
        )

    def _draw(self, sample: SampleRow) -> Draw:
        opened = self._open.get(sample.slot)
        if opened is None:
            raise PlanError(f"a sample names slot {sample.slot}, which is not open")
        if sample.choices > min(MAX_CHOICES, self._limits.vocab_size):
            raise PlanError(f"{sample.choices} choices are asked for; at most {MAX_CHOICES} of the vocabulary are told")
        return Draw(opened[0], opened[1], sample.position, sample.choices)

    def _check_range(self, blocks: Sequence[int]) -> None:
        # Negative numbers can't come over the wire.
        if blocks and max(blocks) >= self._limits.num_blocks:
            raise PlanError(f"block {max(blocks)}; the pool has {self._limits.num_blocks}")


def _where(found: npt.NDArray[np.bool_]) -> Sequence[int]:
    """Return where something is true; mostly it is nowhere."""
    return found.nonzero()[0].tolist() if found.any() else ()


def read_sampling(params: SamplingParams) -> Sampling:
    """Return checked sampling parameters.

    Raises:
        PlanError: one is out of its range.
    """
    in_range = (
        math.isfinite(params.temperature)
        and params.temperature >= 0
        and 0 < params.top_p <= 1
        and 0 <= params.min_p <= 1
        and params.top_logprobs <= MAX_TOP_LOGPROBS
    )
    if not in_range:
        raise PlanError(f"sampling parameters out of range: {str(params).strip()!r}")
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        with_logprobs=params.with_logprobs,
        top_logprobs=params.top_logprobs,
    )


def _sample_slots(plan: StepPlan) -> tuple[int, ...]:
    slots = tuple(sample.slot for sample in plan.samples)
    if len(set(slots)) != len(slots):
        raise PlanError("a slot is sampled twice in one plan")
    for sample in plan.samples:
        if sample.chunk >= len(plan.chunks):
            raise PlanError(f"a sample names chunk {sample.chunk}; the plan has {len(plan.chunks)}")
    return slots
