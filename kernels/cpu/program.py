"""A whole forward pass in one call: operations on fixed buffers, recorded once, done for the rows of each step.

Knows tensors and the library's structures; not models. A call from Python costs microseconds, and so does waking the other
threads: a step of one row has some three hundred operations that take little longer. Recorded, they are done in one parallel
region, whose threads meet between two of them.

Buffers are [most_rows, width]; a step of n rows uses the first n. Numbers are those of kernels/cpu/operations.py, bit for bit.
"""

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.backend import CpuBackend, PreparedStep, fill_attention, give_workspace
from kernels.cpu.library import (
    KINDS,
    AttendCall,
    GateCall,
    LinearCall,
    NormCall,
    Operation,
    RotateCall,
    Strided,
)
from kernels.cpu.operations import PackedWeight
from kernels.interface import AttentionRule, KvCache

#: Less than this is done by one thread, while the others wait: elements, and bytes of weights times rows.
_SHARED_ELEMENTS: Final = 2 * 1024
_SHARED_WEIGHT: Final = 16 * 1024

_Call = LinearCall | NormCall | GateCall | RotateCall | AttendCall


class Program:
    """See the module. Used by one thread, that which calls torch.

    Args:
        backend: attends, with its instruction set; what `run` is given has to be prepared by it.
        cache: the pool that rows are written to.
        most_rows: how many rows a step may have.
        layer: told while the program runs: the number that was last given to `at_layer`.

    All methods that record raise TypeError for tensors of other dtypes than the pool's, ValueError for shapes that don't fit.
    """

    def __init__(self, backend: CpuBackend, cache: KvCache, most_rows: int, layer: ctypes.c_int32) -> None:
        if cache.shape.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"programs are of float32 or bfloat16, not {cache.shape.dtype}")
        self._backend = backend
        self._cache = cache
        self._dtype = cache.shape.dtype
        self._element = library.ELEMENTS[self._dtype]
        self._most_rows = most_rows
        self._told = layer
        self._layer = 0
        self._calls: list[tuple[_Call, int]] = []  # and its work for each row: elements, or bytes of a weight
        self._layers: list[int] = []
        self._attends: list[tuple[AttendCall, int]] = []  # and the pool's layer
        self._rotates: list[tuple[RotateCall, int]] = []
        self._keep: list[object] = []  # what the calls point to
        self._operations: ctypes.Array[Operation] | None = None
        self._set_for = (0, 0)  # rows and threads
        self._pool: list[library.Layer] | None = None  # that the calls point to

    def buffer(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for rows, [most_rows, width], filled with zeros; of the pool's dtype where none is given."""
        return torch.zeros(self._most_rows, width, dtype=dtype or self._dtype)

    # ------------------------------------------------------------------------------------------------------ recording

    def at_layer(self, number: int) -> None:
        """Have it told that what is recorded from here on belongs to this layer."""
        self._layer = number

    def linear(self, source: Tensor, weight: PackedWeight, bias: Tensor | None, to: Tensor) -> None:
        """Record to [rows, outputs] = source [rows, inner] times weight, plus bias; `to` may be of float32 in any case."""
        wide = to.dtype == torch.float32
        self._check(source, weight.inner)
        self._check(to, weight.outputs, torch.float32 if wide else self._dtype)
        if weight.blocks.dtype != self._dtype:
            raise TypeError(f"a weight of {weight.blocks.dtype} in a program of {self._dtype}")
        call = LinearCall(
            input=source.data_ptr(),
            weight=weight.blocks.data_ptr(),
            bias=None if bias is None else self._vector(bias, weight.outputs),
            output=to.data_ptr(),
            input_stride=self._stride(source),
            element=self._element,
            outputs=weight.outputs,
            inner=weight.inner,
            wide=wide,
        )
        self._add(call, weight.outputs * weight.inner * self._dtype.itemsize, source, weight, bias, to)

    def norm(self, source: Tensor, weight: Tensor, epsilon: float, to: Tensor) -> None:
        """Record an RMS norm of each row [size], or of each head of rows [heads, size]; `to` is of the same shape, contiguous."""
        heads, size = source.shape[1:] if source.dim() == 3 else (1, source.shape[1])
        self._check(source, heads * size)
        self._check(to, heads * size)
        call = NormCall(
            input=source.data_ptr(),
            weight=self._vector(weight, size),
            output=to.data_ptr(),
            input_stride=self._stride(source),
            head_stride=size * self._dtype.itemsize,
            element=self._element,
            heads=heads,
            size=size,
            epsilon=epsilon,
        )
        self._add(call, heads * size, source, weight, to)

    def add_norm(self, source: Tensor, residual: Tensor, weight: Tensor, epsilon: float, to: Tensor) -> None:
        """Record residual += source, and an RMS norm of that, all [rows, size]."""
        size = source.shape[1]
        for each in (source, residual, to):
            self._check(each, size)
        call = NormCall(
            input=source.data_ptr(),
            residual=residual.data_ptr(),
            weight=self._vector(weight, size),
            output=to.data_ptr(),
            sum=residual.data_ptr(),
            input_stride=self._stride(source),
            residual_stride=self._stride(residual),
            element=self._element,
            heads=1,
            size=size,
            epsilon=epsilon,
        )
        self._add(call, size, source, residual, weight, to)

    def silu_mul(self, source: Tensor, to: Tensor) -> None:
        """Record to [rows, size] = silu(gate) * up, of source [rows, 2 size]: gate and then up."""
        size = to.shape[1]
        self._check(source, 2 * size)
        self._check(to, size)
        call = GateCall(
            input=source.data_ptr(), output=to.data_ptr(), input_stride=self._stride(source), element=self._element, size=size
        )
        self._add(call, size, source, to)

    def rotate_write(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, cosines: Tensor, sines: Tensor, to: Tensor
    ) -> None:
        """Record what Operations.rotate_write does, of halves, into `to`, [rows, q_heads * key_size]."""
        own, size = self._cache.shape.layers[layer], self._dtype.itemsize
        if own.key_size > library.MAX_TURNED:
            raise ValueError(f"heads of {own.key_size}; {library.MAX_TURNED} is the most")
        q_heads, rotary = queries.shape[1], 2 * cosines.shape[1]
        if queries.shape[2] != own.key_size or rotary > own.key_size:
            raise ValueError(f"queries of {list(queries.shape)}, turned by {rotary}, in a layer of {own}")
        for each, width in (
            (queries, q_heads * own.key_size),
            (keys, own.kv_heads * own.key_size),
            (values, own.kv_heads * own.value_size),
            (cosines, rotary // 2),
            (sines, rotary // 2),
            (to, q_heads * own.key_size),
        ):
            self._check(each, width)
        call = RotateCall(
            queries=self._heads(queries),
            turned=to.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            cosine_stride=cosines.stride(0) * size,
            sine_stride=sines.stride(0) * size,
            q_heads=q_heads,
            rotary=rotary,
        )
        call.write.keys, call.write.values = self._heads(keys), self._heads(values)
        self._rotates.append((call, layer))
        self._add(call, own.token_elements + q_heads * own.key_size, queries, keys, values, cosines, sines, to)

    def attend(self, layer: int, queries: Tensor, rule: AttentionRule, to: Tensor) -> None:
        """Record attention from queries [rows, q_heads, key_size] into `to`, [rows, q_heads * value_size]."""
        own = self._cache.shape.layers[layer]
        q_heads = queries.shape[1]
        if queries.shape[2] != own.key_size or q_heads % own.kv_heads:
            raise ValueError(f"queries of {list(queries.shape)} in a layer of {own}")
        self._check(queries, q_heads * own.key_size)
        self._check(to, q_heads * own.value_size)
        call = AttendCall(queries=self._heads(queries), output=to.data_ptr())
        sinks = fill_attention(call, rule, q_heads)
        self._attends.append((call, layer))
        self._add(call, q_heads * own.key_size, queries, sinks, to)

    # -------------------------------------------------------------------------------------------------------- running

    @torch.inference_mode()
    def run(self, rows: int, prepared: PreparedStep | None = None) -> None:
        """Do all that was recorded for the first `rows` rows.

        Args:
            rows: of this step.
            prepared: of the same rows, by the backend; what neither attends nor writes needs none.

        Raises:
            ValueError: more rows than buffers hold, or other rows than were prepared.
        """
        if not 0 < rows <= self._most_rows:
            raise ValueError(f"{rows} rows in buffers of {self._most_rows}")
        threads = torch.get_num_threads()
        if self._operations is None:
            self._operations = self._listed()
        if self._set_for != (rows, threads):
            self._set_rows(rows, threads)
        if self._attends or self._rotates:
            if prepared is None or prepared.rows != rows:
                raise ValueError(f"{rows} rows, and what was prepared is for others")
            self._point_to(prepared)
        status = self._run(threads)
        if status == library.WORKSPACE_TOO_SMALL and prepared is not None:
            for call, _ in self._attends:
                prepared.workspace = self._backend.workspace_for(call)
            self._point_to(prepared)
            status = self._run(threads)
        assert status == library.DONE, f"the library refused the program: status {status}"

    def _run(self, threads: int) -> int:
        assert self._operations is not None
        return self._backend.run(self._operations, threads, self._told)

    def _listed(self) -> "ctypes.Array[Operation]":
        return (Operation * len(self._calls))(
            *(
                Operation(ctypes.addressof(call), KINDS[type(call)], layer)
                for (call, _), layer in zip(self._calls, self._layers, strict=True)
            )
        )

    def _set_rows(self, rows: int, threads: int) -> None:
        self._set_for = rows, threads
        for call, work in self._calls:
            if isinstance(call, AttendCall):
                call.threads = threads
                continue
            enough = rows * work >= (_SHARED_WEIGHT if isinstance(call, LinearCall) else _SHARED_ELEMENTS)
            if isinstance(call, RotateCall):
                call.write.threads = threads if enough else 1
            else:
                call.rows, call.threads = rows, threads if enough else 1

    def _point_to(self, prepared: PreparedStep) -> None:
        """Let the calls know where this step's tables and slots lie, and the workspace."""
        rows, workspace = prepared.attend.rows, prepared.workspace
        if self._pool is not prepared.layers:
            self._pool = prepared.layers
            for attend, layer in self._attends:
                attend.layer = prepared.layers[layer]
            for rotate, layer in self._rotates:
                rotate.write.layer = prepared.layers[layer]
        for attend, _ in self._attends:
            attend.rows = rows
            give_workspace(attend, workspace)
        for rotate, _ in self._rotates:
            rotate.write.rows = rows

    # --------------------------------------------------------------------------------------------------------- checks

    def _add(self, call: _Call, work: int, *keep: object) -> None:
        self._calls.append((call, work))
        self._layers.append(self._layer)
        self._keep.append(keep)
        self._operations = None
        self._set_for = (0, 0)
        self._pool = None

    def _check(self, tensor: Tensor, width: int, dtype: torch.dtype | None = None) -> None:
        """Insist on rows for all that a step may have, whose elements lie side by side."""
        if tensor.dtype != (dtype or self._dtype) or not tensor.is_cpu:
            raise TypeError(f"{tensor.dtype} on {tensor.device} in a program of {self._dtype}")
        if tensor.shape[0] != self._most_rows or _inner(tensor.shape[1:], tensor.stride()[1:]) != width:
            raise ValueError(f"{list(tensor.shape)} are not {self._most_rows} rows of {width}, side by side")

    def _vector(self, tensor: Tensor, size: int) -> int:
        if tensor.dtype != self._dtype or not tensor.is_cpu:
            raise TypeError(f"{tensor.dtype} on {tensor.device} in a program of {self._dtype}")
        if tensor.shape != (size,) or not tensor.is_contiguous():
            raise ValueError(f"{list(tensor.shape)} is not [{size}], contiguous")
        return tensor.data_ptr()

    def _stride(self, tensor: Tensor) -> int:
        return tensor.stride(0) * self._dtype.itemsize

    def _heads(self, tensor: Tensor) -> Strided:
        return Strided(tensor.data_ptr(), self._stride(tensor), tensor.stride(1) * self._dtype.itemsize)


def _inner(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie side by side in each row; -1 if they don't."""
    count = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != count:
            return -1
        count *= size
    return count
