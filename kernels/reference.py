"""The reference backend: plain torch, on any device, for any heads, sizes, blocks and dtypes. The other backends' oracle.

It gathers a sequence's K and V into contiguous copies and computes in float32. Decodes are computed together, padded to the
longest context among them; prefill chunks one sequence at a time.

What is gathered for a sequence are the positions that one of its rows sees, and nothing else: padding repeats the last of them.
So a slot outside of the context, or outside of every row's window, is never read at all.

A frame of layer l: K as [kv_heads][block_size][key_size], then V as [kv_heads][block_size][value_size]; then layer l + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from kernels.interface import AttentionRule, CacheShape, FrameLayout, KvCache, LayerShape, StepRows

#: Float32 numbers in one temporary (gathered keys, or scores): 64 MiB. More is split.
_MAX_ELEMENTS: Final = 16 * 1024 * 1024

#: Decodes are padded to at most twice their context, or to twice this, below which another group costs more than the padding.
_SHORT: Final = 128


@dataclass(frozen=True, slots=True)
class _Gather:
    """Where the keys of some sequences lie, [sequences, width]: positions first .. context - 1, then the last one repeated."""

    blocks: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Decodes that are computed together: their sequences, which are their rows as well, and their gather."""

    sequences: Tensor  # [n] int64
    gather: _Gather
    hidden: Tensor | None  # [n, 1, 1, width]: the repeated ones, where there are any


@dataclass(slots=True)
class PreparedStep:
    """A step's indexes. Those of the gathers depend on the layer's window and shape, and are made at their first use."""

    cache: KvCache
    rows: StepRows
    write_blocks: Tensor
    write_offsets: Tensor
    views: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    decodes: dict[tuple[int | None, LayerShape], list[_Decodes]] = field(default_factory=dict)
    chunks: dict[tuple[int, int], _Gather] = field(default_factory=dict)


