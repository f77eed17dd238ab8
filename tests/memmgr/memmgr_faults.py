"""Faults to plant in the memory manager, one at a time: each must be caught by a test (tests/memmgr/plant.py).

A fault is a text that stands exactly once in a file and what takes its place. A test of every run checks that it still does: who
changes such a line says here what the fault looks like now.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

_BLOCKS: Final = "memmgr/core/blocks.py"
_PREFIX: Final = "memmgr/core/prefix.py"
_EVICTED: Final = "memmgr/core/evicted.py"
_LINEAGE: Final = "memmgr/core/lineage.py"
_MEMORY: Final = "memmgr/core/memory.py"
_SWAP: Final = "memmgr/core/swap.py"
_QUOTAS: Final = "memmgr/core/quotas.py"
_TENANTS: Final = "memmgr/schedule/tenants.py"
_ADMISSION: Final = "memmgr/schedule/admission.py"
_PINS: Final = "memmgr/core/pins.py"
_SCHEDULER: Final = "memmgr/schedule/scheduler.py"
_ADMITTING: Final = "memmgr/schedule/admitting.py"
_DRAFTS: Final = "memmgr/schedule/drafts.py"
_PLANNING: Final = "memmgr/schedule/planning.py"
_RESULTS: Final = "memmgr/schedule/results.py"
_OUTPUTS: Final = "memmgr/schedule/outputs.py"
_QUEUES: Final = "memmgr/schedule/queues.py"
_REQUESTS: Final = "memmgr/schedule/requests.py"
_FORMING: Final = "memmgr/schedule/forming.py"
_SLOTS: Final = "memmgr/schedule/slots.py"
_SIZES: Final = "memmgr/schedule/sizes.py"
_SESSION: Final = "memmgr/session.py"
_MESSAGES: Final = "memmgr/messages.py"


class RottenFaultError(Exception):
    """A fault's text does not stand in its file exactly once any more."""


