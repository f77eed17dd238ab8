"""An executor made of dicts, at the other end of the messages of engine.proto, and what a request's answer must be.

`blocks[block][offset]` is what a slot of a block holds: the domain of who wrote it, and all tokens up to its own. So reading
through a table gives a sequence's tokens, or shows whose they are. A slot that holds nothing is not in the dict. The seed
of a request's sampling is its handle: this is how the executor knows whose a slot is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from kilburn.v1 import engine_pb2 as engine

VOCABULARY: Final = 5

#: A domain and all tokens up to one.
Value = tuple[str, tuple[int, ...]]


def draw(context: tuple[int, ...], position: int, index: int) -> int | None:
    """Return output number `position` of a request's sequence after its context: now and then none, no numbers."""
    drawn = crc32(bytes((*context, position, index)))
    return None if drawn % 101 == 0 else drawn // 101 % VOCABULARY


def answer(prompt: Sequence[int], index: int, most: int, stop: Sequence[int]) -> tuple[list[int], bool]:
    """Return all outputs of a request's sequence if nobody disturbs it, and whether they end with no numbers."""
    outputs: list[int] = []
    while len(outputs) < most:
        token = draw((*prompt, *outputs), len(outputs), index)
        if token is None:
            return outputs, True
        outputs.append(token)
        if token in stop:
            break
    return outputs, False


@dataclass
class Slot:
    """One sequence's place. `last` was sampled last."""

    handle: int
    index: int
    table: list[int] = field(default_factory=list)
    length: int = 0
    last: int | None = None


class NaiveExecutor:
    """Does plans in order. What a plan may not ask of it is an assertion."""

    def __init__(self, block_size: int, domains: dict[int, str]) -> None:
        self.size = block_size
        self.domains = domains  # by handle
        self.blocks: dict[int, dict[int, Value]] = {}
        self.host: dict[int, dict[int, Value]] = {}  # the same, swapped out
        self.slots: dict[int, Slot] = {}
        self.ahead: deque[engine.StepPlan] = deque()
        self.step = 0

    def do(self) -> engine.StepResult:
        """Do the next plan."""
        plan = self.ahead.popleft()
        self.step += 1
        assert plan.step == self.step
        assert not {out.destination for out in plan.swap_outs} & {back.source for back in plan.swap_ins}
        for out in plan.swap_outs:
            self.host[out.destination] = dict(self.blocks.get(out.source, {}))
        for block in plan.freed_blocks:
            self.blocks.pop(block, None)
        for back in plan.swap_ins:
            self.blocks[back.destination] = dict(self.host[back.source])
        sources = {copy.source for copy in plan.copies}
        for copy in plan.copies:
            assert copy.destination not in sources, "a block is source and destination in one plan"
            self.blocks[copy.destination] = dict(self.blocks.get(copy.source, {}))
        for closed in plan.closes:
            del self.slots[closed]
        for opened in plan.opens:
            assert opened.slot not in self.slots
            self.slots[opened.slot] = Slot(opened.sampling.seed, opened.index)
        for chunk in plan.chunks:
            self._lay(chunk)
        for chunk in plan.chunks:
            self._write(chunk)
        result = engine.StepResult(step=plan.step)
        for row in plan.samples:
            slot, computed = self.slots[row.slot], self.slots[plan.chunks[row.chunk].slot]
            token = draw(self.read(computed), row.position, slot.index)
            if token is None:
                result.failed.append(len(result.token_ids))
            slot.last = token or 0  # the plan after this one may have left already and go on with it
            result.token_ids.append(slot.last)
        return result

    def read(self, slot: Slot) -> tuple[int, ...]:
        """Return a slot's tokens, read through its table."""
        tokens: tuple[int, ...] = ()
        for position in range(slot.length):
            block, offset = slot.table[position // self.size], position % self.size
            assert offset in self.blocks.get(block, {}), f"position {position} was never written, or has been freed"
            domain, written = self.blocks[block][offset]
            assert domain == self.domains[slot.handle], "a sequence reads what another domain wrote"
            assert written[:-1] == tokens, f"position {position} belongs to other tokens"
            tokens = written
        return tokens

    def inspection(self, number: int) -> engine.Inspection:
        """Return what there is once all plans are done."""
        slots = [engine.SlotState(slot=s, length=slot.length, table=slot.table) for s, slot in self.slots.items()]
        return engine.Inspection(id=number, slots=slots)

    def _lay(self, chunk: engine.Chunk) -> None:
        slot = self.slots[chunk.slot]
        for edit in chunk.edits:
            slot.table[edit.logical] = edit.block
        slot.table.extend(chunk.new_blocks)
        assert slot.length in {0, chunk.start}, "a chunk does not go on where the last one ended"
        slot.length = chunk.start
        assert len(slot.table) == -(-(chunk.start + max(1, len(chunk.token_ids))) // self.size)

    def _write(self, chunk: engine.Chunk) -> None:
        slot = self.slots[chunk.slot]
        context, tokens = self.read(slot), list(chunk.token_ids)
        if not tokens:
            assert slot.last is not None, "nothing was sampled yet"
            tokens = [slot.last]
        for token in tokens:
            block, offset = slot.table[slot.length // self.size], slot.length % self.size
            holders = [other for other in self.slots.values() if block in other.table]
            assert holders == [slot], "a shared block is written"
            context = (*context, token)
            self.blocks.setdefault(block, {})[offset] = (self.domains[slot.handle], context)
            slot.length += 1
