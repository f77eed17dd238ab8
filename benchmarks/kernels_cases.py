"""What `benchmarks.kernels` measures, and how much memory that takes (pure).

Knows shapes, lengths and sizes; not tensors, backends or clocks.

The rule of memory: nothing that is measured may be in the cache. So calls go round over at least `ROTATION` times the last cache
level before they come to the same K and V again. A call reads one layer of one set of sequences; the next call reads the next
layer, and after the last layer comes the next set. Frames have `LAYERS` layers, whatever is used of them: each block of a layer
lies as far from the next as in a model's pool. Where the pool is a sparse mapping, the layers that are not used take no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: So many times the last cache level lie between two reads of the same bytes.
ROTATION: Final = 8

#: Of a frame.
LAYERS: Final = 32

#: Layers that are used even where one would do, so that two calls in a row are not on the same memory.
_LEAST_LAYERS: Final = 2

#: Of the pools, if nothing else is said.
BLOCK_SIZE: Final = 16

CHUNK: Final = 512

DECODE: Final = "decode"
PREFILL: Final = "prefill"
TABLE: Final = "table"
BLOCKS: Final = "blocks"
PRODUCTS: Final = "products"
PARTS: Final = (DECODE, PREFILL, TABLE, BLOCKS, PRODUCTS)

BLOCK_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, and the size of keys and values."""

    q_heads: int
    kv_heads: int
    size: int

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q_heads // self.kv_heads

    def __str__(self) -> str:
        return f"({self.q_heads}, {self.kv_heads}, {self.size})"


SHAPES: Final = (Heads(9, 3, 64), Heads(32, 8, 128), Heads(16, 16, 64))


