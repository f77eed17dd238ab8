"""`Memory` against a naive model: dicts, and a pool whose slots hold the whole prefix that they were computed from.

The model does what the memory says, step by step, as an executor would: poison what fell free, make the copies, write through the
tables. A slot's value is the tuple of all tokens up to its own, because K and V of a position depend on all of them: so a block
that is wrongly shared, cloned too late or found under the wrong prefix shows as a wrong value. Tokens are 0 and 1, so that
prefixes meet all the time.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from memmgr.core.blocks import BlockState
from memmgr.core.lineage import Lineage, block_hash, root_hash
from memmgr.core.quotas import Quota
from memmgr.core.swap import SwappingMemory
from memmgr.core.table import RECENCY, MemoryCounters

EXAMPLES = int(os.environ.get("KILBURN_EXAMPLES", "500"))
TENANTS = ["tenant", "other"]
ROOTS = [root_hash("model", tenant, "") for tenant in TENANTS]
POISON = (9,)  # no prefix of zeros and ones
MOST_SEQUENCES = 4

Prefix = tuple[int, ...]


WHICH = st.integers(0, MOST_SEQUENCES - 1)
UNLIKELY = st.sampled_from([False] * 5 + [True])

#: Up to 14 tokens, in one draw: drawing costs more than anything else here.
BITS = st.integers(2, 2**15 - 1).map(lambda number: [int(bit) for bit in f"{number:b}"[1:]])


@lru_cache(None)
def name_of(root: bytes, prefix: Prefix, size: int) -> bytes:
    """Return the name of the block that ends with `prefix`."""
    above = prefix[: (len(prefix) - 1) // size * size]
    parent = name_of(root, above, size) if above else root
    return block_hash(parent, array("I", prefix[len(above) :]).tobytes())


@dataclass
class Sequence:
    """What the model knows of one sequence. `sent`: planned by steps that have ended."""

    root: bytes
    tokens: list[int]
    planned: int = 0
    sent: int = 0
    orphaned: bool = False  # something that it stands on has left the index
    writes: list[tuple[int, int]] = field(default_factory=list)  # of this step
    arriving: bool = False  # what it holds comes from the host in this step

    @property
    def tenant(self) -> str:
        return TENANTS[ROOTS.index(self.root)]

    @property
    def untouched(self) -> bool:
        return not self.writes and self.planned == self.sent


class MemoryMachine(RuleBasedStateMachine):
    @initialize(
        total=st.integers(3, 12),
        size=st.integers(1, 4),
        prefix_cache=st.sampled_from([True, True, True, False]),
        places=st.sampled_from([0, 4, 10]),
    )
    def begin(self, total: int, size: int, prefix_cache: bool, places: int) -> None:
        self.size, self.total, self.prefix_cache, self.places = size, total, prefix_cache, places
        self.counters = MemoryCounters()
        self.begin_empty()

    def begin_empty(self) -> None:
        """An executor says hello."""
        total, size = self.total, self.size
        self.memory = self.new_memory(total, size, prefix_cache=self.prefix_cache)
        self.host: dict[int, list[Prefix]] = {}  # what each block on the host holds
        self.swapped: dict[int, Sequence] = {}
        self.leaving: set[int] = set()  # blocks on the host that are read for the last time in this step
        self.slots: list[list[Prefix]] = [[POISON] * size for _ in range(total)]
        self.sequences: dict[int, Sequence] = {}
        self.born = 0
        self.order: list[int] = []  # cached blocks, the next to be evicted first
        self.known: dict[tuple[bytes, Prefix], int] = {}
        self.quotas: dict[str, tuple[int, int]] = dict.fromkeys(TENANTS, (total, 0))  # limit, floor
        self.held_for: list[str] = []  # the tenants of `held`
        self.held: list[int] = []  # sources of this step's copies, in the order in which they were taken
        self.planning = False  # something was admitted or has grown in this step
        self.pins: dict[int, tuple[list[int], float]] = {}  # number -> blocks, end
        self.clock = 0.0

    def new_memory(self, total: int, size: int, *, prefix_cache: bool) -> SwappingMemory:
        """Evicts by recency, as the model does; blocks that have proven their use are in the small world."""
        return SwappingMemory(
            total, size, prefix_cache=prefix_cache, counters=self.counters, host_blocks=self.places, order=RECENCY
        )

    # ------------------------------------------------------------------------------------------------- the rules

    @precondition(lambda self: len(self.sequences) + len(self.swapped) < MOST_SEQUENCES)
    @rule(
        prompt=BITS,
        chunk=st.sampled_from([14, 14, 5, 0]),
        root=st.sampled_from([0, 0, 0, 1]),
        reserve=st.sampled_from([0, 0, 1]),
    )
    def admit(self, prompt: list[int], chunk: int, root: int, reserve: int) -> None:
        tenant = TENANTS[root]
        lineage = Lineage(ROOTS[root], tenant)
        whole, part = self.naive_match(ROOTS[root], prompt)
        quotas = self.memory.quotas
        allowance, kept_back = quotas.allowance(tenant), reserve + quotas.kept_back(tenant, {})
        admission = self.memory.plan_admission(lineage, array("I", prompt), kept_back, allowance)
        live = self.live()
        needed = -(-(len(prompt) + 1) // self.size) - len(whole)
        revived = set(whole) - live
        room = self.total - len(live | set(whole) | self.pinned()) - reserve - self.kept_for_others(tenant)
        allowed = self.quotas[tenant][0] - len(self.used(tenant)) - len(revived)
        assert self.memory.blocks_charged(lineage, array("I", prompt)) == needed + len(revived)
        assert (admission is not None) == (needed <= min(room, allowed))
        if admission is None:
            return
        assert list(admission.match.blocks) == whole
        tail = admission.match.tail
        if admission.match.tail_tokens:
            assert admission.match.tail_tokens == part
            self.held.append(tail)
            self.held_for.append(tenant)
        else:
            assert part == 0 or needed + 1 > min(room, allowed)
        before = self.live()
        self.planning = True
        table = self.memory.admit(self.born, lineage, admission)
        self.order = [block for block in self.order if block not in {*whole, tail}]
        if admission.match.tail_tokens:
            self.evict(1, before | set(whole) | {tail})
        sequence = Sequence(ROOTS[root], list(prompt), table.planned)
        assert table.planned == table.computed == admission.cached_tokens == len(whole) * self.size + (part if tail >= 0 else 0)
        self.sequences[self.born] = sequence
        self.born += 1
        if count := min(chunk, len(prompt) - table.planned):
            self.extend(self.born - 1, count, [])  # as the scheduler does; else a later rule grows it

    @precondition(lambda self: len(self.sequences) + len(self.swapped) < MOST_SEQUENCES)
    @rule(prompt=BITS, more=BITS, root=st.sampled_from([0, 0, 0, 1]))
    def live_and_go(self, prompt: list[int], more: list[int], root: int) -> None:
        """One comes, is computed, goes on for a while and goes: or there is little to find and to evict."""
        key = self.born
        self.admit(prompt, 14, root, 0)
        if self.born > key:
            self.step(0)
            self.extend(key, len(more), more)
            self.step(0)
            self.release_one(key)

    @precondition(lambda self: self.sequences)
    @rule(which=WHICH, more=BITS)
    def grow(self, which: int, more: list[int]) -> None:
        count = len(more) if which % 2 else 1 + len(more) // 4
        self.extend(self.pick(which), count, more)

    def extend(self, key: int, count: int, more: list[int]) -> None:
        """Grow a table; `more` are the tokens that will be sampled where the known ones end."""
        sequence, table = self.sequences[key], self.memory.tables[key]
        length = sequence.planned + count
        shared = bool(sequence.planned % self.size) and self.holders(table.blocks[-1]) > 1
        new = -(-length // self.size) - len(table.blocks) + shared
        growth = self.memory.plan_growth(table, count)
        room = self.total - len(self.live() | self.pinned()) - self.kept_for_others(sequence.tenant)
        allowed = self.quotas[sequence.tenant][0] - len(self.used(sequence.tenant))
        assert (growth is not None) == (new == 0 or new <= min(room, allowed))
        assert self.memory.blocks_to_grow(table, count) == new
        if growth is None:
            return
        assert growth.clone == shared
        if shared:
            self.held.append(table.blocks[-1])
            self.held_for.append(sequence.tenant)
        before = self.live()
        self.planning = True
        self.memory.grow(growth)
        self.evict(new, before)
        sequence.tokens += more[: max(0, length - len(sequence.tokens))]
        sequence.writes.append((sequence.planned, length))
        sequence.planned = length

    @precondition(lambda self: self.sequences and len(self.sequences) + len(self.swapped) < MOST_SEQUENCES)
    @rule(which=WHICH, more=BITS)
    def fork(self, which: int, more: list[int]) -> None:
        if self.planning:
            self.step(0)  # sequences fork between two steps
        parent = self.pick(which)
        sequence = self.sequences[parent]
        table = self.memory.fork(parent, self.born)
        assert table.blocks == self.memory.tables[parent].blocks
        tokens = sequence.tokens[: sequence.planned]
        self.sequences[self.born] = Sequence(sequence.root, tokens, sequence.planned, sequence.sent, sequence.orphaned)
        self.born += 1
        if len(more) % 4:
            self.extend(self.born - 1, len(more) % 4, more)  # the child writes first, else who comes

    @precondition(lambda self: self.sequences)
    @rule(which=WHICH)
    def release(self, which: int) -> None:
        self.release_one(self.settled(which))

    def note_orphans(self) -> None:
        """What a sequence stands on may leave the index: where another's block stood there for the same content."""
        self.look()
        for key, sequence in self.sequences.items():
            committed = self.memory.tables[key].committed
            prefixes = [tuple(sequence.tokens[: end * self.size]) for end in range(1, committed + 1)]
            if any((sequence.root, prefix) not in self.known for prefix in prefixes):
                sequence.orphaned = True

    def release_one(self, key: int) -> None:
        blocks = list(self.memory.tables[key].blocks)
        sequence = self.sequences.pop(key)
        self.memory.release(key, array("I", sequence.tokens))
        self.let_go_of(blocks)

    def let_go_of(self, blocks: list[int]) -> None:
        """Of a table that is gone: what is in the index can be evicted, the tail first, after all others."""
        self.look()
        cached = set(self.known.values()) - self.live() - self.pinned()
        self.order += [block for block in reversed(blocks) if block in cached and block not in self.order]

    @precondition(lambda self: self.sequences)
    @rule(which=WHICH, together=st.booleans(), first=st.booleans(), after=st.sampled_from(["", "", "step", "swap in"]))
    def swap_out(self, which: int, together: bool, first: bool, after: str) -> None:
        """One sequence, or all, with what steps that have left gave it; perhaps they come back in this step, or the next."""
        if first or any(sequence.arriving for sequence in self.sequences.values()):
            self.step(0)
        keys = [key for key in sorted(self.sequences) if self.sequences[key].sent] if together else [self.pick(which)]
        lengths: dict[Hashable, int] = {key: self.sequences[key].sent for key in keys}
        blocks = {key: self.memory.tables[key].blocks[: -(-lengths[key] // self.size)] for key in keys}
        distinct = {block for table in blocks.values() for block in table}
        swap = self.memory.plan_swap_out(lengths)
        free = self.places - len(self.used_places() | self.leaving)
        assert (swap is not None) == (0 < len(distinct) <= free)
        if swap is None:
            return
        tables = {key: list(self.memory.tables[key].blocks) for key in keys}
        self.memory.swap_out(swap, {key: array("I", self.sequences[key].tokens) for key in keys})
        for key in keys:
            sequence = self.swapped[key] = self.sequences.pop(key)
            sequence.planned = sequence.sent
            sequence.writes.clear()
            held_later = {block for later in keys[keys.index(key) + 1 :] for block in tables[later]}
            self.let_go_of([block for block in tables[key] if block not in held_later])
        places = {block: place for key in keys for block, place in zip(blocks[key], self.memory.swapped[key].blocks, strict=True)}
        assert len(set(places.values())) == len(distinct), "a shared block has one place on the host"
        if after == "step":
            self.step(0)
        if after:
            self.bring_back(keys)

    @precondition(lambda self: self.swapped)
    @rule(which=WHICH, together=st.booleans())
    def swap_in(self, which: int, together: bool) -> None:
        keys = sorted(self.swapped)
        self.bring_back(keys if together else [keys[which % len(keys)]])

    def bring_back(self, keys: list[int]) -> None:
        """A group comes back, all of one tenant."""
        tenant = self.swapped[keys[0]].tenant
        keys = [key for key in keys if self.swapped[key].tenant == tenant]
        found: dict[int, list[int]] = {}
        for key in keys:
            sequence = self.swapped[key]
            most = min(sequence.planned, len(sequence.tokens) - 1) // self.size
            found[key] = self.naive_match(sequence.root, sequence.tokens)[0][:most] if self.prefix_cache else []
        needed = sum(-(-self.swapped[key].planned // self.size) for key in keys)
        cached = {block for blocks in found.values() for block in blocks}
        room = self.total - len(self.live() | self.pinned() | cached) - self.kept_for_others(tenant)
        allowed = self.quotas[tenant][0] - len(self.used(tenant)) - len(cached - self.live())
        quotas = self.memory.quotas
        reserve, allowance = quotas.kept_back(tenant, {}), quotas.allowance(tenant)
        tokens: dict[Hashable, array[int]] = {key: array("I", self.swapped[key].tokens) for key in keys}
        swap = self.memory.plan_swap_in(keys, tokens, needed, reserve, allowance)
        leaving = {place for key in keys for place in self.memory.swapped[key].blocks} & self.memory._outs.keys()
        assert (swap is not None) == (needed - len(cached) <= min(room, allowed) and not leaving)
        if swap is None:
            return
        before, used = self.live() | cached, self.used_places()
        lacking = {place for key in keys for place in self.memory.swapped[key].blocks[len(found[key]) :]}
        tables = self.memory.swap_in(swap)
        self.planning = True
        self.order = [block for block in self.order if block not in cached]
        self.evict(len(lacking), before)
        for key in keys:
            sequence = self.sequences[key] = self.swapped.pop(key)
            sequence.sent, sequence.arriving, sequence.orphaned = 0, True, False
            assert tables[key].blocks[: len(found[key])] == found[key]
        self.leaving |= used - self.used_places()

    @precondition(lambda self: self.swapped)
    @rule(which=WHICH, unlikely=UNLIKELY)
    def drop_swapped(self, which: int, unlikely: bool) -> None:
        if not unlikely:
            return
        used = self.used_places()
        key = sorted(self.swapped)[which % len(self.swapped)]
        del self.swapped[key]
        self.memory.drop_swapped(key)
        self.leaving |= used - self.used_places()

    @precondition(lambda self: self.sequences or self.held)  # or a machine without sequences does little else
    @rule(lag=st.sampled_from([0, 0, 0, 1, 2, 7]))
    def step(self, lag: int) -> None:
        """The step leaves, and each sequence's result comes back but for the last `lag` tokens."""
        self.note_orphans()
        self.end_step()
        for key, sequence in self.sequences.items():
            computed = max(self.memory.tables[key].computed, sequence.sent - lag)
            self.memory.acknowledge(self.memory.tables[key], computed, array("I", sequence.tokens))
            self.look()
            if self.memory.prefix_cache and not sequence.orphaned:
                for end in range(self.size, computed + 1, self.size):
                    assert (sequence.root, tuple(sequence.tokens[:end])) in self.known

    def end_step(self) -> None:
        step = self.memory.end_step()
        self.planning = False
        sources, destinations = {s for s, _ in step.copies}, {d for _, d in step.copies}
        assert not sources & destinations
        assert not sources & (set(step.freed) - {block for _, block in step.ins})
        assert len(destinations) == len(step.copies)
        assert len(set(step.freed)) == len(step.freed)
        assert not {place for _, place in step.outs} & {place for place, _ in step.ins}
        for block, place in step.outs:
            self.host[place] = list(self.slots[block])
        for block in step.freed:
            self.slots[block] = [POISON] * self.size
        for place, block in step.ins:
            self.slots[block] = list(self.host[place])
        for source, destination in step.copies:
            self.slots[destination] = list(self.slots[source])
        self.leaving.clear()
        for key, sequence in self.sequences.items():
            for start, end in sequence.writes:
                for position in range(start, end):
                    self.write(key, position)
            sequence.writes.clear()
            sequence.sent, sequence.arriving = sequence.planned, False
        held, self.held, self.held_for = self.held, [], []
        cached = set(self.known.values()) - self.live() - self.pinned()
        self.order += [block for block in dict.fromkeys(held) if block in cached and block not in self.order]

    @rule(which=st.sampled_from(TENANTS), limit=st.integers(0, 12), floor=st.sampled_from([0, 0, 1, 2, 3]))
    def set_quota(self, which: str, limit: int, floor: int) -> None:
        """Limits and floors come and go, whatever is in use: nothing is taken away by that alone."""
        floor = min(floor, limit or floor)
        self.memory.quotas.set(Quota(which, limit, floor))
        self.quotas[which] = (limit or self.total, floor)

    @precondition(lambda self: self.known and len(self.pinned()) <= self.total // 2)
    @rule(which=st.integers(0, 20), more=BITS, lasts=st.sampled_from([float("inf"), 1.0, 2.0, 5.0]))
    def pin(self, which: int, more: list[int], lasts: float) -> None:
        root, prefix = sorted(self.known)[which % len(self.known)]
        tokens = [*prefix, *more]
        whole, end = [], self.size
        while end <= len(tokens) and (root, tuple(tokens[:end])) in self.known:
            whole.append(self.known[root, tuple(tokens[:end])])
            end += self.size
        tenant = TENANTS[ROOTS.index(root)]
        blocks = self.memory.pins.pinnable(Lineage(root, tenant), array("I", tokens))
        assert list(blocks) == whole
        if not blocks:
            return
        assert self.memory.pins.new_blocks(blocks) == len(set(whole) - self.pinned())
        pin = self.memory.pins.pin(blocks, tenant, self.clock + lasts)
        self.pins[pin.number] = whole, self.clock + lasts
        self.order = [block for block in self.order if block not in whole]

    @precondition(lambda self: self.pins)
    @rule(which=WHICH)
    def unpin(self, which: int) -> None:
        number = sorted(self.pins)[which % len(self.pins)]
        assert self.memory.pins.unpin(number)
        assert not self.memory.pins.unpin(number)
        self.let_go(number)

    @precondition(lambda self: self.pins)
    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def expire(self, seconds: float) -> None:
        self.clock += seconds
        self.memory.pins.expire(self.clock)
        for number in [number for number, (_, end) in self.pins.items() if end <= self.clock]:
            self.let_go(number)

    @precondition(lambda self: self.order)
    @rule(part=st.sampled_from([True, False, False]), unlikely=UNLIKELY)
    def flush(self, part: bool, unlikely: bool) -> None:
        """All that is cached and not pinned, or in some blocks: with what stands on it."""
        if not unlikely:
            return
        blocks = range(self.total // 2) if part else range(self.total)
        prefixes = {block: key for key, block in self.known.items()}
        gone: set[int] = set()
        for root, prefix in (prefixes[block] for block in self.order if block in blocks):
            gone |= {b for b in self.order if prefixes[b][0] == root and self.stands_on(prefixes[b][1], prefix)}
        flushed = self.memory.flush_part(blocks, "") if part else self.memory.flush()
        assert flushed == len(gone)
        self.order = [block for block in self.order if block not in gone]

    @precondition(lambda self: self.sequences)
    @rule(which=WHICH, unlikely=UNLIKELY)
    def distrust(self, which: int, unlikely: bool) -> None:
        """What a sequence computed is no numbers: nothing of it can be found, nor what stands on it. Then it is released."""
        if not unlikely:
            return
        key = self.settled(which)
        table = self.memory.tables[key]
        blocks = list(table.blocks)
        prefixes = {block: key for key, block in self.known.items()}
        gone = {
            other
            for root, prefix in (prefixes[block] for block in blocks if block in prefixes)
            for other in prefixes
            if prefixes[other][0] == root and self.stands_on(prefixes[other][1], prefix)
        }
        self.memory.distrust(table)
        self.forgotten(gone)
        self.memory.release(key, array("I", self.sequences.pop(key).tokens))
        self.look()
        assert not set(self.known.values()) & set(blocks)

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 20), more=BITS, unlikely=UNLIKELY)
    def distrust_cached(self, which: int, more: list[int], unlikely: bool) -> None:
        """The same for one that has been released."""
        if not unlikely:
            return
        root, prefix = sorted(self.known)[which % len(self.known)]
        tokens, lineage = array("I", (*prefix, *more)), Lineage(root, TENANTS[ROOTS.index(root)])
        match = self.memory.index.match(lineage, tokens, len(tokens))
        first = match.blocks[0] if match.blocks else match.tail
        gone: set[int] = set()
        for (other, above), block in self.known.items():
            if block == first:
                gone = {b for (r, p), b in self.known.items() if r == other and self.stands_on(p, above)}
        self.memory.distrust_cached(lineage, tokens)
        self.forgotten(gone)

    @rule(unlikely=UNLIKELY)
    def crash(self, unlikely: bool) -> None:
        """The executor is gone, and its pool: all sequences are released, in the middle of a step, and nothing counts as held."""
        if not unlikely:
            return
        if any(sequence.arriving for sequence in self.sequences.values()):
            self.end_step()
        for key in list(self.sequences):
            self.memory.release(key, array("I", self.sequences[key].tokens))
        for key in list(self.swapped):
            self.memory.drop_swapped(key)
        assert self.memory.host.used == 0
        self.memory.pins.clear()
        self.memory.flush()
        self.memory.check_invariants()
        assert not self.memory.tables
        self.memory.discard()
        assert self.counters.allocated_blocks == self.counters.freed_blocks
        self.begin_empty()

    # ------------------------------------------------------------------------------------------------- the model

    def forgotten(self, gone: set[int]) -> None:
        """Take blocks that have left the index out of the model."""
        self.look()
        assert not set(self.known.values()) & gone
        self.order = [block for block in self.order if block not in gone]
        for number, (blocks, end) in list(self.pins.items()):
            kept = next((depth for depth, block in enumerate(blocks) if block in gone), len(blocks))
            if kept:
                self.pins[number] = blocks[:kept], end
            else:
                del self.pins[number]

    def stands_on(self, prefix: Prefix, above: Prefix) -> bool:
        return prefix == above or (len(above) % self.size == 0 and prefix[: len(above)] == above)

    def used(self, tenant: str) -> set[int]:
        """Return the blocks that are charged to a tenant."""
        tables = [self.memory.tables[key].blocks for key, sequence in self.sequences.items() if sequence.tenant == tenant]
        held = [block for block, whose in zip(self.held, self.held_for, strict=True) if whose == tenant]
        return {block for blocks in (*tables, held) for block in blocks}

    def kept_for_others(self, tenant: str) -> int:
        return sum(max(0, self.quotas[other][1] - len(self.used(other))) for other in TENANTS if other != tenant)

    def pinned(self) -> set[int]:
        return {block for blocks, _ in self.pins.values() for block in blocks}

    def let_go(self, number: int) -> None:
        """Forget a pin: what no other holds can be evicted, the tail first, after all others."""
        blocks, _ = self.pins.pop(number)
        self.order += [block for block in reversed(blocks) if block not in self.live() | self.pinned()]

    def pick(self, which: int) -> int:
        return sorted(self.sequences)[which % len(self.sequences)]

    def settled(self, which: int) -> int:
        """Pick one that may go: not one whose content comes from the host in the step that is being planned."""
        key = self.pick(which)
        if self.sequences[key].arriving:
            self.end_step()
        return key

    def used_places(self) -> set[int]:
        return {place for swapped in self.memory.swapped.values() for place in swapped.blocks}

    def write(self, key: int, position: int) -> None:
        """Write one slot through a table, as the executor does."""
        sequence = self.sequences[key]
        block, slot = self.memory.tables[key].blocks[position // self.size], position % self.size
        assert self.holders(block) == 1, "a slot is written that a second table can see"
        if self.memory.index.hash_of(block) is not None:
            assert slot >= self.memory.index.filled(block), "a slot is written that the index knows"
        assert slot == 0 or self.slots[block][slot - 1] == tuple(sequence.tokens[:position])
        self.slots[block][slot] = tuple(sequence.tokens[: position + 1])

    def holders(self, block: int) -> int:
        return sum(table.blocks.count(block) for table in self.memory.tables.values())

    def live(self) -> set[int]:
        return {block for table in self.memory.tables.values() for block in table.blocks} | set(self.held)

    def naive_match(self, root: bytes, prompt: list[int]) -> tuple[list[int], int]:
        """Return the blocks of the longest run of whole blocks, and how many more tokens some child has."""
        limit = len(prompt) - 1
        whole: list[int] = []
        while (end := (len(whole) + 1) * self.size) <= limit and (root, tuple(prompt[:end])) in self.known:
            whole.append(self.known[root, tuple(prompt[:end])])
        if len(prompt) < self.size:
            return whole, 0
        start, best = len(whole) * self.size, 0
        for other, prefix in self.known:
            if other == root and prefix[:start] == tuple(prompt[:start]) and start < len(prefix) <= start + self.size:
                shared = 0
                while start + shared < min(len(prefix), limit) and prefix[start + shared] == prompt[start + shared]:
                    shared += 1
                best = max(best, shared)
        return whole, best

    def evict(self, allocated: int, live: set[int]) -> None:
        """Take `allocated` blocks: where none is free the oldest goes, and what stands on it."""
        prefixes = {block: key for key, block in self.known.items()}
        free = self.total - len(live | self.pinned()) - len(self.order)
        for _ in range(allocated):
            if free == 0:
                victim = self.order[0]
                root, prefix = prefixes[victim]
                gone = {victim}
                if len(prefix) % self.size == 0:
                    gone |= {b for b in self.order if prefixes[b][0] == root and prefixes[b][1][: len(prefix)] == prefix}
                self.order = [block for block in self.order if block not in gone]
                free += len(gone)
            free -= 1

    def look(self) -> None:
        """Read what the index knows now, and check each entry against what its block really holds."""
        index = self.memory.index
        self.known = {}
        for block in range(self.total):
            name = index.hash_of(block)
            if name is None:
                continue
            filled = index.filled(block)
            prefix = self.slots[block][filled - 1]
            roots = [root for root in ROOTS if name == name_of(root, prefix, self.size)]
            assert roots, f"block {block} is known for what it does not hold"
            assert len(prefix) == index.depths[block] * self.size + filled
            root = roots[0]
            assert (root, prefix) not in self.known, "one content is known twice"
            self.known[root, prefix] = block
        for root, prefix in self.known:
            above = prefix[: (len(prefix) - 1) // self.size * self.size]
            assert not above or (root, above) in self.known, "a node's parent is not in the index"

    # -------------------------------------------------------------------------------------------- after each rule

    @invariant()
    def holds(self) -> None:
        memory = self.memory
        memory.check_invariants()
        self.look()
        live, pinned = self.live(), self.pinned()
        cached = len(self.order) + len(pinned - live)
        assert list(memory.pool.eviction_order()) == self.order
        assert {pin.number: (pin.blocks, pin.expires_at) for pin in memory.pins} == self.pins
        assert memory.pool.pinned == len(pinned)
        for block in range(self.total):
            kept = block in self.order or block in pinned
            expected = BlockState.LIVE if block in live else BlockState.CACHED if kept else BlockState.FREE
            assert memory.pool.state(block) is expected
        assert (memory.pool.live, memory.pool.cached) == (len(live), cached)
        assert memory.pool.free + memory.pool.live + memory.pool.cached == self.total
        for key, sequence in self.sequences.items():
            table = memory.tables[key]
            assert table.planned == sequence.planned
            for position in range(sequence.sent):
                value = self.slots[table.blocks[position // self.size]][position % self.size]
                if sequence.untouched:
                    assert value == tuple(sequence.tokens[: position + 1]), "a sequence reads what is not its own"
        self.note_orphans()
        assert set(memory.swapped) == set(self.swapped)
        assert memory.host.free == self.places - len(self.used_places() | self.leaving)
        for key, sequence in self.swapped.items():
            for position in range(sequence.planned if not memory._outs else 0):
                value = self.host[memory.swapped[key].blocks[position // self.size]][position % self.size]
                assert value == tuple(sequence.tokens[: position + 1]), "what waits on the host is another's"
        assert {tenant: memory.quotas.used(tenant) for tenant in TENANTS} == {t: len(self.used(t)) for t in TENANTS}
        counters = memory.counters
        assert counters.allocated_blocks - counters.freed_blocks == len(live) + cached
        if not memory.prefix_cache:
            assert not self.known
            assert not self.order


def test_memory_agrees_with_a_naive_model() -> None:
    run_state_machine_as_test(
        MemoryMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