class ReferenceBackend:
    """See the module."""

    name = "reference"

    def layout(self, shape: CacheShape) -> FrameLayout:
        """Return the frame's size: exactly K and V of all layers."""
        return FrameLayout("layer-kv-head-token/1", shape.block_size * sum(layer.token_elements for layer in shape.layers))

    def prepare(self, cache: KvCache, rows: StepRows) -> PreparedStep:
        """Split the write slots; the rest is made as layers ask for it."""
        block_size = cache.shape.block_size
        return PreparedStep(
            cache=cache,
            rows=rows,
            write_blocks=rows.write_slots // block_size,
            write_offsets=rows.write_slots % block_size,
        )

    def write_kv(self, prepared: PreparedStep, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store each row in its slot."""
        cached_keys, cached_values = _views(prepared, layer)
        cached_keys[prepared.write_blocks, :, prepared.write_offsets] = keys
        cached_values[prepared.write_blocks, :, prepared.write_offsets] = values

    def paged_attention(self, prepared: PreparedStep, layer: int, queries: Tensor, rule: AttentionRule) -> Tensor:
        """Attend: decodes in groups that fit the limit, chunks one by one in groups of rows that fit it."""
        shape = prepared.cache.shape.layers[layer]
        output = queries.new_empty(queries.shape[0], queries.shape[1], shape.value_size)
        for group in _decode_groups(prepared, shape, rule.window):
            output[group.sequences] = _attend_decodes(prepared, layer, queries[group.sequences], group, rule)
        row = prepared.rows.decodes
        for sequence in range(prepared.rows.decodes, len(prepared.rows.query_lengths)):
            end = row + prepared.rows.query_lengths[sequence]
            _attend_chunk(prepared, layer, sequence, queries[row:end], output[row:end], rule)
            row = end
        return output

    def copy_blocks(self, cache: KvCache, copies: Sequence[tuple[int, int]]) -> None:
        """Copy frame by frame: no temporary of their sum."""
        for source, destination in copies:
            cache.frames[destination].copy_(cache.frames[source])

    def swap_blocks(self, source: Tensor, destination: Tensor, moves: Sequence[tuple[int, int]]) -> None:
        """Copy frame by frame, without waiting where one side is on the host."""
        for index, place in moves:
            destination[place].copy_(source[index], non_blocking=True)


def _views(prepared: PreparedStep, layer: int) -> tuple[Tensor, Tensor]:
    """Return K and V of one layer as [blocks, kv_heads, block_size, size], strided over the frames."""
    found = prepared.views.get(layer)
    if found is None:
        shape, frames = prepared.cache.shape, prepared.cache.frames
        own, block_size = shape.layers[layer], shape.block_size
        offset = int(frames.storage_offset()) + block_size * sum(before.token_elements for before in shape.layers[:layer])
        stride = frames.stride(0)

        def view(size: int, at: int) -> Tensor:
            extent = (frames.shape[0], own.kv_heads, block_size, size)
            return frames.as_strided(extent, (stride, block_size * size, size, 1), at)

        found = (view(own.key_size, offset), view(own.value_size, offset + block_size * own.kv_heads * own.key_size))
        prepared.views[layer] = found
    return found


def _gather(prepared: PreparedStep, sequences: list[int], first: list[int]) -> _Gather:
    """Index the positions from `first` to the end of each sequence's context."""
    tables, block_size = prepared.rows.tables, prepared.cache.shape.block_size
    contexts = [prepared.rows.context_lengths[sequence] for sequence in sequences]
    width = max(context - start for context, start in zip(contexts, first, strict=True))
    starts, last, members = torch.tensor(
        [first, [context - 1 for context in contexts], sequences], dtype=torch.int64, device=tables.device
    )
    positions = torch.minimum(starts[:, None] + torch.arange(width, device=tables.device), last[:, None])
    blocks = tables[members[:, None], positions // block_size].long()
    return _Gather(blocks, positions % block_size)


def _decode_groups(prepared: PreparedStep, shape: LayerShape, window: int | None) -> list[_Decodes]:
    """Return the decodes in groups of like contexts, each group's keys within the limit."""
    groups = prepared.decodes.get((window, shape))
    if groups is None:
        groups = []
        seen = [_seen(context, window) for context in prepared.rows.context_lengths[: prepared.rows.decodes]]
        order = sorted(range(len(seen)), key=seen.__getitem__)
        elements = shape.kv_heads * max(shape.key_size, shape.value_size)
        while order:
            longest = seen[order[-1]]
            alike = sum(2 * max(seen[member], _SHORT) >= longest for member in order)
            size = max(1, min(alike, _MAX_ELEMENTS // (elements * longest)))
            groups.append(_decode_group(prepared, order[-size:], window))
            del order[-size:]
        prepared.decodes[window, shape] = groups
    return groups


def _decode_group(prepared: PreparedStep, members: list[int], window: int | None) -> _Decodes:
    device = prepared.rows.tables.device
    contexts = [prepared.rows.context_lengths[member] for member in members]
    seen = [_seen(context, window) for context in contexts]
    gather = _gather(prepared, members, [context - length for context, length in zip(contexts, seen, strict=True)])
    hidden = None
    if min(seen) < max(seen):
        columns = torch.arange(max(seen), device=device)
        hidden = (columns >= torch.tensor(seen, device=device)[:, None])[:, None, None, :]
    return _Decodes(torch.tensor(members, dtype=torch.int64, device=device), gather, hidden)


def _attend_decodes(prepared: PreparedStep, layer: int, queries: Tensor, group: _Decodes, rule: AttentionRule) -> Tensor:
    keys, values = _fetch(prepared, layer, group.gather)  # [n, kv_heads, width, size]
    count, kv_heads = keys.shape[:2]
    grouped = queries.float().reshape(count, kv_heads, -1, queries.shape[-1])  # [n, kv_heads, q per kv, size]
    out = _attend(grouped, keys, values, group.hidden, rule, _grouped_sinks(rule, kv_heads, 1))
    return out.reshape(count, queries.shape[1], -1).to(queries.dtype)


def _attend_chunk(
    prepared: PreparedStep, layer: int, sequence: int, queries: Tensor, output: Tensor, rule: AttentionRule
) -> None:
    rows, q_heads = queries.shape[:2]
    context = prepared.rows.context_lengths[sequence]
    first = 0 if rule.window is None else max(0, context - rows - rule.window + 1)
    gather = prepared.chunks.get((sequence, first))
    if gather is None:
        gather = prepared.chunks[sequence, first] = _gather(prepared, [sequence], [first])
    keys, values = _fetch(prepared, layer, gather)  # [1, kv_heads, width, size]
    kv_heads, width = keys.shape[1:3]
    columns = torch.arange(first, context, device=queries.device)
    step = max(1, _MAX_ELEMENTS // (q_heads * width))
    for start in range(0, rows, step):
        part = queries[start : start + step].float()
        count = part.shape[0]
        # Row-major inside a head's group, [kv_heads, q per kv * rows, size], so that one product serves a whole group.
        grouped = part.transpose(0, 1).reshape(1, kv_heads, -1, part.shape[-1])
        begin = context - rows + start
        positions = torch.arange(begin, begin + count, device=queries.device)[:, None]
        hidden = columns > positions
        if rule.window is not None:
            hidden |= columns <= positions - rule.window
        hidden = hidden.repeat(q_heads // kv_heads, 1)
        out = _attend(grouped, keys, values, hidden, rule, _grouped_sinks(rule, kv_heads, count))
        output[start : start + count] = out.reshape(q_heads, count, -1).transpose(0, 1)


def _fetch(prepared: PreparedStep, layer: int, gather: _Gather) -> tuple[Tensor, Tensor]:
    """Copy K and V of a gather, as [sequences, kv_heads, width, size] in float32."""
    keys, values = _views(prepared, layer)
    heads = torch.arange(keys.shape[1], device=keys.device)[None, :, None]
    index = (gather.blocks[:, None, :], heads, gather.offsets[:, None, :])
    return keys[index].float(), values[index].float()


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, rule: AttentionRule, sinks: Tensor | None
) -> Tensor:
    """Return softmax(rule(q k)) v in float32. Every row sees at least its own token."""
    scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(rule.scale)
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    if sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1), values)
    weights = torch.softmax(torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1), dim=-1)
    return torch.matmul(weights[..., :-1], values)


def _grouped_sinks(rule: AttentionRule, kv_heads: int, rows: int) -> Tensor | None:
    """Return the sinks as [1, kv_heads, q per kv * rows, 1], as the scores of a group lie."""
    if rule.sinks is None:
        return None
    return rule.sinks.float().reshape(kv_heads, -1).repeat_interleave(rows, dim=1)[None, :, :, None]


def _seen(context: int, window: int | None) -> int:
    """Return how many positions the last row of a context sees."""
    return context if window is None else min(context, window)
