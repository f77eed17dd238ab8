"""From logits to tokens, for all of a step's samples at once.

Knows logits, sampling parameters and counters; not sequences, slots or plans. A token depends only on its own row of logits and
its own draw: never on the rows beside it, nor on how many there are.

The draw is Gumbel-max: of the tokens that the filters leave, the one with the largest `logit / temperature + gumbel` wins, which
samples from the filtered distribution exactly. The noise of token t is Philox word t % 4 of (key = seed, counter = (t // 4,
position, index, domain)). Noise of 1e-5 in the logits changes a token only where two sums are that close; a draw by the inverse
of the cumulative distribution would change tokens at every rounding.
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

#: Logits that one pass of the draw works on; more rows than fit are drawn in several passes. Bounds the temporaries to 64 MiB.
_MAX_LOGITS: Final = 4 * 1024 * 1024

#: Philox counters in one go. On a CPU their temporaries then stay in the second cache level.
_TILE: Final = 16 * 1024

#: Top-p first looks among so many of the most likely tokens, and sorts the whole vocabulary only where they hold too little.
_TOP: Final = 1024

#: The draw first looks at tokens within this distance of the most likely one (in logits over temperature), to learn a sum that
#: the others have to beat.
_NEAR: Final = 4.0

#: The largest noise there is, that of the word 2**32 - 1; with a margin for its rounding.
_MAX_GUMBEL: Final = 33 * math.log(2) + 1e-6


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


@dataclass(frozen=True, slots=True)
class Draw:
    """One sample: whose parameters, and the counter that makes its random numbers its own."""

    sampling: Sampling
    index: int
    position: int


@dataclass(frozen=True, slots=True)
class LogProb:
    """Of the raw distribution: before temperature and filters."""

    token_id: int
    logprob: float
    rank: int  # 1 + the number of tokens that are strictly more likely
    top: tuple[tuple[int, float], ...]  # most likely first, ties by id


@dataclass(frozen=True, slots=True)
class Samples:
    """`token_ids` has one for each draw, 0 for the failed ones; `logprobs` those of the draws that asked and did not fail."""

    token_ids: list[int]
    failed: list[int]
    logprobs: dict[int, LogProb]


def sample(logits: Tensor, draws: Sequence[Draw]) -> Samples:
    """Sample one token from each row.

    Args:
        logits: [draws, vocabulary], any floating dtype; computed in float32. A row that holds NaN, or no finite maximum, fails.
        draws: one for each row.
    """
    assert logits.shape[0] == len(draws)
    logits = logits.float()
    peaks = logits.amax(dim=-1)  # NaN where the row holds one
    finite = torch.isfinite(peaks).tolist()
    tokens = logits.argmax(dim=-1)  # the lowest id among equals
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and finite[row]]
    size = max(1, _MAX_LOGITS // logits.shape[1])
    for start in range(0, len(drawn), size):
        rows = drawn[start : start + size]
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = _draw(logits[index], peaks[index], [draws[row] for row in rows])
    token_ids = tokens.tolist()
    failed = [row for row, ok in enumerate(finite) if not ok]
    for row in failed:
        token_ids[row] = 0
    wanted = [row for row, draw in enumerate(draws) if draw.sampling.with_logprobs and finite[row]]
    logprobs = {row: _logprob(logits[row], token_ids[row], draws[row].sampling.top_logprobs) for row in wanted}
    return Samples(token_ids, failed, logprobs)


def _draw(logits: Tensor, peaks: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return a token for each row; all have a temperature above 0 and a finite peak."""
    temperatures = torch.tensor([draw.sampling.temperature for draw in draws], device=logits.device)
    # The peak is taken off first: logits over a tiny temperature would overflow, a distance of 0 never does.
    tempered = (logits - peaks[:, None]).div_(temperatures[:, None])
    return _race(tempered, _cutoffs(tempered, draws), draws)


# ------------------------------------------------------------------------------------------------------------ filters


