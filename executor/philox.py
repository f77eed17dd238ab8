"""Philox4x32-10 in torch's integer operations: random numbers that are a pure function of a key and a counter.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11). Words are held in int64, which torch computes
on every device; products wrap modulo 2**64, as two's complement does.
"""

from typing import Final

from torch import Tensor

_MASK: Final = 0xFFFFFFFF
_MULTIPLIER_0: Final = 0xD2511F53
_MULTIPLIER_1: Final = 0xCD9E8D57
_WEYL_0: Final = 0x9E3779B9
_WEYL_1: Final = 0xBB67AE85
_ROUNDS: Final = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return four words for each counter, each uniform in 0 .. 2**32 - 1.

    All are int64 tensors of values in 0 .. 2**32 - 1, of one shape or broadcastable to it.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_number in range(_ROUNDS):
        if round_number:
            k0 = (k0 + _WEYL_0) & _MASK
            k1 = (k1 + _WEYL_1) & _MASK
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        # The shift is arithmetic: the mask takes off the copies of the sign.
        c0 = ((product_1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((product_0 >> 32) & _MASK) ^ c3 ^ k1
        c1 = product_1 & _MASK
        c3 = product_0 & _MASK
    return c0, c1, c2, c3
