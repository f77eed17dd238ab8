"""Attention of prefill chunks: tiles over the query rows of one KV head's whole group, causal, behind what is in the cache.

Knows Triton's language; how many tiles there are at most is worked out in `launches`.

A chunk's queries for one KV head are one list of rows, token by token, the group's heads side by side. A tile is ROWS of them
that follow each other, wherever a token begins: no ratio of heads wastes a row, and a group may be larger than a tile.
"""

import triton
import triton.language as tl

from kernels.triton.common import ALL, BY_POSITION, LOWEST, attend_tile, factors, load_blocks, load_tile


@triton.jit
def chunk_of(tile: tl.tensor, starts: tl.tensor, chunks: tl.tensor, GROUP: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """Return which chunk a tile belongs to: the last one whose first tile is not behind it, by bisection."""
    low = 0
    high = chunks
    while high - low > 1:
        middle = (low + high) // 2
        if first_tile(middle, starts, GROUP, ROWS) <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def first_tile(chunk: tl.tensor, starts: tl.tensor, GROUP: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """Return the first tile of a chunk.

    With the rows before it rounded down, and one tile more for each chunk before it, every chunk has as many tiles as it needs
    or one more, and the grid is known from the number of rows and chunks alone.
    """
    rows = (tl.load(starts + chunk) - tl.load(starts)).to(tl.int64) * GROUP
    return (rows // ROWS).to(tl.int32) + chunk


@triton.jit(do_not_specialize=["table_stride", "decodes", "chunks", "window"])
def prefill(
    output: tl.tensor,
    queries: tl.tensor,
    frames: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    starts: tl.tensor,
    sinks: tl.tensor | None,
    scale: tl.tensor,
    softcap: tl.tensor | None,
    window: tl.tensor | None,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    frame_stride: tl.tensor,
    layer_offset: tl.tensor,
    decodes: tl.tensor,
    chunks: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Attend with one tile of rows. Grid: (tiles, KV heads), the last tiles first: they see the most.

    Args:
        contexts: [sequences], tokens in the cache.
        starts: [sequences + 1], each sequence's first row.
        decodes: how many sequences come before the chunks.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    starts += decodes
    chunk = chunk_of(tile, starts, chunks, GROUP, ROWS)
    first_row = tl.load(starts + chunk)
    count = tl.load(starts + chunk + 1) - first_row
    begin = (tile - first_tile(chunk, starts, GROUP, ROWS)) * ROWS  # in the chunk's list of rows
    if begin >= count * GROUP:
        return

    places = begin + tl.arange(0, ROWS)
    exists = places < count * GROUP
    tokens = tl.minimum(places // GROUP, count - 1)  # what exists no more sees what the last row sees: no softmax is empty
    rows = first_row.to(tl.int64) + tokens
    heads = kv_head * GROUP + places % GROUP
    group = load_tile(
        queries, rows * row_stride + heads.to(tl.int64) * head_stride, query_stride, exists, KEY_SIZE, KEY_PADDED, False
    )
    past = tl.load(contexts + decodes + chunk) - count
    positions = past + tokens
    nearest = past + begin // GROUP  # the first row's position
    end = past + (tl.minimum(begin + ROWS, count * GROUP) - 1) // GROUP + 1  # behind the last row's

    head = frames + layer_offset + kv_head.to(tl.int64) * (BLOCK_SIZE * (KEY_SIZE + VALUE_SIZE))
    table = tables + (decodes + chunk).to(tl.int64) * table_stride
    sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    peaks = tl.full([ROWS], LOWEST, tl.float32)
    totals = tl.zeros([ROWS], tl.float32)
    if window is None:
        # All rows see all of these tiles.
        start = (nearest + 1) // TOKENS * TOKENS
        blocks = load_blocks(table, 0, start, BLOCK_SIZE, TOKENS)
        for first in range(0, start, TOKENS):
            sums, peaks, totals, blocks = attend_tile(
                sums, peaks, totals, blocks, group, first, start, positions, head, table, frame_stride, scale, softcap,
                window, KEY_SIZE, VALUE_SIZE, KEY_PADDED, VALUE_PADDED, BLOCK_SIZE, TOKENS, ALL,
            )  # fmt: skip
    else:
        start = tl.maximum(nearest - window + 1, 0)
    blocks = load_blocks(table, start, end, BLOCK_SIZE, TOKENS)
    for first in range(start, end, TOKENS):
        sums, peaks, totals, blocks = attend_tile(
            sums, peaks, totals, blocks, group, first, end, positions, head, table, frame_stride, scale, softcap, window,
            KEY_SIZE, VALUE_SIZE, KEY_PADDED, VALUE_PADDED, BLOCK_SIZE, TOKENS, BY_POSITION,
        )  # fmt: skip

    if sinks is not None:
        sinks += heads
    factor = factors(peaks, totals, sinks, exists)
    columns = tl.arange(0, VALUE_PADDED)
    stored = exists[:, None] & (columns[None, :] < VALUE_SIZE)
    targets = (rows * (KV_HEADS * GROUP) + heads)[:, None] * VALUE_SIZE + columns[None, :]
    tl.store(output + targets, (sums * factor[:, None]).to(output.dtype.element_ty), mask=stored)
