"""From tensors to a kernel with its grid and arguments. Pure: the backend starts what comes out, others compile and look at it.

Knows the layout of frames, strides and tiles; not devices. Nothing here reads a tensor.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kernels.interface import AttentionRule, CacheShape, LayerShape
from kernels.triton.decoding import decode, join
from kernels.triton.prefilling import prefill
from kernels.triton.storing import copy, write
from kernels.triton.tiles import MAX_SPLITS, Chip, decode_tile, padded, prefill_tile

_LOG2_E: Final = math.log2(math.e)

#: Elements of K that a program writes: 16 bytes for each of its 128 threads.
_WRITTEN: Final = 1024

#: Words that a program copies.
_COPIED: Final = 2048

#: Partial results that are joined at a time.
_JOINED: Final = 16


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, ready to run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Return how it is compiled. Products and sums are fused: said here, as Triton's default is about to change."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def start(self) -> None:
        """Run it on the current stream."""
        self.kernel[self.grid](**self.arguments, **self.options)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a pool, and where its sequences are: what all launches for it have in common."""

    frames: Tensor  # [blocks + 1, elements]
    shape: CacheShape
    number: int
    tables: Tensor  # [sequences, width] int32
    contexts: Tensor  # [sequences] int32
    chip: Chip

    @property
    def own(self) -> LayerShape:
        """Return the layer's shape."""
        return self.shape.layers[self.number]

    @property
    def size(self) -> int:
        """Return the larger of a key's size and a value's, padded."""
        return padded(max(self.own.key_size, self.own.value_size))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that say where a token lies."""
        before = sum(layer.token_elements for layer in self.shape.layers[: self.number])
        return {
            "frames": self.frames,
            "frame_stride": self.frames.stride(0),
            "layer_offset": self.shape.block_size * before,
            "KV_HEADS": self.own.kv_heads,
            "KEY_SIZE": self.own.key_size,
            "VALUE_SIZE": self.own.value_size,
            "KEY_PADDED": padded(self.own.key_size),
            "VALUE_PADDED": padded(self.own.value_size),
            "BLOCK_SIZE": self.shape.block_size,
        }

    def attention(self, output: Tensor, queries: Tensor, rule: AttentionRule) -> dict[str, Any]:
        """Return the arguments of either attention kernel but its tile."""
        scale, softcap = rule.scale * _LOG2_E, None
        if rule.softcap is not None:
            scale, softcap = rule.scale / rule.softcap, rule.softcap * _LOG2_E
        return {
            **self.arguments(),
            "output": output,
            "queries": queries,
            "tables": self.tables,
            "contexts": self.contexts,
            "sinks": rule.sinks,
            "scale": scale,
            "softcap": softcap,
            "window": rule.window,
            "row_stride": queries.stride(0),
            "head_stride": queries.stride(1),
            "query_stride": queries.stride(2),
            "table_stride": self.tables.stride(0),
            "GROUP": queries.shape[1] // self.own.kv_heads,
        }


def tiles_of_group(layer: Layer, q_heads: int) -> int:
    """Return how many programs each split of a decode takes."""
    group = q_heads // layer.own.kv_heads
    return layer.own.kv_heads * -(-group // decode_tile(group, layer.size, layer.frames.itemsize).rows)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the splits of a step's decodes come to, until they are joined."""

    sums: Tensor  # [sequences, splits, q_heads, value_size] float32
    peaks: Tensor  # [sequences, splits, q_heads] float32
    totals: Tensor  # likewise


def decoding(
    layer: Layer, output: Tensor, queries: Tensor, rule: AttentionRule, decodes: int, split: int, parts: Parts | None
) -> list[Launch]:
    """Return the launches for the first `decodes` rows: one where `parts` is None, else another that joins them."""
    arguments = layer.attention(output, queries, rule)
    q_heads, value_size = queries.shape[1], layer.own.value_size
    tile = decode_tile(arguments["GROUP"], layer.size, layer.frames.itemsize)
    splits = 1 if parts is None else parts.peaks.shape[1]
    given = {} if parts is None else {"part_sums": parts.sums, "part_peaks": parts.peaks, "part_totals": parts.totals}
    first = Launch(
        decode,
        (tiles_of_group(layer, q_heads), splits, decodes),
        {
            "part_sums": None,
            "part_peaks": None,
            "part_totals": None,
            **arguments,
            **given,
            "split_tokens": split,
            "ROWS": tile.rows,
            "TOKENS": tile.tokens,
        },
        tile.warps,
        tile.stages,
    )
    if parts is None:
        return [first]
    joined = {
        **given,
        "output": output,
        "contexts": layer.contexts,
        "sinks": rule.sinks,
        "window": rule.window,
        "splits": splits,
        "split_tokens": split,
        "VALUE_SIZE": value_size,
        "VALUE_PADDED": padded(value_size),
        "MAX_SPLITS": MAX_SPLITS,
        "SPLITS": _JOINED,
    }
    return [first, Launch(join, (q_heads, decodes), joined)]


def prefilling(
    layer: Layer, output: Tensor, queries: Tensor, rule: AttentionRule, decodes: int, chunks: int, starts: Tensor
) -> Launch:
    """Return the launch for the chunks, which are all rows but the first `decodes`.

    Args:
        starts: [sequences + 1] int32, each sequence's first row.
    """
    arguments = layer.attention(output, queries, rule)
    tile = prefill_tile(layer.size, layer.frames.itemsize, layer.chip)
    # See `first_tile`: enough for any chunks of so many rows.
    tiles = (queries.shape[0] - decodes) * arguments["GROUP"] // tile.rows + chunks
    return Launch(
        prefill,
        (tiles, layer.own.kv_heads),
        {**arguments, "starts": starts, "decodes": decodes, "chunks": chunks, "ROWS": tile.rows, "TOKENS": tile.tokens},
        tile.warps,
        tile.stages,
    )


def writing(layer: Layer, keys: Tensor, values: Tensor, slots: Tensor) -> Launch:
    """Return the launch that stores K and V of all rows."""
    pairs = keys.shape[0] * keys.shape[1]
    each = max(1, _WRITTEN // layer.size)
    return Launch(
        write,
        (-(-pairs // each),),
        {
            **layer.arguments(),
            "keys": keys,
            "values": values,
            "slots": slots,
            "pairs": pairs,
            "key_row_stride": keys.stride(0),
            "key_head_stride": keys.stride(1),
            "key_stride": keys.stride(2),
            "value_row_stride": values.stride(0),
            "value_head_stride": values.stride(1),
            "value_stride": values.stride(2),
            "PAIRS": each,
        },
    )


def copying(frames: Tensor, copies: Tensor) -> Launch:
    """Return the launch that copies frames. `copies` is [copies, 2] int64, sources and destinations."""
    words = as_words(frames)
    grid = (copies.shape[0], -(-words.shape[1] // _COPIED))
    return Launch(copy, grid, {"frames": words, "copies": copies, "words": words.shape[1], "WORDS": _COPIED})


def as_words(frames: Tensor) -> Tensor:
    """View frames as [blocks + 1, words] of the widest integers that fit a frame."""
    size = frames.shape[1] * frames.itemsize
    for word in (torch.int64, torch.int32, torch.int16):
        if size % word.itemsize == 0 and frames.storage_offset() * frames.itemsize % word.itemsize == 0:
            return frames.view(word)
    raise AssertionError("every dtype of a cache has two bytes or four")
