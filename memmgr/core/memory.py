"""The memory: block tables over one pool, shared through one prefix index. Decide, then apply.

    plan_admission -> Admission -> admit     a sequence gets a table that begins with what is cached of its prompt
    plan_growth    -> Growth    -> grow      the table covers the tokens that the next step computes
    fork                                     a second sequence with the same content
    acknowledge                              the executor has computed tokens: blocks that are now full enter the index
    release                                  the sequence's references go; what the index knows of it stays cached
    distrust, distrust_cached, flush         nothing of a sequence, or of all, stays cached
    end_step                                 what the step needs beside the tables: copies, and blocks that fell free

A planner changes nothing and says None where there is not enough; what it returned is applied before anything else changes. Two
lengths matter: tokens `planned` into the pool by plans that have left, and tokens `computed`, acknowledged by the executor. The
executor works strictly in order, so a block that is released may be given away in the next plan at once; only what is read as a
copy's source is held until the end of its step, so that no block is source and destination in one plan.

What happens to blocks is told as records (see `events`) to a list that the owner gave, if it gave one.

What `pins` hold is neither evicted nor flushed; a planner counts on the rest alone. `quotas` say how much of that a tenant may
take; a live block is charged to the tenant of the tables that it is in.

Knows token ids as array("I"), an opaque key for each sequence, and an opaque owner to tell of it; not requests, steps in flight,
text or tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from mypy_extensions import mypyc_attr

from memmgr.core import events
from memmgr.core.blocks import BREATH, BlockPool, BlockState, no_breath
from memmgr.core.events import NO_BLOCK, Indexed, Record, Unindexed
from memmgr.core.evicted import EvictedNames
from memmgr.core.lineage import Lineage, block_hash, pieces_of
from memmgr.core.pins import Pins
from memmgr.core.prefix import Match, Node, PrefixIndex
from memmgr.core.quotas import Quotas
from memmgr.core.table import DEFAULT_ORDER, Admission, EvictionOrder, Growth, MemoryCounters, StepMemory, Table

#: Names of evicted blocks that are remembered at most, whatever the size of the pool: some 150 bytes each.
MAX_GHOSTS: Final = 1 << 20


@mypyc_attr(allow_interpreted_subclasses=True)
class Memory:
    """See the module. Where `prefix_cache` is off, nothing is shared but by `fork`, and nothing is kept.

    A block that an admission uses has proven its use, and so has one whose content was evicted lately and is computed again: the
    names of what was evicted are remembered for a while. A share of the pool is for these (see BlockPool), and so many names
    are remembered for each block.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool,
        counters: MemoryCounters,
        records: list[Record] | None = None,
        order: EvictionOrder = DEFAULT_ORDER,
    ) -> None:
        self.block_size: Final = block_size
        self.prefix_cache: Final = prefix_cache
        self.counters: Final = counters  # perhaps of more pools than this one, one after another
        self.pool: Final = BlockPool(total_blocks, int(total_blocks * order.proven_share))
        self.index: Final = PrefixIndex(total_blocks, block_size)
        self.pins: Final = self._new_pins(records)
        self.quotas: Final = Quotas(total_blocks)
        self.now = 0.0  # of the owner's clock, for stamps only
        self.breathe: Callable[[], None] = (
            no_breath  # the owner's; called again and again in the middle of a check, which is long
        )
        self._records: Final = records  # the owner empties it
        self._tables: dict[Hashable, Table] = {}
        self._copies: dict[int, int] = {}  # destination -> source
        self._held: dict[int, list[object]] = {}  # source -> the owners of references held for the copies of this step
        self._freed: list[int] = []
        self._planning = False  # tables have grown since the last step ended
        self._evicted = EvictedNames(min(order.names * total_blocks, MAX_GHOSTS))

    def _new_pins(self, records: list[Record] | None) -> Pins:
        return Pins(self.pool, self.index, records)

    @property
    def tables(self) -> Mapping[Hashable, Table]:
        """The sequences' tables by key, to read."""
        return MappingProxyType(self._tables)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    # ------------------------------------------------------------------------------------------------- admission

    def plan_match(self, lineage: Lineage, tokens: array[int]) -> Match:
        """Return what is cached of a prompt; its last token is left to compute."""
        return self.index.match(lineage, tokens, len(tokens) - 1) if self.prefix_cache else Match()

    def plan_admission(
        self, lineage: Lineage, tokens: array[int], reserve: int, allowance: int | None = None
    ) -> Admission | None:
        """Decide whether a sequence with these known tokens can begin, all of them and one more fitting, `reserve` blocks left.

        At least the last token is left to compute: its logits are wanted. No more than `allowance` blocks may become live by it.
        """
        match = self.plan_match(lineage, tokens)
        found = len(match.blocks)
        whole = self.blocks_for(len(tokens) + 1)
        room = self.pool.available - reserve
        if whole >= room or allowance is not None:  # else there is room whatever of them is held, the tail's source included
            room -= self.pool.evictable_among(match.blocks)
            needed = whole - found
            allowed = needed if allowance is None else allowance - self._dead(match.blocks)
            if needed > min(room, allowed):
                return None
            if match.tail_tokens and (
                needed + self.pool.evictable(match.tail) > room
                or (allowance is not None and needed + self._dead((match.tail,)) > allowed)
            ):
                match = match.without_tail()  # its source would be held, and is needed
        return Admission(match, found * self.block_size + match.tail_tokens)

    def plan_whole_admission(self, tokens: array[int], reserve: int, allowance: int | None = None) -> Admission | None:
        """Decide as `plan_admission` does, for a sequence that is to be computed whole: nothing that is cached is used."""
        needed = self.blocks_for(len(tokens) + 1)
        most = self.pool.available - reserve
        return None if needed > (most if allowance is None else min(most, allowance)) else Admission(Match(), 0)

    def blocks_charged(self, lineage: Lineage, tokens: array[int]) -> int:
        """Return how many blocks at least become live where a sequence with these tokens, and one more, begins."""
        match = self.plan_match(lineage, tokens)
        return self.blocks_for(len(tokens) + 1) - len(match.blocks) + self._dead(match.blocks)

    def _dead(self, blocks: Iterable[int]) -> int:
        """Return how many of some blocks nobody holds."""
        references = self.pool.references
        return sum(1 for block in blocks if not references[block])

    def plan_evictions(self, admission: Admission, new_blocks: int) -> list[int]:
        """Return the cached blocks that would go if a sequence were admitted and took so many more blocks; changes nothing."""
        match = admission.match
        used = {*match.blocks, match.tail} if match.tail_tokens else set(match.blocks)
        missing = new_blocks - self.pool.free
        gone: dict[int, None] = {}
        for block in self.pool.eviction_order():
            if len(gone) >= missing:
                break
            if block not in used and block not in gone:
                gone.update((doomed, None) for doomed in self.index.standing_on(block, gone) if self.pool.evictable(doomed))
        return list(gone)

    def admit(self, key: Hashable, lineage: Lineage, admission: Admission, owner: object = None) -> Table:
        """Give a sequence its table. Records name it by `owner`, or else by its key."""
        assert key not in self._tables, f"sequence {key} has a table already"
        match, cached = admission
        owner = key if owner is None else owner
        blocks = list(match.blocks)
        node = self.index.node(blocks[-1]) if blocks else None
        table = self._tables[key] = Table(key, owner, lineage, blocks, cached, cached, len(blocks), node)
        if blocks:
            self._share_all(blocks, owner, favour=True)
            self.index.note_hits(blocks)
        if match.tail_tokens:
            self._share(match.tail, owner)
            self.index.note_hits([match.tail])
            blocks.append(self._clone(match.tail, owner))
            self.counters.partial_copies += 1
        self._planning = True
        return table

    def fork(self, parent: Hashable, key: Hashable, owner: object = None) -> Table:
        """Give a new sequence the content of another: every block is shared, the partly filled last one included.

        Between two steps only. A step makes its copies before it writes, so a clone made in the step that also writes to the
        parent's last block would lack what is written.
        """
        assert key not in self._tables, f"sequence {key} has a table already"
        assert not self._planning, "a fork in the middle of a step"
        source = self._tables[parent]
        lineage = source.lineage.fork(source.planned // self.block_size)
        owner = key if owner is None else owner
        self._share_all(source.blocks, owner)
        table = Table(key, owner, lineage, list(source.blocks), source.planned, source.computed, source.committed, source.node)
        self._tables[key] = table
        self.counters.forks += 1
        return table

    # ---------------------------------------------------------------------------------------------------- growth

    def plan_growth(self, table: Table, count: int) -> Growth | None:
        """Decide whether a sequence can take `count` more tokens: the pool, and its tenant's quota, have to have room."""
        size, blocks, length = self.block_size, table.blocks, table.planned + count
        new_blocks = -(-length // size) - len(blocks)
        clone = bool(table.planned % size) and self._is_shared(blocks[-1])
        needed = new_blocks + clone
        if needed and needed > self.quotas.room(table.lineage.tenant, self.pool.available):
            return None
        return Growth(table, length, new_blocks, clone)

    def blocks_to_grow(self, table: Table, count: int) -> int:
        """Return how many blocks a sequence has to take for `count` more tokens."""
        clone = bool(table.planned % self.block_size) and self._is_shared(table.blocks[-1])
        return self.blocks_for(table.planned + count) - len(table.blocks) + clone

    def grow(self, growth: Growth) -> None:
        """Make a table cover the tokens of a step. A shared last block is cloned; the last holder writes in place."""
        table = growth.table
        if growth.clone:
            table.blocks[-1] = self._clone(table.blocks[-1], table.owner)
            self.counters.copied_blocks += 1
        if growth.new_blocks:
            blocks = self._allocate(growth.new_blocks, table.owner)
            self.quotas.charge_all(blocks, table.lineage.tenant)
            table.blocks += blocks
        table.planned = growth.length
        self._planning = True

    # ------------------------------------------------------------------------------- what the executor has done

    def acknowledge(self, table: Table, computed: int, tokens: array[int]) -> None:
        """Take note that the first `computed` of `tokens` are in the pool, and index the blocks that are full by now."""
        assert table.computed <= computed <= table.planned
        table.computed = computed
        full = computed // self.block_size
        if full == table.committed:
            return
        if self.prefix_cache:
            pieces = pieces_of(tokens, table.committed, full, self.block_size)
            names = table.lineage.names_of(table.committed, pieces)
            table.node = self._index(table, table.committed, names, pieces)
        table.committed = full

    def release(self, key: Hashable, tokens: array[int], *, keep_tail: bool = True) -> None:
        """Take a sequence's references away. `tokens` are those that it was made of.

        Its blocks go the last first, so that the tail of a chain is evicted before its head. A last block that is partly filled
        stays known as a tail where `keep_tail`, to be cloned by who comes back with more; not one that this step's copies fill,
        or it could become source and destination in one step.
        """
        table = self._tables.pop(key)
        size = self.block_size
        full, rest = divmod(table.computed, size)
        if keep_tail and self.prefix_cache and rest and full == table.committed and self._is_settled(table.blocks[full]):
            piece = tokens[full * size : table.computed].tobytes()
            self._index(table, full, [block_hash(table.lineage.parent(full), piece)], (piece,))
        self._drop_all(table.blocks[::-1], table.owner)

    def distrust(self, table: Table) -> None:
        """Let nobody find what a sequence's blocks hold: it may be no numbers. The sequence is released next."""
        for block in table.blocks:
            if self.index.hash_of(block) is not None:
                self._forget(block)
        table.computed = table.committed = 0
        table.node = None

    def distrust_cached(self, lineage: Lineage, tokens: array[int]) -> None:
        """Let nobody find what a sequence that has been released left in the cache: it may be no numbers."""
        match = self.index.match(lineage, tokens, len(tokens))
        if match.blocks:
            self._forget(match.blocks[0])
        elif match.tail_tokens:
            self._forget(match.tail)

    def flush(self) -> int:
        """Free every cached block that is not pinned; return how many."""
        if not self.pool.live and not self.pool.pinned:
            return self._flush_whole()
        flushed = 0
        while self.pool.cached > self.pool.pinned_cached:
            flushed += self._forget(self.pool.oldest())
        return flushed

    def _flush_whole(self) -> int:
        """Empty the index at once, where nothing is referenced or pinned: taking out node by node costs several times as much."""
        blocks = self.pool.release_all(self.now)
        if self._records is not None:
            for block in blocks:
                self._records.append((events.FLUSHED, block, None, self._entry(block)))
                self._records.append((events.FREED, block, None, None))
        self.index.clear()
        self.counters.freed_blocks += len(blocks)
        self._freed += blocks
        return len(blocks)

    def flush_part(self, part: range, tenant: str) -> int:
        """Free the cached blocks of a part of the pool that are not pinned, a tenant's or (empty) all; return how many fell free.

        What stands on one of them goes with it.
        """
        evictable, tenants = self.pool.evictable, self.index.tenants
        return sum(self._forget(block) for block in part if evictable(block) and (not tenant or tenants[block] == tenant))

    def end_step(self) -> StepMemory:
        """Close the step that was planned: return its copies and the blocks that fell free, and let go of the sources."""
        step = StepMemory(
            tuple([(source, destination) for destination, source in self._copies.items()]),
            tuple(dict.fromkeys(self._freed)) if self._freed else (),
        )
        self._copies.clear()
        self._freed.clear()
        self._planning = False
        if not self._held:
            return step
        held, self._held = self._held, {}
        for block, owners in held.items():
            for owner in owners:
                self._drop(block, owner)
        return step

    def note_preemption(self, owner: object) -> None:
        """Record that who decides has preempted a request."""
        if self._records is not None:
            self._records.append((events.PREEMPTED, NO_BLOCK, owner, None))

    def discard(self) -> None:
        """Count every block as freed: the pool is gone, and this memory with it."""
        self.counters.freed_blocks += self.pool.live + self.pool.cached

    # ---------------------------------------------------------------------------------------------------- blocks

    def _is_shared(self, block: int) -> bool:
        references = self.pool.references[block]
        return references > 1 and references - len(self._held.get(block, ())) > 1

    def _is_settled(self, block: int) -> bool:
        """Whether one sequence alone holds a block, and its content is there already."""
        return not self._is_shared(block) and block not in self._copies

    def _index(self, table: Table, first: int, names: list[bytes], pieces: tuple[bytes, ...]) -> Node | None:
        """Offer a table's blocks from `first` on to the index; return the node that stands for the last one's content there."""
        lineage, index = table.lineage, self.index
        blocks = table.blocks[first : first + len(names)]
        if first and table.node is None:  # nothing to go on from, but what another holder has offered
            skipped = next((at for at, block in enumerate(blocks) if index.hash_of(block) is not None), len(blocks))
            if skipped == len(blocks):
                return None
            blocks, names, pieces = blocks[skipped:], names[skipped:], pieces[skipped:]
        node = index.insert_chain(blocks, names, pieces, table.node, lineage.root, lineage.tenant)
        if self._evicted:
            self._favour_those_back(blocks, names)
        if self._records is not None:
            for block, name, piece in zip(blocks, names, pieces, strict=True):
                if index.entered_last(block):
                    entry: Indexed = (name, index.parent_of(block), piece, lineage.tenant)
                    self._records.append((events.INDEXED, block, table.owner, entry))
        return node

    def _favour_those_back(self, blocks: list[int], names: list[bytes]) -> None:
        """Favour those of a chain's blocks whose content was evicted lately, up to the first whose was not.

        A chain is evicted from its end, so that its first blocks are remembered the longest: of a prompt that comes once, one
        name is looked up.
        """
        back: list[int] = []
        for block, name in zip(blocks, names, strict=True):
            if not self._evicted.take(name):
                break
            back.append(block)
        if back:
            self.pool.favour(back)

    def _allocate(self, count: int, owner: object) -> list[int]:
        """Give out blocks, which there must be; cached ones are evicted, one by one, where too few are free."""
        pool = self.pool
        blocks = [pool.take()] if count == 1 and pool.free else pool.take_some(min(count, pool.free))
        self._note_all(events.ALLOCATED, blocks, owner)
        while len(blocks) < count:
            taken = self._evict(count - len(blocks))
            self._note_all(events.ALLOCATED, taken, owner)
            blocks += taken
        self.counters.allocated_blocks += count
        return blocks

    def _evict(self, count: int) -> list[int]:
        """Give out blocks that were cached, one at least and `count` at most. None is free."""
        victims = self._victims(count)
        names = self.index.names_of(victims)
        entries = [] if self._records is None else [self._entry(block) for block in victims]
        del victims[self.index.remove_leaves(victims) :]
        if not victims:  # something stands on the first one, and goes with it
            self._evicted.add(names[:1])
            self.counters.evicted_blocks += self._forget(self._victims(1)[0], events.EVICTED)
            return self.pool.take_some(min(count, self.pool.free))
        self._evicted.add(names[: len(victims)])
        self.pool.reuse(victims)
        self._freed += victims
        self.counters.evicted_blocks += len(victims)
        self.counters.freed_blocks += len(victims)
        if self._records is not None:
            self._records.extend([(events.EVICTED, block, None, entry) for block, entry in zip(victims, entries, strict=False)])
        return victims

    def _victims(self, count: int) -> list[int]:
        """Return cached blocks that go where none is free, in their order, one at least and `count` at most."""
        return self.pool.oldest_some(count)

    def _share(self, block: int, owner: object) -> None:
        """Add a reference to a block."""
        if self.pool.share(block):
            self.quotas.charge_again(block, 1)
        if self._records is not None:
            self._records.append((events.SHARED, block, owner, None))

    def _share_all(self, blocks: list[int], owner: object, *, favour: bool = False) -> None:
        """Add a reference to each of some blocks, which are all of one tenant, and favour them."""
        if revived := self.pool.share_all(blocks, favour=favour):
            self.quotas.charge_again(blocks[0], revived)
        self._note_all(events.SHARED, blocks, owner)

    def _note_all(self, kind: int, blocks: Iterable[int], owner: object) -> None:
        """Record what happened alike to each of some blocks."""
        if self._records is not None:
            self._records.extend([(kind, block, owner, None) for block in blocks])

    def _clone(self, source: int, owner: object) -> int:
        """Return a block that this step's copies fill from `source`, of which one reference moves from the caller to the step."""
        self._held.setdefault(source, []).append(owner)
        [destination] = self._allocate(1, owner)
        self.quotas.charge_like(destination, source)
        self._copies[destination] = source
        if self._records is not None:
            self._records.append((events.COPIED, destination, owner, source))
        return destination

    def _drop_all(self, blocks: list[int], owner: object) -> None:
        """Take a reference from blocks of one tenant. With the last one, what the index knows is cached, and others are free."""
        live = self.pool.live
        useless = self.pool.drop_all(blocks, self.index.hashes, self.now)
        if self.pool.live < live:
            self.quotas.discharge(blocks[0], live - self.pool.live)
        if self._records is not None:
            self._note_all(events.RELEASED, blocks, owner)
            self._note_all(events.FREED, useless, None)
        if useless:
            self.pool.release_dropped(useless, self.now)
            self.counters.freed_blocks += len(useless)
            self._freed += useless
            if self._copies:
                for block in useless:
                    self._copies.pop(block, None)  # as in `_free`

    def _drop(self, block: int, owner: object) -> None:
        """Do what `_drop_all` does, with one block."""
        last = self.pool.drop(block)
        if self._records is not None:
            self._records.append((events.RELEASED, block, owner, None))
        if not last:
            return
        self.quotas.discharge(block)
        if self.index.hashes[block] is not None:
            self.pool.keep(block, self.now)
            return
        if self._records is not None:
            self._records.append((events.FREED, block, None, None))
        self._free(block)

    def _forget(self, block: int, kind: int = events.FLUSHED) -> int:
        """Take a block out of the index, and what stands on it, which could not be found any more; return how many fell free.

        `kind` is what the record says of those; what is still referenced is told of as flushed.
        """
        if self.pool.pins[block]:  # or nothing that stands on it is pinned
            self.pins.cut(block)
        doomed = () if self._records is None else self.index.standing_on(block)
        entries = {gone: self._entry(gone) for gone in doomed}
        fell_free, references = 0, self.pool.references
        for gone in self.index.remove(block):
            cached = not references[gone]
            if self._records is not None:
                self._records.append((kind if cached else events.FLUSHED, gone, None, entries[gone]))
            if cached:
                fell_free += 1
                self._free(gone)
                if self._records is not None and kind != events.EVICTED:
                    self._records.append((events.FREED, gone, None, None))
        return fell_free

    def _entry(self, block: int) -> Unindexed:
        return (self.index.hash_of(block) or b"", self.index.tenants[block])

    def _free(self, block: int) -> None:
        self.pool.release(block, self.now)
        self.counters.freed_blocks += 1
        self._copies.pop(block, None)  # its sequence is gone again within the step that cloned it
        self._freed.append(block)

    # ------------------------------------------------------------------------------------------------ invariants

    def check_invariants(self) -> int:
        """Check pool, index, tables and all that holds between them. Returns how many checks were made.

        Raises:
            AssertionError: one does not hold.
        """
        breathe = self.breathe
        checks = self.pool.check_invariants(breathe) + self.index.check_invariants(breathe)
        references = {block: len(owners) for block, owners in self._held.items()}
        for key, table in self._tables.items():
            assert table.key == key
            assert 0 <= table.computed <= table.planned, f"sequence {key} computed more than was planned"
            assert len(table.blocks) == self.blocks_for(table.planned), f"sequence {key} has the wrong number of blocks"
            assert table.committed <= table.computed // self.block_size
            assert len(set(table.blocks)) == len(table.blocks), f"sequence {key} has a block twice"
            for block in table.blocks:
                references[block] = references.get(block, 0) + 1
            checks += 5 + len(table.blocks)
        for block in range(self.pool.total):
            if not block % BREATH:
                breathe()
            counted, expected = self.pool.references[block], references.get(block, 0)
            assert counted == expected, f"block {block} counts {counted} references, {expected} sequences hold it"
            known = self.index.hash_of(block) is not None
            state = self.pool.state(block)
            assert known or state is not BlockState.CACHED, f"cached block {block} can't be found"
            assert not (known and state is BlockState.FREE), f"free block {block} is in the index"
            if known and self.index.filled(block) < self.block_size:
                assert counted == len(self._held.get(block, ())), f"block {block} is a tail and referenced"
        checks += self.pins.check_invariants(self.block_size)
        checks += self.quotas.check_invariants(block for block, counted in enumerate(self.pool.references) if counted)
        for key, table in self._tables.items():
            belongs = all(self.quotas.tenant(block) == table.lineage.tenant for block in table.blocks)
            assert belongs, f"sequence {key} holds a block of another tenant"
        for destination, source in self._copies.items():
            assert source not in self._copies, f"block {source} is source and destination in one step"
            assert destination != source
        balance = self.counters.allocated_blocks - self.counters.freed_blocks
        assert balance == self.pool.live + self.pool.cached, "allocated and freed blocks do not add up"
        return checks + 4 * self.pool.total + 2 * len(self._copies) + 1
