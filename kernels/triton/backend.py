"""The backend for NVIDIA GPUs: the protocol of kernels/interface.py, by launching Triton's kernels.

Knows steps, frames and launches; what a kernel computes is in the modules beside. Once a step `prepare` sends a few small
numbers to the device, in one copy. Nothing waits for the device: all grids come from what the host knows, so that a step's
launches can be captured in a CUDA graph.

On a CPU it works in Triton's interpreter only (TRITON_INTERPRET=1 before Triton is imported), which is how it is tested without
a GPU, and far too slow for anything else.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
import triton
from torch import Tensor

from kernels.interface import AttentionRule, CacheShape, FrameLayout, KvCache, StepRows
from kernels.registry import BackendError
from kernels.triton.common import INTERPRETED
from kernels.triton.launches import Launch, Layer, Parts, copying, decoding, prefilling, tiles_of_group, writing
from kernels.triton.tiles import ASSUMED, Chip, split_tokens


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step's numbers on the device, and what its layers use one after the other."""

    cache: KvCache
    rows: StepRows
    contexts: Tensor  # [sequences] int32
    starts: Tensor  # [sequences + 1] int32, each sequence's first row
    chip: Chip
    splits: dict[tuple[int | None, int, int], tuple[int, int]] = field(default_factory=dict)
    parts: dict[tuple[int, int, int], Parts] = field(default_factory=dict)

    def layer(self, number: int) -> Layer:
        """Return what the launches for a layer need."""
        return Layer(self.cache.frames, self.cache.shape, number, self.rows.tables, self.contexts, self.chip)

    def split(self, window: int | None, programs_each: int, row_bytes: int) -> tuple[int, int]:
        """Return (tokens of a split, splits) for the decodes of a layer; see `split_tokens`."""
        key = (window, programs_each, row_bytes)
        found = self.splits.get(key)
        if found is None:
            contexts = self.rows.context_lengths[: self.rows.decodes]
            seen = contexts if window is None else [min(context, window) for context in contexts]
            tokens = split_tokens(seen, programs_each, row_bytes, self.chip)
            found = self.splits[key] = (tokens, -(-max(seen) // tokens))
        return found

    def parts_of(self, splits: int, q_heads: int, value_size: int) -> Parts:
        """Return room for the splits' results: the same for all layers alike, as they run one after the other."""
        found = self.parts.get((splits, q_heads, value_size))
        if found is None:
            extent = (self.rows.decodes, splits, q_heads)
            empty = self.contexts.new_empty
            sums = empty((*extent, value_size), dtype=torch.float32)
            found = Parts(sums, empty(extent, dtype=torch.float32), empty(extent, dtype=torch.float32))
            self.parts[splits, q_heads, value_size] = found
        return found


class TritonBackend:
    """See the module."""

    name = "triton"

    def __init__(self) -> None:
        """Find out whether it can work at all.

        Raises:
            BackendError: there is no GPU, and the kernels are not interpreted.
        """
        if not torch.cuda.is_available() and not INTERPRETED.value:
            raise BackendError("the Triton kernels can't be used: torch finds no NVIDIA GPU; see nvidia-smi")
        if not INTERPRETED.value and not _compiler():
            raise BackendError(
                "the Triton kernels can't be used: Triton needs a C compiler to launch them; install gcc, or set CC"
            )

    def layout(self, shape: CacheShape) -> FrameLayout:
        """Return the frame's size: exactly K and V of all layers, of a layer one KV head after the other, K before V.

        A row of 16-byte multiples begins at one; others are not padded, and load more slowly.
        """
        return FrameLayout("layer-head-kv-token/1", shape.block_size * sum(layer.token_elements for layer in shape.layers))

    def prepare(self, cache: KvCache, rows: StepRows) -> PreparedStep:
        """Send contexts and first rows to the device.

        Raises:
            BackendError: the cache is not on a GPU, and the kernels are not interpreted.
        """
        device = _device_of(cache.frames)
        sequences = len(rows.query_lengths)
        starts = [0]
        for length in rows.query_lengths:
            starts.append(starts[-1] + length)
        packed = _to_device([*rows.context_lengths, *starts], torch.int32, device)
        return PreparedStep(cache, rows, packed[:sequences], packed[sequences:], _chip(device))

    def write_kv(self, prepared: PreparedStep, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store all rows in one launch."""
        _start([writing(prepared.layer(layer), keys, values, prepared.rows.write_slots)], prepared.cache.frames.device)

    def paged_attention(self, prepared: PreparedStep, layer: int, queries: Tensor, rule: AttentionRule) -> Tensor:
        """Attend: the decodes in one launch or two, all chunks in another."""
        own, decodes = prepared.layer(layer), prepared.rows.decodes
        q_heads, value_size = queries.shape[1], own.own.value_size
        output = queries.new_empty(queries.shape[0], q_heads, value_size)
        launches = []
        if decodes:
            tokens, splits = prepared.split(rule.window, tiles_of_group(own, q_heads), q_heads * (value_size + 2) * 4)
            parts = None if splits == 1 else prepared.parts_of(splits, q_heads, value_size)
            launches += decoding(own, output, queries, rule, decodes, tokens, parts)
        chunks = len(prepared.rows.query_lengths) - decodes
        if chunks:
            launches.append(prefilling(own, output, queries, rule, decodes, chunks, prepared.starts))
        _start(launches, prepared.cache.frames.device)
        return output

    def copy_blocks(self, cache: KvCache, copies: Sequence[tuple[int, int]]) -> None:
        """Copy all frames in one launch.

        Raises:
            BackendError: as `prepare`.
        """
        device = _device_of(cache.frames)
        if copies:
            flat = [block for pair in copies for block in pair]
            _start([copying(cache.frames, _to_device(flat, torch.int64, device).view(-1, 2))], device)

    def swap_blocks(self, source: Tensor, destination: Tensor, moves: Sequence[tuple[int, int]]) -> None:
        """Copy frames between the device and pinned memory of the host, (source, destination), in order on the current stream.

        Neighbours that stay neighbours are one copy. The host may look at its frames once the stream has come this far.
        """
        for first, target, length in _runs(moves):
            destination[target : target + length].copy_(source[first : first + length], non_blocking=True)


def _device_of(frames: Tensor) -> torch.device:
    if frames.device.type != "cuda" and not INTERPRETED.value:
        raise BackendError(f"--attention triton: the cache is on {frames.device}; Triton's kernels need an NVIDIA GPU")
    return frames.device


@cache
def _chip(device: torch.device) -> Chip:
    if device.type != "cuda":
        return ASSUMED
    properties = torch.cuda.get_device_properties(device)
    shared = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return Chip(properties.multi_processor_count, shared, from_shared=properties.major in (9, 10))


def _start(launches: Sequence[Launch], device: torch.device) -> None:
    """Start kernels on a device, whichever the thread's own is."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for launch in launches:
            launch.start()


def _to_device(numbers: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Send numbers without waiting for them to arrive: from pinned memory, which torch keeps until they have."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _compiler() -> bool:
    """Tell whether Triton will find the C compiler that it makes its launchers with."""
    return bool(os.environ.get("CC")) or any(shutil.which(name) for name in ("clang", "gcc", "cc"))


def _runs(moves: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (source, destination, length) of moves, joined where both sides follow on each other."""
    runs: list[tuple[int, int, int]] = []
    for source, destination in moves:
        if runs:
            first, target, length = runs[-1]
            if source == first + length and destination == target + length:
                runs[-1] = (first, target, length + 1)
                continue
        runs.append((source, destination, 1))
    return runs
