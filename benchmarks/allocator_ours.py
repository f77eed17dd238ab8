"""Kilburn's side of `benchmarks.allocator`: memmgr's memory core, as the scheduler calls it. See `allocator_rounds`."""

from __future__ import annotations

from array import array
from typing import Final

from benchmarks.allocator_rounds import BLOCK_SIZE, NUM_BLOCKS, serve
from memmgr.core.lineage import Lineage, root_hash
from memmgr.core.memory import Memory
from memmgr.core.table import MemoryCounters, Table


class _Sequence:
    """What the scheduler keeps of a request for the memory."""

    def __init__(self, key: str, tokens: array[int], lineage: Lineage) -> None:
        self.key: Final = key
        self.tokens: Final = tokens
        self.lineage: Final = lineage
        self.table: Table | None = None


class Ours:
    """An Allocator; no records are kept, as nobody watches."""

    def __init__(self) -> None:
        self._memory = Memory(NUM_BLOCKS, BLOCK_SIZE, prefix_cache=True, counters=MemoryCounters())
        self._root = root_hash("model", "tenant", "")

    def sequence(self, key: str, tokens: list[int], *, named: bool) -> _Sequence:
        """See Allocator."""
        ids = array("I", tokens)
        lineage = Lineage(self._root, "tenant")
        if named:
            self._memory.plan_match(lineage, ids)
            for logical in range(len(lineage.names), len(ids) // BLOCK_SIZE):
                lineage.name(logical, ids[logical * BLOCK_SIZE : (logical + 1) * BLOCK_SIZE].tobytes())
        return _Sequence(key, ids, lineage)

    def admit(self, sequence: _Sequence) -> int:
        """See Allocator: planned and acknowledged at once. The owner's clock has gone on, here as below."""
        memory, tokens = self._memory, sequence.tokens
        memory.now += 1.0
        admission = memory.plan_admission(sequence.lineage, tokens, 0)
        assert admission is not None
        table = sequence.table = memory.admit(sequence.key, sequence.lineage, admission)
        growth = memory.plan_growth(table, len(tokens) - table.planned)
        assert growth is not None
        memory.grow(growth)
        memory.end_step()
        memory.acknowledge(table, len(tokens), tokens)
        return admission.cached_tokens

    def decode(self, sequences: list[_Sequence], token: int) -> None:
        """See Allocator."""
        memory = self._memory
        memory.now += 1.0
        for sequence in sequences:
            assert sequence.table is not None
            growth = memory.plan_growth(sequence.table, 1)
            assert growth is not None
            memory.grow(growth)
            sequence.tokens.append(token)
        memory.end_step()
        for sequence in sequences:
            assert sequence.table is not None
            memory.acknowledge(sequence.table, sequence.table.planned, sequence.tokens)

    def free(self, sequence: _Sequence) -> None:
        """See Allocator."""
        self._memory.now += 1.0
        self._memory.release(sequence.key, sequence.tokens)

    def flush(self) -> None:
        """See Allocator."""
        self._memory.flush()


if __name__ == "__main__":
    serve(Ours())
