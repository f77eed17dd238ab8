"""The native backend for CPUs: tensors in, addresses and strides out to kernels/cpu/native.

Knows the interface and the library's structures; not how anything is computed. What the library takes on trust is checked here:
shapes, dtypes, devices. That tables and slots name blocks of the pool is the caller's part (executor/batch.py checks plans).

Like torch's own operations, and for the sake of OpenMP, it is used by one thread of the process.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.library import AttendCall, CopyCall, Layer, Operation, Rows, Strided, WriteCall
from kernels.interface import AttentionRule, CacheShape, FrameLayout, KvCache, LayerShape, StepRows

#: Fewer elements of K and V than this are written by one thread: waking another takes as long.
_SHARED_WRITE: Final = 2048

#: Fewer bytes than this are copied by one thread.
_SHARED_COPY: Final = 128 * 1024

#: No context is longer; a longer window would lose its upper bits on its way into the structure.
_MAX_WINDOW: Final = 2**31 - 1

_ALIGNMENT: Final = 64


@dataclass(slots=True)
class PreparedStep:
    """One step's calls. `keep` has the arrays that they point to."""

    cache: KvCache
    rows: int
    layers: list[Layer]
    attend: AttendCall
    write: WriteCall
    keep: tuple[object, ...]
    workspace: Tensor  # what `attend` points to; the backend may have a larger one by now
    sinks: dict[int, Tensor | None] = field(default_factory=dict)  # of each layer that has some, as float32


