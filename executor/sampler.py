"""From logits to tokens, for all of a step's samples at once.

Knows logits, sampling parameters and counters; not sequences, slots or plans. A token depends only on its own row of logits and
its own draw: never on the rows beside it, nor on how many there are. The draw itself is executor/race.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from executor.logprobs import LogProb, logprobs, most_likely
from executor.race import Keys, race

#: Logits that one pass of the draw works on; more rows than fit are drawn in several passes. Bounds a temporary to 32 MiB.
_MAX_LOGITS: Final = 4 * 1024 * 1024

#: Top-p first looks among so many of the most likely tokens, and sorts the whole vocabulary only where they hold too little.
_TOP: Final = 1024


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence is sampled; the fields of the protocol's SamplingParams, checked."""

    temperature: float  # 0: the most likely token
    top_p: float
    top_k: int  # 0: off
    min_p: float
    seed: int
    with_logprobs: bool
    top_logprobs: int


@dataclass(slots=True)  # made for each token, and freezing makes it three times as slow
class Draw:
    """One sample: whose parameters, and the counter that makes its random numbers its own.

    Where `choices` is not 0 nothing is drawn: so many of the most likely tokens are told instead.
    """

    sampling: Sampling
    index: int
    position: int
    choices: int = 0


@dataclass(frozen=True, slots=True)
class Samples:
    """`token_ids` has one for each draw, 0 where none was drawn; the others what was asked for of those that did not fail."""

    token_ids: list[int]
    failed: list[int]
    logprobs: dict[int, LogProb]
    choices: dict[int, tuple[tuple[int, float], ...]]  # (id, log-probability), most likely first


#: Returns the largest logit of each row, [rows], NaN where the row holds one, and the first id that has it, [rows] int64.
Peaks = Callable[[Tensor], tuple[Tensor, Tensor]]


def torch_peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See Peaks; on any device."""
    return logits.amax(dim=-1), logits.argmax(dim=-1)


def sample(logits: Tensor, draws: Sequence[Draw], find_peaks: Peaks = torch_peaks) -> Samples:
    """Sample one token from each row.

    Args:
        logits: [draws, vocabulary], any floating dtype; computed in float32. A row that holds NaN, or no finite maximum, fails.
        draws: one for each row.
        find_peaks: how, where there is something faster than torch.
    """
    assert logits.shape[0] == len(draws)
    logits = logits.float()
    peaks, tokens = find_peaks(logits)
    finite = [math.isfinite(peak) for peak in peaks.tolist()]
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and finite[row] and not draw.choices]
    size = max(1, _MAX_LOGITS // logits.shape[1])
    for start in range(0, len(drawn), size):
        rows = drawn[start : start + size]
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = _draw(logits[index], peaks[index], [draws[row] for row in rows])
    token_ids = tokens.tolist()
    failed = [row for row, ok in enumerate(finite) if not ok]
    told = [row for row, draw in enumerate(draws) if draw.choices and finite[row]]
    for row in (*failed, *told):
        token_ids[row] = 0
    wanted = [row for row, draw in enumerate(draws) if draw.sampling.with_logprobs and finite[row] and not draw.choices]
    found: dict[int, LogProb] = {}
    for start in range(0, len(wanted), size):
        rows = wanted[start : start + size]
        alternatives = [draws[row].sampling.top_logprobs for row in rows]
        index = torch.tensor(rows, device=logits.device)
        found.update(zip(rows, logprobs(logits[index], [token_ids[row] for row in rows], alternatives), strict=True))
    choices: dict[int, tuple[tuple[int, float], ...]] = {}
    for start in range(0, len(told), size):
        rows = told[start : start + size]
        index = torch.tensor(rows, device=logits.device)
        choices.update(zip(rows, most_likely(logits[index], [draws[row].choices for row in rows]), strict=True))
    return Samples(token_ids, failed, found, choices)


def _draw(logits: Tensor, peaks: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return a token for each row; all have a temperature above 0 and a finite peak."""
    temperatures = torch.tensor([draw.sampling.temperature for draw in draws], device=logits.device)
    # The peak is taken off first: logits over a tiny temperature would overflow, a distance of 0 never does.
    tempered = logits.sub_(peaks[:, None]).div_(temperatures[:, None])
    keys = Keys.of([(draw.sampling.seed, draw.position, draw.index) for draw in draws], logits.device)
    return race(tempered, cutoffs(tempered, [draw.sampling for draw in draws]), keys)


def cutoffs(tempered: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """Return for each row the value below which top-k, top-p and min-p leave nothing.

    Each of the three keeps the most likely tokens down to some value, so all three together keep those down to the largest of
    these values. Tokens that tie with the last one kept are kept with it. The order is that of transformers: top-p weighs
    what top-k left; min-p compares with the most likely token, which no filter changes.
    """
    vocabulary, device = tempered.shape[1], tempered.device
    found = torch.tensor([math.log(row.min_p) if row.min_p > 0 else -math.inf for row in sampling], device=device)
    top_k = [row.top_k if row.top_k < vocabulary else 0 for row in sampling]
    filtered = [number for number, row in enumerate(sampling) if top_k[number] or row.top_p < 1]
    if filtered:
        index = torch.tensor(filtered, device=device)
        k = torch.tensor([top_k[number] for number in filtered], device=device)
        p = torch.tensor([sampling[number].top_p for number in filtered], dtype=torch.float64, device=device)
        width = _TOP if bool((p < 1).any()) else min(int(k.max()), _TOP)
        found[index] = torch.maximum(found[index], _top_cutoffs(tempered[index], k, p, width))
    return found


def _top_cutoffs(tempered: Tensor, k: Tensor, p: Tensor, width: int) -> Tensor:
    """Return the values that top-k and then top-p cut at, looking among the `width` most likely tokens first.

    Args:
        tempered: [rows, vocabulary].
        k: [rows], 0 where off.
        p: [rows] float64, 1 where off.
    """
    vocabulary = tempered.shape[1]
    width = min(width, vocabulary)
    values = tempered.topk(width, dim=-1).values  # falling
    kth = torch.where(k > 0, values.gather(1, (k.clamp(1, width) - 1)[:, None])[:, 0], -math.inf)
    weights = torch.where(values >= kth[:, None], values.double().exp(), 0)
    masses = weights.cumsum(dim=-1)
    total = torch.where(k > 0, masses[:, -1], tempered.exp().sum(dim=-1).double())
    # Kept: the tokens before which less than top_p of the mass lies. At least the first.
    kept = (masses - weights < (p * total)[:, None]).sum(dim=-1).clamp(min=1)
    boundary = torch.where(p < 1, values.gather(1, kept[:, None] - 1)[:, 0], -math.inf)
    cutoffs = torch.maximum(kth, boundary)
    if width < vocabulary:
        # Too narrow: for top-k, for all that ties with its last token, or for top-p's mass.
        unsure = (k > width) | ((p < 1) & (((k > 0) & (values[:, -1] >= kth)) | (masses[:, -1] < p * total)))
        short = unsure.nonzero()[:, 0]
        if len(short):
            cutoffs[short] = _top_cutoffs(tempered[short], k[short], p[short], vocabulary)
    return cutoffs
