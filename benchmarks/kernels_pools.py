"""A paged pool full of K and V, and a backend that attends through it: a contender of `benchmarks.kernels`.

Knows the kernels' interface and the rule of memory (see kernels_cases); not what it is compared with.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.kernels_cases import PREFILL, Case, Room
from benchmarks.kernels_data import Source, queries
from kernels.interface import AttentionBackend, AttentionRule, CacheShape, KvCache, LayerShape, StepRows

#: Rows that are written at once while a pool is filled.
_WRITTEN_ROWS: Final = 4096


class Paged:
    """The sequences of a case in a pool, `room.sets` times; call `n` attends to the next layer of the next set.

    `scattered`: every table is a random choice of all blocks. Otherwise tables are in order, over frames that lie side by side.
    """

    def __init__(
        self, backend: AttentionBackend[Any], case: Case, room: Room, dtype: torch.dtype, device: torch.device, *, scattered: bool
    ) -> None:
        heads = case.heads
        layer = LayerShape(heads.kv_heads, heads.size, heads.size)
        shape = CacheShape((layer,) * room.frame_layers, case.block_size, dtype)
        blocks = room.sets * case.sequences * case.blocks
        frames = _frames(blocks + 1, backend.layout(shape).elements, dtype, device)
        self._backend = backend
        self._case = case
        self._layers = room.layers
        self._cache = KvCache(shape, frames)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)) if scattered else torch.arange(blocks)
        self._tables = order.to(torch.int32).view(room.sets, case.sequences, case.blocks)
        self._rule = AttentionRule(scale=heads.size**-0.5)
        self._queries = queries(case.sequences * case.rows, heads.q_heads, heads.size, dtype).to(device)
        source = Source(heads.kv_heads, heads.size, case.tokens, dtype)
        for tables in self._tables:
            self._fill(source, tables)
        self._prepared = [backend.prepare(self._cache, self._rows(tables)) for tables in self._tables]

    def __call__(self, number: int) -> Tensor:
        """Attend. Returns [sequences * rows, q_heads, size]."""
        number, layer = divmod(number, self._layers)
        return self._backend.paged_attention(self._prepared[number % len(self._prepared)], layer, self._queries, self._rule)

    def _rows(self, tables: Tensor) -> StepRows:
        """Return the step that is measured: the last rows of every sequence, or the one row that it has."""
        case = self._case
        positions = torch.arange(case.tokens - case.rows, case.tokens)
        return StepRows(
            decodes=0 if case.part == PREFILL else case.sequences,
            query_lengths=(case.rows,) * case.sequences,
            context_lengths=(case.tokens,) * case.sequences,
            tables=tables.to(self._cache.frames.device),
            write_slots=torch.cat([self._slots(table, positions) for table in tables]),
        )

    def _slots(self, table: Tensor, positions: Tensor) -> Tensor:
        block_size = self._case.block_size
        slots = table[positions // block_size].long() * block_size + positions % block_size
        return slots.to(self._cache.frames.device)

    def _fill(self, source: Source, tables: Tensor) -> None:
        """Write the sequences of one set, in steps of prefill chunks."""
        tokens = self._case.tokens
        device = self._cache.frames.device
        together = max(1, _WRITTEN_ROWS // tokens)
        for start in range(0, len(tables), together):
            members = range(start, min(start + together, len(tables)))
            for first in range(0, tokens, _WRITTEN_ROWS):
                end = min(first + _WRITTEN_ROWS, tokens)
                positions = torch.arange(first, end)
                rows = StepRows(
                    decodes=0,
                    query_lengths=(end - first,) * len(members),
                    context_lengths=(end,) * len(members),
                    tables=tables[start : members.stop].to(device),
                    write_slots=torch.cat([self._slots(tables[member], positions) for member in members]),
                )
                prepared = self._backend.prepare(self._cache, rows)
                parts = [source.rows(member, first, end) for member in members]
                keys = torch.cat([part[0] for part in parts]).to(device)
                values = torch.cat([part[1] for part in parts]).to(device)
                for layer in range(self._layers):
                    self._backend.write_kv(prepared, layer, keys, values)


def _frames(count: int, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [count, elements]. On the CPU in shared memory, as the executor's pool is: a page is taken when it is written."""
    if device.type != "cpu":
        return torch.empty(count, elements, dtype=dtype, device=device)
    descriptor = os.memfd_create("kilburn-benchmark")
    try:
        os.ftruncate(descriptor, count * elements * dtype.itemsize)
        mapped = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapped, dtype=dtype).view(count, elements)
