"""The prefix index: which known content which block holds.

Content is named by a chain of hashes (see `lineage`). Hashes find, comparison decides: a hit has the tokens asked for and hangs
on the node before it, and who inserts names the node that it goes on from, not a hash. So a collision costs a miss, never a
wrong token.

The index is a forest of nodes, each node one block. A node with fewer tokens than a block is the tail of a sequence that ended
there: it is found as the source of a clone, has no children, and is never referenced itself. A node's parent is always in the
index: whoever removes a node removes what stands on it.

Knows tokens and block numbers; not references, tables or the order of eviction.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterator
from typing import Final, NamedTuple

from memmgr.core.blocks import BREATH, no_breath
from memmgr.core.forest import NONE, Forest, Nodes
from memmgr.core.lineage import Lineage, block_hash, pieces_of

#: Children of one node looked at for a prefix that ends inside a block. A system prompt has thousands, the recent ones matter.
MAX_CHILDREN_COMPARED: Final = 16

_TOKEN_BYTES: Final = 4  # of an id, in a block's tokens


class Match(NamedTuple):
    """What the index knows of a prompt: whole blocks from its start, then perhaps a part of one more.

    `blocks[i]` holds tokens i * size .. (i + 1) * size - 1. `tail` is a block whose first `tail_tokens` tokens go on from there;
    -1 where there is none.
    """

    blocks: tuple[int, ...] = ()
    tail: int = NONE
    tail_tokens: int = 0

    def without_tail(self) -> Match:
        """Return the whole blocks alone."""
        return Match(self.blocks)


class Node(NamedTuple):
    """A node as it was at some time. `serial` numbers the insertions, so that no later node in the same block passes for it."""

    block: int
    serial: int


class PrefixIndex:
    """See the module. `total` blocks of `block_size` tokens."""

    __slots__ = (
        "_above",
        "_block_of",
        "_block_size",
        "_first_child",
        "_insertions",
        "_next_sibling",
        "_parents",
        "_previous_sibling",
        "_roots",
        "_serials",
        "_tokens",
        "depths",
        "hashes",
        "hits",
        "tenants",
    )

    def __init__(self, total: int, block_size: int) -> None:
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self.hashes: Final[list[bytes | None]] = [None] * total  # under which a block is known; None: it isn't in the index
        self._tokens: list[bytes | None] = [None] * total
        self._parents: list[bytes | None] = [None] * total  # a hash: of the parent node or of a root
        self._above = [NONE] * total  # the parent node's block
        self._serials = [0] * total  # 0: not in the index
        self._insertions = 0
        self._roots: dict[bytes, int] = {}  # root -> its most recent child
        self.depths: Final = [0] * total
        self.hits: Final = [0] * total  # admissions that used a block since it entered
        self.tenants: Final[list[str]] = [""] * total
        # Children hang in a list, the most recent first, threaded through these.
        self._first_child = [NONE] * total
        self._next_sibling = [NONE] * total
        self._previous_sibling = [NONE] * total

    def __len__(self) -> int:
        return len(self._block_of)

    def hash_of(self, block: int) -> bytes | None:
        """Return the hash under which a block is known, or None where it is not in the index."""
        return self.hashes[block]

    def names_of(self, blocks: list[int]) -> list[bytes]:
        """Return the hash under which each of some indexed blocks is known."""
        hashes = self.hashes
        return [hashes[block] or b"" for block in blocks]

    def parent_of(self, block: int) -> bytes:
        """Return the hash that an indexed block hangs on: its parent node's or its root."""
        parent = self._parents[block]
        assert parent is not None
        return parent

    def node(self, block: int) -> Node:
        """Return the node of an indexed block, to go on from."""
        assert self.hashes[block] is not None
        return Node(block, self._serials[block])

    def filled(self, block: int) -> int:
        """Return how many tokens of an indexed block the index knows."""
        tokens = self._tokens[block]
        assert tokens is not None
        return len(tokens) // 4

    def above(self, block: int) -> int:
        """Return the parent node's block; negative where an indexed block hangs on a root."""
        return self._above[block]

    def node_at(self, block: int) -> tuple[int, bytes | None, bytes | None, bytes | None, str]:
        """Return a block's serial, name, parent, tokens and tenant, as `nodes` has them."""
        return (
            self._serials[block],
            self.hashes[block],
            self._parents[block],
            self._tokens[block],
            self.tenants[block],
        )

    def nodes(self, part: slice) -> Nodes:
        """Return what is known of a part of the blocks."""
        return Nodes(
            names=self.hashes[part],
            parents=self._parents[part],
            tokens=self._tokens[part],
            tenants=self.tenants[part],
            depths=self.depths[part],
            hits=self.hits[part],
            serials=self._serials[part],
        )

    def forest(self) -> Forest:
        """Return all nodes, to be read before the index changes."""
        return Forest(
            hashes=self.hashes,
            parents=self._parents,
            tokens=self._tokens,
            tenants=self.tenants,
            depths=self.depths,
            hits=self.hits,
            first_child=self._first_child,
            next_sibling=self._next_sibling,
            roots=tuple(self._roots.values()),
        )

    def match(self, lineage: Lineage, tokens: array[int], limit: int) -> Match:
        """Find the longest known prefix of `tokens[:limit]`: the unbroken run of whole blocks, then a part of one.

        A prompt shorter than a block is never matched: what could be saved is less than a block, and such prompts share little
        but their first token.
        """
        size = self._block_size
        blocks = self._chain(lineage, tokens, max(0, limit // size))
        above = blocks[-1] if blocks else NONE
        tail, tail_tokens = NONE, 0
        if len(tokens) >= size:
            start = len(blocks) * size
            tail, tail_tokens = self._best_child(above, lineage.root, tokens[start : min(limit, start + size)].tobytes())
        return Match(tuple(blocks), tail, tail_tokens)

    def _chain(self, lineage: Lineage, tokens: array[int], whole: int) -> list[int]:
        """Return the blocks that hold the first of `whole` blocks of tokens, from the root on."""
        size, block_of, names = self._block_size, self._block_of, lineage.names
        if not whole or (names[0] if names else lineage.name(0, tokens[:size].tobytes())) not in block_of:
            return []  # as of most prompts
        # Where one is not there, those after it are not either, or hang on something else, which is seen below.
        blocks = [block for name in names[:whole] if (block := block_of.get(name)) is not None]
        if len(blocks) == len(names) < whole:
            name = lineage.parent(len(names))
            for piece in pieces_of(tokens, len(names), whole, size):
                name = block_hash(name, piece)
                names.append(name)
                block = block_of.get(name)
                if block is None:
                    break
                blocks.append(block)
        # What was found by name is compared at once, as no block holds more than `size` tokens. If that fails, names collided.
        known_tokens, known_above = self._tokens, self._above
        data = tokens[: len(blocks) * size].tobytes()
        held = b"".join([known_tokens[block] or b"" for block in blocks])
        above = [known_above[block] for block in blocks]
        if held == data and above == [NONE, *blocks[:-1]] and self._parents[blocks[0]] == lineage.root:
            return blocks
        for logical, (block, piece) in enumerate(zip(blocks, pieces_of(tokens, 0, len(blocks), size), strict=True)):
            if not self._holds(block, piece, blocks[logical - 1] if logical else NONE, lineage.root):
                return blocks[:logical]
        return blocks

    def note_hits(self, blocks: list[int]) -> None:
        """Take note that an admission uses some blocks."""
        hits = self.hits
        for block in blocks:
            hits[block] += 1

    def insert(self, block: int, name: bytes, above: Node | None, root: bytes, tokens: bytes, tenant: str) -> Node | None:
        """Let `block` stand for `tokens` after the node `above`, or after `root` where that is None.

        Returns the node to go on from. The first one wins: where another block has this content, that is its node, and `block`
        stays out of the index. None: `block` could not be found, because `above` is gone or other content has taken its name.
        """
        assert self.hashes[block] is None, f"block {block} is in the index already"
        return self.insert_chain([block], [name], (tokens,), above, root, tenant)

    def insert_chain(
        self,
        blocks: list[int],
        names: list[bytes],
        pieces: tuple[bytes, ...],
        above: Node | None,
        root: bytes,
        tenant: str,
    ) -> Node | None:
        """Insert blocks, each after the node of the one before it, the first after `above` or `root`; see `insert`.

        A block that is in the index already is its own node: another holder, forked from the same sequence, has offered it.
        Returns the last one's node; `entered_last` says which are new in the index.
        """
        block_of, hashes, known_tokens, parents = self._block_of, self.hashes, self._tokens, self._parents
        known_above, serials, first_child = self._above, self._serials, self._first_child
        depths, tenants = self.depths, self.tenants
        serial = self._insertions = self._insertions + 1  # of all of them: none is here twice
        lost, childless = False, False  # childless: the block before this one is a new node
        over, parent, depth = NONE, root, 0
        if above is not None:
            over, lost = above.block, serials[above.block] != above.serial
            parent, depth = hashes[over] or root, depths[over] + 1
        for block, name, piece in zip(blocks, names, pieces, strict=True):
            if hashes[block] is not None:
                other, lost = block, False
            elif lost:
                continue
            elif name not in block_of:
                block_of[name] = block
                hashes[block] = name
                known_tokens[block] = piece
                parents[block] = parent
                known_above[block] = over
                serials[block] = serial
                depths[block] = depth
                tenants[block] = tenant
                if childless:
                    first_child[over] = block
                else:
                    self._hang(block, over, root)
                over, parent, childless = block, name, True
                depth += 1
                continue
            else:
                other = block_of[name]
                if not self._holds(other, piece, over, root):
                    lost = True
                    continue
            over, parent, depth, childless = other, hashes[other] or root, depths[other] + 1, False
        return None if lost else Node(over, serials[over])

    def entered_last(self, block: int) -> bool:
        """Whether a block is in the index by the last insertion."""
        return self._serials[block] == self._insertions

    def standing_on(self, block: int, without: Container[int] = ()) -> list[int]:
        """Return an indexed block and all that stands on it, the deepest first, `block` last.

        Nothing of `without`, nor what stands on that.
        """
        doomed = [block]
        if self._first_child[block] == NONE:
            return doomed
        for known in doomed:
            child = self._first_child[known]
            while child != NONE:
                if child not in without:
                    doomed.append(child)
                child = self._next_sibling[child]
        doomed.reverse()
        return doomed

    def remove(self, block: int) -> list[int]:
        """Forget a block and all that stands on it. Returns them, the deepest first, `block` last."""
        doomed = self.standing_on(block)
        for known in doomed:
            self._forget(known)
        return doomed

    def remove_leaves(self, blocks: list[int]) -> int:
        """Forget blocks up to the first that something stands on; return how many that were."""
        hashes, known_tokens, parents, known_above = self.hashes, self._tokens, self._parents, self._above
        first_child, next_sibling, previous_sibling = self._first_child, self._next_sibling, self._previous_sibling
        for number, block in enumerate(blocks):
            if first_child[block] != NONE:
                return number
            above = known_above[block]
            if above == NONE or next_sibling[block] != NONE or previous_sibling[block] != NONE:
                self._forget(block)
                continue
            first_child[above] = known_above[block] = NONE
            del self._block_of[hashes[block] or b""]
            hashes[block] = known_tokens[block] = parents[block] = None
            self._serials[block] = self.hits[block] = 0
        return len(blocks)

    def clear(self) -> None:
        """Forget everything."""
        for block in self._block_of.values():
            self.hashes[block] = self._tokens[block] = self._parents[block] = None
            self._above[block] = self._first_child[block] = NONE
            self._next_sibling[block] = self._previous_sibling[block] = NONE
            self._serials[block] = self.hits[block] = 0
        self._block_of.clear()
        self._roots.clear()

    def _holds(self, block: int, tokens: bytes, above: int, root: bytes) -> bool:
        """Whether an indexed block has these tokens and hangs where it should: on the node `above`, or on `root`."""
        if self._tokens[block] != tokens or self._above[block] != above:
            return False
        return above != NONE or self._parents[block] == root

    def _forget(self, block: int) -> None:
        name, parent, above = self.hashes[block], self._parents[block], self._above[block]
        assert name is not None
        assert parent is not None
        before, after = self._previous_sibling[block], self._next_sibling[block]
        if before != NONE:
            self._next_sibling[before] = after
        elif above != NONE:
            self._first_child[above] = after
        elif after != NONE:
            self._roots[parent] = after
        else:
            del self._roots[parent]
        if after != NONE:
            self._previous_sibling[after] = before
        self._next_sibling[block] = self._previous_sibling[block] = self._above[block] = NONE
        del self._block_of[name]
        self.hashes[block] = self._tokens[block] = self._parents[block] = None
        self._serials[block] = self.hits[block] = 0

    def _hang(self, block: int, above: int, root: bytes) -> None:
        first = self._first(above, root)
        if above == NONE:
            self._roots[root] = block
        else:
            self._first_child[above] = block
        self._next_sibling[block] = first
        if first != NONE:
            self._previous_sibling[first] = block

    def _first(self, above: int, root: bytes) -> int:
        """Return the most recent child of a node, or of a root where `above` is none."""
        return self._roots.get(root, NONE) if above == NONE else self._first_child[above]

    def _children(self, above: int, root: bytes) -> Iterator[int]:
        child = self._first(above, root)
        while child != NONE:
            yield child
            child = self._next_sibling[child]

    def _best_child(self, above: int, root: bytes, wanted: bytes) -> tuple[int, int]:
        """Return the child that shares the most leading tokens with `wanted`, and how many; (-1, 0) where none does."""
        best, shared = NONE, 0  # bytes, of whole tokens
        child, known_tokens, next_sibling = self._first(above, root), self._tokens, self._next_sibling
        better = wanted[:_TOKEN_BYTES]  # what a child begins with that shares more than the best
        for _ in range(MAX_CHILDREN_COMPARED):
            if child == NONE or shared == len(wanted):
                break
            known = known_tokens[child] or b""
            if known.startswith(better):
                best, shared = child, _common(known, wanted)
                better = wanted[: shared + _TOKEN_BYTES]
            child = next_sibling[child]
        return best, shared // _TOKEN_BYTES

    def check_invariants(self, breathe: Callable[[], None] = no_breath) -> int:
        """Check names, parents, depths and the threads. Returns how many checks were made. `breathe`: see Memory.

        Raises:
            AssertionError: one does not hold.
        """
        hung = 0
        parents = [(NONE, root) for root in self._roots] + [(block, name) for name, block in self._block_of.items()]
        for number, (above, parent) in enumerate(parents):
            if not number % BREATH:
                breathe()
            before = NONE
            for child in self._children(above, parent):
                assert self._above[child] == above, f"block {child} hangs on a parent that is not its own"
                assert self._parents[child] == parent, f"block {child} has another parent's hash"
                assert self._previous_sibling[child] == before, f"the siblings of block {child} are torn"
                before = child
                hung += 1
        assert hung == len(self._block_of), f"{hung} blocks hang in the forest, {len(self._block_of)} are known"
        known = sum(1 for name in self.hashes if name is not None)
        assert known == len(self._block_of), f"{known} blocks have a hash, {len(self._block_of)} are known"
        for number, (name, block) in enumerate(self._block_of.items()):
            if not number % BREATH:
                breathe()
            tokens, hangs_on = self._tokens[block], self._parents[block]
            assert tokens is not None
            assert hangs_on is not None
            assert self.hashes[block] == name
            assert block_hash(hangs_on, tokens) == name, f"block {block} has the wrong hash"
            assert 0 < len(tokens) // 4 <= self._block_size
            if len(tokens) // 4 < self._block_size:
                assert self._first_child[block] == NONE, f"block {block} is a tail and has children"
            above = self._above[block]
            expected = 0 if above == NONE else self.depths[above] + 1
            assert (above == NONE) == (hangs_on in self._roots), f"the parent of block {block} is not known"
            assert self.depths[block] == expected, f"block {block} has the wrong depth"
            assert 0 < self._serials[block] <= self._insertions
        return 3 * hung + known + 8 * len(self._block_of)


def _common(one: bytes, other: bytes) -> int:
    """Return how many leading bytes two have in common, of whole tokens."""
    if one.startswith(other):
        return len(other)
    bytes_apart = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(bytes_apart, min(len(one), len(other))) // _TOKEN_BYTES * _TOKEN_BYTES
