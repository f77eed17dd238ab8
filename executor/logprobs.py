"""What is told about a sampled token and the most likely ones: log-probabilities of the raw distribution, before any filter.

Knows rows of logits; not how a token was chosen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogProb:
    """About one sampled token."""

    token_id: int
    logprob: float
    rank: int  # 1 + the number of tokens that are strictly more likely
    top: tuple[tuple[int, float], ...]  # (id, logprob), most likely first, ties by id


def logprobs(logits: Tensor, token_ids: Sequence[int], alternatives: Sequence[int]) -> list[LogProb]:
    """Return one for each row.

    Args:
        logits: [rows, vocabulary] float32, without NaN.
        token_ids: the token that was sampled from each row.
        alternatives: how many of the most likely tokens each row asks for.
    """
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    totals = torch.logsumexp(logits, dim=-1)
    ranks = ((logits > chosen).sum(dim=-1) + 1).tolist()
    values = (chosen[:, 0] - totals).tolist()
    tops = _tops(logits, totals, alternatives)
    return [LogProb(*row) for row in zip(token_ids, values, ranks, tops, strict=True)]


def most_likely(logits: Tensor, counts: Sequence[int], hidden: Sequence[Ints | None] = ()) -> list[tuple[tuple[int, float], ...]]:
    """Return for each row so many of the most likely tokens, as (id, log-probability), most likely first, ties by id.

    The log-probabilities are those of log_softmax in float32, as transformers takes them for its beams: over the default model's
    vocabulary that is off by some 8e-6, always to the same side, and a sum over many tokens would show the difference.

    Args:
        logits: [rows, vocabulary] float32, without NaN.
        counts: one for each row; more than the vocabulary are all of it.
        hidden: for each row tokens that get -inf; the others' are not changed by it, as transformers does it to beams.
    """
    values = logits.log_softmax(dim=-1)
    for row, ids in enumerate(hidden):
        if ids is not None:
            values[row, torch.from_numpy(ids).to(values.device)] = -math.inf
    return _tops(values, logits.new_zeros(len(counts)), counts)


def _tops(logits: Tensor, totals: Tensor, alternatives: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    vocabulary = logits.shape[1]
    if not any(alternatives):
        return [() for _ in alternatives]
    # One more than is asked for shows whether the last one ties with what was left out.
    values, ids = (part.tolist() for part in logits.topk(min(max(alternatives) + 1, vocabulary), dim=-1))
    found = []
    for row, (asked, total) in enumerate(zip(alternatives, totals.tolist(), strict=True)):
        count = min(asked, vocabulary)
        pairs = list(zip(ids[row], values[row], strict=True))
        if 0 < count < vocabulary and values[row][count - 1] == values[row][count]:
            tied = (logits[row] == values[row][count]).nonzero()[:, 0]  # rising: the lowest ids first
            pairs = [pair for pair in pairs if pair[1] > values[row][count]]
            pairs += [(token_id, values[row][count]) for token_id in tied[:count].tolist()]
        pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        found.append(tuple((token_id, value - total) for token_id, value in pairs[:count]))
    return found
