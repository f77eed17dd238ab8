"""A memory so small that everything that can happen to it can be tried (memmgr_search.py): the world and its operations.

The world is the real memory with a naive executor beside it that knows what each slot of each block holds: the domain and all
tokens up to its own, as in test_memmgr_memory_machine.py.

Two states are the same where they differ in the names of blocks and of sequences alone. What is left out of `World.signature`
never decides anything: counters, stamps (the clock stands still), generations, hits, what a node's serial is (but not whether it
still holds), the hashes (functions of domain and tokens, which are in it), quotas (there are none). A new attribute of the core
makes `check_attributes` fail until somebody has said in `_KNOWN_ATTRIBUTES` that it was thought of.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from memmgr.core.blocks import BlockPool, BlockState
from memmgr.core.lineage import Lineage, root_hash
from memmgr.core.pins import Pin, Pins
from memmgr.core.prefix import Node, PrefixIndex
from memmgr.core.swap import HostBlocks, SwappedTable, SwappingMemory
from memmgr.core.table import MemoryCounters, Table

BLOCKS: Final = 4
BLOCK_SIZE: Final = 2
MOST_SEQUENCES: Final = 3
MOST_PINS: Final = 1
HOST_BLOCKS: Final = 2

#: Of the domains.
ROOTS: Final = tuple(root_hash("model", "tenant", salt) for salt in "ab")

#: (domain, tokens). They share a block, part of a block, and nothing.
PROMPTS: Final = ((0, (0, 0, 0)), (0, (0, 0, 1, 1)), (0, (0, 1)), (1, (0, 0, 0)))

#: The name of an operation and its arguments.
Operation = tuple[Any, ...]

#: A pool full of what two sequences left; two sequences that hold one block, partly filled, of a longer prompt.
_CACHED: Final[tuple[Operation, ...]] = (
    ("admit", 0, 1),
    ("grow", 0, 2, 0),
    ("grow", 0, 2, 0),
    ("admit", 1, 3),
    ("grow", 1, 2, 0),
    ("grow", 1, 1, 0),
    ("end_step",),
    ("acknowledge", 0),
    ("acknowledge", 1),
    ("release", 0),
    ("release", 1),
)
_FORKED: Final[tuple[Operation, ...]] = (
    ("admit", 0, 1),
    ("grow", 0, 1, 0),
    ("end_step",),
    ("fork", 0, 1),
)

BEGINNINGS: Final[dict[str, tuple[Operation, ...]]] = {"empty": (), "cached": _CACHED, "forked": _FORKED}

#: What a slot holds: its domain, and all tokens up to its own.
Value = tuple[int, tuple[int, ...]]

POISON: Final[Value] = (-1, ())
_CLEAN: Final = (POISON,) * BLOCK_SIZE

Signature = tuple[Any, ...]

_KNOWN_ATTRIBUTES: Final = {
    SwappingMemory: (
        "block_size prefix_cache counters pool index pins now _records _tables _copies _held _freed _planning "
        "host _swapped _outs _ins quotas _evicted breathe"
    ),
    HostBlocks: "total references _free _unused _leaving",
    SwappedTable: "owner lineage blocks planned",
    BlockPool: (
        "_favoured _free _fresh _most_proven _proven _run_of _stamps _unused cached generations live pinned pinned_cached pins "
        "references shared total"
    ),
    PrefixIndex: (
        "_above _block_of _block_size _first_child _insertions _next_sibling _parents _previous_sibling _roots "
        "_serials _tokens depths hashes hits tenants"
    ),
    Pins: "_pool _index _records _pins _made _next_expiry",
    Table: "key owner lineage blocks planned computed committed node",
    Lineage: "names root tenant",
    Pin: "number tenant blocks expires_at",
}


@dataclass(slots=True)
class Sequence:
    """What the model knows of one sequence."""

    domain: int
    tokens: tuple[int, ...]
    planned: int
    sent: int  # planned by steps that have left, or found in the cache; what lies between is written when the step leaves
    unheard: tuple[int, ...] = ()  # how far each step that has left and is not acknowledged went


class World:
    """See the module. `apply` raises AssertionError where the memory does wrong."""

    __slots__ = ("contents", "host", "memory", "sequences", "swapped")

    def __init__(self) -> None:
        counters = MemoryCounters()
        self.memory = SwappingMemory(BLOCKS, BLOCK_SIZE, prefix_cache=True, counters=counters, host_blocks=HOST_BLOCKS)
        self.host: list[tuple[Value, ...]] = [_CLEAN] * HOST_BLOCKS
        self.swapped: dict[tuple[int, ...], tuple[Sequence, ...]] = {}  # by the keys that went out together
        self.contents: list[tuple[Value, ...]] = [_CLEAN] * BLOCKS
        self.sequences: dict[int, Sequence] = {}

    # -------------------------------------------------------------------------------------------- the operations

    def operations(self) -> Iterator[Operation]:
        """Yield all that may be asked for now."""
        memory = self.memory
        taken = {*self.sequences, *(key for keys in self.swapped for key in keys)}
        free_key = next((key for key in range(MOST_SEQUENCES) if key not in taken), None)
        if free_key is not None:
            for prompt in range(len(PROMPTS)):
                yield "admit", free_key, prompt
        arriving = {key for key, table in memory.tables.items() if not memory._ins.keys().isdisjoint(table.blocks)}
        going = tuple(key for *_, key in self._rows() if self.sequences[key].sent)
        for keys in {(key,) for key in going} | ({going} if going else set()):
            yield "swap_out", keys
        for keys in self.swapped:
            yield "swap_in", keys
            yield "drop_swapped", keys
        for key, sequence in self.sequences.items():
            for count in 1, 2:
                yield "grow", key, count, 0
                if sequence.planned + count > len(sequence.tokens):
                    yield "grow", key, count, 1
            if sequence.unheard:
                yield "acknowledge", key
            if free_key is not None and not memory._planning:
                yield "fork", key, free_key
            if key in arriving:
                continue  # a step that brings a sequence in leaves before anything ends it
            yield "release", key
            if sequence.unheard:
                yield "distrust", key
        if memory._planning or memory._copies or memory._held or memory._freed or memory._outs or memory.host._leaving:
            yield ("end_step",)
        if len(memory.pins) < MOST_PINS:
            for prompt, (domain, tokens) in enumerate(PROMPTS[:2]):
                if memory.pins.pinnable(Lineage(ROOTS[domain], "tenant"), array("I", tokens)):
                    yield "pin", prompt
        for pin in memory.pins:
            yield "unpin", pin.number
        if memory.pool.cached > memory.pool.pinned_cached:
            yield ("flush",)

    def apply(self, operation: Operation) -> bool:
        """Do one operation; False: the memory refused it, and nothing has changed."""
        name, *arguments = operation
        done: bool = getattr(self, f"_{name}")(*arguments)
        return done

    def _admit(self, key: int, prompt: int) -> bool:
        domain, tokens = PROMPTS[prompt]
        lineage = Lineage(ROOTS[domain], "tenant")
        admission = self.memory.plan_admission(lineage, array("I", tokens), 0)
        if admission is None:
            return False
        match = admission.match
        found = [value for block in match.blocks for value in self.contents[block]]
        if match.tail_tokens:
            found += self.contents[match.tail][: match.tail_tokens]
        assert found == [(domain, tokens[: end + 1]) for end in range(admission.cached_tokens)], "a hit is none"
        table = self.memory.admit(key, lineage, admission)
        self.sequences[key] = Sequence(domain, tokens, table.planned, table.planned)
        return True

    def _grow(self, key: int, count: int, token: int) -> bool:
        sequence, table = self.sequences[key], self.memory.tables[key]
        growth = self.memory.plan_growth(table, count)
        if growth is None:
            return False
        self.memory.grow(growth)
        end = sequence.planned + count
        sequence.tokens += (token,) * max(0, end - len(sequence.tokens))
        sequence.planned = end
        return True

    def _acknowledge(self, key: int) -> bool:
        sequence = self.sequences[key]
        computed, *sequence.unheard = sequence.unheard  # type: ignore[assignment]
        sequence.unheard = tuple(sequence.unheard)
        self.memory.acknowledge(self.memory.tables[key], computed, array("I", sequence.tokens))
        return True

    def _fork(self, parent: int, key: int) -> bool:
        source = self.sequences[parent]
        self.memory.fork(parent, key)
        tokens = source.tokens[: source.planned]
        self.sequences[key] = Sequence(source.domain, tokens, source.planned, source.sent, source.unheard)
        return True

    def _release(self, key: int) -> bool:
        sequence = self.sequences.pop(key)
        self.memory.release(key, array("I", sequence.tokens))
        return True

    def _distrust(self, key: int) -> bool:
        blocks = list(self.memory.tables[key].blocks)
        self.memory.distrust(self.memory.tables[key])
        self._release(key)
        for block in blocks:
            assert self.memory.index.hash_of(block) is None, "what may be no numbers can be found"
        return True

    def _swap_out(self, keys: tuple[int, ...]) -> bool:
        lengths: dict[Hashable, int] = {key: self.sequences[key].sent for key in keys}
        swap = self.memory.plan_swap_out(lengths)
        if swap is None:
            return False
        self.memory.swap_out(swap, {key: array("I", self.sequences[key].tokens) for key in keys})
        self.swapped[keys] = tuple(self.sequences.pop(key) for key in keys)
        for sequence in self.swapped[keys]:
            sequence.planned, sequence.unheard = sequence.sent, ()
            sequence.tokens += (0,) * (sequence.planned + 1 - len(sequence.tokens))  # the one sampled last, at least, is known
        return True

    def _swap_in(self, keys: tuple[int, ...]) -> bool:
        sequences = self.swapped[keys]
        tokens: dict[Hashable, array[int]] = {
            key: array("I", sequence.tokens) for key, sequence in zip(keys, sequences, strict=True)
        }
        needed = sum(self.memory.blocks_for(sequence.planned) for sequence in sequences)
        swap = self.memory.plan_swap_in(keys, tokens, needed)
        if swap is None:
            return False
        self.memory.swap_in(swap)
        self.sequences |= dict(zip(keys, sequences, strict=True))
        del self.swapped[keys]
        return True

    def _drop_swapped(self, keys: tuple[int, ...]) -> bool:
        for key in keys:
            self.memory.drop_swapped(key)
        del self.swapped[keys]
        return True

    def _end_step(self) -> bool:
        step = self.memory.end_step()
        assert not {place for _, place in step.outs} & {place for place, _ in step.ins}, "a host block is written and read"
        for block, place in step.outs:
            self.host[place] = self.contents[block]
        sources, destinations = {source for source, _ in step.copies}, {to for _, to in step.copies}
        assert not sources & destinations, "a block is source and destination in one step"
        brought = {block for _, block in step.ins}
        assert not sources & (set(step.freed) - brought), "a copy's source fell free in its step"
        assert not brought & destinations, "a block is brought in and copied to in one step"
        for block in step.freed:
            self.contents[block] = _CLEAN
        for place, block in step.ins:
            self.contents[block] = self.host[place]
        for place in range(HOST_BLOCKS):
            if not self.memory.host.references[place]:
                self.host[place] = _CLEAN
        for source, destination in step.copies:
            self.contents[destination] = self.contents[source]
        for key, sequence in self.sequences.items():
            for position in range(sequence.sent, sequence.planned):
                self._write(key, sequence, position)
            if sequence.sent < sequence.planned:
                sequence.unheard += (sequence.planned,)
                sequence.sent = sequence.planned
        return True

    def _pin(self, prompt: int) -> bool:
        domain, tokens = PROMPTS[prompt]
        blocks = self.memory.pins.pinnable(Lineage(ROOTS[domain], "tenant"), array("I", tokens))
        self.memory.pins.pin(blocks, "tenant", float("inf"))
        return True

    def _unpin(self, number: int) -> bool:
        assert self.memory.pins.unpin(number)
        return True

    def _flush(self) -> bool:
        self.memory.flush()
        return True

    def _write(self, key: int, sequence: Sequence, position: int) -> None:
        """Write one slot through a table, as the executor does."""
        logical, slot = divmod(position, BLOCK_SIZE)
        block = self.memory.tables[key].blocks[logical]
        holders = sum(table.blocks.count(block) for table in self.memory.tables.values())
        assert holders == 1, "a shared block is written"
        if self.memory.index.hash_of(block) is not None:
            assert slot >= self.memory.index.filled(block), "a slot is written that the index knows"
        values = list(self.contents[block])
        if slot:
            assert values[slot - 1] == (sequence.domain, sequence.tokens[:position]), "what comes before is not there"
        values[slot] = (sequence.domain, sequence.tokens[: position + 1])
        self.contents[block] = tuple(values)

    # ------------------------------------------------------------------------------------------------ the checks

    def check(self) -> None:
        """Check all that must hold in every state."""
        memory, index = self.memory, self.memory.index
        memory.check_invariants()
        held = {block for table in memory.tables.values() for block in table.blocks} | set(memory._held)
        for block in range(BLOCKS):
            assert (memory.pool.state(block) is BlockState.LIVE) == (block in held), "a block in use is free, or one leaks"
            if index.hash_of(block) is None:
                continue
            chain = [block]
            while index.above(chain[0]) >= 0:
                chain.insert(0, index.above(chain[0]))
            domain = ROOTS.index(index.parent_of(chain[0]))
            tokens = b"".join(index._tokens[one] or b"" for one in chain)
            known = tuple(array("I", tokens))
            values = [value for one in chain for value in self.contents[one][: index.filled(one)]]
            assert values == [(domain, known[: end + 1]) for end in range(len(known))], f"block {block} is known for another's"
        for key, sequence in self.sequences.items():
            table = memory.tables[key]
            assert table.planned == sequence.planned
            for position in range(sequence.sent):
                block = table.blocks[position // BLOCK_SIZE]
                block = memory._copies.get(block, block)  # what a copy, or the host, will bring
                holds = self.contents[block] if block not in memory._ins else self._on_host(memory._ins[block])
                value = holds[position % BLOCK_SIZE]
                assert value == (sequence.domain, sequence.tokens[: position + 1]), "a sequence reads what is not its own"
        for keys, sequences in self.swapped.items():
            for key, sequence in zip(keys, sequences, strict=True):
                for position in range(sequence.planned):
                    value = self._on_host(memory.swapped[key].blocks[position // BLOCK_SIZE])[position % BLOCK_SIZE]
                    assert value == (sequence.domain, sequence.tokens[: position + 1]), "what waits on the host is another's"

    def _on_host(self, place: int) -> tuple[Value, ...]:
        """Return what a host block holds when this step has left: what goes out is read first."""
        source = self.memory._outs.get(place)
        return self.host[place] if source is None else self.contents[source]

    def check_leaks(self) -> None:
        """Let everything go: all blocks must be free then. The world is of no use afterwards."""
        if self.memory._ins:
            self._end_step()
        for key in list(self.sequences):
            self._release(key)
        for keys in list(self.swapped):
            self._drop_swapped(keys)
        self.memory.end_step()
        assert self.memory.host.free == HOST_BLOCKS, "a block on the host leaks"
        self.memory.pins.clear()
        self.memory.flush()
        self.memory.check_invariants()
        assert self.memory.pool.free == BLOCKS, "a block leaks"
        assert len(self.memory.index) == 0, "a name leaks"

    # --------------------------------------------------------------------------------------------- one and the same

    def signature(self) -> Signature:
        """Return the state, with blocks and sequences named by where they appear in it."""
        memory = self.memory
        pool, index = memory.pool, memory.index
        freed = set(memory._freed)
        numbers: dict[int, int] = {}

        def named(block: int) -> int:
            return numbers.setdefault(block, len(numbers))

        tables = tuple(
            (about, state, *map(named, memory._tables[key].blocks), _node(named, index, memory._tables[key].node))
            for about, state, _, key in self._rows()
        )
        copies = frozenset((named(to), named(source)) for to, source in memory._copies.items())
        held = tuple((named(source), len(owners)) for source, owners in memory._held.items())
        order = tuple(
            tuple(
                (run.whole, run is segment.last, *(named(one) for one in run.blocks[run.first :] if pool._run_of[one] is run))
                for run in segment.runs
            )
            for segment in (pool._fresh, pool._proven)
        )
        pins = tuple(tuple(map(named, pin.blocks)) for pin in memory.pins)
        # A free block that holds nothing is like one that was never given out, unless another is given out before it.
        used = [block for block in pool._free if block in freed or self.contents[block] != _CLEAN]
        free = tuple(map(named, reversed(pool._free[pool._free.index(used[0]) :]))) if used else ()
        # Whatever is in the index is held, cached or pinned, so it has its number by now.
        known = tuple(
            (number, named(above) if (above := index._above[block]) >= 0 else index._parents[block], index._tokens[block])
            for block, number in numbers.items()
            if index.hashes[block] is not None
        )
        assert len(known) == len(index)
        children = tuple(
            tuple(map(named, index._children(block, b""))) for block in numbers if index._first_child[block] >= 0
        ) + tuple((root, *map(named, index._children(-1, root))) for root in ROOTS if root in index._roots)
        places: dict[int, int] = {}
        swapped = tuple(
            (
                len(keys),
                *(
                    (
                        (s.domain, s.tokens, s.planned, s.sent),
                        len(memory.swapped[key].lineage.names),
                        *(places.setdefault(place, len(places)) for place in memory.swapped[key].blocks),
                    )
                    for key, s in zip(keys, sequences, strict=True)
                ),
            )
            for keys, sequences in self.swapped.items()
        )
        ins = frozenset((named(block), places.setdefault(place, len(places))) for block, place in memory._ins.items())
        outs = frozenset((places.setdefault(place, len(places)), named(block)) for place, block in memory._outs.items())
        leaving = frozenset(places.setdefault(place, len(places)) for place in memory.host._leaving)
        host = (swapped, ins, outs, leaving, tuple(self.host[place] for place in places))
        contents = tuple((self.contents[block], pool._favoured[block]) for block in numbers)
        return (
            host,
            tables,
            copies,
            held,
            frozenset(map(named, freed)),
            order,
            pins,
            free,
            known,
            children,
            contents,
            memory._planning,
            tuple(map(tuple, (memory._evicted._older, memory._evicted._younger))),
        )

    def _rows(self) -> list[Signature]:
        """Return what there is to say of each sequence without a name, and its key, in an order that no name decides."""
        memory, index = self.memory, self.memory.index
        return sorted(
            (
                (s.domain, s.tokens, s.planned, s.sent, s.unheard),
                (t.computed, t.committed, len(t.lineage.names), _standing(index, t.node)),
                tuple(self._about(block) for block in t.blocks),
                key,
            )
            for key, s, t in ((key, s, memory.tables[key]) for key, s in self.sequences.items())
        )

    def _about(self, block: int) -> tuple[Any, ...]:
        """Return what there is to say of one block without a name."""
        memory = self.memory
        known = memory.index.hashes[block] is not None
        copied = memory._copies.get(block, -1)
        return (
            memory.pool.references[block],
            self.contents[block],
            known,
            memory.pool.pins[block],
            memory.pool._favoured[block],
            (self.contents[copied], memory.pool.references[copied]) if copied >= 0 else (),
            block in memory._ins,
            block in memory._freed,
            len(memory._held.get(block, ())),
        )


def _standing(index: PrefixIndex, node: Node | None) -> int:
    """Return whether a table's node is none, gone, or there."""
    if node is None:
        return 0
    return 2 if index._serials[node.block] == node.serial else 1


def _node(named: Callable[[int], int], index: PrefixIndex, node: Node | None) -> int:
    return named(node.block) if node is not None and _standing(index, node) == 2 else -1


def check_attributes() -> None:
    """Check that the core has no attribute that `World.signature` was written without."""
    memory = World().memory
    for kind, known in _KNOWN_ATTRIBUTES.items():
        with_dict = {SwappingMemory: memory, HostBlocks: memory.host, Pins: memory.pins}.get(kind)
        has: Iterable[str] = _slots(kind) if with_dict is None else vars(with_dict)
        assert set(has) == set(known.split()), f"{kind.__name__} has other attributes: does one of them decide anything?"


def _slots(kind: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = kind.__slots__
    return names


def kept(world: World) -> bytes:
    """Return a world as it is now, to go on from `again` and again."""
    return pickle.dumps(world, pickle.HIGHEST_PROTOCOL)


def again(world: bytes) -> World:
    """Return a world that was kept."""
    copy: World = pickle.loads(world)
    return copy


def begin(operations: tuple[Operation, ...]) -> World:
    """Return the world after some operations."""
    world = World()
    for operation in operations:
        assert world.apply(operation), operation
    return world
