"""What a step on the CPU does beside attention: products with few rows, RMS norms, gates, rotary embedding.

Knows tensors and the library's structures; not models. All tensors of a call are of bfloat16 or of float32; sums are of float32.
The elements of a row have to lie side by side, rows may lie any stride apart; results are new and contiguous.

They are here where oneDNN, through torch, is measurably not enough: a product with few rows reads its weight at half the memory's
speed there, and what an operation of torch does to few rows takes less time than calling it.

Like torch's own operations, and for the sake of OpenMP, they are used by one thread of the process.
"""

from ctypes import byref
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.cpu import library
from kernels.cpu.backend import PreparedStep
from kernels.cpu.library import GateCall, LinearCall, NormCall, PeaksCall, RotateCall, Strided

#: Rows that share each load of a weight, where there are registers for it: with more, the weight is read again from the cache.
FEW_ROWS: Final = 8

#: A parallel region costs 1 to 2 µs. Less than this is done by one thread: bytes of a weight, elements of norms and gates.
_SHARED_WEIGHT: Final = 64 * 1024
_SHARED_ELEMENTS: Final = 16 * 1024

#: Likewise, elements of queries, keys and values: writing into a frame is slower than reading.
_SHARED_HEADS: Final = 4 * 1024

#: What the library calls a dtype, and the size of an element.
_ELEMENTS: Final = {dtype: (library.ELEMENTS[dtype], dtype.itemsize) for dtype in (torch.float32, torch.bfloat16)}


