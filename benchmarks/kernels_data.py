"""K, V and queries for `benchmarks.kernels`, the same in every process and with every version of torch.

Knows numbers and rows; needs torch alone, so that the peer's process can use it. Integers are hashed to numbers of mean 0 and
variance 1: no generator whose sequence might differ. Rows repeat after `_ROWS`, which is prime: no kernel's speed depends on what
the numbers are, and so a pool of gigabytes is filled by copying.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_ROWS: Final = 8191
_KEYS, _VALUES, _QUERIES = range(3)

#: Largest difference, of the largest value, that two ways to compute the same may have in 16 bits. Over thousands of tokens
#: values cancel out, and some ways round parts before they join them.
TOLERANCE: Final = 0.05


def noise(count: int, seed: int) -> Tensor:
    """Return [count] numbers in float32."""
    mask = 0xFFFFFFFF
    bits = torch.arange(count, dtype=torch.int64) + seed * 0x9E3779B9 & mask
    bits = (bits ^ bits >> 16) * 0x7FEB352D & mask
    bits = (bits ^ bits >> 15) * 0x846CA68B & mask
    bits ^= bits >> 16
    return (bits.to(torch.float32) / 2**32 - 0.5) * 12**0.5


class Source:
    """K and V of any token of any sequence, all sequences having the same number of tokens."""

    def __init__(self, kv_heads: int, size: int, tokens: int, dtype: torch.dtype) -> None:
        self._tokens = tokens
        shape = (_ROWS, kv_heads, size)
        self._bases = [noise(_ROWS * kv_heads * size, seed).to(dtype).view(shape) for seed in (_KEYS, _VALUES)]

    def rows(self, sequence: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return K and V of the tokens first .. end - 1, each [tokens, kv_heads, size]."""
        index = (torch.arange(first, end) + sequence * self._tokens) % _ROWS
        return self._bases[0][index], self._bases[1][index]


def queries(rows: int, q_heads: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return [rows, q_heads, size]."""
    return noise(rows * q_heads * size, _QUERIES).to(dtype).view(rows, q_heads, size)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, of the largest value expected. NaN where something is no number."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
