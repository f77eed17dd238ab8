"""Lengths that are made up: where a data set's mean lengths are known, and its lengths are not to be had.

Lognormal, as lengths of texts are found to be: many short, few long. Rounded to whole tokens, at least one. The same seed gives
the same lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from random import Random
from typing import Final

from memmgr.simulate.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal distribution of lengths, by its mean in tokens and the standard deviation of its logarithm."""

    mean: float
    sigma: float

    def draw(self, source: Random) -> int:
        """Return one length."""
        return max(1, round(source.lognormvariate(log(self.mean) - self.sigma**2 / 2, self.sigma)))


#: The means that Kwon et al. (2023, figure 11) give for the Alpaca data set. The spreads are ours: instructions are of much the
#: same length, answers are one word or a page.
ALPACA_PROMPTS: Final = Lengths(19.31, 0.5)
ALPACA_OUTPUTS: Final = Lengths(58.45, 1.0)


def alpaca(
    requests: int, seed: int = 0, prompts: Lengths = ALPACA_PROMPTS, outputs: Lengths = ALPACA_OUTPUTS
) -> Iterator[TraceRequest]:
    """Yield so many requests with lengths like Alpaca's."""
    source = Random(seed)  # noqa: S311 - lengths, no secret
    for _ in range(requests):
        yield TraceRequest(prompts.draw(source), outputs.draw(source))