def _cutoffs(tempered: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return for each row the value below which top-k, top-p and min-p leave nothing.

    Each of the three keeps the most likely tokens down to some value, so all three together keep those down to the largest of
    these values. Tokens that tie with the last one kept are kept with it. The order is that of transformers: top-p weighs
    what top-k left; min-p compares with the most likely token, which no filter changes.
    """
    vocabulary = tempered.shape[1]
    cutoffs = torch.tensor(
        [math.log(draw.sampling.min_p) if draw.sampling.min_p > 0 else -math.inf for draw in draws], device=tempered.device
    )
    top_k = [draw.sampling.top_k if 0 < draw.sampling.top_k < vocabulary else 0 for draw in draws]
    top_p = [draw.sampling.top_p for draw in draws]
    filtered = [row for row in range(len(draws)) if top_k[row] or top_p[row] < 1]
    if filtered:
        index = torch.tensor(filtered, device=tempered.device)
        found = _top_cutoffs(tempered[index], [top_k[row] for row in filtered], [top_p[row] for row in filtered], _TOP)
        cutoffs[index] = torch.maximum(cutoffs[index], found)
    return cutoffs


def _top_cutoffs(tempered: Tensor, top_k: list[int], top_p: list[float], width: int) -> Tensor:
    """Return the values that top-k and then top-p cut at, looking among the `width` most likely tokens first."""
    vocabulary = tempered.shape[1]
    if all(p == 1 for p in top_p) and max(top_k) <= width:
        width = max(top_k)
    width = min(width, vocabulary)
    values = tempered.topk(width, dim=-1).values  # falling
    device = tempered.device
    k = torch.tensor(top_k, device=device)
    p = torch.tensor(top_p, dtype=torch.float64, device=device)
    kth = values.gather(1, (k.clamp(1, width) - 1)[:, None])
    kth = torch.where(k[:, None] > 0, kth, -math.inf)
    masses = torch.where(values >= kth, values.double().exp(), 0).cumsum(dim=-1)
    total = torch.where(tempered >= kth, tempered, -math.inf).exp().sum(dim=-1, dtype=torch.float64)
    # Kept: the tokens before which less than top_p of the mass lies. At least the first.
    before = torch.nn.functional.pad(masses[:, :-1], (1, 0))
    kept = (before < p[:, None] * total[:, None]).sum(dim=-1).clamp(min=1)
    boundary = torch.where(p < 1, values.gather(1, kept[:, None] - 1)[:, 0], -math.inf)
    cutoffs = torch.maximum(kth[:, 0], boundary)
    if width < vocabulary:
        short = ((k > width) | ((p < 1) & (masses[:, -1] < p * total))).nonzero()[:, 0]
        if len(short):
            chosen = short.tolist()
            cutoffs[short] = _top_cutoffs(
                tempered[short], [top_k[row] for row in chosen], [top_p[row] for row in chosen], vocabulary
            )
    return cutoffs


# --------------------------------------------------------------------------------------------------------------- race


def _race(tempered: Tensor, cutoffs: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return for each row the token with the largest sum of logit and noise, among those not below the cutoff.

    Exact, with noise drawn for few tokens: those near the peak go first, and of the others only those are looked at that the
    largest noise could bring above the best sum so far.
    """
    short = -tempered.shape[1] % 4
    padded = torch.nn.functional.pad(tempered, (0, short), value=-math.inf)
    quads = padded.view(padded.shape[0], -1, 4)
    keys = _keys(draws, tempered.device)
    near = (quads >= cutoffs.clamp(min=-_NEAR)[:, None, None]).any(dim=-1)
    best, tokens = _best(quads, near, cutoffs, keys)
    reach = torch.maximum(cutoffs.double(), best - _MAX_GUMBEL)
    far = (quads >= reach[:, None, None]).any(dim=-1) & ~near
    far_best, far_tokens = _best(quads, far, cutoffs, keys)
    return torch.where(far_best > best, far_tokens, tokens)


def _keys(draws: Sequence[Draw], device: torch.device) -> Tensor:
    """Return the rows' seeds and counters as [rows, 4]: low and high word of the seed, position, index."""
    words = [(draw.sampling.seed & 0xFFFFFFFF, draw.sampling.seed >> 32, draw.position, draw.index) for draw in draws]
    return torch.tensor(words, dtype=torch.int64, device=device)


def _best(quads: Tensor, chosen: Tensor, cutoffs: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest sum and its token, over the tokens of the chosen quads that are not below the cutoff."""
    rows, members = quads.shape[:2]
    best = torch.full((rows,), -math.inf, dtype=torch.float64, device=quads.device)
    tokens = torch.zeros(rows, dtype=torch.int64, device=quads.device)
    pairs = chosen.nonzero()
    for start in range(0, len(pairs), _TILE):
        row, quad = pairs[start : start + _TILE].unbind(dim=1)
        logits = quads[row, quad]
        sums = torch.where(logits >= cutoffs[row][:, None], logits.double() + _gumbels(keys[row], quad), -math.inf)
        tops, words = sums.max(dim=-1)
        tile_best = torch.full_like(best, -math.inf).scatter_reduce_(0, row, tops, "amax")
        ids = torch.where(tops == tile_best[row], quad * 4 + words, members * 4)
        tile_tokens = torch.full_like(tokens, members * 4).scatter_reduce_(0, row, ids, "amin")
        better = tile_best > best
        best = torch.where(better, tile_best, best)
        tokens = torch.where(better, tile_tokens, tokens)
    return best, tokens


def _gumbels(keys: Tensor, quad: Tensor) -> Tensor:
    """Return the noise of the four tokens of each quad, [quads, 4] float64, within -3.14 .. 22.88."""
    domain = torch.full_like(quad, _DOMAIN)
    words = philox4x32((quad, keys[:, 2], keys[:, 3], domain), (keys[:, 0], keys[:, 1]))
    # Uniform in (0, 1), both ends excluded; exact in float64.
    uniform = torch.stack(words, dim=-1).double().add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


# ---------------------------------------------------------------------------------------------------- log-probabilities


def _logprob(logits: Tensor, token_id: int, alternatives: int) -> LogProb:
    """Return what is told about the sampled token, and the most likely ones."""
    chosen = logits[token_id]
    total = torch.logsumexp(logits, dim=-1)
    rank = 1 + int((logits > chosen).sum())
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        count = min(alternatives, logits.shape[0])
        least = logits.topk(count).values[-1]
        ids = (logits >= least).nonzero()[:, 0]  # rising; more than `count` where some tie with the last
        values, order = logits[ids].sort(descending=True, stable=True)
        ids = ids[order[:count]]
        top = tuple(zip(ids.tolist(), (values[:count] - total).tolist(), strict=True))
    return LogProb(token_id, float(chosen - total), rank, top)
