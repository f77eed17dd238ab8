"""The draw: of the tokens that are left, the one with the largest `logit + gumbel` wins.

Knows tempered logits, cutoffs and keys; not sampling parameters. This samples from the softmax of what the cutoff leaves,
exactly (Gumbel-max). The noise of token t is word t % 4 of Philox with key = seed, counter = (t // 4, position, index, domain).
Noise of 1e-5 in the logits, as another batch size brings, changes a token only where two sums are that close; a draw by the
inverse of the cumulative distribution would change it at every rounding.

Random numbers are made only for tokens that could win: the noise of a 32-bit word is at most 33 ln 2, so that a token far enough
below the best sum so far has lost without being drawn. Of the words that are made, few are worth two logarithms.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from executor.philox import philox4x32

#: Separates these random numbers from those of other uses of the same seed. "KILB".
_DOMAIN: Final = 0x4B494C42

#: Counters in one go: enough for two threads, and their temporaries stay in the second cache level.
_TILE: Final = 64 * 1024

#: Tokens within this distance of the most likely one are drawn first, to learn a sum that the others have to beat.
_NEAR: Final = 4.0

#: The largest noise there is, that of the word 2**32 - 1; with a margin for its rounding.
_MAX_GUMBEL: Final = 33 * math.log(2) + 1e-6

#: A row of which a larger share is chosen is drawn whole.
_WHOLE_SHARE: Final = 0.25

#: For the rounding of a comparison in float32.
_SLACK: Final = 1.001


@dataclass(frozen=True, slots=True)
class Keys:
    """Of each row: the seed's low and high word, and the two counter words that are the same for all its tokens."""

    words: Tensor  # [rows, 4] int64: seed low, seed high, position, index

    @classmethod
    def of(cls, draws: Sequence[tuple[int, int, int]], device: torch.device) -> "Keys":
        """Return the keys of (seed, position, index); a seed has 64 bits, the others 32."""
        words = [(seed & 0xFFFFFFFF, seed >> 32, position, index) for seed, position, index in draws]
        return cls(torch.tensor(words, dtype=torch.int64, device=device))

    def draw(self, rows: Tensor, quads: Tensor) -> Tensor:
        """Return the four words of each (row, quad), [..., 4], for rows and quads of shapes that broadcast."""
        low, high, position, index = self.words[rows].unbind(dim=-1)
        domain = torch.full((), _DOMAIN, device=quads.device)
        return torch.stack(philox4x32((quads, position, index, domain), (low, high)), dim=-1)


def race(logits: Tensor, cutoffs: Tensor, keys: Keys) -> Tensor:
    """Return the winner of each row, [rows] int64.

    Args:
        logits: [rows, vocabulary] float32, over temperature, less their row's maximum: the largest is 0.
        cutoffs: [rows] float32, at most 0: lower logits take no part.
    """
    short = -logits.shape[1] % 4
    quads = torch.nn.functional.pad(logits, (0, short), value=-math.inf).view(logits.shape[0], -1, 4)
    quad_peaks = quads.amax(dim=-1)
    best = torch.full_like(cutoffs, -math.inf, dtype=torch.float64)
    winners = torch.zeros_like(best, dtype=torch.int64)
    near = quad_peaks >= cutoffs.clamp(min=-_NEAR)[:, None]
    best, winners = _race(quads, near, cutoffs, keys, best, winners)
    far = quad_peaks >= torch.maximum(cutoffs, (best - _MAX_GUMBEL).float())[:, None]
    return _race(quads, far.logical_and_(near.logical_not_()), cutoffs, keys, best, winners)[1]


def _race(quads: Tensor, chosen: Tensor, cutoffs: Tensor, keys: Keys, best: Tensor, winners: Tensor) -> tuple[Tensor, Tensor]:
    """Let the tokens of the chosen quads race against the best so far; return the new best sums and their tokens.

    A row of which much is chosen takes part as a whole: that is less work than picking quads.
    """
    members = quads.shape[1]
    whole = chosen.sum(dim=-1) > members * _WHOLE_SHARE
    everyone = torch.arange(members, device=quads.device)[None]
    for rows in torch.split(whole.nonzero(), max(1, _TILE // members)):
        logits = quads[rows[:, 0]]
        best, winners = _contest(logits, keys.draw(rows, everyone), rows, everyone, cutoffs, best, winners)
    rows, picked = chosen.logical_and_(whole.logical_not_()[:, None]).nonzero(as_tuple=True)
    for row, quad in zip(torch.split(rows, _TILE), torch.split(picked, _TILE), strict=True):
        best, winners = _contest(quads[row, quad], keys.draw(row, quad), row, quad, cutoffs, best, winners)
    return best, winners


def _contest(
    logits: Tensor, words: Tensor, rows: Tensor, quads: Tensor, cutoffs: Tensor, best: Tensor, winners: Tensor
) -> tuple[Tensor, Tensor]:
    """Let tokens with their words race; logits and words are [..., 4], rows and quads broadcast to [...]."""
    # Winning takes -log(u) <= exp(logit - best), and 1 - u <= -log(u).
    missing = (2**32 - words).float().sub_(0.5).mul_(2.0**-32)
    able = missing <= (logits - best[rows][..., None].float()).exp_().mul_(_SLACK)
    able &= logits >= cutoffs[rows][..., None]
    found = able.nonzero(as_tuple=True)
    row, quad = (part.expand(able.shape[:-1])[found[:-1]] for part in (rows, quads))
    sums = logits[found].double() + _gumbel(words[found])
    return _merge(best, winners, row, sums, quad * 4 + found[-1])


def _merge(best: Tensor, winners: Tensor, rows: Tensor, sums: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Take candidates (row, sum, token) into each row's best; of equal sums the lowest token wins."""
    tops = torch.full_like(best, -math.inf).scatter_reduce_(0, rows, sums, "amax")
    none = torch.iinfo(torch.int64).max
    ids = torch.where(sums == tops[rows], tokens, none)
    leaders = torch.full_like(winners, none).scatter_reduce_(0, rows, ids, "amin")
    better = (tops > best) | ((tops == best) & (leaders < winners))
    return torch.where(better, tops, best), torch.where(better, leaders, winners)


def _gumbel(words: Tensor) -> Tensor:
    """Return the noise of words, in float64, within -3.14 .. 22.88."""
    # Uniform in (0, 1), both ends excluded; exact.
    return words.double().add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()