@dataclass(frozen=True)
class Fault:
    """See the module. `file` from the root of the tree."""

    name: str
    file: str
    old: str
    new: str

    def applied(self, root: Path = ROOT) -> str:
        """Return the file's text with the fault in it.

        Raises:
            RottenFaultError: it can't be planted.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if (times := text.count(self.old)) != 1:
            raise RottenFaultError(
                f"{self.name}: its text stands {times} times in {self.file}; write down what it looks like now"
            )
        return text.replace(self.old, self.new)


FAULTS: Final = (
    # ------------------------------------------------------------------------------------------------------ references
    Fault("a reference is not dropped", _MEMORY, "self._drop_all(table.blocks[::-1],", "self._drop_all(table.blocks[:0:-1],"),
    Fault(
        "a held source is never let go", _MEMORY, "            for owner in owners:\n", "            for owner in owners[1:]:\n"
    ),
    Fault(
        "a source is not held until its step has left",
        _MEMORY,
        "self._held.setdefault(source, []).append(owner)",
        "self._drop(source, owner)",
    ),
    Fault(
        "a block is freed while another holds it",
        _BLOCKS,
        "        if references > 1:\n            return False\n        self.live -= 1",
        "        self.live -= 1",
    ),
    Fault("a block is freed twice", _BLOCKS, "self._free.append(block)", "self._free.extend((block, block))"),
    Fault(
        "a fork takes no reference to the last block",
        _MEMORY,
        "self._share_all(source.blocks, owner)",
        "self._share_all(source.blocks[:-1], owner)",
    ),
    Fault(
        "a hit takes no reference to its last block",
        _MEMORY,
        "self._share_all(blocks, owner, favour=True)",
        "self._share_all(blocks[:-1], owner, favour=True)",
    ),
    Fault(
        "a block is never shared again after two",
        _BLOCKS,
        "            if count:\n                self.shared += count == 1",
        "            if count:\n                self.shared += count >= 1",
    ),
    Fault(
        "one more holder is not counted",
        _BLOCKS,
        "        self.references[block] = count + 1\n        if count:\n            self.shared += count == 1",
        "        self.references[block] = count or 1\n        if count:\n            self.shared += count == 1",
    ),
    Fault(
        "a table that is shared by many falls free with the first",
        _BLOCKS,
        "                run = self._proven.run_at(now)\n                for block in blocks:\n"
        "                    if references[block] != 1:\n",
        "                run = self._proven.run_at(now)\n                for block in blocks:\n"
        "                    if references[block] < 1:\n",
    ),
    Fault(
        "a revived table stays in the order of eviction",
        _BLOCKS,
        "                references[block] = 1\n                run_of[block] = None\n",
        "                references[block] = 1\n",
    ),
    Fault(
        "a revived block stays in the order of eviction",
        _BLOCKS,
        "            self._run_of[block] = None\n            self._let_go(run, 1)\n        self.cached -= 1",
        "            self._let_go(run, 1)\n        self.cached -= 1",
    ),
    Fault("a whole table is revived and counted as cached", _BLOCKS, "            self.cached -= len(runs)\n", ""),
    Fault(
        "what fell free is not given out again",
        _BLOCKS,
        "        self._free += blocks\n\n    def release_all",
        "\n    def release_all",
    ),
    Fault(
        "generations stand still",
        _BLOCKS,
        "        for block in blocks:\n            references[block] = 1\n            generations[block] += 1\n",
        "        for block in blocks:\n            references[block] = 1\n",
    ),
    # --------------------------------------------------------------------------------------------------- copy-on-write
    Fault("a shared last block is written in place", _MEMORY, "        if growth.clone:\n", "        if False:\n"),
    Fault("a copy is skipped", _MEMORY, "self._copies[destination] = source", "pass"),
    Fault(
        "an off-by-one at a block's edge: the clone",
        _MEMORY,
        "clone = bool(table.planned % size) and",
        "clone = table.planned % size > 1 and",
    ),
    Fault("a block at its edge is cloned", _MEMORY, "clone = bool(table.planned % size) and", "clone = bool(blocks) and"),
    Fault("every write clones", _MEMORY, "- len(self._held.get(block, ())) > 1", "- len(self._held.get(block, ())) > 0"),
    Fault("a held source counts as shared", _MEMORY, " - len(self._held.get(block, ())) > 1", " > 1"),
    Fault("a copy for a sequence that is gone is made", _MEMORY, "self._copies.pop(block, None)  # as", "pass  # as"),
    Fault("a tail that another holds is indexed", _MEMORY, " and self._is_settled(table.blocks[full])", ""),
    Fault("a tail whose copy has not left is indexed", _MEMORY, " and block not in self._copies", ""),
    Fault("a fork in the middle of a step", _MEMORY, 'assert not self._planning, "a fork in the middle of a step"', "pass"),
    Fault(
        "a fork keeps the name of a block that it has not filled",
        _MEMORY,
        "source.lineage.fork(source.planned // self.block_size)",
        "source.lineage.fork(self.blocks_for(source.planned))",
    ),
    # ------------------------------------------------------------------------------------------------------------ room
    Fault(
        "an off-by-one at a block's edge: the count",
        _MEMORY,
        "return -(-tokens // self.block_size)",
        "return tokens // self.block_size + 1",
    ),
    Fault("a clone costs no room", _MEMORY, "needed = new_blocks + clone", "needed = new_blocks"),
    Fault("a revived block costs no room", _MEMORY, "            room -= self.pool.evictable_among(match.blocks)\n", ""),
    Fault("there is room for all but a tail's source", _MEMORY, "if whole >= room or allowance", "if whole > room or allowance"),
    Fault(
        "the token after the prompt has no room",
        _MEMORY,
        "        whole = self.blocks_for(len(tokens) + 1)\n",
        "        whole = self.blocks_for(len(tokens))\n",
    ),
    Fault("a tail's source costs no room", _MEMORY, "needed + self.pool.evictable(match.tail) > room", "needed > room"),
    Fault("the reserve is not left", _MEMORY, "room = self.pool.available - reserve\n", "room = self.pool.available\n"),
    Fault("pinned blocks count as room", _BLOCKS, "- self.live - self.pinned_cached", "- self.live"),
    # -------------------------------------------------------------------------------------------------------- eviction
    Fault(
        "a pinned block is evicted: pinned while cached",
        _BLOCKS,
        "            self._leave(block)\n            self.pinned_cached += 1\n",
        "            self.pinned_cached += 1\n",
    ),
    Fault(
        "a pinned block is evicted: cached while pinned",
        _BLOCKS,
        "            self._stamps[block] = now\n        else:\n            self._enter(block, now)\n",
        "            self._stamps[block] = now\n        self._enter(block, now)\n",
    ),
    Fault("a pinned block is evicted with what it stands on", _MEMORY, "self.pins.cut(block)", "pass"),
    Fault("the newest goes first", _BLOCKS, "next(iter(runs))", "next(reversed(runs))"),
    Fault(
        "the head of a chain goes before its tail", _MEMORY, "self._drop_all(table.blocks[::-1],", "self._drop_all(table.blocks,"
    ),
    Fault(
        "a block is evicted while one is free",
        _MEMORY,
        "pool.take_some(min(count, pool.free))",
        "pool.take_some(min(count, max(0, pool.free - (pool.cached > pool.pinned_cached))))",
    ),
    Fault("what stands on an evicted block stays", _PREFIX, "doomed = self.standing_on(block)", "doomed = [block]"),
    Fault("what was used twice is not kept apart", _BLOCKS, "if favoured[blocks[-1]]:", "if False:"),
    Fault(
        "what was used twice is kept for ever",
        _BLOCKS,
        "while (excess := proven.held - self._most_proven) > 0:",
        "while excess := 0:",
    ),
    Fault(
        "what was moved on counts as favoured",
        _BLOCKS,
        "                self._favoured[block] = False\n            self._let_go",
        "                pass\n            self._let_go",
    ),
    Fault("what comes back is not known again", _MEMORY, "            back.append(block)\n", ""),
    Fault("names are remembered for ever", _EVICTED, "if len(self._younger) >= self._half:", "if False:"),
    Fault("what fell free is not told", _MEMORY, "        self._freed.append(block)\n", ""),
    Fault(
        "a block that was used again stays in the order of eviction",
        _BLOCKS,
        "            run_of[block] = None\n            gone += 1\n",
        "            gone += 1\n",
    ),
    # ------------------------------------------------------------------------------------------------------------ pins
    Fault("an unpinned block is lost to eviction", _BLOCKS, "            self._enter(block, self._stamps[block])\n", ""),
    Fault("a pin ends late", _PINS, "if pin.expires_at <= now]", "if pin.expires_at < now]"),
    Fault(
        "a pin that was cut holds a block that is gone",
        _PINS,
        "self._let_go(pin.blocks[kept:])",
        "self._let_go(pin.blocks[kept + 1 :])",
    ),
    Fault(
        "the head of a pinned chain is evicted before its tail", _PINS, "for block in reversed(blocks):", "for block in blocks:"
    ),
    # ----------------------------------------------------------------------------------------------------------- index
    Fault("a hash is committed early", _MEMORY, "full = computed // self.block_size", "full = table.planned // self.block_size"),
    Fault(
        "an off-by-one at a block's edge: the commit",
        _MEMORY,
        "full = computed // self.block_size",
        "full = (computed + 1) // self.block_size",
    ),
    Fault("the parent is left out of a hash", _LINEAGE, '(b"p", parent, _length', '(b"p", _length'),
    Fault("the tokens are left out of a hash", _LINEAGE, "_length_tag(len(tokens)), tokens)", "_length_tag(len(tokens)))"),
    Fault("the salt is ignored", _LINEAGE, ', (b"s", salt):', ":"),
    Fault("the tenant is ignored", _LINEAGE, '(b"m", model), (b"t", tenant),', '(b"m", model),'),
    Fault("the model is ignored", _LINEAGE, '(b"m", model), (b"t", tenant),', '(b"t", tenant),'),
    Fault(
        "lengths are left out of a root",
        _LINEAGE,
        'digest.update(tag + len(data).to_bytes(8, "little") + data)',
        "digest.update(tag + data)",
    ),
    Fault("the tokens of a hit are not compared", _PREFIX, "if self._tokens[block] != tokens or", "if"),
    Fault("the parent of a hit is not compared", _PREFIX, " or self._above[block] != above:", ":"),
    Fault("the domain of a hit is not compared", _PREFIX, "return above != NONE or self._parents[block] == root", "return True"),
    Fault(
        "a node that is gone passes for its successor",
        _PREFIX,
        "serials[above.block] != above.serial",
        "serials[above.block] == 0",
    ),
    Fault(
        "the last prompt token is found",
        _MEMORY,
        "self.index.match(lineage, tokens, len(tokens) - 1)",
        "self.index.match(lineage, tokens, len(tokens))",
    ),
    Fault("an off-by-one at a block's edge: the match", _PREFIX, "max(0, limit // size)", "max(0, (limit - 1) // size)"),
    Fault(
        "one token too many of a child is used",
        _PREFIX,
        "best, shared = child, _common(known, wanted)",
        "best, shared = child, min(len(wanted), _common(known, wanted) + _TOKEN_BYTES)",
    ),
    Fault("a child's tokens are not compared", _PREFIX, "_common(known, wanted)", "min(len(known), len(wanted))"),
    Fault("siblings are torn", _PREFIX, "            self._previous_sibling[after] = before\n", "            pass\n"),
    Fault(
        "what may be no numbers is found: its first block",
        _MEMORY,
        "        for block in table.blocks:\n            if self.index",
        "        for block in table.blocks[1:]:\n            if self.index",
    ),
    Fault(
        "what may be no numbers is found: after its release",
        _RESULTS,
        "self._memory.distrust_cached(sequence.lineage, sequence.tokens)",
        "pass",
    ),
    # ------------------------------------------------------------------------------------------------------- scheduler
    Fault("the first in rank is preempted", _TENANTS, "return running[-1]", "return running[0]"),
    Fault("one comes back before its last token has", _ADMITTING, "if request.in_flight:  #", "if False:  #"),
    Fault(
        "a preempted one loses its seniority",
        _QUEUES,
        "        request.state = State.WAITING\n        insort(self.waiting, request, key=_rank)\n",
        "        request.state = State.WAITING\n        self.waiting.append(request)\n",
    ),
    Fault("another's blocks are given away", _SIZES, "    return owed\n", "    return {}\n"),
    Fault(
        "the branches' blocks are given away",
        _ADMISSION,
        "return branch_blocks(live, memory) + blocks_after(",
        "return blocks_after(",
    ),
    Fault("a handle is taken twice", _SCHEDULER, "if submission.key in self._registry:", "if False:"),
    Fault(
        "a request id is taken twice",
        _SCHEDULER,
        "if self._registry.find(submission.tenant, submission.request_id)",
        "if None",
    ),
    Fault("what is out when the executor dies stays out", _SCHEDULER, "        self._results.clear()\n", ""),
    Fault(
        "a Finish of what is yet to come is believed",
        _SCHEDULER,
        "not 0 <= output_tokens <= sequence.outputs",
        "output_tokens < 0",
    ),
    Fault(
        "a sequence that has ended goes on",
        _OUTPUTS,
        "        if sequence.ended:\n            return\n        request = sequence.request\n",
        "        request = sequence.request\n",
    ),
    Fault("a stop token is not noticed", _OUTPUTS, "if result.token in submission.stop_token_ids:", "if False:"),
    Fault(
        "one token too many",
        _OUTPUTS,
        "elif sequence.outputs == request.max_outputs:",
        "elif sequence.outputs > request.max_outputs:",
    ),
    Fault(
        "a leader that leaves keeps its followers",
        _QUEUES,
        "self.join(self.forming.leave(sequence))",
        "self.forming.leave(sequence)",
    ),
    Fault(
        "one waits for the block of its last token",
        _FORMING,
        "(len(tokens) - 1) // self._block_size",
        "len(tokens) // self._block_size",
    ),
    Fault("a slot is not closed", _SLOTS, "        self._closed.append(slot)\n", ""),
    Fault(
        "the executor is not told of a clone",
        _REQUESTS,
        "for logical in range(first, len(told)) if",
        "for logical in range(0) if",
    ),
    Fault(
        "the prompt is sampled twice",
        _PLANNING,
        "one.outputs_promised += request.search is None",
        "one.outputs_promised += len(sampled) > 1",
    ),
    # ------------------------------------------------------------------------------------------------------------ swap
    Fault("a shared block goes to the host twice", _SWAP, "if block in places:", "if False:"),
    Fault("a shared block comes back twice", _SWAP, "if place in places:", "if False:"),
    Fault("what waits for its copy goes out before it is there", _SWAP, "= self._copies.get(block, block)", "= block"),
    Fault(
        "a host block is given out in the step that reads it", _SWAP, "self._leaving.append(block)", "self._free.append(block)"
    ),
    Fault(
        "a swapped table comes back in the step in which it leaves", _SWAP, "if any(place in self._outs", "if False and any(True"
    ),
    Fault("more goes to the host than fits", _SWAP, "len(blocks) > self.host.free", "len(blocks) > self.host.total"),
    Fault("what arrives leaves in the same step", _SWAP, "        if self._ins and any(", "        if False and any("),
    Fault(
        "what is copied from what arrives leaves in the same step",
        _SWAP,
        "any(self._copies.get(block, block) in self._ins",
        "any(block in self._ins",
    ),
    Fault(
        "what comes back finds more than it had",
        _SWAP,
        "self.plan_match(swapped.lineage, tokens[key]).blocks[:whole]",
        "self.plan_match(swapped.lineage, tokens[key]).blocks",
    ),
    Fault(
        "what comes back costs no room where it is cached",
        _SWAP,
        "self.pool.available - revived - reserve",
        "self.pool.available - reserve",
    ),
    Fault(
        "a swapped table that is not wanted leaks",
        _QUEUES,
        "            self._swap.drop_swapped(sequence.key)\n",
        "            pass\n",
    ),
    Fault("what was planned and has not left goes out", _DRAFTS, "sequence.table.planned - count", "sequence.table.planned"),
    Fault(
        "what comes in is not told",
        _SWAP,
        "        self._ins.clear()\n",
        "        self._ins.clear()\n        step = replace(step, ins=())\n",
    ),
    # ---------------------------------------------------------------------------------------------------------- quotas
    Fault("a clone is charged to nobody", _MEMORY, "self.quotas.charge_like(destination, source)", "pass"),
    Fault(
        "a block that is used again is charged to nobody",
        _MEMORY,
        "            self.quotas.charge_again(blocks[0], revived)\n",
        "            pass\n",
    ),
    Fault("what is guaranteed to others is taken", _QUOTAS, "room = available - self.owed +", "room = available +"),
    Fault("a limit is not kept", _QUOTAS, "return room if allowance is None else min(room, allowance)", "return room"),
    Fault(
        "a floor that is not used any more is not kept back",
        _QUOTAS,
        "self.owed += max(0, min(count, self._floors.get(tenant, 0) - used))",
        "pass",
    ),
    # --------------------------------------------------------------------------------------------------------- session
    Fault(
        "a result out of turn is taken", _SESSION, "result.step != next(iter(self._samples))", "result.step not in self._samples"
    ),
    Fault(
        "a result with too many tokens is taken",
        _MESSAGES,
        "if len(result.token_ids) != len(samples):",
        "if len(result.token_ids) < len(samples):",
    ),
    Fault("a failed step is taken for done", _SESSION, "        if result.error:\n", "        if False:\n"),
    Fault("what the pool held counts as held after its end", _SESSION, "        self.scheduler.memory.discard()\n", ""),
    Fault(
        "the copies are not sent", _MESSAGES, "(message.copies, plan.memory.copies)", "(message.copies, plan.memory.copies[1:])"
    ),
    Fault("the edits are not sent", _MESSAGES, "in chunk.edits:", "in chunk.edits[1:]:"),
    Fault("too much is pinned", _SESSION, "pool.pinned + guaranteed + new > most", "pool.pinned + guaranteed > most"),
)