#: Outputs that a packed weight has side by side: kBlockOutputs in native/linear.h.
_BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inner] as `linear` reads it: 32 outputs side by side for each pair of the inner dimension.

    `blocks` is [outputs / 32, inner / 2, 64], rounded up, filled with zeros. The 64 are twice sixteen outputs by two of the inner
    dimension; the two are side by side in bfloat16, where products of pairs are added at once, else apart: native/linear.h.
    """

    blocks: Tensor
    outputs: int
    inner: int

    def rows(self, numbers: Tensor) -> Tensor:
        """Return rows of the weight, as [n, inner], for numbers [n]: for models whose head is their embedding as well."""
        block, part, output = numbers // _BLOCK, numbers % _BLOCK // 16, numbers % 16
        shape = self.blocks.shape[:2]
        if self.blocks.dtype == torch.bfloat16:
            found = self.blocks.view(*shape, 2, 16, 2)[block, :, part, output]
        else:
            found = self.blocks.view(*shape, 2, 2, 16)[block, :, part, :, output]
        return found.flatten(1)[:, : self.inner]


def pack(weight: Tensor) -> PackedWeight:
    """Pack a weight [outputs, inner], of any strides.

    Raises:
        TypeError: it is not of bfloat16 or float32, on the CPU.
        ValueError: it is no matrix.
    """
    _element(weight.dtype)
    _check_kind(weight, weight.dtype)
    if weight.dim() != 2:
        raise ValueError(f"{list(weight.shape)} is not [outputs, inner]")
    outputs, inner = weight.shape
    whole = pad(weight, (0, inner % 2, 0, -outputs % _BLOCK))
    blocks, pairs = whole.shape[0] // _BLOCK, whole.shape[1] // 2
    apart = whole.reshape(blocks, 2, 16, pairs, 2)  # block, part, output, pair, half
    ordered = apart.permute((0, 3, 1, 2, 4) if weight.dtype == torch.bfloat16 else (0, 3, 1, 4, 2))
    return PackedWeight(ordered.reshape(blocks, pairs, 2 * _BLOCK).contiguous(), outputs, inner)


class Operations:
    """See the module.

    Args:
        instructions: the instruction set to compute with, one of `library.instructions()`; the best of them where it is None.

    Raises:
        library.LibraryError: the library is not there, or this machine has no such instructions.

    All operations raise TypeError for tensors of other dtypes or devices, ValueError for shapes or strides that don't fit.
    """

    def __init__(self, instructions: str | None = None) -> None:
        self._library = library.load()
        self.instructions = self._library.choose(instructions)
        self._number = self._library.number(self.instructions)
        # Filled anew by each call, which takes a fraction of making them anew: on one row these microseconds are what is left.
        self._linear, self._norm, self._gate, self._rotate = LinearCall(), NormCall(heads=1), GateCall(), RotateCall()
        self._peaks = PeaksCall()

    def linear(self, rows: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """Return rows [n, inner] times weight [outputs, inner] plus bias [outputs], as [n, outputs].

        A row's result is the same bit for bit, whatever rows it comes with and however many threads there are.
        """
        dtype = rows.dtype
        element, size = _element(dtype)
        count, inner, stride = _matrix(rows, dtype)
        _check_kind(weight.blocks, dtype)
        if weight.inner != inner:
            raise ValueError(f"a weight of {[weight.outputs, weight.inner]} for rows of {inner}")
        output = rows.new_empty(count, weight.outputs)
        call = self._linear
        call.input, call.input_stride = rows.data_ptr(), stride * size
        call.weight = weight.blocks.data_ptr()
        call.bias = None if bias is None else _vector(bias, dtype, weight.outputs)
        call.output = output.data_ptr()
        call.element, call.rows, call.outputs, call.inner = element, count, weight.outputs, inner
        call.threads = torch.get_num_threads() if weight.outputs * inner * size >= _SHARED_WEIGHT else 1
        _check(self._library.linear(self._number, byref(call)))
        return output

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return weight [size] * rows [n, size] / sqrt(mean of their squares + epsilon), rounded before the weight and after it.

        As transformers' LlamaRMSNorm has it. Sums add up in another order there: in bfloat16 a value can differ where its float32
        lies at the edge between two.
        """
        call = self._norm
        call.residual = call.sum = None
        return self._finish_norm(call, rows, weight, epsilon)

    def add_rms_norm(self, rows: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Return the norm of rows + residual, both [n, size], and that sum, rounded, which is the next residual."""
        dtype = rows.dtype
        count, size, stride = _matrix(residual, dtype)
        if residual.shape != rows.shape:
            raise ValueError(f"a residual of {list(residual.shape)} beside rows of {list(rows.shape)}")
        total = rows.new_empty(count, size)
        call = self._norm
        call.residual, call.residual_stride = residual.data_ptr(), stride * dtype.itemsize
        call.sum = total.data_ptr()
        return self._finish_norm(call, rows, weight, epsilon), total

    def silu_mul(self, rows: Tensor) -> Tensor:
        """Return silu(gate) * up, [n, size], of rows [n, 2 size] that hold gate and then up; silu(gate) is rounded in between."""
        dtype = rows.dtype
        element, bytes_each = _element(dtype)
        count, both, stride = _matrix(rows, dtype)
        if both % 2:
            raise ValueError(f"rows of {both} are no gate and up")
        size = both // 2
        output = rows.new_empty(count, size)
        call = self._gate
        call.input, call.input_stride = rows.data_ptr(), stride * bytes_each
        call.output = output.data_ptr()
        call.element, call.rows, call.size, call.threads = element, count, size, _threads(count * size)
        _check(self._library.silu_mul(self._number, byref(call)))
        return output

    def rotate_write(
        self,
        prepared: PreparedStep,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        cosines: Tensor,
        sines: Tensor,
        *,
        interleaved: bool = False,
    ) -> Tensor:
        """Turn queries and keys by their rows' angles, store the keys and the values, and return the queries.

        All are of the pool's dtype, which may be float16 too: queries [rows, q_heads, key_size] and what write_kv takes, the
        elements of a head side by side; cosines and sines [rows, rotary / 2]. The first `rotary` elements of a head turn, as
        pairs (i, i + rotary / 2), or (2 i, 2 i + 1) where they are interleaved. Products are rounded, then their sums, as in
        transformers' modules: the results are theirs bit for bit.
        """
        own, dtype, rows = prepared.cache.shape.layers[layer], prepared.cache.shape.dtype, prepared.rows
        q_heads = queries.shape[1]
        rotary = 2 * cosines.shape[1]
        if cosines.shape != (rows, rotary // 2) or sines.shape != cosines.shape or rotary > own.key_size:
            raise ValueError(f"angles of {list(cosines.shape)} and {list(sines.shape)} for {rows} rows of {own.key_size}")
        if own.key_size > library.MAX_TURNED:
            raise ValueError(f"heads of {own.key_size}; {library.MAX_TURNED} is the most")
        _, _, cosine_stride = _matrix(cosines, dtype)
        _, _, sine_stride = _matrix(sines, dtype)
        turned = queries.new_empty(rows, q_heads, own.key_size)
        call, size = self._rotate, dtype.itemsize
        call.write = prepared.write
        write = call.write
        write.layer = prepared.layers[layer]
        _put_heads(write.keys, keys, dtype, (rows, own.kv_heads, own.key_size))
        _put_heads(write.values, values, dtype, (rows, own.kv_heads, own.value_size))
        _put_heads(call.queries, queries, dtype, (rows, q_heads, own.key_size))
        elements = rows * (own.token_elements + q_heads * own.key_size)
        write.threads = torch.get_num_threads() if elements >= _SHARED_HEADS else 1
        call.turned = turned.data_ptr()
        call.cosines, call.cosine_stride = cosines.data_ptr(), cosine_stride * size
        call.sines, call.sine_stride = sines.data_ptr(), sine_stride * size
        call.q_heads, call.rotary, call.interleaved = q_heads, rotary, interleaved
        _check(self._library.rotate_write(self._number, byref(call)))
        return turned

    def _finish_norm(self, call: NormCall, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        dtype = rows.dtype
        element, bytes_each = _element(dtype)
        count, size, stride = _matrix(rows, dtype)
        output = rows.new_empty(count, size)
        call.input, call.input_stride = rows.data_ptr(), stride * bytes_each
        call.weight = _vector(weight, dtype, size)
        call.output = output.data_ptr()
        call.element, call.rows, call.size, call.epsilon, call.threads = element, count, size, epsilon, _threads(count * size)
        _check(self._library.rms_norm(self._number, byref(call)))
        return output

    def peaks(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return of rows [n, size] float32 the largest elements, [n], and the first indexes that have them, [n] int64.

        Where a row holds NaN its maximum is NaN, and its index is of no meaning. One pass: amax and argmax are two slow ones.
        """
        count, size, stride = _matrix(rows, torch.float32)
        if size == 0:
            raise ValueError("rows of nothing have no largest element")
        maxima, indexes = rows.new_empty(count), rows.new_empty(count, dtype=torch.int64)
        call = self._peaks
        call.input, call.input_stride, call.rows, call.size = rows.data_ptr(), stride * rows.itemsize, count, size
        call.maxima, call.indexes, call.threads = maxima.data_ptr(), indexes.data_ptr(), _threads(count * size)
        _check(self._library.peaks(self._number, byref(call)))
        return maxima, indexes


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= _SHARED_ELEMENTS else 1


def _element(dtype: torch.dtype) -> tuple[int, int]:
    found = _ELEMENTS.get(dtype)
    if found is None:
        raise TypeError(f"bfloat16 or float32 is wanted, not {dtype}")
    return found


def _matrix(tensor: Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the rows of a matrix, their length, and how many elements lie from one to the next."""
    _check_kind(tensor, dtype)
    shape, strides = tensor.shape, tensor.stride()
    if len(shape) != 2:
        raise ValueError(f"{list(shape)} is not [n, size]")
    if strides[1] != 1 and shape[1] > 1:
        raise ValueError("the elements of a row do not lie side by side")
    return shape[0], shape[1], strides[0]


def _put_heads(to: Strided, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Note where heads lie, [rows, heads, size]."""
    _check_kind(tensor, dtype)
    if tensor.shape != shape:
        raise ValueError(f"{list(tensor.shape)} is not {list(shape)}")
    row, head, element = tensor.stride()
    if element != 1 and shape[2] > 1:
        raise ValueError("the elements of a head do not lie side by side")
    to.data, to.row_stride, to.head_stride = tensor.data_ptr(), row * dtype.itemsize, head * dtype.itemsize


def _vector(tensor: Tensor, dtype: torch.dtype, size: int) -> int:
    """Return the address of a vector of this size."""
    _check_kind(tensor, dtype)
    if tensor.shape != (size,):
        raise ValueError(f"{list(tensor.shape)} is not [{size}]")
    if tensor.stride(0) != 1 and size > 1:
        raise ValueError("the elements of a vector do not lie side by side")
    return tensor.data_ptr()


def _check_kind(tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype:
        raise TypeError(f"{tensor.dtype} beside {dtype}")
    if not tensor.is_cpu:
        raise TypeError(f"a tensor lies on {tensor.device}, not on the CPU")


def _check(status: int) -> None:
    assert status == library.DONE, f"the library refused the call: status {status}"
