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

    All are int64 tensors of values in 0 .. 2**32 - 1, of shapes that broadcast. Where they differ, nothing is expanded before it
    has to be: with counters of [1, n] and keys of [m, 1] the first round costs next to nothing.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        # Only what is multiplied next has to be clean above its 32 bits; all else (the sign that the shift draws in, the
        # products' high halves, the carries of the key) is masked with it.
        c0 = ((product_1 >> 32) ^ c1 ^ (k0 + number * _WEYL_0)).bitwise_and_(_MASK)
        c2 = ((product_0 >> 32) ^ c3 ^ (k1 + number * _WEYL_1)).bitwise_and_(_MASK)
        c1, c3 = product_1, product_0
    return c0, c1 & _MASK, c2, c3 & _MASK