@dataclass(frozen=True, slots=True)
class Case:
    """So many sequences alike: each computes `rows` rows, which are the last ones of its `tokens`."""

    part: str
    sequences: int
    rows: int
    tokens: int
    heads: Heads
    block_size: int = BLOCK_SIZE

    @property
    def name(self) -> str:
        """Return how people call it."""
        if self.part == PREFILL:
            return f"prefill {self.rows} on {self.tokens - self.rows} {self.heads}"
        block = f" block {self.block_size}" if self.part == BLOCKS else ""
        return f"{self.part} {self.sequences} x {self.tokens} {self.heads}{block}"

    @property
    def blocks(self) -> int:
        """Blocks of one sequence."""
        return -(-self.tokens // self.block_size)

    def read_bytes(self, itemsize: int) -> int:
        """Bytes of K and V that one call has to read in any case: those of all tokens, once."""
        return self.sequences * self.tokens * self.heads.kv_heads * self.heads.size * 2 * itemsize

    def layer_bytes(self, itemsize: int) -> int:
        """Bytes that the sequences' blocks take in one layer of the pool."""
        return self.sequences * self.blocks * self.block_size * self.heads.kv_heads * self.heads.size * 2 * itemsize


def decodes() -> list[Case]:
    """Return the decode cases."""
    return [
        Case(DECODE, sequences, 1, tokens, heads)
        for heads in SHAPES
        for sequences in (1, 8, 32, 64)
        for tokens in (128, 512, 2048, 8192)
    ]


def prefills() -> list[Case]:
    """Return the prefill chunks."""
    return [Case(PREFILL, 1, CHUNK, context + CHUNK, heads) for heads in SHAPES for context in (0, 2048, 8192)]


def tables() -> list[Case]:
    """Return the cases in which a scattered table is compared with one contiguous run."""
    return [
        Case(TABLE, sequences, 1, tokens, heads) for heads in SHAPES for sequences in (1, 8, 32) for tokens in (512, 2048, 8192)
    ]


def block_sizes() -> list[tuple[Case, ...]]:
    """Return one curve for each shape: the same sequences in blocks of all sizes."""
    curves = ((32, 512, SHAPES[0]), (8, 2048, SHAPES[1]), (16, 512, SHAPES[2]))
    return [
        tuple(Case(BLOCKS, sequences, 1, tokens, heads, block_size) for block_size in BLOCK_SIZES)
        for sequences, tokens, heads in curves
    ]


@dataclass(frozen=True, slots=True)
class Room:
    """What a case's tensors are: `layers` used of the `frame_layers` of each frame, `sets` of sequences, contiguous `copies`."""

    frame_layers: int
    layers: int
    sets: int
    copies: int
    bytes: int  # of all tensors together


class NoRoomError(Exception):
    """A case does not fit: the reason, for people."""


def rotation_bytes(cache_bytes: int) -> int:
    """Return how much lies between two reads of the same bytes, at least."""
    return ROTATION * cache_bytes


def room(
    case: Case, itemsize: int, cache_bytes: int, limit_bytes: int, *, pools: int = 1, peers: bool = True, sparse: bool = True
) -> Room:
    """Return how large a case's tensors are, so that the rule of memory is kept.

    There are `pools` pools and, where `peers`, contiguous copies and one call's gathered copy; `sparse`: what is not used of a
    frame takes no memory.

    Raises:
        NoRoomError: even the least takes more than the limit.
    """
    distance = rotation_bytes(cache_bytes)
    layer_bytes = case.layer_bytes(itemsize)
    sets = -(-distance // (LAYERS * layer_bytes))
    fewest = LAYERS if sets > 1 else -(-distance // layer_bytes)
    copies = -(-distance // case.read_bytes(itemsize)) if peers else 0
    rest = distance + (copies + peers) * case.read_bytes(itemsize)  # `distance`: what the plain read goes over
    for layers in sorted({max(fewest, _LEAST_LAYERS), fewest}, reverse=True):
        needed = rest + pools * sets * layers * layer_bytes
        if needed <= limit_bytes:
            return Room(LAYERS if sparse else layers, layers, sets, copies, needed)
    raise NoRoomError(f"it takes {needed / 2**30:.1f} GiB, and the limit is {limit_bytes / 2**30:.1f}")


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix: `outputs` rows of `inputs`, as `torch.nn.Linear` has it."""

    what: str
    inputs: int
    outputs: int

    @property
    def name(self) -> str:
        """Return how people call it."""
        return f"{self.what} {self.inputs} -> {self.outputs}"

    def bytes(self, itemsize: int) -> int:
        """Size of the matrix."""
        return self.inputs * self.outputs * itemsize


#: Of the default model, with q, k and v, and gate and up, in one matrix each; then of models of 7 to 8 billion parameters.
WEIGHTS: Final = (
    Weight("qkv", 576, 960),
    Weight("gate, up", 576, 3072),
    Weight("down", 1536, 576),
    Weight("head", 576, 49152),
    Weight("square", 4096, 4096),
    Weight("wide", 4096, 14336),
)

ROWS: Final = tuple(range(1, 9))


def weight_copies(weight: Weight, itemsize: int, cache_bytes: int, limit_bytes: int) -> int:
    """Return how many copies of a weight keep the rule of memory. There are two of each: row-major, and packed.

    Raises:
        NoRoomError: they take more than the limit.
    """
    copies = max(2, -(-rotation_bytes(cache_bytes) // weight.bytes(itemsize)))
    needed = rotation_bytes(cache_bytes) + 2 * copies * weight.bytes(itemsize)
    if needed > limit_bytes:
        raise NoRoomError(f"it takes {needed / 2**30:.1f} GiB, and the limit is {limit_bytes / 2**30:.1f}")
    return copies


def wanted(name: str, words: tuple[str, ...]) -> bool:
    """Tell whether a case's name has one of the words in it; where there is none, every case is wanted."""
    return not words or any(word in name for word in words)


def cache_size(text: str) -> int:
    """Return the bytes of a size as Linux writes it: `32768K`.

    Raises:
        ValueError: it is none.
    """
    text = text.strip()
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 0)
    return int(text[:-1]) * unit if unit else int(text)
