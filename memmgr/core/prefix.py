"""The prefix index: which known content which block holds.

Content is named by a chain of hashes, one for each block: BLAKE2b over the parent's hash and the block's tokens, rooted in
(model, tenant, salt), every field tagged and length-prefixed, so that no two domains and no two splits of the same bytes can
meet. Hashes find, comparison decides: a hit has the tokens asked for and hangs on the node before it, and who inserts names the
node that it goes on from, not a hash. So a collision costs a miss, never a wrong token.

The index is a forest of nodes, each node one block. A node with fewer tokens than a block is the tail of a sequence that ended
there: it is found as the source of a clone, has no children, and is never referenced itself. A node's parent is always in the
index: whoever removes a node removes what stands on it.

Knows tokens and block numbers; not references, tables or the order of eviction.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

#: Of a hash, in bytes. 128 bits: with comparison on top, collisions are a matter of speed, not of truth.
HASH_BYTES: Final = 16

#: Children of one node looked at for a prefix that ends inside a block. A system prompt has thousands, the recent ones matter.
MAX_CHILDREN_COMPARED: Final = 16

_NONE: Final = -1


@dataclass(frozen=True, slots=True)
class Match:
    """What the index knows of a prompt: whole blocks from its start, then perhaps a part of one more.

    `blocks[i]` holds tokens i * size .. (i + 1) * size - 1. `tail` is a block whose first `tail_tokens` tokens go on from there;
    -1 where there is none.
    """

    blocks: tuple[int, ...] = ()
    tail: int = _NONE
    tail_tokens: int = 0

    def without_tail(self) -> Match:
        """Return the whole blocks alone."""
        return Match(self.blocks)


@dataclass(frozen=True, slots=True)
class Node:
    """A node as it was at some time. `serial` numbers the insertions, so that no later node in the same block passes for it."""

    block: int
    serial: int


def root_hash(model: str, tenant: str, salt: str) -> bytes:
    """Return the root of one domain: prefixes are shared only within it."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"kilburn.root")
    for tag, field in (b"m", model), (b"t", tenant), (b"s", salt):
        data = field.encode()
        digest.update(tag + len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the hash of a block: `parent` is its predecessor's or the root's, `tokens` are little-endian 32-bit ids."""
    digest = blake2b(b"p" + parent, digest_size=HASH_BYTES, person=b"kilburn.block")
    digest.update(b"k" + len(tokens).to_bytes(8, "little") + tokens)
    return digest.digest()


class Lineage:
    """The names of one growing sequence's whole blocks in one domain, each hashed once and kept across preemptions."""

    __slots__ = ("names", "root", "tenant")

    def __init__(self, root: bytes, tenant: str) -> None:
        self.root: Final = root
        self.tenant: Final = tenant  # for people who look at a block; the root is what separates
        self.names: Final[list[bytes]] = []

    def parent(self, logical: int) -> bytes:
        """Return the name that block `logical` hangs on; the blocks before it must have names."""
        return self.names[logical - 1] if logical else self.root

    def name(self, logical: int, tokens: bytes) -> bytes:
        """Return the name of whole block `logical`, which holds `tokens`; the blocks before it must have names."""
        if logical == len(self.names):
            self.names.append(block_hash(self.parent(logical), tokens))
        return self.names[logical]

    def fork(self, whole_blocks: int) -> Lineage:
        """Return a sequence's of its own that begins with the same so many whole blocks."""
        forked = Lineage(self.root, self.tenant)
        forked.names.extend(self.names[:whole_blocks])
        return forked


@dataclass(frozen=True, slots=True)
class Forest:
    """The nodes of an index and how they hang together: its own arrays, to be read at once, or copies of them."""

    hashes: Sequence[bytes | None]
    parents: Sequence[bytes | None]
    tokens: Sequence[bytes | None]
    tenants: Sequence[str]
    depths: array[int]
    hits: array[int]
    first_child: array[int]
    next_sibling: array[int]
    roots: Sequence[int]  # the most recent child of each

    def walk(self, tenant: str, max_depth: int) -> Iterator[int]:
        """Yield the blocks depth first, a tenant's or (empty) all, down to `max_depth` blocks from the root or (0) to the leaves.

        The domains come in no order that means anything; the children of a node the most recent first.
        """
        for root in self.roots:
            if tenant and self.tenants[root] != tenant:
                continue
            ahead = [root]
            while ahead:
                block = ahead.pop()
                if (after := self.next_sibling[block]) != _NONE:
                    ahead.append(after)
                yield block
                if (child := self.first_child[block]) != _NONE and not 0 < max_depth <= self.depths[block] + 1:
                    ahead.append(child)


class PrefixIndex:
    """See the module. `total` blocks of `block_size` tokens."""

    __slots__ = (
        "_above",
        "_block_of",
        "_block_size",
        "_first_child",
        "_hashes",
        "_insertions",
        "_next_sibling",
        "_parents",
        "_previous_sibling",
        "_roots",
        "_serials",
        "_tokens",
        "depths",
        "hits",
        "tenants",
    )

    def __init__(self, total: int, block_size: int) -> None:
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._hashes: list[bytes | None] = [None] * total
        self._tokens: list[bytes | None] = [None] * total
        self._parents: list[bytes | None] = [None] * total  # a hash: of the parent node or of a root
        self._above = array("i", [_NONE]) * total  # the parent node's block
        self._serials = array("Q", bytes(8 * total))  # 0: not in the index
        self._insertions = 0
        self._roots: dict[bytes, int] = {}  # root -> its most recent child
        self.depths: Final = array("I", bytes(4 * total))
        self.hits: Final = array("Q", bytes(8 * total))  # admissions that used a block since it entered
        self.tenants: Final[list[str]] = [""] * total
        # Children hang in a list, the most recent first, threaded through these.
        self._first_child = array("i", [_NONE]) * total
        self._next_sibling = array("i", [_NONE]) * total
        self._previous_sibling = array("i", [_NONE]) * total

    def __len__(self) -> int:
        return len(self._block_of)

    def hash_of(self, block: int) -> bytes | None:
        """Return the hash under which a block is known, or None where it is not in the index."""
        return self._hashes[block]

    def parent_of(self, block: int) -> bytes:
        """Return the hash that an indexed block hangs on: its parent node's or its root."""
        parent = self._parents[block]
        assert parent is not None
        return parent

    def node(self, block: int) -> Node:
        """Return the node of an indexed block, to go on from."""
        assert self._hashes[block] is not None
        return Node(block, self._serials[block])

    def filled(self, block: int) -> int:
        """Return how many tokens of an indexed block the index knows."""
        tokens = self._tokens[block]
        assert tokens is not None
        return len(tokens) // 4

    def above(self, block: int) -> int:
        """Return the parent node's block; negative where an indexed block hangs on a root."""
        return self._above[block]

    def entries(self, part: slice) -> tuple[list[bytes | None], list[bytes | None]]:
        """Return for each block of a part the hash by which it is known, and its tokens, 4 bytes each; None where it is not."""
        return self._hashes[part], self._tokens[part]

    def forest(self, *, copied: bool) -> Forest:
        """Return all nodes. Where they are not `copied`, what was returned is of use only until the index changes."""
        return Forest(
            hashes=self._hashes[:] if copied else self._hashes,
            parents=self._parents[:] if copied else self._parents,
            tokens=self._tokens[:] if copied else self._tokens,
            tenants=self.tenants[:] if copied else self.tenants,
            depths=self.depths[:] if copied else self.depths,
            hits=self.hits[:] if copied else self.hits,
            first_child=self._first_child[:] if copied else self._first_child,
            next_sibling=self._next_sibling[:] if copied else self._next_sibling,
            roots=tuple(self._roots.values()),
        )

    def match(self, lineage: Lineage, tokens: array[int], limit: int) -> Match:
        """Find the longest known prefix of `tokens[:limit]`: the unbroken run of whole blocks, then a part of one.

        A prompt shorter than a block is never matched: what could be saved is less than a block, and such prompts share little
        but their first token.
        """
        size = self._block_size
        blocks: list[int] = []
        above = _NONE
        for start in range(0, limit - size + 1, size):
            piece = tokens[start : start + size].tobytes()
            block = self._block_of.get(lineage.name(len(blocks), piece), _NONE)
            if block == _NONE or not self._holds(block, piece, above, lineage.root):
                break
            blocks.append(block)
            above = block
        tail, tail_tokens = _NONE, 0
        if len(tokens) >= size:
            start = len(blocks) * size
            tail, tail_tokens = self._best_child(above, lineage.root, tokens[start : min(limit, start + size)])
        return Match(tuple(blocks), tail, tail_tokens)

    def insert(self, block: int, name: bytes, above: Node | None, root: bytes, tokens: bytes, tenant: str) -> Node | None:
        """Let `block` stand for `tokens` after the node `above`, or after `root` where that is None.

        Returns the node to go on from. The first one wins: where another block has this content, that is its node, and `block`
        stays out of the index. None: `block` could not be found, because `above` is gone or other content has taken its name.
        """
        assert self._hashes[block] is None, f"block {block} is in the index already"
        if above is not None and self._serials[above.block] != above.serial:
            return None
        parent_block = _NONE if above is None else above.block
        if name in self._block_of:
            other = self._block_of[name]
            return self.node(other) if self._holds(other, tokens, parent_block, root) else None
        self._insertions += 1
        self._block_of[name] = block
        self._hashes[block] = name
        self._tokens[block] = tokens
        self._parents[block] = root if above is None else self._hashes[above.block]
        self._above[block] = parent_block
        self._serials[block] = self._insertions
        self.depths[block] = 0 if above is None else self.depths[above.block] + 1
        self.hits[block] = 0
        self.tenants[block] = tenant
        self._hang(block, parent_block, root)
        return self.node(block)

    def standing_on(self, block: int) -> list[int]:
        """Return an indexed block and all that stands on it, the deepest first, `block` last."""
        doomed = [block]
        for known in doomed:
            child = self._first_child[known]
            while child != _NONE:
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

    def _holds(self, block: int, tokens: bytes, above: int, root: bytes) -> bool:
        """Whether an indexed block has these tokens and hangs where it should: on the node `above`, or on `root`."""
        if self._tokens[block] != tokens or self._above[block] != above:
            return False
        return above != _NONE or self._parents[block] == root

    def _forget(self, block: int) -> None:
        name, parent, above = self._hashes[block], self._parents[block], self._above[block]
        assert name is not None
        assert parent is not None
        before, after = self._previous_sibling[block], self._next_sibling[block]
        if before != _NONE:
            self._next_sibling[before] = after
        elif above != _NONE:
            self._first_child[above] = after
        elif after != _NONE:
            self._roots[parent] = after
        else:
            del self._roots[parent]
        if after != _NONE:
            self._previous_sibling[after] = before
        self._next_sibling[block] = self._previous_sibling[block] = self._above[block] = _NONE
        del self._block_of[name]
        self._hashes[block] = self._tokens[block] = self._parents[block] = None
        self._serials[block] = 0

    def _hang(self, block: int, above: int, root: bytes) -> None:
        first = self._first(above, root)
        if above == _NONE:
            self._roots[root] = block
        else:
            self._first_child[above] = block
        self._next_sibling[block] = first
        if first != _NONE:
            self._previous_sibling[first] = block

    def _first(self, above: int, root: bytes) -> int:
        """Return the most recent child of a node, or of a root where `above` is none."""
        return self._roots.get(root, _NONE) if above == _NONE else self._first_child[above]

    def _children(self, above: int, root: bytes) -> Iterator[int]:
        child = self._first(above, root)
        while child != _NONE:
            yield child
            child = self._next_sibling[child]

    def _best_child(self, above: int, root: bytes, wanted: array[int]) -> tuple[int, int]:
        """Return the child that shares the most leading tokens with `wanted`, and how many; (-1, 0) where none does."""
        best, shared = _NONE, 0
        for looked_at, child in enumerate(self._children(above, root)):
            if looked_at == MAX_CHILDREN_COMPARED or shared == len(wanted):
                break
            known = array("I", self._tokens[child] or b"")
            length = min(len(known), len(wanted))
            if length <= shared:
                continue
            if known[:length] != wanted[:length]:
                length = next(i for i in range(length) if known[i] != wanted[i])
            if length > shared:
                best, shared = child, length
        return best, shared

    def check_invariants(self) -> int:
        """Check names, parents, depths and the threads. Returns how many checks were made.

        Raises:
            AssertionError: one does not hold.
        """
        hung = 0
        parents = [(_NONE, root) for root in self._roots] + [(block, name) for name, block in self._block_of.items()]
        for above, parent in parents:
            before = _NONE
            for child in self._children(above, parent):
                assert self._above[child] == above, f"block {child} hangs on a parent that is not its own"
                assert self._parents[child] == parent, f"block {child} has another parent's hash"
                assert self._previous_sibling[child] == before, f"the siblings of block {child} are torn"
                before = child
                hung += 1
        assert hung == len(self._block_of), f"{hung} blocks hang in the forest, {len(self._block_of)} are known"
        known = sum(1 for name in self._hashes if name is not None)
        assert known == len(self._block_of), f"{known} blocks have a hash, {len(self._block_of)} are known"
        for name, block in self._block_of.items():
            tokens, hangs_on = self._tokens[block], self._parents[block]
            assert tokens is not None
            assert hangs_on is not None
            assert self._hashes[block] == name
            assert block_hash(hangs_on, tokens) == name, f"block {block} has the wrong hash"
            assert 0 < len(tokens) // 4 <= self._block_size
            if len(tokens) // 4 < self._block_size:
                assert self._first_child[block] == _NONE, f"block {block} is a tail and has children"
            above = self._above[block]
            expected = 0 if above == _NONE else self.depths[above] + 1
            assert (above == _NONE) == (hangs_on in self._roots), f"the parent of block {block} is not known"
            assert self.depths[block] == expected, f"block {block} has the wrong depth"
            assert 0 < self._serials[block] <= self._insertions
        return 3 * hung + known + 8 * len(self._block_of)