class CpuBackend:
    """See the module.

    Args:
        instructions: the instruction set to compute with, one of `library.instructions()`; the best of them where it is None.

    Raises:
        library.LibraryError: the library is not there, or this machine has no such instructions.
    """

    name = "cpu"

    def __init__(self, instructions: str | None = None) -> None:
        self._library = library.load()
        self.instructions = self._library.choose(instructions)
        self._number = self._library.number(self.instructions)
        self._workspace = torch.empty(_ALIGNMENT, dtype=torch.uint8)  # grown by the first calls that need more
        self._known: tuple[tuple[int, tuple[int, ...], CacheShape], list[Layer]] | None = (
            None  # the last pool's layers, by its place
        )

    def layout(self, shape: CacheShape) -> FrameLayout:
        """Return the frame's size: K and V of all layers, sizes padded as native/layout.h says."""
        return FrameLayout("cpu-sub-tiles-of-16/1", sum(self._elements(layer, shape) for layer in shape.layers))

    def prepare(self, cache: KvCache, rows: StepRows) -> PreparedStep:
        """Put the step's lengths where the library can read them."""
        _check_rows(cache, rows)
        place = (cache.frames.data_ptr(), tuple(cache.frames.shape), cache.shape)
        if self._known is None or self._known[0] != place:
            self._known = place, self._find_layers(cache)
        layers = self._known[1]
        lengths = np.array([rows.query_lengths, rows.context_lengths], dtype=np.int32)
        tables, slots = rows.tables.contiguous(), rows.write_slots.contiguous()
        native = Rows(
            tables=tables.data_ptr(),
            table_stride=tables.shape[1],
            query_lengths=lengths[0].ctypes.data,
            context_lengths=lengths[1].ctypes.data,
            write_slots=slots.data_ptr(),
            sequences=len(rows.query_lengths),
            decodes=rows.decodes,
            rows=slots.shape[0],
        )
        threads = torch.get_num_threads()
        attend = AttendCall(rows=native, threads=threads)
        give_workspace(attend, self._workspace)
        return PreparedStep(
            cache=cache,
            rows=slots.shape[0],
            layers=layers,
            attend=attend,
            write=WriteCall(rows=native, threads=threads),
            keep=(lengths, tables, slots),
            workspace=self._workspace,
        )

    def write_kv(self, prepared: PreparedStep, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store each row in its slot."""
        shape, dtype = prepared.cache.shape.layers[layer], prepared.cache.shape.dtype
        keys, values = _readable(keys, dtype), _readable(values, dtype)
        assert keys.is_cpu
        assert values.is_cpu
        assert keys.shape == (prepared.rows, shape.kv_heads, shape.key_size)
        assert values.shape == (prepared.rows, shape.kv_heads, shape.value_size)
        call = prepared.write
        call.layer = prepared.layers[layer]
        _put(call.keys, keys)
        _put(call.values, values)
        call.threads = prepared.attend.threads if prepared.rows * shape.token_elements >= _SHARED_WRITE else 1
        _check(self._library.write(self._number, ctypes.byref(call)))

    def paged_attention(self, prepared: PreparedStep, layer: int, queries: Tensor, rule: AttentionRule) -> Tensor:
        """Attend; queries of another dtype than the pool's are rounded to it."""
        shape, dtype = prepared.cache.shape.layers[layer], prepared.cache.shape.dtype
        own = queries if queries.dtype is dtype and queries.stride(-1) == 1 else _readable(queries, dtype)
        rows, q_heads, size = own.shape
        assert own.is_cpu
        assert (rows, size) == (prepared.rows, shape.key_size)
        assert q_heads > 0
        assert q_heads % shape.kv_heads == 0
        output = torch.empty(rows, q_heads, shape.value_size, dtype=dtype)
        call = prepared.attend
        call.layer, call.output = prepared.layers[layer], output.data_ptr()
        _put(call.queries, own)
        prepared.sinks[layer] = fill_attention(call, rule, q_heads)
        status = self._library.attend(self._number, ctypes.byref(call))
        if status == library.WORKSPACE_TOO_SMALL:
            prepared.workspace = self.workspace_for(call)
            give_workspace(call, prepared.workspace)
            status = self._library.attend(self._number, ctypes.byref(call))
        _check(status)
        return output if queries.dtype is dtype else output.to(queries.dtype)

    def copy_blocks(self, cache: KvCache, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole frames."""
        self.swap_blocks(cache.frames, cache.frames, copies)

    def swap_blocks(self, source: Tensor, destination: Tensor, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole frames from one tensor of frames to another."""
        if not moves:
            return
        assert source.shape[1] == destination.shape[1]
        assert source.dtype == destination.dtype
        assert source.is_cpu
        assert destination.is_cpu
        assert source.stride(1) == destination.stride(1) == 1
        pairs = np.array(moves, dtype=np.int64)
        assert pairs.shape == (len(moves), 2)
        assert pairs.min() >= 0
        assert pairs[:, 0].max() < source.shape[0]
        assert pairs[:, 1].max() < destination.shape[0]
        size = source.element_size()
        call = CopyCall(
            source=source.data_ptr(),
            destination=destination.data_ptr(),
            source_stride=source.stride(0) * size,
            destination_stride=destination.stride(0) * size,
            frame_bytes=source.shape[1] * size,
            moves=pairs.ctypes.data,
            count=len(pairs),
            threads=torch.get_num_threads() if len(pairs) * source.shape[1] * size >= _SHARED_COPY else 1,
        )
        self._library.copy(ctypes.byref(call))

    def _find_layers(self, cache: KvCache) -> list[Layer]:
        """Find out where each layer's part of the first frame lies."""
        layers, offset = [], 0
        for layer in cache.shape.layers:
            layers.append(_layer(layer, cache.shape, cache.frames.data_ptr() + offset, cache.frames.stride(0)))
            offset += self._elements(layer, cache.shape) * cache.shape.dtype.itemsize
        assert offset == cache.frames.shape[1] * cache.shape.dtype.itemsize, "the frames are not of this layout"
        return layers

    def _elements(self, layer: LayerShape, shape: CacheShape) -> int:
        return self._library.layer_elements(ctypes.byref(_layer(layer, shape, 0, 0)))

    def run(self, operations: "ctypes.Array[Operation]", threads: int, layer: ctypes.c_int32) -> int:
        """Do a program's operations and return the library's status: kernels/cpu/program.py."""
        return self._library.run(self._number, operations, len(operations), threads, ctypes.byref(layer))

    def workspace_for(self, call: AttendCall) -> Tensor:
        """Return memory that this call can work in."""
        need = self._library.attend_workspace(self._number, ctypes.byref(call)) + _ALIGNMENT
        if need > self._workspace.shape[0]:
            self._workspace = torch.empty(need, dtype=torch.uint8)
        return self._workspace


def fill_attention(call: AttendCall, rule: AttentionRule, q_heads: int) -> Tensor | None:
    """Put a layer's rule into its call; what is returned has to be kept as long as the call is used."""
    call.q_heads, call.scale, call.softcap = q_heads, rule.scale, rule.softcap or 0.0
    call.window = min(rule.window or 0, _MAX_WINDOW)
    call.sinks = None
    if rule.sinks is None:
        return None
    sinks = rule.sinks.to("cpu", torch.float32).contiguous()
    assert sinks.shape == (q_heads,)
    call.sinks = sinks.data_ptr()
    return sinks


def give_workspace(call: AttendCall, workspace: Tensor) -> None:
    """Let a call work in this memory."""
    start = workspace.data_ptr()
    call.workspace = start + -start % _ALIGNMENT
    call.workspace_bytes = workspace.shape[0] - -start % _ALIGNMENT


def _layer(layer: LayerShape, shape: CacheShape, base: int, stride: int) -> Layer:
    assert shape.block_size > 0
    return Layer(
        base=base,
        frame_stride=stride * shape.dtype.itemsize,
        element=library.ELEMENTS[shape.dtype],
        block_size=shape.block_size,
        kv_heads=layer.kv_heads,
        key_size=layer.key_size,
        value_size=layer.value_size,
    )


def _readable(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same values with the elements of a head side by side."""
    states = states.to(dtype)
    return states if states.stride(-1) == 1 else states.contiguous()


def _put(to: Strided, states: Tensor) -> None:
    """Note where [rows, heads, size] lie."""
    row, head, _ = states.stride()
    size = states.dtype.itemsize
    to.data, to.row_stride, to.head_stride = states.data_ptr(), row * size, head * size


def _check(status: int) -> None:
    assert status == library.DONE, f"the library refused the call: status {status}"


def _check_rows(cache: KvCache, rows: StepRows) -> None:
    sequences = len(rows.query_lengths)
    assert cache.frames.device.type == "cpu"
    assert cache.frames.is_contiguous()
    assert cache.frames.dtype == cache.shape.dtype
    assert len(rows.context_lengths) == sequences == rows.tables.shape[0]
    assert 0 <= rows.decodes <= sequences
    assert rows.tables.is_cpu
    assert rows.tables.dtype == torch.int32
    assert rows.write_slots.is_cpu
    assert rows.write_slots.dtype == torch.int64
    assert sum(rows.query_lengths) == rows.write_slots.shape[0]
    assert max(rows.context_lengths, default=0) <= rows.tables.shape[1] * cache.shape.block_size
    assert all(0 < length <= context for length, context in zip(rows.query_lengths, rows.context_lengths, strict=True))
    assert all(length == 1 for length in rows.query_lengths[: rows.decodes])
