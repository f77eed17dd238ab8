"""What a model's step on the CPU does beside attention: products with few rows, RMS norms, the gate of the feed-forward part.

Knows tensors and the library's structures; not models. All tensors of a call are of bfloat16 or of float32; sums are of float32.
The elements of a row have to lie side by side, rows may lie any stride apart; results are new and contiguous.

They are here where oneDNN, through torch, is measurably not enough: a product with few rows reads its weight at half the speed of
the memory there, and what an operation of torch does to few rows takes less time than calling it.

Like torch's own operations, and for the sake of OpenMP, they are used by one thread of the process.
"""

from ctypes import byref
from typing import Final

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.library import GateCall, LinearCall, NormCall

#: The most rows for which `linear` is meant: it is right for more, and torch is faster.
FEW_ROWS: Final = 8

#: A parallel region costs 1 to 2 µs. Less than this is done by one thread: bytes of a weight, elements of norms and gates.
_SHARED_WEIGHT: Final = 64 * 1024
_SHARED_ELEMENTS: Final = 16 * 1024

_ALIGNMENT: Final = 64

_ELEMENTS: Final = {dtype: library.ELEMENTS[dtype] for dtype in (torch.float32, torch.bfloat16)}


class Operations:
    """See the module.

    Args:
        instructions: the instruction set to compute with, one of `library.instructions()`; the best of them where it is None.

    Raises:
        library.LibraryError: the library is not there, or this machine has no such instructions.
    """

    def __init__(self, instructions: str | None = None) -> None:
        self._library = library.load()
        self.instructions = self._library.choose(instructions)
        self._number = self._library.number(self.instructions)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._workspace = self._grow(0)  # its address and size: products with the same shapes need nothing new

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return rows [n, inner] times weight [outputs, inner] plus bias [outputs], as [n, outputs].

        A row's result is the same bit for bit, whatever rows it comes with and however many threads there are.
        """
        element = _element(rows, weight, bias)
        count, inner = rows.shape
        _check(weight.shape[1:] == (inner,), "weight", weight)
        outputs = weight.shape[0]
        output = rows.new_empty(count, outputs)
        size = rows.element_size()
        threads = torch.get_num_threads() if outputs * inner * size >= _SHARED_WEIGHT else 1
        call = LinearCall(
            rows.data_ptr(),
            weight.data_ptr(),
            None if bias is None else _vector(bias, outputs, "bias"),
            output.data_ptr(),
            *self._workspace,
            rows.stride(0) * size,
            weight.stride(0) * size,
            element,
            count,
            outputs,
            inner,
            threads,
        )
        status = self._library.linear(self._number, byref(call))
        if status == library.WORKSPACE_TOO_SMALL:
            call.workspace, call.workspace_bytes = self._grow(self._library.linear_workspace(self._number, byref(call)))
            status = self._library.linear(self._number, byref(call))
        _check_done(status)
        return output

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return weight [size] * rows [n, size] / sqrt(mean of their squares + epsilon), rounded before the weight and after it.

        As transformers' LlamaRMSNorm has it. Sums add up in another order there: in bfloat16 a value can differ where its float32
        lies at the edge between two.
        """
        return self._norm(rows, None, None, weight, epsilon)

    def add_rms_norm(self, rows: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Return the norm of rows + residual, both [n, size], and that sum, rounded, which is the next residual."""
        total = torch.empty(rows.shape, dtype=rows.dtype)
        _check(residual.shape == rows.shape, "residual", residual)
        return self._norm(rows, residual, total, weight, epsilon), total

    def silu_mul(self, rows: Tensor) -> Tensor:
        """Return silu(gate) * up, [n, size], of rows [n, 2 size] that hold gate and then up; silu(gate) is rounded in between."""
        element = _element(rows)
        count, both = rows.shape
        _check(both % 2 == 0, "rows", rows)
        size = both // 2
        output = rows.new_empty(count, size)
        threads = torch.get_num_threads() if count * size >= _SHARED_ELEMENTS else 1
        call = GateCall(rows.data_ptr(), output.data_ptr(), rows.stride(0) * rows.element_size(), element, count, size, threads)
        _check_done(self._library.silu_mul(self._number, byref(call)))
        return output

    def _norm(self, rows: Tensor, residual: Tensor | None, total: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        element = _element(rows, weight, residual)
        count, size = rows.shape
        output = rows.new_empty(count, size)
        threads = torch.get_num_threads() if count * size >= _SHARED_ELEMENTS else 1
        call = NormCall(
            rows.data_ptr(),
            None if residual is None else residual.data_ptr(),
            _vector(weight, size, "weight"),
            output.data_ptr(),
            None if total is None else total.data_ptr(),
            rows.stride(0) * rows.element_size(),
            0 if residual is None else residual.stride(0) * rows.element_size(),
            element,
            count,
            size,
            epsilon,
            threads,
        )
        _check_done(self._library.rms_norm(self._number, byref(call)))
        return output

    def _grow(self, need: int) -> tuple[int, int]:
        self._memory = torch.empty(need + _ALIGNMENT, dtype=torch.uint8)
        start = self._memory.data_ptr()
        self._workspace = (start + -start % _ALIGNMENT, need)
        return self._workspace


def _check_done(status: int) -> None:
    assert status == library.DONE, f"the library refused the call: status {status}"


def _element(rows: Tensor, *others: Tensor | None) -> int:
    """Return what the library calls the dtype that all of them have.

    Raises:
        TypeError: they are not all of bfloat16 or all of float32, on the CPU.
        ValueError: rows are not [n, size], or the elements of a row do not lie side by side.
    """
    element = _ELEMENTS.get(rows.dtype)
    if element is None:
        raise TypeError(f"bfloat16 or float32 is wanted, not {rows.dtype}")
    if rows.dim() != 2:
        raise ValueError(f"rows are {list(rows.shape)}, not [n, size]")
    for tensor in (rows, *others):
        if tensor is None:
            continue
        if tensor.dtype != rows.dtype:
            raise TypeError(f"{tensor.dtype} beside {rows.dtype}")
        if not tensor.is_cpu:
            raise TypeError(f"a tensor lies on {tensor.device}, not on the CPU")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError("the elements of a row do not lie side by side")
    return element


def _vector(tensor: Tensor, size: int, name: str) -> int:
    _check(tensor.shape == (size,), name, tensor)
    return tensor.data_ptr()


def _check(fits: bool, name: str, tensor: Tensor) -> None:
    if not fits:
        raise ValueError(f"{name} is {list(tensor.shape)}, which does not fit the rows")
