"""Writing K and V of a step's rows into their slots, and copying frames.

Knows Triton's language and the layout of a frame (see `common`); not steps or plans.
"""

import triton
import triton.language as tl

from kernels.triton.common import load_tile


@triton.jit(do_not_specialize=["pairs"])
def write(
    frames: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    pairs: tl.tensor,
    key_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    key_stride: tl.tensor,
    value_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_stride: tl.tensor,
    frame_stride: tl.tensor,
    layer_offset: tl.tensor,
    KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Store K and V of PAIRS pairs of a row and a KV head. Grid: (all pairs / PAIRS, rounded up)."""
    own = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    exists = own < pairs
    rows = own // KV_HEADS
    heads = own % KV_HEADS
    slot = tl.load(slots + rows, mask=exists, other=0)
    inside = slot % BLOCK_SIZE
    places = slot // BLOCK_SIZE * frame_stride + layer_offset + heads * (BLOCK_SIZE * (KEY_SIZE + VALUE_SIZE))

    key = load_tile(keys, rows * key_row_stride + heads * key_head_stride, key_stride, exists, KEY_SIZE, KEY_PADDED, False)
    columns = tl.arange(0, KEY_PADDED)
    targets = (places + inside * KEY_SIZE)[:, None] + columns[None, :]
    tl.store(frames + targets, key, mask=exists[:, None] & (columns[None, :] < KEY_SIZE))

    value = load_tile(
        values, rows * value_row_stride + heads * value_head_stride, value_stride, exists, VALUE_SIZE, VALUE_PADDED, False
    )
    columns = tl.arange(0, VALUE_PADDED)
    targets = (places + BLOCK_SIZE * KEY_SIZE + inside * VALUE_SIZE)[:, None] + columns[None, :]
    tl.store(frames + targets, value, mask=exists[:, None] & (columns[None, :] < VALUE_SIZE))


@triton.jit
def copy(frames: tl.tensor, copies: tl.tensor, words: tl.tensor, WORDS: tl.constexpr) -> None:
    """Copy WORDS words of one frame. Grid: (copies; a frame's words / WORDS, rounded up).

    Args:
        frames: [frames, words] of an integer type.
        copies: [copies, 2] int64, source and destination.
        words: of one frame.
    """
    pair = copies + tl.program_id(0) * 2
    places = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = places < words
    word = tl.load(frames + tl.load(pair) * words + places, mask=inside)
    tl.store(frames + tl.load(pair + 1) * words + places, word, mask=inside)
