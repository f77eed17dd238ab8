"""Which tiles, warps and stages each kernel is run with: a few plain conditions, nothing measured at run time.

Knows sizes and limits of chips; not tensors. What each choice takes of registers and shared memory stands in
docs/kernels-triton.md, by `python -m benchmarks.triton_resources`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: `tl.dot` wants 16 rows, columns and elements at least.
_SMALLEST: Final = 16

#: Programs for each multiprocessor that a step's decodes are to be split into. Some three are there at a time; with more to
#: come, none stands idle for long when the others are at their last.
_PROGRAMS: Final = 8

#: Tokens of a split, at least: below, starting a program costs more than its reading.
_SPLIT_SHORTEST: Final = 128

#: At most, where a context allows it: above, longer splits save next to nothing, and the last ones are waited for longer.
_SPLIT_LONGEST: Final = 1024

#: Splits of a context, at most: the programs that join them read all their weights at once.
MAX_SPLITS: Final = 128

#: What the splits' results of one layer may take: 64 MiB. It is not part of the pool, and many short contexts beside a long one
#: leave most of it unused.
_PARTS_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Chip:
    """What the choices know of a GPU."""

    processors: int
    shared: int  # bytes of shared memory that a program may have
    from_shared: bool  # products take their operands from shared memory: Hopper, and Blackwell in data centres


#: Assumed where there is no GPU: an H100.
ASSUMED: Final = Chip(processors=132, shared=227 * 1024, from_shared=True)


@dataclass(frozen=True, slots=True)
class Tile:
    """How an attention kernel is run: `rows` of queries against `tokens` at a time."""

    rows: int
    tokens: int
    warps: int
    stages: int


def padded(size: int) -> int:
    """Return the next power of two: the sizes that Triton's tensors have."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())


def decode_tile(group: int, size: int, itemsize: int) -> Tile:
    """Return the tile for decoding with `group` query heads for each KV head.

    Args:
        group: query heads for each KV head.
        size: elements of a key or of a value, the larger, padded.
        itemsize: bytes of an element of the cache.
    """
    # A tile of K or of V takes 16 KiB: what several of them in flight on each multiprocessor need to keep the memory busy.
    tokens = min(128, max(_SMALLEST, 16 * 1024 // (size * itemsize)))
    rows = 16 if group <= 16 or itemsize == 4 else 32
    # Four warps would share 256 elements in registers that just do, or just do not.
    return Tile(rows, tokens, warps=8 if size > 128 and itemsize == 2 else 4, stages=3)


def prefill_tile(size: int, itemsize: int, chip: Chip) -> Tile:
    """Return the tile for prefilling; see `decode_tile`."""
    if itemsize == 4:
        # Products of float32 run on the ordinary units, and keep both operands in registers.
        if size <= 64:
            return Tile(32, 32, warps=4, stages=1)
        return Tile(32, 16, warps=8, stages=1) if size <= 128 else Tile(16, 16, warps=4, stages=1)
    if size > 128:
        return Tile(64, 32, warps=8, stages=3 if chip.shared >= 128 * 1024 else 2)
    # Where operands go by way of registers, 64 tokens of 128 elements would fill those up.
    return Tile(128, 64 if size <= 64 or chip.from_shared else 32, warps=8, stages=3)


def split_tokens(seen: Sequence[int], programs_each: int, row_bytes: int, chip: Chip) -> int:
    """Return how many tokens a split has: a power of two.

    Args:
        seen: tokens that each decode attends to.
        programs_each: programs that each split of a decode takes.
        row_bytes: what the result of one split of one decode takes.
        chip: the device.
    """
    wanted = sum(seen) * programs_each // (chip.processors * _PROGRAMS)
    most = max(1, min(MAX_SPLITS, _PARTS_BYTES // (len(seen) * row_bytes)))
    longest = max(seen)
    tokens = _SPLIT_SHORTEST
    while (tokens < wanted and tokens < _SPLIT_LONGEST) or tokens * most < longest:
        tokens *= 2
    return tokens
