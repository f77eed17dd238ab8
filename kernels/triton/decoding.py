"""Attention of one row for each sequence: a context split over programs, and what joins the parts again.

Knows Triton's language; how many splits there are, and of how many tokens, is decided in `launches`.

All query heads of a KV head are the rows of one product, so that K and V are loaded once for all of them. A product has at least
16 rows; what is missing in a group is padding. That wastes products, of which there are plenty, and no memory traffic.
"""

import triton
import triton.language as tl

from kernels.triton.common import BEFORE_END, LOWEST, attend_tile, factors, load_blocks, load_tile


@triton.jit(do_not_specialize=["table_stride", "split_tokens", "window"])
def decode(
    output: tl.tensor,
    part_sums: tl.tensor | None,
    part_peaks: tl.tensor | None,
    part_totals: tl.tensor | None,
    queries: tl.tensor,
    frames: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
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
    split_tokens: tl.tensor,
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
    """Attend with ROWS heads of one group of one sequence to one split of its context.

    Grid: (KV heads * tiles of a group, splits, sequences): neighbours read neighbouring pieces of the same frames. Where the
    context ends before the split there is nothing to do.

    Args:
        output: [rows, q_heads, VALUE_SIZE], where there is one split.
        part_sums: [sequences, splits, q_heads, VALUE_SIZE] float32, where there are more; else None.
        part_peaks, part_totals: [sequences, splits, q_heads] float32, likewise.
    """
    tiles: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(0) // tiles
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    context = tl.load(contexts + sequence)
    start = split * split_tokens
    if window is not None:
        start += tl.maximum(context - window, 0)
    if start >= context:
        return
    end = tl.minimum(start + split_tokens, context)

    members = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    exists = members < GROUP
    heads = kv_head * GROUP + members
    group = load_tile(
        queries + sequence * row_stride, heads.to(tl.int64) * head_stride, query_stride, exists, KEY_SIZE, KEY_PADDED, False
    )
    head = frames + layer_offset + kv_head.to(tl.int64) * (BLOCK_SIZE * (KEY_SIZE + VALUE_SIZE))
    table = tables + sequence * table_stride
    sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    peaks = tl.full([ROWS], LOWEST, tl.float32)
    totals = tl.zeros([ROWS], tl.float32)
    blocks = load_blocks(table, start, end, BLOCK_SIZE, TOKENS)
    for first in range(start, end, TOKENS):
        sums, peaks, totals, blocks = attend_tile(
            sums, peaks, totals, blocks, group, first, end, members, head, table, frame_stride, scale, softcap, window,
            KEY_SIZE, VALUE_SIZE, KEY_PADDED, VALUE_PADDED, BLOCK_SIZE, TOKENS, BEFORE_END,
        )  # fmt: skip

    columns = tl.arange(0, VALUE_PADDED)
    stored = exists[:, None] & (columns[None, :] < VALUE_SIZE)
    if part_sums is None:
        if sinks is not None:
            sinks += heads
        factor = factors(peaks, totals, sinks, exists)
        places = (sequence * (KV_HEADS * GROUP) + heads)[:, None] * VALUE_SIZE + columns[None, :]
        tl.store(output + places, (sums * factor[:, None]).to(output.dtype.element_ty), mask=stored)
    else:
        parts = (sequence * tl.num_programs(1) + split) * (KV_HEADS * GROUP) + heads
        tl.store(part_sums + parts[:, None] * VALUE_SIZE + columns[None, :], sums, mask=stored)
        tl.store(part_peaks + parts, peaks, mask=exists)
        tl.store(part_totals + parts, totals, mask=exists)


@triton.jit(do_not_specialize=["splits", "split_tokens", "window"])
def join(
    output: tl.tensor,
    part_sums: tl.tensor,
    part_peaks: tl.tensor,
    part_totals: tl.tensor,
    contexts: tl.tensor,
    sinks: tl.tensor | None,
    window: tl.tensor | None,
    splits: tl.tensor,
    split_tokens: tl.tensor,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Join the splits of one query head of one sequence, SPLITS at a time. Grid: (q_heads, sequences).

    What was not written, because the context ends before, is not read either.
    """
    head = tl.program_id(0)
    q_heads = tl.num_programs(0)
    sequence = tl.program_id(1).to(tl.int64)
    seen = tl.load(contexts + sequence)
    if window is not None:
        seen = tl.minimum(seen, window)
    count = (seen + split_tokens - 1) // split_tokens
    own = sequence * splits * q_heads + head
    every = tl.arange(0, MAX_SPLITS)
    peaks = tl.load(part_peaks + own + every * q_heads, mask=every < count, other=float("-inf"))
    totals = tl.load(part_totals + own + every * q_heads, mask=every < count, other=0.0)
    peak = tl.max(peaks, 0)
    total = tl.sum(totals * tl.exp2(peaks - peak), 0)
    if sinks is not None:
        sinks += head
    factor = factors(peak, total, sinks, head >= 0)

    columns = tl.arange(0, VALUE_PADDED)
    sums = tl.zeros([VALUE_PADDED], tl.float32)
    for first in range(0, count, SPLITS):
        parts = first + tl.arange(0, SPLITS)
        there = parts < count
        places = own + parts.to(tl.int64) * q_heads
        weights = tl.exp2(tl.load(part_peaks + places, mask=there, other=float("-inf")) - peak)
        tile = load_tile(part_sums, places * VALUE_SIZE, 1, there, VALUE_SIZE, VALUE_PADDED, False)
        sums += tl.sum(tile * weights[:, None], 0)
    places = (sequence * q_heads + head) * VALUE_SIZE + columns
    tl.store(output + places, (sums * factor).to(output.dtype.element_ty), mask=columns < VALUE_SIZE)
