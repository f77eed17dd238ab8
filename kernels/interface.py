"""What every attention backend does, in which words, on which tensors.

Knows shapes, strides and the layout of one step's rows; not how anything is computed, and nothing of models, slots or plans.

The words:

    frame     one physical block: one contiguous piece of memory with K and V of all layers for `block_size` tokens
    table     a sequence's blocks, in the order of its tokens: token `p` lies in block `table[p // block_size]`
    row       one token that this step computes
    context   the tokens of a sequence that are in the cache once this step's rows are written
    decode    a sequence with one row in this step; the others are prefill chunks
    scratch   the last frame: takes the writes of padding rows, and pads tables; never read for a result

A slot of a frame that was never written may hold anything, NaN among it, and so may whatever lies outside a sequence's context:
a backend never multiplies with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K and V of one token in one layer: `kv_heads` keys of `key_size` and values of `value_size` elements."""

    kv_heads: int
    key_size: int
    value_size: int

    @property
    def token_elements(self) -> int:
        """Elements that one token takes in this layer."""
        return self.kv_heads * (self.key_size + self.value_size)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a frame has to hold."""

    layers: tuple[LayerShape, ...]
    block_size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """How a backend lays a frame out. For one shape and dtype, `name` changes whenever the meaning of a frame's bytes does."""

    name: str
    elements: int  # of the cache's dtype

    def frame_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of one frame."""
        return self.elements * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KvCache:
    """The frames of one pool, scratch last. `frames` is [blocks + 1, elements], contiguous."""

    shape: CacheShape
    frames: Tensor

    @property
    def scratch(self) -> int:
        """The number of the scratch block."""
        return self.frames.shape[0] - 1


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, sequence by sequence, decodes first.

    Sequence `s` has the rows `starts[s] .. starts[s + 1] - 1`; its last row is token `context_lengths[s] - 1`.
    """

    decodes: int  # the first so many sequences have one row each
    query_lengths: tuple[int, ...]  # rows of each sequence, at least 1
    context_lengths: tuple[int, ...]  # each at least its query length
    tables: Tensor  # [sequences, width] int32, on the cache's device; padded with the scratch block
    write_slots: Tensor  # [rows] int64: block * block_size + offset of each row, no two alike but in the scratch block


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How one layer attends, the same at every step.

    A row at position p sees the positions max(0, p - window + 1) .. p of its own sequence. Its scores are
    `scale * q.k`, then `softcap * tanh(score / softcap)`; `sinks`, one logit for each query head, take part in the softmax
    and have no value.

    Scores and sinks may be any finite numbers up to 2e38, be they all far below zero. One of -inf has a weight of 0, and a sink
    of -inf is none at all. Where a score or a sink is inf or NaN, or all are -inf, the row is NaN: it has no softmax.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [query heads]

    def __post_init__(self) -> None:
        """Refuse what no model means.

        Raises:
            ValueError: a window sees nothing, or a cap is not above zero.
        """
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} sees nothing")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"a soft-cap of {self.softcap} is not above 0")


PreparedT = TypeVar("PreparedT")


class AttentionBackend(Protocol[PreparedT]):
    """Reads and writes frames. Query heads are a multiple of KV heads: query head h reads KV head h // (q_heads // kv_heads).

    `prepare` is called once a step; what it returns is handed to the calls for each layer of that step.
    """

    @property
    def name(self) -> str:
        """The name that --attention knows."""

    def layout(self, shape: CacheShape) -> FrameLayout:
        """Return how this backend lays out a frame of this shape."""

    def prepare(self, cache: KvCache, rows: StepRows) -> PreparedT:
        """Work out once what all layers of a step need: indexes, masks, splits."""

    def write_kv(self, prepared: PreparedT, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the rows' K [rows, kv_heads, key_size] and V [rows, kv_heads, value_size], of any strides."""

    def paged_attention(self, prepared: PreparedT, layer: int, queries: Tensor, rule: AttentionRule) -> Tensor:
        """Attend from queries [rows, q_heads, key_size], of any strides, whose K and V are already written.

        Returns [rows, q_heads, value_size], contiguous, in the queries' dtype; the softmax is computed in float32.
        """

    def copy_blocks(self, cache: KvCache, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole frames, (source, destination); no block is both, and no destination appears twice."""

    def swap_blocks(self, source: Tensor, destination: Tensor, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole frames between two tensors of frames, each [frames, elements], of the same width and dtype.

        `moves` are (index in source, index in destination), no destination twice. One of the two may be on the host while the
        other is on a device; then it is pinned, and the copies are in order with the device's other work: they may still be
        under way when this returns.
        """
