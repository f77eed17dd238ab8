"""Prompts one by one through the prefix index: how many of their blocks a cache of some size finds again.

Each prompt is admitted, computed and released before the next one comes, so the whole pool is its cache. Whole blocks only: a
prompt's last block, where it is partly filled, is asked for and never found, nor kept. Outputs are left out: no trace says what
they were, nor which later prompt has them. (A server finds one block less where a prompt ends with a block and is known whole: it
computes the last token for its logits.)

The hit rate is blocks found over blocks that the prompts take up, the partly filled ones included.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Final

from memmgr.core.lineage import Lineage, root_hash
from memmgr.core.memory import Memory
from memmgr.core.table import Admission, MemoryCounters
from memmgr.simulate.saturated import Report, Slots
from memmgr.simulate.traces import MOONCAKE_BLOCK, TraceRequest


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a cache sees it. `tokens` are those of whole blocks; `asked` counts the partly filled one too."""

    tokens: array[int]
    asked: int


@dataclass(slots=True)
class Hits:
    """Blocks that prompts take up, and those of them that were found; prompts longer than the pool are refused."""

    prompts: int = 0
    refused: int = 0
    asked: int = 0
    found: int = 0

    @property
    def rate(self) -> float:
        """The share that was found."""
        return self.found / max(1, self.asked)


def granule(block_size: int) -> int:
    """Return how many tokens of a trace can be one token here without a change to what is found.

    A trace's ids name MOONCAKE_BLOCK tokens each, all alike here. A block holds whole granules and so does what an id names, so
    two blocks are equal where their granules are, and the index has the same shape.
    """
    return gcd(block_size, MOONCAKE_BLOCK)


def prompts_of(trace: Iterable[TraceRequest], block_size: int) -> Iterator[Prompt]:
    """Yield a trace's prompts in granules."""
    unit = granule(block_size)
    for request in trace:
        assert request.prefix, "the trace has no prefixes"
        whole = request.prompt_tokens // block_size * block_size // unit
        tokens = array("I")
        for one in request.prefix:
            tokens.extend(array("I", [one]) * (MOONCAKE_BLOCK // unit))
        yield Prompt(tokens[:whole], -(-request.prompt_tokens // block_size))


class OneByOne:
    """One memory that prompts pass through. `block_size` in tokens of the prompts that it is given."""

    def __init__(self, memory: Memory) -> None:
        self.memory: Final = memory
        self.hits: Final = Hits()
        self.slots: Final = Slots()
        self._root = root_hash("simulated", "", "")

    def run(self, prompt: Prompt) -> int:
        """Take a prompt in, compute it, let it go. Returns how many of its blocks were found."""
        memory, size = self.memory, self.memory.block_size
        length = len(prompt.tokens)
        blocks = length // size
        if blocks > memory.pool.total:
            self.hits.refused += 1
            return 0
        self.hits.prompts += 1
        self.hits.asked += prompt.asked
        if not blocks:
            return 0
        lineage = Lineage(self._root, "")
        memory.now = float(self.hits.prompts)
        match = memory.index.match(lineage, prompt.tokens, length)
        found = len(match.blocks)
        key = self.hits.prompts
        table = memory.admit(key, lineage, Admission(match.without_tail(), found * size))
        growth = memory.plan_growth(table, length - table.planned)
        assert growth is not None, "one prompt alone fits"
        memory.grow(growth)
        memory.end_step()
        self.slots.steps += 1
        self.slots.used += memory.pool.live
        self.slots.free += memory.pool.available
        memory.acknowledge(table, length, prompt.tokens)
        memory.release(key, prompt.tokens)
        self.hits.found += found
        return found


def cache(num_blocks: int, block_size: int, kind: type[Memory] = Memory) -> OneByOne:
    """Return an empty cache of so many blocks for prompts in granules; `block_size` in the trace's tokens."""
    size = block_size // granule(block_size)
    return OneByOne(kind(num_blocks, size, prefix_cache=True, counters=MemoryCounters()))


def simulate_one_by_one(
    num_blocks: int, block_size: int, trace: Iterable[TraceRequest], on_progress: Callable[[int], None] = lambda done: None
) -> Report:
    """Run a trace's prompts one by one; a step is one prompt. `on_progress` hears how many are done with."""
    runner = cache(num_blocks, block_size)
    for number, prompt in enumerate(prompts_of(trace, block_size), 1):
        runner.run(prompt)
        on_progress(number)
    used, _, _, _, free = runner.slots.shares()
    return Report(
        policy="paged",
        requests=runner.hits.prompts,
        refused=runner.hits.refused,
        steps=runner.slots.steps,
        utilization=used,
        reserved=0.0,
        internal_fragmentation=0.0,
        external_fragmentation=0.0,
        free=free,
        mean_running=1.0 if runner.slots.steps else 0.0,
        block_hit_rate=runner.hits.rate,
        evictions=runner.memory.counters.evicted_blocks,
        preemptions=0,
        max_waste_tokens=0,
    )
