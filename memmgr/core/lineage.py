"""What names content: a chain of hashes, one for each whole block of a sequence.

BLAKE2b over the parent's hash and the block's tokens, rooted in (model, tenant, salt), every field tagged and length-prefixed, so
that no two domains and no two splits of the same bytes can meet.

Knows tokens, not blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from struct import unpack
from typing import Final

#: Of a hash, in bytes. 128 bits: with comparison on top, collisions are a matter of speed, not of truth.
HASH_BYTES: Final = 16


def root_hash(model: str, tenant: str, salt: str) -> bytes:
    """Return the root of one domain: prefixes are shared only within it."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"kilburn.root")
    for tag, field in (b"m", model), (b"t", tenant), (b"s", salt):
        data = field.encode()
        digest.update(tag + len(data).to_bytes(8, "little") + data)
    return digest.digest()


_new_block_digest: Final = blake2b(
    digest_size=HASH_BYTES, person=b"kilburn.block"
).copy  # in half of the time that a new one takes


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the hash of a block: `parent` is its predecessor's or the root's, `tokens` are little-endian 32-bit ids."""
    digest = _new_block_digest()
    digest.update(b"".join((b"p", parent, _length_tag(len(tokens)), tokens)))
    return digest.digest()


@cache
def _length_tag(length: int) -> bytes:
    return b"k" + length.to_bytes(8, "little")


def pieces_of(tokens: array[int], first: int, end: int, size: int) -> tuple[bytes, ...]:
    """Return what blocks first .. end - 1 of `size` tokens each hold, as the index keeps it."""
    data = tokens[first * size : end * size].tobytes()
    if end - first == 1:
        return (data,)
    return unpack(f"{size * tokens.itemsize}s" * (end - first), data)  # in a third of the time that slices take


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

    def names_of(self, first: int, pieces: Sequence[bytes]) -> list[bytes]:
        """Return the names of the whole blocks from `first` on, which hold `pieces`; the blocks before them must have names."""
        names, end = self.names, first + len(pieces)
        if len(names) < end:
            name = self.parent(len(names))
            for piece in pieces[len(names) - first :]:
                name = block_hash(name, piece)
                names.append(name)
        return names[first:end]

    def fork(self, whole_blocks: int) -> Lineage:
        """Return a sequence's of its own that begins with the same so many whole blocks."""
        forked = Lineage(self.root, self.tenant)
        forked.names.extend(self.names[:whole_blocks])
        return forked
