"""What the attention kernels share: products, looking into the cache through a table, one step of the online softmax.

Knows Triton's language; not tensors, grids or steps. Scores are in powers of two: the caller's scale has log2(e) in it.

A frame of layer l, from `layer_offset` on: for each KV head its K as [block_size][key_size], then its V as
[block_size][value_size]. So what one program reads of a block is one piece of memory.
"""

import triton
import triton.language as tl

#: Triton reads TRITON_INTERPRET once, when it is imported. Its interpreter multiplies 16-bit floats wrongly.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Which tokens of a tile a query row sees.
ALL = tl.constexpr(0)
BEFORE_END = tl.constexpr(1)
BY_POSITION = tl.constexpr(2)  # up to its own, and as far back as the window goes

# What peaks begin with: below every score, so that a row may have none but very low ones; finite, so that -inf - -inf does not
# arise where a row sees nothing of a tile. A score of -inf has a weight of 0; a row with no other comes to 0 / 0, which is NaN,
# as in every softmax.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def product(left: tl.tensor, right: tl.tensor, added: tl.tensor) -> tl.tensor:
    """Return left @ right + added in float32; float32 operands are not rounded to TF32."""
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, added, input_precision="ieee")


@triton.jit
def load_tile(
    start: tl.tensor,
    offsets: tl.tensor,
    stride: tl.tensor,
    seen: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ALL_SEEN: tl.constexpr,
) -> tl.tensor:
    """Load [rows, PADDED] from rows of SIZE elements; zero, and not read, where a row is not seen and behind its end."""
    columns = tl.arange(0, PADDED)
    places = start + offsets[:, None] + columns[None, :] * stride
    if ALL_SEEN and SIZE == PADDED:
        tile = tl.load(places)
    elif SIZE == PADDED:
        tile = tl.load(places, mask=seen[:, None], other=0.0)
    elif ALL_SEEN:
        tile = tl.load(places, mask=columns[None, :] < SIZE, other=0.0)
    else:
        tile = tl.load(places, mask=seen[:, None] & (columns[None, :] < SIZE), other=0.0)
    return tile


@triton.jit
def load_blocks(
    table: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """Return the block of each token of a tile; the table is not read from `end` on."""
    tokens = first + tl.arange(0, TOKENS)
    return tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh to float32's precision: near zero, where 1 - exp(-2|x|) has no digits left, by its series."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    power = tl.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2|x|)
    far = (1.0 - power) / (1.0 + power)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -far, far))


@triton.jit
def attend_tile(
    sums: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    blocks: tl.tensor,
    queries: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    positions: tl.tensor,
    head: tl.tensor,
    table: tl.tensor,
    frame_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor | None,
    window: tl.tensor | None,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    SEEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Take the tokens first .. first + TOKENS - 1 of a sequence into the online softmax of some query rows.

    Args:
        sums: [rows, VALUE_PADDED], the weighted values so far, relative to `peaks`.
        peaks: [rows], the highest score so far; LOWEST before there is one.
        totals: [rows], the sum of weights so far, relative to `peaks`.
        blocks: [TOKENS], the tile's blocks. Those of the next tile are asked for here and are the last result: so the table
            is never waited for, and the pipeline of K and V has one load in it and not two that depend on each other.
        queries: [rows, KEY_PADDED].
        first: the first token of the tile.
        end: no token from here on is read.
        positions: [rows], each row's own position.
        head: the pointer to this KV head of this layer, in the pool's first frame.
        table: the sequence's blocks.
        frame_stride: elements from one frame to the next.
        scale: of the products, with log2(e) in it; with `softcap`, divided by it instead.
        softcap: with log2(e) in it.
        window: how many positions a row sees.
        KEY_SIZE, VALUE_SIZE: elements of a token's K and V; PADDED: the next power of two, 16 at least.
        BLOCK_SIZE: tokens of a block.
        TOKENS: tokens of a tile; it need not be a block's.
        SEEN: see above.
    """
    tokens = first + tl.arange(0, TOKENS)
    seen = tokens < end
    upcoming = load_blocks(table, first + TOKENS, end, BLOCK_SIZE, TOKENS)
    frames = blocks.to(tl.int64) * frame_stride
    slots = tokens % BLOCK_SIZE
    keys = load_tile(head, frames + slots * KEY_SIZE, 1, seen, KEY_SIZE, KEY_PADDED, SEEN == ALL)
    scores = product(queries, tl.trans(keys), tl.zeros([queries.shape[0], TOKENS], tl.float32)) * scale
    if softcap is not None:
        scores = softcap * tanh(scores)
    if SEEN == BEFORE_END:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    if SEEN == BY_POSITION:
        visible = tokens[None, :] <= positions[:, None]
        if window is not None:
            visible = visible & (tokens[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peaks, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peaks - higher)
    # As the product takes them; the totals are of the same, so that rounding cancels where few tokens weigh much.
    weights = weights.to(head.dtype.element_ty)
    values = load_tile(head + BLOCK_SIZE * KEY_SIZE, frames + slots * VALUE_SIZE, 1, seen, VALUE_SIZE, VALUE_PADDED, SEEN == ALL)
    totals = totals * shrink + tl.sum(weights.to(tl.float32), 1)
    sums = product(weights, values, sums * shrink[:, None])
    return sums, higher, totals, upcoming


@triton.jit
def factors(peaks: tl.tensor, totals: tl.tensor, sinks: tl.tensor | None, exists: tl.tensor) -> tl.tensor:
    """Return what to multiply each row's sums with, once all tokens are in: 1 / total.

    With `sinks`, pointers to one more logit for each row that exists, which takes part in the softmax and has no value. One of
    -inf is none; one of inf or NaN makes the row NaN.
    """
    if sinks is None:
        factor = 1.0 / totals
    else:
        logits = tl.load(sinks, mask=exists, other=0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(peaks, logits)
        shrink = tl.exp2(peaks - higher)
        factor = shrink / (totals * shrink + tl.exp2(logits - higher))
    return factor
